//! I10: no secret is in any log line, object, event, user data, record or page. Every secret of the simulated GitHub has a
//! canary in it, and so has the webhook secret; here all places are searched for it after all tests.

use std::fs;

use anyhow::Result;
use base64::{Engine, prelude::BASE64_STANDARD};
use k8s_openapi::api::core::v1::Secret;
use kube::{ResourceExt, api::ListParams};
use paddock_bed::{cloud::Cloud, github::CANARY, stage::CLUSTER};
use serde_json::json;

use crate::support::World;

const PAGES: [&str; 9] = [
    "/health",
    "/readyz",
    "/metrics",
    "/usage",
    "/usage.json",
    "/history",
    "/jobs.json?per_page=1000",
    "/workers",
    "/workers.json?per_page=1000",
];

/// Where a secret was found, one line each; an error if a place could not be searched.
pub async fn leaks(world: &World) -> Result<Vec<String>> {
    let stage = &world.stage;
    let mut places: Vec<Place> = Vec::new();
    for log in fs::read_dir(stage.dir().join("operator"))? {
        let path = log?.path();
        places.push((format!("the operator's log {}", path.display()), fs::read(&path)?));
    }
    let audit = fs::read(stage.kube.audit_log())?;
    places.push(("what the operator wrote to Kubernetes".into(), audit));
    for instance in stage.aws.instances() {
        places.push((format!("the log of {}", instance.id), stage.machines.log(&instance.id).into_bytes()));
        places.push((format!("the user data of {}", instance.id), instance.user_data));
    }
    places.push(("the table".into(), Cloud::new(&stage.aws, CLUSTER).dump().await?.into_bytes()));
    for path in PAGES {
        places.push((format!("the page {path}"), page(world, path).await?));
    }
    let searched: usize = places.iter().map(|(_, text)| text.len()).sum();
    println!("{} places with {searched} bytes were searched for secrets", places.len());
    let needles = needles(stage.private_key());
    let mut found: Vec<_> = places.iter().filter_map(|place| search(place, &needles)).collect();
    // A search that finds nothing where secrets belong would find none anywhere.
    for place in where_secrets_belong(world).await? {
        if search(&place, &needles).is_none() {
            found.push(format!("unknown places: the search does not see it in {}", place.0));
        }
    }
    Ok(found)
}

/// A page of the operator; asked for again should the operator be replaced at this moment.
async fn page(world: &World, path: &str) -> Result<Vec<u8>> {
    let url = format!("{}{path}", world.url());
    let get = async || reqwest::get(&url).await?.error_for_status()?.bytes().await;
    let mut page = Vec::new();
    world
        .until_true(&format!("{path} is answered"), async || match get().await {
            Ok(text) => {
                page = text.into();
                Ok(true)
            }
            Err(error) => {
                eprintln!("{path}: {error}");
                Ok(false)
            }
        })
        .await?;
    Ok(page)
}

type Place = (String, Vec<u8>);

/// Where the secret is in a place, if it is in there.
fn search((place, text): &Place, needles: &[Needle]) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    let small = text.to_lowercase();
    let at = needles.iter().find_map(|needle| match needle {
        Needle::Word(word) => small.find(word),
        Needle::Exact(word) => text.find(word),
    })?;
    let line = text.get(..at).and_then(|before| before.lines().last()).unwrap_or_default();
    Some(format!("{place}: after {:?}", line.get(line.len().saturating_sub(120)..).unwrap_or(line)))
}

/// A key in a Secret, a token in one, and the webhook secrets: each in other letters.
async fn where_secrets_belong(world: &World) -> Result<Vec<Place>> {
    let namespace = world.namespace().await?;
    let token = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "token", "namespace": namespace },
        "stringData": { "token": format!("ghs_{CANARY}") },
    });
    world.stage.kube.apply(&token.to_string()).await?;
    let secrets = world.api::<Secret>(&namespace).list(&ListParams::default()).await?;
    let secrets = secrets.into_iter().map(|secret| {
        let text = serde_json::to_vec(&secret)?;
        anyhow::Ok((format!("the Secret {}", secret.name_any()), text))
    });
    let webhook = ("the webhook secrets".into(), fs::read(world.stage.webhook_secrets())?);
    secrets.chain([Ok(webhook)]).collect()
}

enum Needle {
    /// Found in any case.
    Word(String),
    Exact(String),
}

/// The canary and a line of the App's private key, each also as it looks in base64, wherever in the text it begins.
fn needles(private_key: &str) -> Vec<Needle> {
    let line = private_key.lines().nth(3).unwrap_or(private_key);
    let mut needles = vec![Needle::Word(CANARY.to_lowercase()), Needle::Exact(line.to_owned())];
    let upper = CANARY.to_uppercase();
    for secret in [CANARY, &upper, line] {
        needles.extend((0..3).map(|shift| Needle::Exact(in_base64(secret, shift))));
    }
    needles
}

/// What is the same of `secret` in any base64 text where it begins `shift` bytes after a multiple of three.
fn in_base64(secret: &str, shift: usize) -> String {
    let whole = BASE64_STANDARD.encode([" ".repeat(shift).as_bytes(), secret.as_bytes()].concat());
    let (first, last) = ((shift * 8).div_ceil(6), (shift + secret.len()) * 8 / 6);
    whole[first..last].to_owned()
}
