//! Simulated nodes, for scale and for machines that cannot run a real one. KWOK acts as the kubelet, so pods become
//! Running without any process.

use std::{collections::BTreeMap, fs, process::Command, time::Duration};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::net::TcpStream;

use crate::{
    kube::ControlPlane,
    process::{Process, free_port, tool},
};

/// The tool that [`SimulatedNodes::start`] needs, for `isolate::Options`.
pub const TOOLS: [&str; 1] = ["kwok"];

/// KWOK manages only nodes with this annotation.
const ANNOTATION: (&str, &str) = ("kwok.x-k8s.io/node", "fake");

const DEADLINE: Duration = Duration::from_secs(180);

pub struct SimulatedNodes {
    client: Client,
    _kwok: Process,
}

impl SimulatedNodes {
    pub async fn start(plane: &ControlPlane) -> Result<Self> {
        let config = plane.dir().join("kwok.yaml");
        fs::write(&config, include_str!("kwok.yaml"))?;
        let server = format!("127.0.0.1:{}", free_port()?);
        let mut command = Command::new(tool("kwok")?);
        command
            .arg(format!("--config={}", config.display()))
            .arg(format!("--kubeconfig={}", plane.kubeconfig().display()))
            .arg(format!("--server-address={server}"))
            .arg(format!("--manage-nodes-with-annotation-selector={}={}", ANNOTATION.0, ANNOTATION.1))
            .arg("--node-lease-duration-seconds=40");
        let mut kwok = Process::spawn("kwok", command, &plane.dir().join("log"))?;
        kwok.until_ready(DEADLINE, async || TcpStream::connect(&server).await.is_ok()).await?;
        Ok(Self { client: plane.client(), _kwok: kwok })
    }

    /// Adds nodes `<prefix>-0` to `<prefix>-<n - 1>` with these labels, ample CPU, memory, pods and storage, and
    /// `allocatable`. KWOK makes them Ready a moment later.
    pub async fn add(
        &self,
        prefix: &str,
        n: usize,
        labels: &[(&str, &str)],
        allocatable: &[(&str, &str)],
    ) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let added = stream::iter(0..n).map(|i| {
            let (nodes, name) = (&nodes, format!("{prefix}-{i}"));
            async move {
                nodes.create(&PostParams::default(), &node(&name, labels)?).await?;
                let status = json!({ "status": status(allocatable) });
                nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
                Ok(())
            }
        });
        added.buffer_unordered(16).try_collect().await
    }
}

fn node(name: &str, labels: &[(&str, &str)]) -> Result<Node> {
    let usual = [("kubernetes.io/hostname", name), ("kubernetes.io/os", "linux"), ("type", "kwok")];
    let labels: BTreeMap<_, _> = usual.iter().chain(labels).copied().collect();
    let metadata = json!({ "name": name, "labels": labels, "annotations": { ANNOTATION.0: ANNOTATION.1 } });
    Ok(serde_json::from_value(json!({ "metadata": metadata }))?)
}

fn status(allocatable: &[(&str, &str)]) -> serde_json::Value {
    let usual = [("cpu", "64"), ("memory", "256Gi"), ("pods", "250"), ("ephemeral-storage", "1Ti")];
    let resources: BTreeMap<_, _> = usual.iter().chain(allocatable).copied().collect();
    json!({ "capacity": resources, "allocatable": resources })
}
