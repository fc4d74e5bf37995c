//! The runners that GitHub lists for download.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use axum::extract::State;
use serde_json::{Value, json};

use super::{Answer, At, ok};
use crate::{hub::Hub, model::Release};

pub async fn downloads(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.read(|world, _| ok(list(&world.release(at.owner()))))
}

/// As in GitHub's example of the answer: archives by system and architecture, checksums where it has them.
fn list(release: &Release) -> Value {
    let Release { version, checksums } = release;
    let one = |os: &str, architecture: &str, end: &str| {
        let filename = format!("actions-runner-{os}-{architecture}-{version}.{end}");
        let url = format!("https://github.com/actions/runner/releases/download/v{version}/{filename}");
        let mut runner = json!({"os": os, "architecture": architecture, "download_url": url, "filename": filename});
        if *checksums {
            let mut hasher = DefaultHasher::new();
            filename.hash(&mut hasher);
            runner["sha256_checksum"] = json!(format!("{:064x}", hasher.finish()));
        }
        runner
    };
    let linux = ["x64", "arm", "arm64"].map(|architecture| one("linux", architecture, "tar.gz"));
    let others = [one("osx", "x64", "tar.gz"), one("win", "x64", "zip")];
    linux.into_iter().chain(others).collect()
}
