//! Whose claims may use one machine after each other (`reuse.scope`).

use anyhow::{Context, Result, ensure};
use paddock::api::{ClaimPhase, ClaimReason, FailureReason, RunnerClaimStatus, Worker, WorkerSource};
use paddock_bed::stage::ORGANIZATION;
use paddock_record::State;
use serde_json::{Value, json};

use crate::fixture::{
    ec2_pool::{Ec2Pool, is_pooled, why},
    world::World,
};

fn of(repository: &str) -> Value {
    json!({ "repository": format!("{ORGANIZATION}/{repository}") })
}

/// Claims one machine, and waits until it serves.
async fn served(pool: &Ec2Pool<'_>, name: &str, run_id: &str, settings: Value) -> Result<(String, WorkerSource)> {
    pool.claim(name, run_id, settings).await?;
    let ready = pool.until_phase(name, ClaimPhase::Ready).await?;
    let worker = ready.workers.first().with_context(|| format!("{name} has a worker"))?;
    Ok((worker.name.clone(), worker.source))
}

/// The same, and back to the pool.
async fn used(pool: &Ec2Pool<'_>, name: &str, run_id: &str, settings: Value) -> Result<String> {
    let (id, _) = served(pool, name, run_id, settings).await?;
    pool.release(name).await?;
    pool.until_record(&id, "pooled", is_pooled).await?;
    Ok(id)
}

/// A machine that has served one repository serves that repository alone, and its Worker says so.
pub async fn machine_of_one_repository_is_not_given_to_another(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "maxInstances": 4 })).await?;
    let first = used(&pool, "a-1", "9401", of("a")).await?;
    let scope = format!("repository:{}/a", ORGANIZATION.to_ascii_lowercase());
    pool.until_record(&first, "of its repository", |record| record.scope == scope).await?;
    let shows = |worker: &Worker| worker.status.as_ref().and_then(|status| status.scope.as_ref()) == Some(&scope);
    world.until::<Worker>(&pool.namespace, &first, "of its repository", shows).await?;

    let (other, source) = served(&pool, "b-1", "9402", of("b")).await?;
    ensure!(other != first && source == WorkerSource::Created, "b got {other} ({source:?}) beside {first}");
    let (none, source) = served(&pool, "none", "9403", json!({})).await?;
    ensure!(none != first && source == WorkerSource::Created, "no repository got {none} ({source:?}) beside {first}");
    // GitHub compares names without case.
    let (again, source) = served(&pool, "a-2", "9404", of("A")).await?;
    ensure!(again == first && source == WorkerSource::Pool, "a got {again} ({source:?}), not {first}");
    for name in ["b-1", "none", "a-2"] {
        pool.release(name).await?;
    }
    pool.clean_up().await
}

/// Where the pool says so, a machine serves one repository after another.
pub async fn pool_may_give_a_machine_to_every_repository(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "maxInstances": 1, "reuse": { "scope": "Pool" } })).await?;
    let first = used(&pool, "a", "9411", of("a")).await?;
    let (again, source) = served(&pool, "b", "9412", of("b")).await?;
    ensure!(again == first && source == WorkerSource::Pool, "b got {again} ({source:?}), not {first}");
    pool.release("b").await?;
    // A scope that is set later keeps what has served everyone from all.
    pool.until_record(&first, "pooled", is_pooled).await?;
    pool.set(json!({ "maxInstances": 2 })).await?;
    let (fresh, source) = served(&pool, "a-2", "9413", of("a")).await?;
    ensure!(fresh != first && source == WorkerSource::Created, "a got {fresh} ({source:?}) beside {first}");
    pool.release("a-2").await?;
    pool.clean_up().await
}

/// In a full pool the idle machine of another repository ends for a claim that then fits: the one that has been idle
/// longest. None ends for a claim that does not fit.
pub async fn idle_machine_of_another_repository_makes_room(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "maxInstances": 2 })).await?;
    let (newer, _) = served(&pool, "a-1", "9421", of("a")).await?;
    let longest = used(&pool, "a-2", "9422", of("a")).await?;
    pool.claim("large", "9423", json!({ "count": 2, "repository": format!("{ORGANIZATION}/c") })).await?;
    let full = |status: &RunnerClaimStatus| why(status).0 == ClaimReason::PoolFull.as_str();
    pool.until_claim("large", "waiting for room", full).await?;
    ensure!(pool.ids(State::Idle).await? == [longest.clone()], "it stays: {:?}", pool.records().await?);
    pool.release("large").await?;
    pool.release("a-1").await?;
    pool.until_pooled(2).await?;

    let (fresh, source) = served(&pool, "b", "9424", of("b")).await?;
    ensure!(source == WorkerSource::Created && fresh != newer && fresh != longest, "{fresh} ({source:?})");
    pool.until_ended(&longest, FailureReason::ScopeEvicted).await?;
    pool.until_event("b", "MadeRoom").await?;
    ensure!(pool.ids(State::Idle).await? == [newer.clone()], "one is enough: {:?}", pool.records().await?);
    ensure!(pool.running().len() == 2, "{:?}", pool.instances());
    pool.release("b").await?;
    pool.clean_up().await
}

/// A machine that has served a repository does not count for `minIdle`: a new one is launched beside it, and it ends
/// with its idle time.
pub async fn warm_minimum_is_refilled_by_a_new_machine_after_one_was_used(world: &World) -> Result<()> {
    // Long enough to leave GitHub in, and for a renewal in the last half of it.
    let settings = |warm: u32| json!({ "minIdle": warm, "maxInstances": 2, "lifetimes": { "idle": "90s" } });
    let pool = Ec2Pool::new(world, settings(0)).await?;
    let first = used(&pool, "a", "9431", of("a")).await?;
    pool.set(settings(1)).await?;
    let is_new = async || Ok(pool.ids(State::Idle).await?.into_iter().find(|id| *id != first));
    let fresh = world.until_found("a new machine is idle", is_new).await?;
    pool.until_ended(&first, FailureReason::ThresholdPassed).await?;
    ensure!(pool.ids(State::Idle).await? == [fresh.clone()], "it is renewed: {:?}", pool.records().await?);
    let (taken, _) = served(&pool, "b", "9432", of("b")).await?;
    ensure!(taken == fresh, "b got {taken}, not {fresh}");
    pool.release("b").await?;
    pool.clean_up().await
}
