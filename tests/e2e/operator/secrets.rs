//! I10: no secret is in any log line, object, event, user data, record or page. Every secret of the simulated GitHub
//! contains a canary, and so does the webhook secret; after all tests every place is searched for it.

use std::fs;

use anyhow::Result;
use base64::{Engine, prelude::BASE64_STANDARD};
use k8s_openapi::api::core::v1::Secret;
use kube::{ResourceExt, api::ListParams};
use paddock_bed::{cloud::Cloud, github::CANARY, stage::CLUSTER};
use serde_json::json;

use crate::fixture::{page::Page, world::World};

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

/// Where a secret was found, one line each. A search that fails counts as a leak.
pub async fn leaks(world: &World) -> Vec<String> {
    find_leaks(world).await.unwrap_or_else(|error| vec![format!("unknown places: {error:#}")])
}

async fn find_leaks(world: &World) -> Result<Vec<String>> {
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
        let page = Page::until(world, path, |page| page.status == 200).await?;
        places.push((format!("the page {path}"), page.body.into_bytes()));
    }
    let searched: usize = places.iter().map(|(_, text)| text.len()).sum();
    println!("{} places with {searched} bytes were searched for secrets", places.len());
    let needles = needles(stage.private_key());
    let mut found: Vec<_> = places.iter().filter_map(|place| search(place, &needles)).collect();
    // A search that misses secrets where they belong proves nothing.
    for place in where_secrets_belong(world).await? {
        if search(&place, &needles).is_none() {
            found.push(format!("unknown places: the search misses the secret in {}", place.0));
        }
    }
    Ok(found)
}

type Place = (String, Vec<u8>);

/// Where a secret is in a place, if it is there.
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

/// A private key and a token in Secrets, and the file of webhook secrets: each is encoded differently.
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
    /// Matches in upper and lower case.
    Word(String),
    Exact(String),
}

/// The canary and a line of the App's private key, plain and in base64 at every offset.
fn needles(private_key: &str) -> Vec<Needle> {
    let line = private_key.lines().nth(3).unwrap_or(private_key);
    let mut needles = vec![Needle::Word(CANARY.to_lowercase()), Needle::Exact(line.to_owned())];
    let upper = CANARY.to_uppercase();
    for secret in [CANARY, &upper, line] {
        needles.extend((0..3).map(|shift| Needle::Exact(in_base64(secret, shift))));
    }
    needles
}

/// The part of `secret` in base64 that does not depend on its neighbours, if it begins `shift` bytes after a multiple
/// of three.
fn in_base64(secret: &str, shift: usize) -> String {
    let whole = BASE64_STANDARD.encode([" ".repeat(shift).as_bytes(), secret.as_bytes()].concat());
    let (first, last) = ((shift * 8).div_ceil(6), (shift + secret.len()) * 8 / 6);
    whole[first..last].to_owned()
}
