//! A claim follows its job.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use paddock::api::{ClaimPhase, RunnerClaim, Worker};
use paddock_bed::github::{Conclusion, Effect, Fault};
use serde_json::json;

use crate::fixture::{
    board_pool::{BoardPool, late_runners, message},
    world::World,
};

fn reason(claim: &RunnerClaim) -> String {
    let conditions = claim.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.first().map(|condition| condition.reason.clone()).unwrap_or_default()
}

/// The claim shows which runner has its job, and the end of the job.
pub async fn a_claim_follows_its_job(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    let job = pool.queue(None)?;
    let claim = pool.claim_for(&job).await?;
    let name = pool.until_running(&claim).await?;
    pool.annotate(&claim, "in_progress", Some(&name)).await?;
    let ready = pool.until_claim(&claim, ClaimPhase::Ready).await?;
    let runner = ready.status.and_then(|status| status.runner).context("the claim says which runner has the job")?;
    ensure!(runner.name == name && runner.id.is_some(), "{runner:?}");
    pool.annotate(&claim, "completed", Some(&name)).await?;
    let done = pool.until_claim(&claim, ClaimPhase::Completed).await?;
    ensure!(message(&done) == "the job is done");
    Ok(())
}

/// A job that is cancelled before it gets a worker gets none.
pub async fn a_job_cancelled_before_provisioning_makes_no_pod(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.claim("blocker").await?;
    pool.until_running("blocker").await?;
    let job = pool.queue(None)?;
    let claim = pool.claim_for(&job).await?;
    pool.until_says(&claim, "no free slot").await?;
    pool.annotate(&claim, "completed", None).await?;
    pool.until_claim(&claim, ClaimPhase::Completed).await?;
    world.api::<RunnerClaim>(&pool.namespace).delete("blocker", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "blocker").await?;
    let made = pool.workers().await?;
    ensure!(made.iter().all(|worker| worker.spec.board.as_ref().is_some_and(|board| board.claim != claim)), "{made:?}");
    Ok(())
}

/// A cancelled job frees its slot at once: its idle runner is removed, at GitHub first.
pub async fn a_job_cancelled_after_provisioning_frees_its_slot(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    let job = pool.queue(None)?;
    let claim = pool.claim_for(&job).await?;
    let name = pool.until_running(&claim).await?;
    world.stage.github.cancel_job(job.id);
    pool.annotate(&claim, "completed", None).await?;
    pool.until_claim(&claim, ClaimPhase::Completed).await?;
    pool.until_no_runner(&name).await?;
    world.until_gone::<Pod>(&pool.namespace, &name).await?;
    world.until_gone::<Worker>(&pool.namespace, &name).await?;
    pool.claim("next").await?;
    pool.until_running("next").await?;
    Ok(())
}

/// I1: each of two runners takes the other's job: no job waits, and no third runner is created.
pub async fn runners_that_swap_jobs_leave_no_job_waiting(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 4, late_runners()).await?;
    let jobs = [pool.queue(None)?, pool.queue(None)?];
    let claims = [pool.claim_for(&jobs[0]).await?, pool.claim_for(&jobs[1]).await?];
    let names = [pool.until_running(&claims[0]).await?, pool.until_running(&claims[1]).await?];
    pool.annotate(&claims[0], "in_progress", Some(&names[1])).await?;
    pool.until_claim(&claims[0], ClaimPhase::Ready).await?;
    pool.annotate(&claims[1], "in_progress", Some(&names[0])).await?;
    pool.until_says(&claims[1], &format!("runner {} has the job", names[0])).await?;
    // The first job has ended, and with it the second claim's worker. The first claim's worker continues.
    pool.annotate(&claims[0], "completed", Some(&names[1])).await?;
    pool.until_claim(&claims[0], ClaimPhase::Completed).await?;
    let workers = pool.workers().await?;
    ensure!(workers.len() == 2, "no third worker: {workers:?}");
    ensure!(workers.iter().all(|worker| worker.metadata.deletion_timestamp.is_none()), "no worker is deleted");
    // A third job finds no idle runner and gets its own.
    let third = pool.queue(None)?;
    let third = pool.claim_for(&third).await?;
    pool.until_running(&third).await?;
    Ok(())
}

/// A job that GitHub does not know, and one that is still queued after its run has ended, fail with their reasons.
pub async fn jobs_that_will_never_run_fail(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 2, json!({ "timeouts": { "stuckQueued": "2s" } })).await?;
    let stuck = pool.queue(None)?;
    world.stage.github.finish_run(stuck.run_id, Conclusion::Cancelled);
    let stuck = pool.claim_for(&stuck).await?;
    pool.claim_with("job-1", json!({ "job": { "id": 1 } })).await?;
    let unknown = pool.until_claim("job-1", ClaimPhase::Failed).await?;
    ensure!(reason(&unknown) == "JobNotFound", "{unknown:?}");
    let stuck = pool.until_claim(&stuck, ClaimPhase::Failed).await?;
    ensure!(reason(&stuck) == "JobStuckQueued", "{stuck:?}");
    world.until_true("their pods are gone", async || Ok(pool.pods().await?.is_empty())).await
}

/// Jobs that GitHub does not tell about, here because it redirects to another host, keep no question about others back.
pub async fn jobs_that_github_does_not_tell_about_delay_no_other(world: &World) -> Result<()> {
    let pool =
        BoardPool::simulated(world, 1, json!({ "timeouts": { "stuckQueued": "2s", "registration": "1h" } })).await?;
    let github = &world.stage.github;
    let (moved, cancelled) = ([pool.queue(None)?, pool.queue(None)?, pool.queue(None)?], pool.queue(None)?);
    github.cancel_job(cancelled.id);
    for job in &moved {
        let elsewhere = Effect::Redirect { status: 301, location: "https://elsewhere.example/".into() };
        github.fault(Fault::new("GET", &format!("/repos/*/actions/jobs/{}", job.id), elsewhere));
        pool.claim_for(job).await?;
    }
    let claim = pool.claim_for(&cancelled).await?;
    pool.until_claim(&claim, ClaimPhase::Completed).await?;
    for job in &moved {
        let claim = world.api::<RunnerClaim>(&pool.namespace).get(&format!("job-{}", job.id)).await?;
        let phase = claim.status.and_then(|status| status.phase);
        ensure!(phase.is_none_or(|phase| !phase.is_over()), "nothing is known of job {}: {phase:?}", job.id);
    }
    Ok(())
}
