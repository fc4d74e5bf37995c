//! The end of a run releases its claim, and its machines are used again or end.

use anyhow::{Context, Result, ensure};
use kube::api::{Patch, PatchParams};
use paddock::api::{ANNOTATION_RUN_STATE, ClaimPhase, ClaimReason, FailureReason, RunnerClaim, Worker};
use paddock_bed::{
    github::JobRequest,
    stage::{ORGANIZATION, REPOSITORY},
};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, why},
    world::World,
};

/// A webhook annotates the claim: its machine returns to the pool, and the Completed claim stays.
pub async fn run_completed_by_webhook_releases_its_claim(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    pool.claim("build", "8001", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let completed = json!({ "metadata": { "annotations": { ANNOTATION_RUN_STATE: "completed" } } });
    let claims = world.api::<RunnerClaim>(&pool.namespace);
    claims.patch("build", &PatchParams::default(), &Patch::Merge(completed)).await?;
    let status = pool.until_phase("build", ClaimPhase::Completed).await?;
    ensure!(why(&status).0 == ClaimReason::Completed.as_str() && status.workers.is_empty(), "{status:?}");
    let times = &status.phase_times;
    ensure!(times.ready <= times.releasing && times.releasing <= times.completed, "{times:?}");
    pool.until_pooled(1).await?;
    for phase in ["Pending", "Claiming", "Validating", "Ready", "Releasing", "Completed"] {
        pool.until_event("build", phase).await?;
    }
    pool.release("build").await?;
    pool.clean_up().await
}

/// Without a webhook the operator learns from GitHub that the run has completed. The claim is deleted after the
/// retention time.
pub async fn run_completed_without_webhook_releases_its_claim_which_retention_deletes(world: &World) -> Result<()> {
    world.kill_operator()?;
    // If it lost its lease, it would be restarted without these arguments.
    world.start_operator_with(&["--run-poll", "2s", "--retention", "5s", "--lease-duration", "15s"]).await?;
    let outcome = release_without_webhook(world).await;
    world.kill_operator()?;
    world.start_operator().await?;
    outcome
}

async fn release_without_webhook(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let repository = format!("{ORGANIZATION}/{REPOSITORY}");
    let request = JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec!["8101".into()],
        run_id: Some(8101),
        duration_ms: Some(100),
        ..Default::default()
    };
    let job = world.stage.github.queue_job(request)?.id;
    pool.claim("build", "8101", json!({ "repository": repository })).await?;
    pool.claim("other", "8102", json!({ "repository": repository })).await?;
    let done = async || Ok(world.stage.github.job(job).is_some_and(|job| job.conclusion.is_some()));
    world.until_true("the job is done", done).await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    // GitHub does not know the other claim's run, which proves nothing: the claim keeps its machine.
    pool.until_phase("other", ClaimPhase::Ready).await?;
    pool.release("other").await?;
    pool.clean_up().await
}

/// I2: a machine serves at most `maxClaims` claims, then deregisters and ends.
pub async fn i2_machine_at_its_claim_limit_ends_and_leaves_no_runner(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "reuse": { "maxClaims": 2 }, "maxInstances": 1 })).await?;
    pool.claim("first", "8201", json!({})).await?;
    let id = pool.until_phase("first", ClaimPhase::Ready).await?.workers[0].name.clone();
    pool.release("first").await?;
    pool.until_pooled(1).await?;
    pool.claim("second", "8202", json!({})).await?;
    let status = pool.until_phase("second", ClaimPhase::Ready).await?;
    ensure!(status.workers[0].name == id, "the machine is used again");
    pool.release("second").await?;
    pool.until_ended(&id, FailureReason::MaxClaimsServed).await?;
    ensure!(pool.runners().is_empty(), "the machine deregistered first: {:?}", pool.runners());
    pool.clean_up().await
}

/// A machine whose scrub script fails serves no other claim, and its Worker says why.
pub async fn a_machine_whose_scrub_script_fails_is_never_pooled(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "reuse": { "scrubScript": "exit 3" } })).await?;
    pool.claim("build", "8301", json!({})).await?;
    let id = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    pool.release("build").await?;
    pool.until_ended(&id, FailureReason::ScrubFailed).await?;
    let worker = world.api::<Worker>(&pool.namespace).get(&id).await?;
    let failure = worker.status.and_then(|status| status.failure).context("a failed worker says why")?;
    ensure!(failure.message.contains("exit status: 3"), "{failure:?}");
    ensure!(
        pool.runners().is_empty() && pool.cloud.queue_size(&pool.queue().await?).await? == 0,
        "no claim can get it"
    );
    pool.clean_up().await
}
