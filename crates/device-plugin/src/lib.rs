//! `paddock device-plugin`: advertises the runner slots of a board to its kubelet, and labels the node with the board.

pub mod board;
pub mod kubelet;
mod label;
pub mod settings;
mod slots;

use anyhow::{Result, bail};
use kube::Client;
use tokio_util::sync::CancellationToken;

use kubelet::Plugin;
use settings::Settings;

/// The kubelet's device plugin API, generated from its own proto file.
#[allow(clippy::all)]
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// Advertises the slots and labels the node until `stop`. Failures are logged and retried.
pub async fn run(settings: Settings, client: Client, stop: CancellationToken) -> Result<()> {
    let board = settings.board()?;
    let plugin = Plugin::new(settings.plugin_dir, settings.resource_name, settings.slots);
    tracing::info!(node = settings.node_name, board, "device plugin started: {plugin}");
    tokio::select! {
        () = label::keep(client, &settings.node_name, &board) => bail!("the watch of the node ended by itself"),
        () = plugin.serve(&stop) => Ok(()),
    }
}
