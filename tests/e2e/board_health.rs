//! Health of workers on boards: simulated nodes run the pods, and the simulated GitHub plays the runners, or does not.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use paddock::api::{ClaimPhase, Failure, FailureReason, LABEL_BOARD, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::github::Conclusion;
use serde_json::{Value, json};

use crate::{
    boards::{Boards, unplayed},
    support::World,
};

fn failure(worker: Worker) -> Result<Failure> {
    worker.status.and_then(|status| status.failure).map(|failure| *failure).context("a failed worker says why")
}

async fn pod_phase(boards: &Boards<'_>, name: &str) -> Result<Option<String>> {
    let pod = boards.world.api::<Pod>(&boards.namespace).get_opt(name).await?;
    Ok(pod.and_then(|pod| pod.status).and_then(|status| status.phase))
}

/// A pod that cannot start is given up with the scheduler's own words, and the slot is free for another try.
pub async fn a_pod_that_never_starts_is_given_up(world: &World) -> Result<()> {
    let storage = json!({ "request": "10Ti", "limit": "10Ti" });
    let boards = Boards::simulated(world, 1, json!({ "ephemeralStorage": storage })).await?;
    boards.claim("build").await?;
    let mut name = None;
    world
        .until_true("a pod is made", async || {
            name = boards.pods().await?.first().map(|pod| pod.name_any());
            Ok(name.is_some())
        })
        .await?;
    let name = name.context("it was there")?;
    // However long the scheduler takes for its words: the pod's time is up after them.
    let events = world.api::<Event>(&boards.namespace);
    let of_pod = |event: &Event| {
        let words = event.message.as_deref().unwrap_or_default();
        event.involved_object.name.as_ref() == Some(&name) && words.contains("ephemeral-storage")
    };
    let told = async || Ok(events.list(&ListParams::default()).await?.items.iter().any(of_pod));
    world.until_true("the scheduler said why the pod does not start", told).await?;
    let short = json!({ "spec": { "board": { "timeouts": { "podPending": "1s" } } } });
    let pools = world.api::<RunnerPool>(&boards.namespace);
    pools.patch("riscv", &PatchParams::default(), &Patch::Merge(short)).await?;
    let failure = failure(boards.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::PodStuckPending, "{failure:?}");
    let told = failure.events.iter().any(|event| event.message.contains("ephemeral-storage"));
    ensure!(told, "the events say why: {failure:?}");
    boards.until_no_runner(&name).await?;
    world.until_gone::<Pod>(&boards.namespace, &name).await?;
    boards.until_says("build", "pod_stuck_pending").await?;
    Ok(())
}

/// A pod that runs and whose runner never comes is ended, so that its log stays, and replaced.
pub async fn a_runner_that_never_registers_is_replaced(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 2, json!({ "timeouts": { "registration": "10s" } })).await?;
    boards.claim("build").await?;
    let name = boards.until_running("build").await?;
    let failure = failure(boards.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::RunnerNeverRegistered, "{failure:?}");
    ensure!(!failure.containers.is_empty(), "it says how the containers were: {failure:?}");
    boards.until_no_runner(&name).await?;
    let ended = async || Ok(pod_phase(&boards, &name).await?.as_deref() == Some("Failed"));
    world.until_true("the pod is ended and stays", ended).await?;
    let replaced = async || Ok(boards.workers().await?.len() > 1);
    world.until_true("another worker is made", replaced).await
}

/// A runner that gets no job is removed at GitHub first, and then ended.
pub async fn a_runner_without_a_job_is_given_up(world: &World) -> Result<()> {
    // Long enough for the claim to say that it is Ready.
    let boards = Boards::simulated(world, 1, json!({ "timeouts": { "idle": "15s" } })).await?;
    boards.claim("build").await?;
    let name = boards.until_running("build").await?;
    world.stage.github.play_runner(&name)?;
    boards.until_was("build", ClaimPhase::Ready).await?;
    let failure = failure(boards.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::RunnerIdle, "{failure:?}");
    boards.until_no_runner(&name).await
}

/// I8: a runner with a job that no webhook told of is left alone, for as long as it takes.
pub async fn i8_a_busy_runner_is_never_given_up(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, json!({ "timeouts": { "idle": "2s" } })).await?;
    boards.claim("build").await?;
    let name = boards.until_running("build").await?;
    let job = boards.job(None)?;
    let github = &world.stage.github;
    github.play_runner(&name)?;
    boards.until_claim("build", ClaimPhase::Ready).await?;
    // Two looks at the list, at least, find it busy.
    let list = "/orgs/{org}/actions/runner-groups/{runner_group_id}/runners";
    let before = boards.asked("GET", list);
    world.until_true("GitHub was asked", async || Ok(boards.asked("GET", list) >= before + 2)).await?;
    let worker = boards.until_worker(&name, WorkerState::Running).await?;
    ensure!(worker.metadata.deletion_timestamp.is_none(), "it is left alone");
    ensure!(pod_phase(&boards, &name).await?.as_deref() == Some("Running"));
    github.finish_job(job, Conclusion::Success);
    ensure!(github.job(job).is_some_and(|job| job.conclusion == Some(Conclusion::Success)));
    Ok(())
}

