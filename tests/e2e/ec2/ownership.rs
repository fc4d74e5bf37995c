//! A machine belongs to one claim, by its uid; machines and records that no claim can use are reclaimed.

use anyhow::{Context, Result, ensure};
use kube::api::{DeleteParams, Patch, PatchParams};
use paddock::api::{ClaimPhase, ClaimReason, FailureReason, RunnerClaim, RunnerClaimStatus, RunnerPool};
use paddock_record::{State, attribute};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, why},
    world::World,
};

/// I1, I2: a claim that was removed by force leaves its machine without an owner. A new claim of that name gets runners of
/// its own run, and the machine returns to the pool.
pub async fn i1_claim_made_again_under_its_name_gets_its_own_machines(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    pool.claim("build", "9100", json!({})).await?;
    let first = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();

    let claims = world.api::<RunnerClaim>(&pool.namespace);
    let removed = json!({ "metadata": { "finalizers": null } });
    claims.patch("build", &PatchParams::default(), &Patch::Merge(removed)).await?;
    claims.delete("build", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    pool.claim("build", "9101", json!({})).await?;

    let second = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let runner = world.stage.github.runner(&second).context("GitHub knows the runner")?;
    ensure!(runner.labels == ["9101"], "the runner is for {:?}", runner.labels);
    if first != second {
        pool.until_record(&first, "reclaimed", |record| record.state == State::Idle && record.claim.is_empty()).await?;
        pool.until_event(POOL, "WorkerReclaimed").await?;
    }
    pool.release("build").await?;
    pool.until_pooled(pool.running().len()).await?;
    pool.clean_up().await
}

/// A record of another version of Paddock is used if it can be, with the attributes that only that version knows, and
/// its machine is terminated if it cannot.
pub async fn records_of_other_versions_are_used_or_reclaimed(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let id = pool.the(State::Idle).await?;
    let absent = [
        attribute::LEAVING,
        attribute::RUN_ID,
        attribute::CLAIM,
        attribute::CLAIM_UID,
        attribute::CLAIMS,
        attribute::SCOPE,
    ];
    pool.cloud.edit_record(&id, &[("color", "blue")], &absent).await?;
    pool.claim("build", "9110", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers[0].name == id, "{ready:?}");
    ensure!(pool.cloud.attribute(&id, "color").await?.as_deref() == Some("blue"), "unknown attributes are kept");
    pool.release("build").await?;

    let id = ready.workers[0].name.clone();
    pool.until_record(&id, "pooled", |record| record.state == State::Idle && record.leaving.is_empty()).await?;
    pool.cloud.edit_record(&id, &[(attribute::STATE, "hibernated")], &[]).await?;
    pool.until_ended(&id, FailureReason::RecordUnreadable).await?;
    pool.clean_up().await
}

/// A finished claim keeps its last condition when its pool is deleted, also after a restart of the operator.
pub async fn finished_claim_keeps_its_condition_without_its_pool(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({})).await?;
    pool.claim("build", "9120", json!({ "resourceClass": "no-such-class" })).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    pool.clean_up().await?;
    world.until_gone::<RunnerPool>(&pool.namespace, POOL).await?;
    world.kill_operator()?;
    world.start_operator().await?;
    // Two other claims that the new operator has looked at, one after the other: it has long looked at the first.
    for (name, run) in [("next", "9121"), ("last", "9122")] {
        pool.claim(name, run, json!({})).await?;
        let waits = |status: &RunnerClaimStatus| why(status).0 == ClaimReason::PoolNotFound.as_str();
        pool.until_claim(name, "waiting for its pool", waits).await?;
    }
    let now = pool.until_phase("build", ClaimPhase::Failed).await?;
    ensure!(why(&now) == why(&failed), "{:?} has become {:?}", why(&failed), why(&now));
    for name in ["build", "next", "last"] {
        pool.release(name).await?;
    }
    Ok(())
}
