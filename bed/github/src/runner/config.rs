//! `config.sh`: registering a runner and removing it.

use std::path::Path;

use reqwest::StatusCode;

use super::{Options, Outcome, files};
use crate::protocol::{Registration, Removal};

pub async fn configure(options: &Options<'_>) -> Outcome {
    let dir = Path::new(".");
    if files::is_configured(dir) {
        return Err("Cannot configure the runner because it is already configured. To reconfigure the runner, run \
                    'config.cmd remove' or './config.sh remove' first."
            .into());
    }
    let (url, token) = (options.required("url")?, options.required("token")?);
    let url = url.trim_end_matches('/');
    let (server, path) = split(url).ok_or_else(|| format!("'{url}' is not the address of an owner or a repository"))?;
    let defaults = ["self-hosted", "Linux", architecture()].map(str::to_owned);
    let labels = options.value("labels").unwrap_or_default();
    let labels = labels.split(',').map(str::trim);
    let registration = Registration {
        path: path.to_owned(),
        token,
        name: options.value("name").unwrap_or_else(host_name),
        labels: labels.filter(|label| !label.is_empty()).map(str::to_owned).collect(),
        default_labels: if options.flag("no-default-labels") { vec![] } else { defaults.into() },
        group: options.value("runnergroup"),
        replace: options.flag("replace"),
        ephemeral: options.flag("ephemeral"),
        work_folder: options.value("work").unwrap_or_else(|| "_work".into()),
    };
    if registration.labels.is_empty() && registration.default_labels.is_empty() {
        return Err("At least one label is needed with --no-default-labels".into());
    }
    let answer = reqwest::Client::new().post(format!("{server}/_runner/register")).json(&registration).send().await;
    let answer = answer.map_err(|error| format!("Cannot reach {server}: {error}"))?;
    match answer.status() {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND => {
            return Err(format!(
                "Http response code: NotFound from 'POST {server}/api/v3/actions/runner-registration'\n\
                 Response status code does not indicate success: 404 (Not Found)."
            )
            .into());
        }
        _ => return Err(answer.text().await.unwrap_or_default().into()),
    }
    println!("√ Runner successfully added\n√ Runner connection is good");
    let mut registered: files::Files = answer.json().await.map_err(|error| error.to_string())?;
    // The server's own address may differ from the one that is reachable from here.
    registered.settings.server_url = server.to_owned();
    registered.settings.git_hub_url = url.to_owned();
    files::write(dir, &registered).map_err(|error| format!("Cannot save the settings: {error}"))?;
    println!("√ Settings Saved.");
    Ok(())
}

pub async fn remove(options: &Options<'_>) -> Outcome {
    let dir = Path::new(".");
    if let Ok(files) = files::read(dir) {
        let (settings, token) = (files.settings, options.required("token")?);
        let removal = Removal { runner: settings.agent_id, token };
        let url = format!("{}/_runner/remove", settings.server_url);
        let answer = reqwest::Client::new().post(url).json(&removal).send().await;
        let answer = answer.map_err(|error| format!("Failed: Removing runner from the server\n{error}"))?;
        match answer.status() {
            status if status.is_success() => {}
            // Only without the admin flow it asks for the runner first (`ConfigurationManager.cs`, UnconfigureAsync).
            StatusCode::GONE if !settings.use_runner_admin_flow => {
                println!("Does not exist. Skipping Removing runner from the server");
            }
            status => {
                // `RunnerDotcomServer.cs` prints status and body, then the exception ends the command.
                let status = if status == StatusCode::GONE { StatusCode::NOT_FOUND } else { status };
                let (text, reason) = (answer.text().await.unwrap_or_default(), status.canonical_reason().unwrap_or(""));
                let (code, api) = (reason.replace(' ', ""), format!("{}/api/v3", settings.server_url));
                let (_, path) = split(&settings.git_hub_url).unwrap_or_default();
                let scope = if path.contains('/') { "repos" } else { "orgs" };
                let url = format!("{api}/{scope}/{path}/actions/runners/{}", settings.agent_id);
                return Err(format!(
                    "Http response code: {code} from 'Delete {url}' (Request Id: 0)\n{text}\nFailed: Removing runner from \
                     the server\nResponse status code does not indicate success: {} ({reason}).",
                    status.as_u16()
                )
                .into());
            }
        }
        println!("√ Runner removed successfully");
    } else {
        println!(
            "Cannot connect to server, because config files are missing. Skipping removing runner from the server."
        );
    }
    files::remove(dir);
    Ok(())
}

/// `http://host:1/owner/repo` → (`http://host:1`, `owner/repo`).
fn split(url: &str) -> Option<(&str, &str)> {
    let host = url.find("://")? + 3;
    let slash = host + url[host..].find('/')?;
    let path = &url[slash + 1..];
    (!path.is_empty() && path.split('/').count() <= 2).then_some((&url[..slash], path))
}

/// GitHub's label for this CPU architecture.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "X64",
        "aarch64" => "ARM64",
        "riscv64" => "RISCV64",
        other => other,
    }
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "runner".into(), |name| name.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_an_owner_or_a_repository() {
        assert_eq!(split("http://a:1/o"), Some(("http://a:1", "o")));
        assert_eq!(split("http://a:1/o/r"), Some(("http://a:1", "o/r")));
        assert_eq!(split("http://a:1/"), None);
        assert_eq!(split("http://a:1/o/r/x"), None);
        assert_eq!(split("a/b"), None);
    }
}
