//! An instance's metadata service: IMDSv2 only.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Result;
use axum::{
    Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, put},
};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tokio::{net::TcpListener, task::AbortHandle};

use crate::{ACCOUNT, PARTITION, front::Front, iam::access_key, instances::Instance};

const TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";
const TOKEN: &str = "x-aws-ec2-metadata-token";

/// The maximum lifetime of a token, in seconds.
const MAX_TTL: u64 = 21_600;

struct Metadata {
    front: Arc<Front>,
    id: String,
    tokens: Mutex<HashMap<String, Instant>>,
}

/// Serves one instance's metadata until aborted; returns its URL.
pub async fn serve(front: Arc<Front>, id: &str) -> Result<(String, AbortHandle)> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let state = Arc::new(Metadata { front, id: id.to_owned(), tokens: Mutex::default() });
    let router =
        Router::new().route("/latest/api/token", put(token)).route("/latest/{*path}", get(read)).with_state(state);
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    Ok((url, server.abort_handle()))
}

async fn token(State(metadata): State<Arc<Metadata>>, headers: HeaderMap) -> Response {
    let ttl = headers.get(TTL).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let Some(ttl) = ttl.filter(|ttl| (1..=MAX_TTL).contains(ttl)) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let token = format!("{:032x}", rand::random::<u128>());
    metadata.tokens.lock().unwrap().insert(token.clone(), Instant::now() + Duration::from_secs(ttl));
    ([(TTL, ttl.to_string())], token).into_response()
}

async fn read(State(metadata): State<Arc<Metadata>>, Path(path): Path<String>, headers: HeaderMap) -> Response {
    let token = headers.get(TOKEN).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let expires = metadata.tokens.lock().unwrap().get(token).copied();
    if expires.is_none_or(|expires| expires < Instant::now()) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let instance = metadata.front.instances.get(&metadata.id);
    let found = instance.and_then(|instance| lookup(&instance, path.trim_end_matches('/'), Timestamp::now()));
    match found {
        Some(value) => value.into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// The value at a path below `/latest/`.
fn lookup(instance: &Instance, path: &str, now: Timestamp) -> Option<Vec<u8>> {
    let region = instance.zone.trim_end_matches(|letter: char| letter.is_ascii_lowercase());
    let text = match path {
        "meta-data/instance-id" => instance.id.clone(),
        "meta-data/instance-type" => instance.instance_type.clone(),
        "meta-data/ami-id" => instance.image_id.clone(),
        "meta-data/local-ipv4" => instance.private_ip.clone(),
        "meta-data/instance-life-cycle" => instance.usage.name().to_owned(),
        "meta-data/services/partition" => PARTITION.to_owned(),
        "meta-data/placement/region" => region.to_owned(),
        "meta-data/placement/availability-zone" => instance.zone.clone(),
        "meta-data/tags/instance" => {
            let keys: Vec<_> = shown_tags(instance)?.keys().map(String::as_str).collect();
            keys.join("\n")
        }
        "meta-data/iam/security-credentials" => instance.role.clone()?,
        "meta-data/spot/instance-action" => {
            json!({ "action": "terminate", "time": instance.spot_notice.as_ref()? }).to_string()
        }
        "meta-data/spot/termination-time" => instance.spot_notice.clone()?,
        "dynamic/instance-identity/document" => identity(instance, region),
        "user-data" => return Some(instance.user_data.clone()).filter(|data| !data.is_empty()),
        _ => {
            if let Some(key) = path.strip_prefix("meta-data/tags/instance/") {
                shown_tags(instance)?.get(key)?.clone()
            } else {
                let role = path.strip_prefix("meta-data/iam/security-credentials/")?;
                credentials(instance, role, now)?
            }
        }
    };
    Some(text.into_bytes())
}

fn shown_tags(instance: &Instance) -> Option<&BTreeMap<String, String>> {
    instance.metadata_tags.then_some(&instance.tags)
}

fn identity(instance: &Instance, region: &str) -> String {
    let document = json!({
        "accountId": ACCOUNT,
        "architecture": "x86_64",
        "availabilityZone": instance.zone,
        "imageId": instance.image_id,
        "instanceId": instance.id,
        "instanceType": instance.instance_type,
        "privateIp": instance.private_ip,
        "region": region,
        "version": "2017-09-30",
    });
    document.to_string()
}

/// Credentials whose key contains the instance id, so that a request identifies its sender.
fn credentials(instance: &Instance, role: &str, now: Timestamp) -> Option<String> {
    (instance.role.as_deref() == Some(role)).then(|| {
        let credentials = json!({
            "Code": "Success",
            "LastUpdated": now.to_string(),
            "Type": "AWS-HMAC",
            "AccessKeyId": access_key(&instance.id),
            "SecretAccessKey": "bed",
            "Token": format!("bed-{}", instance.id),
            "Expiration": (now + SignedDuration::from_hours(6)).to_string(),
        });
        credentials.to_string()
    })
}
