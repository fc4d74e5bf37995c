//! Claims outlast the operator's death, the loss of its lease, and a restart of the API server.

use anyhow::{Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use paddock::api::{ClaimPhase, RunnerClaim};
use paddock_bed::{kube::RELEASE_NAMESPACE, process::Signal};
use serde_json::json;

use crate::fixture::{ec2_pool::Ec2Pool, world::World};

/// The replica that the Lease names.
async fn leader(world: &World) -> Result<String> {
    let lease = world.api::<Lease>(RELEASE_NAMESPACE).get("paddock").await?;
    let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
    Ok(holder.split('_').next().unwrap_or_default().to_owned())
}

/// I5: an operator that is killed in the middle of a claim loses nothing; the next one completes it.
pub async fn i5_claim_survives_kill_of_the_operator(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1 })).await?;
    pool.claim("build", "7200", json!({})).await?;
    let begun = |claim: &RunnerClaim| claim.status.as_ref().is_some_and(|status| status.phase.is_some());
    world.until::<RunnerClaim>(&pool.namespace, "build", "begun", begun).await?;
    world.kill_operator()?;
    world.start_operator().await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// Two replicas: the second takes over from a leader that is paused longer than its lease lasts; the first, resumed,
/// finds its lease lost and exits.
pub async fn paused_leader_is_replaced_and_exits(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1 })).await?;
    let log_before = world.operator_log().len();
    world.until_true("the first replica leads", async || Ok(leader(world).await? == "operator")).await?;
    // The second is not restarted if it loses its lease, so its lease lasts longer.
    let second = world.stage.operator("second", &["--lease-duration", "15s"]).await?;
    world.operator.signal(Signal::SIGSTOP)?;
    let served = async {
        world.until_true("the second replica leads", async || Ok(leader(world).await? == "second")).await?;
        pool.claim("build", "7300", json!({})).await?;
        pool.until_phase("build", ClaimPhase::Ready).await
    };
    let served = served.await;
    world.operator.signal(Signal::SIGCONT)?;
    served?;
    // The log also has the lines of earlier replicas of this name.
    let log = || world.operator_log().get(log_before..).unwrap_or_default().to_owned();
    let exited = async || Ok(log().contains("the lease was lost"));
    world.until_true("the first replica exited and logged why", exited).await?;
    ensure!(leader(world).await? == "second", "the second replica still leads");

    // A leader that is asked to stop releases its lease, so the next one leads at once.
    second.stop().await?;
    world.until_true("the new replica leads", async || Ok(leader(world).await? == "operator")).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// An API server that restarts in the middle of a claim delays it, no more.
pub async fn claim_survives_restart_of_the_api_server(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1 })).await?;
    pool.claim("build", "7500", json!({})).await?;
    world.stage.kube.restart_apiserver().await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("build").await?;
    pool.clean_up().await
}
