//! Health of workers on boards: simulated nodes run the pods, and the simulated GitHub simulates runners, or does not.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use paddock::api::{ClaimPhase, Failure, FailureReason, LABEL_BOARD, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::github::Conclusion;
use serde_json::{Value, json};

use crate::fixture::{
    board_pool::{BoardPool, late_runners},
    world::World,
};

fn failure(worker: Worker) -> Result<Failure> {
    worker.status.and_then(|status| status.failure).map(|failure| *failure).context("a failed worker says why")
}

async fn pod_phase(pool: &BoardPool<'_>, name: &str) -> Result<Option<String>> {
    let pod = pool.world.api::<Pod>(&pool.namespace).get_opt(name).await?;
    Ok(pod.and_then(|pod| pod.status).and_then(|status| status.phase))
}

/// A pod that cannot start fails its worker with the scheduler's own message, and its slot is free again.
pub async fn pod_that_never_starts_fails_its_worker(world: &World) -> Result<()> {
    let storage = json!({ "request": "10Ti", "limit": "10Ti" });
    let pool = BoardPool::simulated(world, 1, json!({ "ephemeralStorage": storage })).await?;
    pool.claim("build").await?;
    let created = async || Ok(pool.pods().await?.first().map(|pod| pod.name_any()));
    let name = world.until_found("a pod is created", created).await?;
    // The timeout is shortened only after the scheduler has said why, however long that takes.
    let events = world.api::<Event>(&pool.namespace);
    let of_pod = |event: &Event| {
        let words = event.message.as_deref().unwrap_or_default();
        event.involved_object.name.as_ref() == Some(&name) && words.contains("ephemeral-storage")
    };
    let recorded = async || Ok(events.list(&ListParams::default()).await?.items.iter().any(of_pod));
    world.until_true("the scheduler said why the pod does not start", recorded).await?;
    let short = json!({ "spec": { "board": { "timeouts": { "podPending": "1s" } } } });
    let pools = world.api::<RunnerPool>(&pool.namespace);
    pools.patch("riscv", &PatchParams::default(), &Patch::Merge(short)).await?;
    let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::PodStuckPending, "{failure:?}");
    let explained = failure.events.iter().any(|event| event.message.contains("ephemeral-storage"));
    ensure!(explained, "the events say why: {failure:?}");
    pool.until_no_runner(&name).await?;
    world.until_gone::<Pod>(&pool.namespace, &name).await?;
    pool.until_says("build", "pod_stuck_pending").await?;
    Ok(())
}

/// A pod whose runner never registers is ended in a way that keeps its log, and replaced.
pub async fn a_runner_that_never_registers_is_replaced(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 2, json!({ "timeouts": { "registration": "10s" } })).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::RunnerNeverRegistered, "{failure:?}");
    ensure!(!failure.containers.is_empty(), "the failure shows the containers: {failure:?}");
    pool.until_no_runner(&name).await?;
    let ended = async || Ok(pod_phase(&pool, &name).await?.as_deref() == Some("Failed"));
    world.until_true("the pod has failed and is kept", ended).await?;
    let replaced = async || Ok(pool.workers().await?.len() > 1);
    world.until_true("another worker is created", replaced).await
}

/// A runner without a job is removed at GitHub first, then its pod ends.
pub async fn idle_runner_is_removed_after_its_timeout(world: &World) -> Result<()> {
    // Long enough for the claim to become Ready.
    let pool = BoardPool::simulated(world, 1, json!({ "timeouts": { "idle": "15s" } })).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    world.stage.github.play_runner(&name)?;
    pool.until_was("build", ClaimPhase::Ready).await?;
    let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::RunnerIdle, "{failure:?}");
    pool.until_no_runner(&name).await
}

/// I8: a runner whose job no webhook reported is kept for as long as the job takes.
pub async fn i8_busy_runner_is_kept(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, json!({ "timeouts": { "idle": "2s" } })).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let job = pool.job(None)?;
    let github = &world.stage.github;
    github.play_runner(&name)?;
    pool.until_claim("build", ClaimPhase::Ready).await?;
    // At least two lists of runners show it busy.
    let list = "/orgs/{org}/actions/runner-groups/{runner_group_id}/runners";
    let before = pool.asked("GET", list);
    world.until_true("GitHub has listed the runners twice", async || Ok(pool.asked("GET", list) >= before + 2)).await?;
    let worker = pool.until_worker(&name, WorkerState::Running).await?;
    ensure!(worker.metadata.deletion_timestamp.is_none(), "the worker is kept");
    ensure!(pod_phase(&pool, &name).await?.as_deref() == Some("Running"));
    github.finish_job(job, Conclusion::Success);
    ensure!(github.job(job).is_some_and(|job| job.conclusion == Some(Conclusion::Success)));
    Ok(())
}

