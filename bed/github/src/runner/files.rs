//! The runner's registration files, with the names and fields of the real runner.

use std::{collections::BTreeMap, fs, io, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::model::{Runner, Scope};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    pub agent_id: u64,
    pub agent_name: String,
    pub pool_id: u64,
    pub pool_name: String,
    pub ephemeral: bool,
    pub server_url: String,
    /// Whether the runner deletes itself at GitHub by its number, as GitHub tells it when it registers.
    #[serde(default)]
    pub use_runner_admin_flow: bool,
    pub git_hub_url: String,
    pub work_folder: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CredentialData {
    pub client_id: String,
    pub authorization_url: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Credentials {
    pub scheme: String,
    pub data: CredentialData,
}

/// `.runner` and `.credentials`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Files {
    pub settings: Settings,
    pub credentials: Credentials,
}

pub fn of(server: &str, runner: &Runner, group: &str, work_folder: &str, admin_flow: bool) -> Files {
    let path = match &runner.scope {
        Scope::Organization(owner) => owner.clone(),
        Scope::Repository(owner, name) => format!("{owner}/{name}"),
    };
    Files {
        settings: Settings {
            agent_id: runner.id,
            agent_name: runner.name.clone(),
            pool_id: runner.group_id,
            pool_name: group.to_owned(),
            ephemeral: runner.ephemeral,
            server_url: server.to_owned(),
            use_runner_admin_flow: admin_flow,
            git_hub_url: format!("{server}/{path}"),
            work_folder: work_folder.to_owned(),
        },
        credentials: Credentials {
            scheme: "OAuth".into(),
            data: CredentialData {
                client_id: runner.secret.clone(),
                authorization_url: format!("{server}/_runner/session"),
            },
        },
    }
}

/// The content of a JIT config before its own Base64: file names and contents.
pub fn encoded(files: &Files) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        (".runner", STANDARD.encode(json!(files.settings).to_string())),
        (".credentials", STANDARD.encode(json!(files.credentials).to_string())),
    ])
}

pub fn decoded(jit_config: &str) -> Option<Files> {
    let outer: BTreeMap<String, String> = serde_json::from_slice(&STANDARD.decode(jit_config.trim()).ok()?).ok()?;
    let file = |name| STANDARD.decode(outer.get(name)?).ok();
    Some(Files {
        settings: serde_json::from_slice(&file(".runner")?).ok()?,
        credentials: serde_json::from_slice(&file(".credentials")?).ok()?,
    })
}

pub fn write(dir: &Path, files: &Files) -> io::Result<()> {
    fs::write(dir.join(".runner"), serde_json::to_vec_pretty(&files.settings)?)?;
    fs::write(dir.join(".credentials"), serde_json::to_vec_pretty(&files.credentials)?)
}

/// `ConfigurationStore.cs`: the file of the newer service is enough.
pub fn is_configured(dir: &Path) -> bool {
    [".runner", ".runner_migrated"].iter().any(|name| dir.join(name).exists())
}

pub fn read(dir: &Path) -> io::Result<Files> {
    // `Runner.cs` tries the settings of the newer service first.
    let one_of = |names: [&str; 2]| fs::read(dir.join(names[0])).or_else(|_| fs::read(dir.join(names[1])));
    Ok(Files {
        settings: serde_json::from_slice(&one_of([".runner_migrated", ".runner"])?)?,
        credentials: serde_json::from_slice(&one_of([".credentials_migrated", ".credentials"])?)?,
    })
}

/// `ConfigurationManager.cs`, DeleteLocalRunnerConfig.
pub fn remove(dir: &Path) {
    for name in [".credentials", ".runner"] {
        let found = [name.to_owned(), format!("{name}_migrated")].map(|name| fs::remove_file(dir.join(name)).is_ok());
        match found.contains(&true) {
            true => println!("√ Removed {name}"),
            false => println!("Does not exist. Skipping Removing {name}"),
        }
    }
}
