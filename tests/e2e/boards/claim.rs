//! Claims on boards: a real kubelet runs the pods, and the runners in them take jobs from the simulated GitHub.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use paddock::api::{ClaimPhase, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::github::{Conclusion, Effect, Fault};
use serde_json::{Value, json};

use crate::fixture::{
    board_pool::{BOARD, BoardPool, late_runners, message},
    world::{DEADLINE, World},
};

/// A claim gets a pod on the board, its runner runs a job, and afterwards only the Worker and its finished pod are
/// left.
pub async fn claim_runs_a_job_on_the_board(world: &World) -> Result<()> {
    let pool = BoardPool::real(world, 1).await?;
    pool.claim("build").await?;
    let claim = pool.until_claim("build", ClaimPhase::Ready).await?;
    let name = pool.worker_of(&claim)?;
    let worker = pool.until_worker(&name, WorkerState::Running).await?;
    let status = worker.status.clone().unwrap_or_default();
    ensure!(status.location.as_deref() == Some("board-1"), "the Worker says where it runs: {status:?}");
    let runner = world.stage.github.runner(&name).context("Ready means that GitHub knows the runner")?;
    ensure!(runner.os != "unknown", "Ready means that the runner was online: {runner:?}");
    // The runner may be offline for a moment between two polls.
    world.stage.github.until_online(&name, true, DEADLINE).await?;

    let secret = world.api::<Secret>(&pool.namespace).get(&name).await?;
    let owners = secret.owner_references();
    let pod = world.api::<Pod>(&pool.namespace).get(&name).await?;
    ensure!(
        owners.len() == 1 && Some(&owners[0].uid) == pod.metadata.uid.as_ref(),
        "the pod owns its Secret: {owners:?}"
    );
    let config = secret.data.unwrap_or_default().remove("jitconfig").context("the Secret has the config")?;
    let config = String::from_utf8(config.0)?;
    let shown = [json!(pod), json!(worker), json!(claim)].map(|object| object.to_string());
    ensure!(!shown.iter().any(|text| text.contains(&config)), "I10: the config is in the Secret alone");

    let job = pool.job(Some(200))?;
    pool.until_worker(&name, WorkerState::Completed).await?;
    let job = world.stage.github.job(job).context("GitHub knows the job")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    ensure!(job.taken_by.is_some_and(|taken| taken.runner_name == name), "its own runner ran it");
    let claim = pool.until_claim("build", ClaimPhase::Completed).await?;
    ensure!(claim.status.is_some_and(|status| status.progress == "1/1"));

    pool.until_no_runner(&name).await?;
    world.until_gone::<Secret>(&pool.namespace, &name).await?;
    let pod = world.api::<Pod>(&pool.namespace).get(&name).await?;
    ensure!(pod.status.and_then(|status| status.phase).as_deref() == Some("Succeeded"), "the pod stays for its log");
    world.api::<RunnerClaim>(&pool.namespace).delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    world.api::<Worker>(&pool.namespace).get(&name).await.context("the Worker outlives the claim")?;
    Ok(())
}

/// I7: with one slot the second claim waits, says why, and gets the slot when it is free.
pub async fn second_claim_waits_for_the_slot(world: &World) -> Result<()> {
    let pool = BoardPool::real(world, 1).await?;
    pool.claim("a-first").await?;
    pool.until_claim("a-first", ClaimPhase::Ready).await?;
    pool.claim("b-second").await?;
    let waits = format!("no free slot on board {BOARD} (0 of 1)");
    world.until::<RunnerClaim>(&pool.namespace, "b-second", "waiting", |claim| message(claim) == waits).await?;
    pool.job(Some(100))?;
    pool.until_claim("a-first", ClaimPhase::Completed).await?;
    pool.until_claim("b-second", ClaimPhase::Ready).await?;
    let workers = world.api::<Worker>(&pool.namespace).list(&ListParams::default()).await?;
    ensure!(workers.items.len() == 2, "no more workers than claims");
    Ok(())
}

