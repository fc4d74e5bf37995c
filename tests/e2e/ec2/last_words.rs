//! What a machine says last is where a user looks: in the claim's condition, in the pool's, and in the Worker.

use anyhow::{Context, Result, ensure};
use paddock::api::{ClaimPhase, Failure, FailureReason, METADATA_ACCESS, RunnerPoolStatus, Worker};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, why},
    world::{DEADLINE, World},
};

/// Waits until the Worker of the pool's one machine shows why it has ended.
async fn failure(pool: &Ec2Pool<'_>) -> Result<Failure> {
    let id = pool.instances().first().context("the pool had a machine")?.id.clone();
    let failed = |worker: &Worker| worker.status.as_ref().is_some_and(|status| status.failure.is_some());
    let worker = pool.world.until::<Worker>(&pool.namespace, &id, "failed", failed).await?;
    Ok(*worker.status.and_then(|status| status.failure).context("it has failed")?)
}

/// A script that fails is shown with what it printed, but for credentials.
pub async fn failed_script_is_shown_with_what_it_printed(world: &World) -> Result<()> {
    let script = "echo looking for a disk; echo https://x:ghs_7_eyJhbGciOiJSUzI1NiJ9.eyJqdGkiOiJhIn0.c2lnbmF0@github.com; \
                  echo the disk is too small >&2; exit 3";
    let pool = Ec2Pool::new(world, json!({ "preRunnerScript": script })).await?;
    pool.claim("build", "9700", json!({})).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    let said = "looking for a disk; https://x:[redacted]@github.com; the disk is too small";
    ensure!(why(&failed).1.contains(said), "{failed:?}");
    let log = failure(&pool).await?.log_tail.unwrap_or_default();
    ensure!(log == said.replace("; ", "\n"), "{log}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A machine that gets no agent ends itself: EC2 says so, and its console why.
pub async fn machine_without_an_agent_shows_its_console(world: &World) -> Result<()> {
    let mut agent = world.stage.ec2_pool("", "", json!({}))["spec"]["ec2"]["agent"].clone();
    agent["sha256"] = "0".repeat(64).into();
    let pool = Ec2Pool::new(world, json!({ "agent": agent })).await?;
    pool.claim("build", "9701", json!({})).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    let message = why(&failed).1;
    ensure!(message.contains("shut itself down before its agent had started"), "{message}");
    ensure!(message.contains("Client.InstanceInitiatedShutdown"), "{message}");
    let log = failure(&pool).await?.log_tail.unwrap_or_default();
    ensure!(log.contains("does not have the checksum"), "{log}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A runner that an admin deletes at GitHub ends its machine, and the claim says why.
pub async fn deleted_runner_ends_its_machine_and_the_claim_says_why(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    pool.claim("build", "9702", json!({ "count": 2 })).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    let id = ready.workers[0].name.clone();
    world.stage.github.until_online(&id, true, DEADLINE).await?;
    world.stage.github.delete_runner(&id);
    let short = pool.until_claim("build", "short of one", |status| status.progress == "1/2").await?;
    let (reason, message) = why(&short);
    ensure!(reason == "WorkerLost" && message.contains("the runner was deleted at GitHub"), "{message}");
    ensure!(short.phase == Some(ClaimPhase::Ready), "the other machine still runs");
    pool.until_ended(&id, FailureReason::RunnerEnded).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// The bed's image has no user for its runner: a pool says that jobs reach the metadata service, unless it allows that.
pub async fn pool_says_that_its_jobs_reach_the_metadata_service(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1 })).await?;
    let shown = |status: &RunnerPoolStatus| {
        let access = status.conditions.iter().find(|condition| condition.type_ == METADATA_ACCESS);
        access.is_some_and(|access| access.status == "True" && access.message.contains("no user called runner"))
    };
    pool.until_pool("warned", shown).await?;
    pool.until_event(POOL, "MetadataReachable").await?;
    let allowed = json!({ "minIdle": 1, "metadata": { "runnerAccess": true, "hopLimit": 2 } });
    let open = Ec2Pool::new(world, allowed).await?;
    let status = open.pool_status().await?;
    ensure!(status.conditions.iter().all(|condition| condition.type_ != METADATA_ACCESS), "{status:?}");
    open.clean_up().await?;
    pool.clean_up().await
}
