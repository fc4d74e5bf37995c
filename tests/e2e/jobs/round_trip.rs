//! A job from GitHub to a board and back, where only GitHub is simulated.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{ResourceExt, api::ListParams};
use paddock::api::{
    ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE, ClaimPhase, LABEL_CLAIM, RunnerClaim, Worker, WorkerState,
};
use paddock_bed::{
    device_plugin::DevicePlugin,
    github::{Conclusion, Status},
    stage::RUNNER_IMAGE,
};
use serde_json::json;

use crate::fixture::{
    board_pool::{BOARD, node},
    job_pool::JobPool,
    world::{DEADLINE, World},
};

/// A job's webhook becomes a claim; its pod starts on the real kubelet, in a slot of the real device plugin; its runner
/// runs the job and ends; the pod is deleted after its grace, and the slot is free.
pub async fn job_goes_from_github_to_the_board_and_back(world: &World) -> Result<()> {
    let github = &world.stage.github;
    let changes = json!({ "board": BOARD, "image": RUNNER_IMAGE, "timeouts": { "podGrace": "3s" } });
    let pool = JobPool::new(world, 1, changes).await?;
    let (namespace, node) = (&pool.namespace, node(world).await?);
    let _plugin = DevicePlugin::start(&world.stage.kube, node, BOARD, &pool.resource(), 1).await?;
    pool.until_free(1).await?;

    let job = pool.queue(0, None)?;
    let name = format!("job-{job}");
    let taken = github.until_job(job, DEADLINE, |job| job.status == Status::InProgress && job.heard).await?;
    let runner = taken.taken_by.context("a runner has the job")?.runner_name;
    let pods = world.api::<Pod>(namespace).list(&ListParams::default()).await?.items;
    let [pod] = &pods[..] else { anyhow::bail!("{} pods, not one", pods.len()) };
    ensure!(pod.name_any() == runner, "the pod's runner has the job");
    ensure!(pod.labels().get(LABEL_CLAIM) == Some(&name));
    let spec = pod.spec.clone().unwrap_or_default();
    ensure!(spec.node_name.as_deref() == Some(node.name()), "it runs on the real node: {:?}", spec.node_name);
    let limits = spec.containers[0].resources.as_ref().and_then(|resources| resources.limits.clone());
    let slot = limits.unwrap_or_default().remove(&pool.resource());
    ensure!(slot.is_some_and(|slot| slot.0 == "1"), "it has the slot");
    let said = |claim: &RunnerClaim, key: &str| claim.annotations().get(key).cloned().unwrap_or_default();
    let told = |claim: &RunnerClaim| said(claim, ANNOTATION_JOB_STATE) == "in_progress";
    let claim = world.until::<RunnerClaim>(namespace, &name, "told that its job runs", told).await?;
    ensure!(said(&claim, ANNOTATION_JOB_RUNNER).ends_with(&runner), "and who has it: {:?}", claim.annotations());

    github.finish_job(job, Conclusion::Success);
    let done = |claim: &RunnerClaim| claim.status.as_ref().and_then(|it| it.phase) == Some(ClaimPhase::Completed);
    world.until::<RunnerClaim>(namespace, &name, "Completed", done).await?;
    let served = |worker: &Worker| worker.status.as_ref().and_then(|it| it.state) == Some(WorkerState::Completed);
    world.until::<Worker>(namespace, &runner, "completed", served).await?;
    let job = github.job(job).context("the job is known")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    world.until_gone::<Pod>(namespace, &runner).await?;
    world.until_gone::<Secret>(namespace, &runner).await?;
    ensure!(github.runner(&runner).is_none(), "GitHub has no runner left");
    pool.until_free(1).await
}