/// I8: deleting a claim does not end its busy runner, and finishes when the job does.
pub async fn busy_worker_outlives_the_deletion_of_its_claim(world: &World) -> Result<()> {
    let pool = BoardPool::real(world, 1).await?;
    pool.claim("build").await?;
    let claim = pool.until_claim("build", ClaimPhase::Ready).await?;
    let name = pool.worker_of(&claim)?;
    let job = pool.job(None)?;
    ensure!(pool.until_taken(job).await? == name);
    world.api::<RunnerClaim>(&pool.namespace).delete("build", &DeleteParams::default()).await?;
    let busy = |claim: &RunnerClaim| message(claim).contains("busy");
    world.until::<RunnerClaim>(&pool.namespace, "build", "waiting for its busy runner", busy).await?;
    let pod = world.api::<Pod>(&pool.namespace).get(&name).await?;
    ensure!(pod.metadata.deletion_timestamp.is_none(), "the pod is kept");
    world.stage.github.finish_job(job, Conclusion::Success);
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    pool.until_no_runner(&name).await?;
    let job = world.stage.github.job(job).context("GitHub knows the job")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    Ok(())
}

/// Deleting a claim removes its idle runner, at GitHub first.
pub async fn deleted_claim_removes_its_idle_runner(world: &World) -> Result<()> {
    let pool = BoardPool::real(world, 1).await?;
    pool.claim("build").await?;
    let claim = pool.until_claim("build", ClaimPhase::Ready).await?;
    let name = pool.worker_of(&claim)?;
    world.api::<RunnerClaim>(&pool.namespace).delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    pool.until_no_runner(&name).await?;
    world.until_gone::<Pod>(&pool.namespace, &name).await?;
    world.until_gone::<Secret>(&pool.namespace, &name).await?;
    world.api::<RunnerPool>(&pool.namespace).delete("riscv", &DeleteParams::default()).await?;
    world.until_gone::<RunnerPool>(&pool.namespace, "riscv").await
}

/// I1, I2: a JIT config whose answer was lost leaves a runner that no pod can become; it is removed and another
/// created.
pub async fn lost_jit_config_is_replaced(world: &World) -> Result<()> {
    let pool = BoardPool::real(world, 1).await?;
    let route = format!("/orgs/{}/actions/runners/generate-jitconfig", pool.login);
    world.stage.github.fault(Fault::new("POST", &route, Effect::LostResponse).times(1));
    pool.claim("build").await?;
    let claim = pool.until_claim("build", ClaimPhase::Ready).await?;
    let name = pool.worker_of(&claim)?;
    let label = &pool.label;
    let runners = world.stage.github.runners();
    let own: Vec<_> =
        runners.iter().filter(|runner| runner.labels.contains(label)).map(|runner| &runner.name).collect();
    ensure!(own == [&name], "one runner, not {own:?}");
    pool.job(Some(100))?;
    pool.until_worker(&name, WorkerState::Completed).await?;
    pool.until_no_runner(&name).await
}

/// A worker whose pod fails says why, and is replaced.
pub async fn failed_pod_is_explained_and_replaced(world: &World) -> Result<()> {
    let pool = BoardPool::real(world, 1).await?;
    pool.claim("build").await?;
    let claim = pool.until_claim("build", ClaimPhase::Ready).await?;
    let name = pool.worker_of(&claim)?;
    // The kubelet ends the pod at its deadline.
    let deadline: Value = json!({ "spec": { "activeDeadlineSeconds": 1 } });
    let pods = world.api::<Pod>(&pool.namespace);
    pods.patch(&name, &PatchParams::default(), &Patch::Merge(deadline)).await?;
    let failed = pool.until_worker(&name, WorkerState::Failed).await?;
    let failure = failed.status.and_then(|status| status.failure).context("a failed worker says why")?;
    ensure!(failure.message.contains("DeadlineExceeded"), "{failure:?}");
    pool.until_no_runner(&name).await?;
    let replaced = |claim: &RunnerClaim| {
        let status = claim.status.clone().unwrap_or_default();
        status.phase == Some(ClaimPhase::Ready) && status.workers.len() == 2
    };
    world.until::<RunnerClaim>(&pool.namespace, "build", "Ready again", replaced).await?;
    Ok(())
}

/// A claim for several runners, applied by hand, is Ready when all of them are online.
pub async fn claim_for_two_is_ready_when_both_runners_are_online(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 2, late_runners()).await?;
    pool.claim_with("two", json!({ "count": 2 })).await?;
    world.until_true("there are two pods", async || Ok(pool.pods().await?.len() == 2)).await?;
    for worker in pool.workers().await? {
        let name = worker.metadata.name.unwrap_or_default();
        world
            .until_true("the runner is registered", async || Ok(world.stage.github.play_runner(&name).is_ok()))
            .await?;
    }
    let claim = pool.until_claim("two", ClaimPhase::Ready).await?;
    ensure!(claim.status.is_some_and(|status| status.progress == "2/2"));
    Ok(())
}
