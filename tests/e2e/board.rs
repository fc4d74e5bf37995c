//! The board path: a real kubelet runs the pods, and the runner inside takes jobs from the simulated GitHub.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use paddock::api::{ClaimPhase, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::github::{Conclusion, Effect, Fault};
use serde_json::{Value, json};

use crate::{
    boards::{BOARD, Boards, message},
    support::{DEADLINE, World},
};

/// A claim gets a pod on the board, its runner takes a job, and when the job is done nothing is left but records.
pub async fn claim_runs_a_job_on_the_board(world: &World) -> Result<()> {
    let boards = Boards::real(world, 1).await?;
    boards.claim("build").await?;
    let claim = boards.until_claim("build", ClaimPhase::Ready).await?;
    let name = boards.worker_of(&claim)?;
    let worker = boards.until_worker(&name, WorkerState::Running).await?;
    let status = worker.status.clone().unwrap_or_default();
    ensure!(status.location.as_deref() == Some("board-1"), "it says where it runs: {status:?}");
    let runner = world.stage.github.runner(&name).context("Ready means that GitHub knows the runner")?;
    ensure!(runner.os != "unknown", "Ready means that the runner was there: {runner:?}");
    // Between two polls it may be offline for a moment.
    world.stage.github.until_online(&name, true, DEADLINE).await?;

    let secret = world.api::<Secret>(&boards.namespace).get(&name).await?;
    let owners = secret.owner_references();
    let pod = world.api::<Pod>(&boards.namespace).get(&name).await?;
    ensure!(
        owners.len() == 1 && Some(&owners[0].uid) == pod.metadata.uid.as_ref(),
        "the pod owns its Secret: {owners:?}"
    );
    let config = secret.data.unwrap_or_default().remove("jitconfig").context("the Secret has the config")?;
    let config = String::from_utf8(config.0)?;
    let shown = [json!(pod), json!(worker), json!(claim)].map(|object| object.to_string());
    ensure!(!shown.iter().any(|text| text.contains(&config)), "I10: the config is in the Secret alone");

    let job = boards.job(Some(200))?;
    boards.until_worker(&name, WorkerState::Completed).await?;
    let job = world.stage.github.job(job).context("the job is known")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    ensure!(job.taken_by.is_some_and(|taken| taken.runner_name == name), "its own runner ran it");
    let claim = boards.until_claim("build", ClaimPhase::Completed).await?;
    ensure!(claim.status.is_some_and(|status| status.progress == "1/1"));

    boards.until_no_runner(&name).await?;
    world.until_gone::<Secret>(&boards.namespace, &name).await?;
    let pod = world.api::<Pod>(&boards.namespace).get(&name).await?;
    ensure!(pod.status.and_then(|status| status.phase).as_deref() == Some("Succeeded"), "the pod stays for its log");
    world.api::<RunnerClaim>(&boards.namespace).delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&boards.namespace, "build").await?;
    world.api::<Worker>(&boards.namespace).get(&name).await.context("the record outlives the claim")?;
    Ok(())
}

/// I7: with one slot the second claim waits, says for what, and gets the slot when it is free.
pub async fn second_claim_waits_for_the_slot(world: &World) -> Result<()> {
    let boards = Boards::real(world, 1).await?;
    boards.claim("a-first").await?;
    boards.until_claim("a-first", ClaimPhase::Ready).await?;
    boards.claim("b-second").await?;
    let waits = format!("no free slot on board {BOARD} (0 of 1)");
    world.until::<RunnerClaim>(&boards.namespace, "b-second", "waiting", |claim| message(claim) == waits).await?;
    boards.job(Some(100))?;
    boards.until_claim("a-first", ClaimPhase::Completed).await?;
    boards.until_claim("b-second", ClaimPhase::Ready).await?;
    let workers = world.api::<Worker>(&boards.namespace).list(&ListParams::default()).await?;
    ensure!(workers.items.len() == 2, "no more workers than claims");
    Ok(())
}

