//! A claim on a board: a pod with a runner, one job, and the end.

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod, Secret};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use paddock::api::{ClaimPhase, LABEL_BOARD, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::{
    github::{Conclusion, JobRequest},
    image::runner_image,
    node::Node,
    stage::{CREDENTIALS, ORGANIZATION, REPOSITORY, Stage, binary},
};
use serde_json::json;

use crate::life::{Life, Scenario};

const BOARD: &str = "test-board";
const NODE: &str = "board-1";
const IMAGE: &str = "paddock-bed/runner:1";

pub const SCENARIO: Scenario =
    Scenario { name: "board", parallel: 4, writes: 20, play: |life| play(life).boxed_local() };

/// The node that all lives share; it ends when it is dropped.
pub async fn start_node(stage: &Stage) -> Result<Node> {
    let node = Node::start(&stage.kube, NODE, &[(LABEL_BOARD, BOARD)]).await?;
    let archive = stage.dir().join("runner.tar");
    runner_image(IMAGE, &binary("paddock-bed-runner")?, &["jit"])?.write(&archive)?;
    node.import_image(&archive).await?;
    Ok(node)
}

async fn prepare(life: &Life<'_>, label: &str) -> Result<()> {
    let namespace = &life.namespace;
    let resource = format!("paddock.test/{namespace}");
    let capacity = json!({ "status": { "capacity": { &resource: "1" } } });
    let nodes: Api<KubeNode> = Api::all(life.stage.kube.client());
    let advertise = async || Ok(nodes.patch_status(NODE, &PatchParams::default(), &Patch::Merge(&capacity)).await?);
    life.until("the node has a slot", advertise).await?;
    let pool = json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool", "metadata": {"name": "riscv"},
        "spec": {"board": {
            "board": BOARD, "labels": [[label]], "image": IMAGE, "resourceName": resource,
            // Busy cores are slow, and the worker must not be replaced: every life has exactly one.
            "timeouts": {"registration": "1h", "podPending": "1h", "idle": "1h"},
            "github": {"credentialsRef": {"name": CREDENTIALS}, "runnerGroup": namespace},
        }},
    });
    life.apply::<RunnerPool>(pool).await?;
    let owner = life.stage.github.organization(ORGANIZATION);
    let claim = json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim", "metadata": {"name": "build"},
        "spec": {
            "runId": "1", "labels": [label],
            "owner": {"id": owner.id, "login": owner.login, "type": "Organization"},
        },
    });
    life.apply::<RunnerClaim>(claim).await
}

async fn play(life: &Life<'_>) -> Result<()> {
    let label = format!("rv-{}", life.namespace);
    life.begin("serve");
    prepare(life, &label).await?;
    let github = &life.stage.github;
    let job = JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec![label.clone()],
        duration_ms: Some(100),
        ..JobRequest::default()
    };
    let job = github.queue_job(job)?.id;
    life.until("the claim is Completed", async || {
        let status = life.api::<RunnerClaim>().get("build").await?.status.unwrap_or_default();
        ensure!(status.phase == Some(ClaimPhase::Completed), "{status:#?}");
        Ok(())
    })
    .await?;
    let job = github.job(job).context("GitHub knows the job")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "the job did not succeed: {job:?}");

    let workers = life.api::<Worker>().list(&ListParams::default()).await?.items;
    ensure!(workers.len() == 1, "I1: one worker for one claim, not {workers:#?}");
    let state = workers[0].status.as_ref().and_then(|status| status.state);
    ensure!(state == Some(WorkerState::Completed), "the worker is {state:?}");
    let pods = life.api::<Pod>().list(&ListParams::default()).await?.items;
    ensure!(pods.len() == 1 && pods[0].metadata.name == workers[0].metadata.name, "I1: its pod alone");

    life.begin("delete");
    life.delete::<RunnerClaim>("build").await?;
    life.delete::<RunnerPool>("riscv").await?;
    life.until_none::<RunnerClaim>("claims", |_| true).await?;
    life.until_none::<RunnerPool>("pools", |_| true).await?;
    life.until_none::<Worker>("workers with a finalizer", |worker| worker.metadata.finalizers.is_some()).await?;
    let config = |secret: &Secret| secret.type_.as_deref() == Some("paddock.dev/jit-config");
    life.until_none::<Secret>("JIT configs", config).await?;
    let left: Vec<_> = github.runners().into_iter().filter(|runner| runner.labels.contains(&label)).collect();
    ensure!(left.is_empty(), "I2: runners are left: {left:?}");
    Ok(())
}
