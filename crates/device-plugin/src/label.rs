//! The node's label with its board, kept whatever happens to it.

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

/// The label of nodes that names the board; pools select by it.
const LABEL_BOARD: &str = "riseproject.dev/board";
const FIELD_MANAGER: &str = "paddock-device-plugin";

/// Between two tries to write: what failed is mostly somebody else's outage.
const RETRY: Duration = Duration::from_secs(5);

/// What the API server tells of nodes without their status, which changes all the time.
type Nodes = Api<PartialObjectMeta<Node>>;

/// Watches this one node, and labels it whenever it appears without the board or loses it. Never ends.
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
            Ok(Event::InitDone) if !exists => tracing::warn!(node = name, "there is no such node yet; waiting for it"),
            Ok(Event::Init | Event::InitDone | Event::Delete(_)) => {}
            Err(error) => tracing::warn!(node = name, %error, "the watch of the node was interrupted"),
        }
    }
}

fn is_labelled(labels: &BTreeMap<String, String>, board: &str) -> bool {
    labels.get(LABEL_BOARD).is_some_and(|label| label == board)
}

/// Writes until it is written, or the node is gone.
async fn label(nodes: &Nodes, name: &str, board: &str) {
    let patch = Patch::Merge(json!({ "metadata": { "labels": { LABEL_BOARD: board } } }));
    let manager = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    loop {
        match nodes.patch(name, &manager, &patch).await {
            Ok(_) => return tracing::info!(node = name, board, "the node is labelled"),
            Err(kube::Error::Api(status)) if status.is_not_found() => return,
            Err(error) => tracing::warn!(node = name, %error, "the node cannot be labelled; trying again in {RETRY:?}"),
        }
        tokio::time::sleep(RETRY).await;
    }
}
