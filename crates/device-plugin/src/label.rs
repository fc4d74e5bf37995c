//! Keeps the board label on the node.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt,
    api::{PartialObjectMeta, Patch, PatchParams},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde_json::json;

/// The node label that names the board; pools select nodes by it.
const LABEL_BOARD: &str = "riseproject.dev/board";
const FIELD_MANAGER: &str = "paddock-device-plugin";

/// Pause between two attempts to write the label. The usual cause is an API server outage, so it need not be short.
const LABEL_RETRY: Duration = Duration::from_secs(5);

/// Node metadata only: the status changes all the time and is not needed.
type Nodes = Api<PartialObjectMeta<Node>>;

/// Watches this node and labels it whenever the label is missing or wrong. Never returns.
pub async fn keep(client: Client, name: &str, board: &str) {
    let nodes: Nodes = Api::all(client);
    let this = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = pin!(watcher(nodes.clone(), this).default_backoff());
    let mut exists = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(node) | Event::InitApply(node)) => {
                exists = true;
                if !is_labelled(node.labels(), board) {
                    label(&nodes, name, board).await;
                }
            }
            Ok(Event::InitDone) if !exists => tracing::warn!(node = name, "node not found; waiting for it"),
            Ok(Event::Init | Event::InitDone | Event::Delete(_)) => {}
            Err(error) => tracing::warn!(node = name, %error, "node watch interrupted"),
        }
    }
}

fn is_labelled(labels: &BTreeMap<String, String>, board: &str) -> bool {
    labels.get(LABEL_BOARD).is_some_and(|label| label == board)
}

/// Retries until the label is written or the node is deleted.
async fn label(nodes: &Nodes, name: &str, board: &str) {
    let patch = Patch::Merge(json!({ "metadata": { "labels": { LABEL_BOARD: board } } }));
    let manager = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    loop {
        match nodes.patch(name, &manager, &patch).await {
            Ok(_) => return tracing::info!(node = name, board, "node labelled"),
            Err(kube::Error::Api(status)) if status.is_not_found() => return,
            Err(error) => tracing::warn!(node = name, %error, "cannot label the node; retrying in {LABEL_RETRY:?}"),
        }
        tokio::time::sleep(LABEL_RETRY).await;
    }
}