/// I8: GitHub decides: a runner that it refuses to remove as busy is kept, although its claim has no job.
pub async fn i8_runner_that_github_calls_busy_is_kept(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    let github = &world.stage.github;
    let cancelled = pool.queue(None)?;
    let claim = pool.claim_for(&cancelled).await?;
    let name = pool.until_running(&claim).await?;
    github.cancel_job(cancelled.id);
    let other = pool.job(None)?;
    github.play_runner(&name)?;
    let route = "/orgs/{org}/actions/runners/{runner_id}";
    let before = pool.asked("DELETE", route);
    pool.annotate(&claim, "completed", None).await?;
    pool.until_claim(&claim, ClaimPhase::Completed).await?;
    world
        .until_true("the operator has tried to remove the runner", async || Ok(pool.asked("DELETE", route) > before))
        .await?;
    let worker = pool.until_worker(&name, WorkerState::Running).await?;
    ensure!(worker.metadata.deletion_timestamp.is_none(), "the worker is kept");
    ensure!(pod_phase(&pool, &name).await?.as_deref() == Some("Running"));
    github.finish_job(other, Conclusion::Success);
    Ok(())
}

/// Workers on an unreachable node fail at once and are replaced on another node.
pub async fn a_lost_node_fails_its_worker_and_another_takes_over(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 2, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let worker = pool.until_worker(&name, WorkerState::Running).await?;
    let node = worker.status.and_then(|status| status.location).context("a running worker has a location")?;
    let nodes: Api<Node> = Api::all(world.stage.kube.client());
    let taint = json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoSchedule" });
    let lost: Value = json!({ "spec": { "taints": [taint] }, "metadata": { "labels": { LABEL_BOARD: "lost" } } });
    // Kubernetes removes the taint from a node that is ready: it is set until the operator has seen it.
    let failed = async || {
        nodes.patch(&node, &PatchParams::default(), &Patch::Merge(&lost)).await?;
        let worker = world.api::<Worker>(&pool.namespace).get(&name).await?;
        Ok(worker.status.and_then(|status| status.state) == Some(WorkerState::Failed))
    };
    world.until_true("the worker has failed", failed).await?;
    let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::NodeUnreachable, "{failure:?}");
    ensure!(failure.message.contains(&node), "{failure:?}");
    pool.until_no_runner(&name).await?;
    let other = pool.until_running("build").await?;
    ensure!(other != name, "another worker runs on another node");
    Ok(())
}

/// A worker whose pod was deleted fails, says so, and is replaced.
pub async fn worker_without_pod_fails_and_is_replaced(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let now = DeleteParams::default().grace_period(0);
    world.api::<Pod>(&pool.namespace).delete(&name, &now).await?;
    let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::PodMissing, "{failure:?}");
    pool.until_no_runner(&name).await?;
    let other = pool.until_running("build").await?;
    ensure!(other != name, "another worker runs");
    Ok(())
}

/// I2: a runner with the pool's prefix but without a worker is removed; others are kept.
pub async fn i2_runner_without_worker_is_removed(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let github = &world.stage.github;
    let ours = github.runner(&name).context("the runner is registered")?;
    let prefix: String = name.split_inclusive('-').take(2).collect();
    let (stray, foreign) = (format!("{prefix}stray-{}", pool.namespace), format!("foreign-{}", pool.namespace));
    github.add_runner(&ours, &stray);
    github.add_runner(&ours, &foreign);
    // GitHub is asked for runners because the worker is not online yet; the clean-up uses the same list.
    pool.until_no_runner(&stray).await?;
    ensure!(github.runner(&foreign).is_some(), "a runner without the prefix is kept");
    ensure!(github.runner(&name).is_some(), "a runner with a worker is kept");
    world.api::<RunnerClaim>(&pool.namespace).delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await
}