/// I8: deleting a claim leaves its busy runner alone, and finishes when the job does.
pub async fn busy_worker_outlives_the_deletion_of_its_claim(world: &World) -> Result<()> {
    let boards = Boards::real(world, 1).await?;
    boards.claim("build").await?;
    let claim = boards.until_claim("build", ClaimPhase::Ready).await?;
    let name = boards.worker_of(&claim)?;
    let job = boards.job(None)?;
    ensure!(boards.until_taken(job).await? == name);
    world.api::<RunnerClaim>(&boards.namespace).delete("build", &DeleteParams::default()).await?;
    let busy = |claim: &RunnerClaim| message(claim).contains("busy");
    world.until::<RunnerClaim>(&boards.namespace, "build", "waiting for its busy runner", busy).await?;
    let pod = world.api::<Pod>(&boards.namespace).get(&name).await?;
    ensure!(pod.metadata.deletion_timestamp.is_none(), "the pod is left alone");
    world.stage.github.finish_job(job, Conclusion::Success);
    world.until_gone::<RunnerClaim>(&boards.namespace, "build").await?;
    boards.until_no_runner(&name).await?;
    let job = world.stage.github.job(job).context("the job is known")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    Ok(())
}

/// An idle runner goes with its claim, at GitHub first.
pub async fn deleted_claim_takes_its_idle_runner_along(world: &World) -> Result<()> {
    let boards = Boards::real(world, 1).await?;
    boards.claim("build").await?;
    let claim = boards.until_claim("build", ClaimPhase::Ready).await?;
    let name = boards.worker_of(&claim)?;
    world.api::<RunnerClaim>(&boards.namespace).delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&boards.namespace, "build").await?;
    boards.until_no_runner(&name).await?;
    world.until_gone::<Pod>(&boards.namespace, &name).await?;
    world.until_gone::<Secret>(&boards.namespace, &name).await?;
    world.api::<RunnerPool>(&boards.namespace).delete("riscv", &DeleteParams::default()).await?;
    world.until_gone::<RunnerPool>(&boards.namespace, "riscv").await
}

/// I1, I2: a JIT config whose answer was lost leaves a runner that nobody can be; it makes room for another.
pub async fn lost_jit_config_is_replaced(world: &World) -> Result<()> {
    let boards = Boards::real(world, 1).await?;
    let route = format!("/orgs/{}/actions/runners/generate-jitconfig", boards.login);
    world.stage.github.fault(Fault::new("POST", &route, Effect::LostResponse).times(1));
    boards.claim("build").await?;
    let claim = boards.until_claim("build", ClaimPhase::Ready).await?;
    let name = boards.worker_of(&claim)?;
    let label = &boards.label;
    let runners = world.stage.github.runners();
    let own: Vec<_> =
        runners.iter().filter(|runner| runner.labels.contains(label)).map(|runner| &runner.name).collect();
    ensure!(own == [&name], "one runner, not {own:?}");
    boards.job(Some(100))?;
    boards.until_worker(&name, WorkerState::Completed).await?;
    boards.until_no_runner(&name).await
}

/// A pod that fails says how, and another worker takes its place.
pub async fn failed_pod_is_explained_and_replaced(world: &World) -> Result<()> {
    let boards = Boards::real(world, 1).await?;
    boards.claim("build").await?;
    let claim = boards.until_claim("build", ClaimPhase::Ready).await?;
    let name = boards.worker_of(&claim)?;
    // The kubelet ends the pod, as it does at its deadline.
    let deadline: Value = json!({ "spec": { "activeDeadlineSeconds": 1 } });
    let pods = world.api::<Pod>(&boards.namespace);
    pods.patch(&name, &PatchParams::default(), &Patch::Merge(deadline)).await?;
    let failed = boards.until_worker(&name, WorkerState::Failed).await?;
    let failure = failed.status.and_then(|status| status.failure).context("a failed worker says why")?;
    ensure!(failure.message.contains("DeadlineExceeded"), "{failure:?}");
    boards.until_no_runner(&name).await?;
    let replaced = |claim: &RunnerClaim| {
        let status = claim.status.clone().unwrap_or_default();
        status.phase == Some(ClaimPhase::Ready) && status.workers.len() == 2
    };
    world.until::<RunnerClaim>(&boards.namespace, "build", "Ready again", replaced).await?;
    Ok(())
}