/// I8: GitHub has the last word: a runner that it calls busy stays although nobody here knows of its job.
pub async fn i8_github_refuses_to_remove_a_busy_runner(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    let github = &world.stage.github;
    let cancelled = boards.queue(None)?;
    let claim = boards.claim_for(&cancelled).await?;
    let name = boards.until_running(&claim).await?;
    github.cancel_job(cancelled.id);
    let other = boards.job(None)?;
    github.play_runner(&name)?;
    let route = "/orgs/{org}/actions/runners/{runner_id}";
    let before = boards.asked("DELETE", route);
    boards.tell(&claim, "completed", None).await?;
    boards.until_claim(&claim, ClaimPhase::Completed).await?;
    world.until_true("GitHub was asked", async || Ok(boards.asked("DELETE", route) > before)).await?;
    let worker = boards.until_worker(&name, WorkerState::Running).await?;
    ensure!(worker.metadata.deletion_timestamp.is_none(), "it is left alone");
    ensure!(pod_phase(&boards, &name).await?.as_deref() == Some("Running"));
    github.finish_job(other, Conclusion::Success);
    Ok(())
}

/// Pods on a node that does not answer are given up at once, and their slots elsewhere are used.
pub async fn a_lost_node_fails_its_worker_and_another_takes_over(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 2, unplayed()).await?;
    boards.claim("build").await?;
    let name = boards.until_running("build").await?;
    let worker = boards.until_worker(&name, WorkerState::Running).await?;
    let node = worker.status.and_then(|status| status.location).context("it says where it runs")?;
    let nodes: Api<Node> = Api::all(world.stage.kube.client());
    let taint = json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoSchedule" });
    let lost: Value = json!({ "spec": { "taints": [taint] }, "metadata": { "labels": { LABEL_BOARD: "lost" } } });
    // Kubernetes takes the taint away from a node that is ready after all: it is put there until it was seen.
    let seen = async || {
        nodes.patch(&node, &PatchParams::default(), &Patch::Merge(&lost)).await?;
        let worker = world.api::<Worker>(&boards.namespace).get(&name).await?;
        Ok(worker.status.and_then(|status| status.state) == Some(WorkerState::Failed))
    };
    world.until_true("its worker failed", seen).await?;
    let failure = failure(boards.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::NodeUnreachable, "{failure:?}");
    ensure!(failure.message.contains(&node), "{failure:?}");
    boards.until_no_runner(&name).await?;
    let other = boards.until_running("build").await?;
    ensure!(other != name, "another worker on another node");
    Ok(())
}

/// A worker whose pod somebody deleted is over, says so, and is replaced.
pub async fn a_worker_without_a_pod_is_over_and_replaced(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    boards.claim("build").await?;
    let name = boards.until_running("build").await?;
    let now = DeleteParams::default().grace_period(0);
    world.api::<Pod>(&boards.namespace).delete(&name, &now).await?;
    let failure = failure(boards.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::PodMissing, "{failure:?}");
    boards.until_no_runner(&name).await?;
    let other = boards.until_running("build").await?;
    ensure!(other != name, "another worker");
    Ok(())
}

/// I2: a runner of ours that no worker stands for is removed, and nobody else's is touched.
pub async fn i2_a_runner_without_a_worker_is_swept(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    boards.claim("build").await?;
    let name = boards.until_running("build").await?;
    let github = &world.stage.github;
    let ours = github.runner(&name).context("it is registered")?;
    let prefix: String = name.split_inclusive('-').take(2).collect();
    let (stray, foreign) = (format!("{prefix}stray-{}", boards.namespace), format!("foreign-{}", boards.namespace));
    github.add_runner(&ours, &stray);
    github.add_runner(&ours, &foreign);
    // The list is read for the worker that has not come online; the sweep reads along.
    boards.until_no_runner(&stray).await?;
    ensure!(github.runner(&foreign).is_some(), "a foreign runner is not ours to remove");
    ensure!(github.runner(&name).is_some(), "one with a worker stays");
    world.api::<RunnerClaim>(&boards.namespace).delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&boards.namespace, "build").await
}
