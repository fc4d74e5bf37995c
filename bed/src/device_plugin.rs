//! `paddock device-plugin` next to the node's kubelet, with the permissions of the chart.

use std::{process::Command, time::Duration};

use anyhow::Result;
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::Api;

use crate::{
    kube::{ControlPlane, RELEASE, RELEASE_NAMESPACE},
    node::Node,
    process::{Process, Signal},
    stage::binary,
};

const DEADLINE: Duration = Duration::from_secs(180);

pub struct DevicePlugin {
    process: Process,
}

impl DevicePlugin {
    /// Starts a plugin and waits until the node has its slots. The chart's permissions must be installed with
    /// `devicePlugin.enabled`.
    pub async fn start(plane: &ControlPlane, node: &Node, board: &str, resource: &str, slots: u32) -> Result<Self> {
        let account = format!("{RELEASE}-device-plugin");
        let kubeconfig = plane.kubeconfig_of_pod(RELEASE_NAMESPACE, &account, node.name()).await?;
        let mut command = Command::new(binary("paddock")?);
        command
            .args(["device-plugin", "--board", board, "--resource-name", resource, "--slots", &slots.to_string()])
            .env("NODE_NAME", node.name())
            .env("KUBECONFIG", kubeconfig);
        let name = format!("device-plugin-{}", resource.replace('/', "-"));
        let mut process = Process::spawn(&name, command, &plane.dir().join("node/log"))?;
        let nodes: Api<KubeNode> = Api::all(plane.client());
        let has_slots = async || allocatable(&nodes, node.name(), resource).await.ok() == Some(slots);
        process.until_ready(DEADLINE, has_slots).await?;
        Ok(Self { process })
    }

    pub fn log(&self) -> String {
        self.process.log_tail(usize::MAX)
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Stops it and returns its exit status.
    pub async fn stop(self) -> Result<std::process::ExitStatus> {
        self.process.stop().await
    }
}

/// The allocatable amount of a resource on a node.
pub async fn allocatable(nodes: &Api<KubeNode>, node: &str, resource: &str) -> Result<u32> {
    let offered = nodes.get(node).await?.status.and_then(|status| status.allocatable?.remove(resource));
    Ok(offered.map_or(Ok(0), |quantity| quantity.0.parse())?)
}
