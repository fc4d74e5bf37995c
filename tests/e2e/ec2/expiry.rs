//! Expired machines are terminated by the operator or shut themselves down.

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kube::Api;
use paddock::api::{ClaimPhase, FailureReason, RunnerClaim};
use paddock_bed::aws::{
    Service,
    faults::{Effect, Rule},
};
use paddock_record::{EXPIRY_SLACK, State};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{AwsFault, Ec2Pool, never_done, why},
    world::World,
};

/// A machine whose start takes too long is terminated, and its claim fails.
pub async fn i2_operator_terminates_machine_that_starts_too_late(world: &World) -> Result<()> {
    let pool =
        Ec2Pool::new(world, json!({ "preRunnerScript": never_done(), "lifetimes": { "created": "5s" } })).await?;
    pool.claim("build", "8700", json!({})).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    ensure!(failed.workers.is_empty(), "I4: {failed:?}");
    let id = pool.instances().first().context("a machine was launched")?.id.clone();
    pool.until_ended(&id, FailureReason::ThresholdPassed).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// A claimed machine that does not answer in its time is terminated, and the claim gets another.
pub async fn i2_operator_terminates_expired_claimed_machine(world: &World) -> Result<()> {
    let settings = json!({ "minIdle": 1, "lifetimes": { "claimed": "4s" }, "timeouts": { "registration": "10m" } });
    let pool = Ec2Pool::new(world, settings.clone()).await?;
    let id = pool.the(State::Idle).await?;
    let mut no_more = settings;
    no_more["minIdle"] = json!(0);
    pool.set(no_more).await?;
    world.stage.machines.freeze(&id)?;
    pool.claim("build", "8710", json!({})).await?;
    pool.until_ended(&id, FailureReason::ThresholdPassed).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers[0].name != id, "{ready:?}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A machine runs no longer than `maxRuntime`, and stays idle no longer than `lifetimes.idle`.
pub async fn i2_operator_terminates_expired_running_and_idle_machines(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "lifetimes": { "idle": "5s" } })).await?;
    // Long enough for the claim to become Ready before its machine ends; otherwise it would fail.
    pool.claim("short", "8720", json!({ "maxRuntime": "10s" })).await?;
    pool.claim("long", "8721", json!({})).await?;
    let (short, long) = (pool.until_phase("short", ClaimPhase::Completed), pool.until_phase("long", ClaimPhase::Ready));
    let (short, long) = tokio::try_join!(short, long)?;
    ensure!(short.workers.is_empty() && why(&short).0 == "MaxRuntimeReached", "{short:?}");
    let idle = long.workers[0].name.clone();
    for id in pool.instances().into_iter().map(|instance| instance.id).filter(|id| *id != idle) {
        pool.until_ended(&id, FailureReason::ThresholdPassed).await?;
    }
    pool.release("short").await?;
    pool.release("long").await?;
    pool.until_ended(&idle, FailureReason::ThresholdPassed).await?;
    pool.clean_up().await
}

/// I2: if the operator can no longer change a record, the machine shuts itself down a minute after its threshold, in
/// every state.
pub async fn i2_expired_machine_shuts_down_in_every_state_without_the_operator(world: &World) -> Result<()> {
    // One machine for each state. The operator loses access to its record once it is in that state, before it expires.
    let created = async {
        let settings = json!({ "preRunnerScript": never_done(), "lifetimes": { "created": "20s" } });
        let pool = Ec2Pool::new(world, settings).await?;
        pool.claim("build", "8730", json!({})).await?;
        let id = pool.the(State::Created).await?;
        expires_alone(pool, id).await
    };
    let claimed = async {
        let settings = json!({
            "minIdle": 1, "maxInstances": 1, "lifetimes": { "claimed": "20s" }, "timeouts": { "registration": "10m" },
        });
        let pool = Ec2Pool::new(world, settings).await?;
        let id = pool.the(State::Idle).await?;
        world.stage.machines.freeze(&id)?;
        pool.claim("build", "8731", json!({})).await?;
        pool.until_record(&id, "claimed", |record| record.state == State::Claimed).await?;
        let denied = deny_operator(&pool, &id);
        world.stage.machines.thaw(&id)?;
        until_shut_down(pool, id, denied).await
    };
    let idle = async {
        let pool =
            Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1, "lifetimes": { "idle": "30s" } })).await?;
        let id = pool.the(State::Idle).await?;
        expires_alone(pool, id).await
    };
    let running = async {
        let pool = Ec2Pool::new(world, json!({})).await?;
        pool.claim("build", "8732", json!({ "maxRuntime": "20s" })).await?;
        let id = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
        expires_alone(pool, id).await
    };
    tokio::try_join!(created, claimed, idle, running).map(drop)
}

fn deny_operator<'a>(pool: &Ec2Pool<'a>, id: &str) -> [AwsFault<'a>; 2] {
    let deny = |service, action, code| pool.fault(Rule::on(service, action, Effect::error(code)).containing(id));
    [
        deny(Service::DynamoDb, "UpdateItem", "AccessDeniedException"),
        deny(Service::Ec2, "TerminateInstances", "UnauthorizedOperation"),
    ]
}

async fn expires_alone(pool: Ec2Pool<'_>, id: String) -> Result<()> {
    let denied = deny_operator(&pool, &id);
    until_shut_down(pool, id, denied).await
}

async fn until_shut_down(pool: Ec2Pool<'_>, id: String, denied: [AwsFault<'_>; 2]) -> Result<()> {
    let record = pool.cloud.record(&id).await?.context("the machine has a record")?;
    let last = record.threshold.context("the record has a threshold")? + EXPIRY_SLACK;
    pool.world.until_true("the machine has expired", async || Ok(Timestamp::now() > last)).await?;
    pool.until_gone_at_ec2(&id).await?;
    let record = pool.cloud.record(&id).await?.context("the machine has a record")?;
    ensure!(record.state != State::Terminated, "only the machine itself ended it: {record:?}");
    drop(denied);
    pool.set(json!({})).await?;
    let claims: Api<RunnerClaim> = pool.world.api(&pool.namespace);
    if claims.get_opt("build").await?.is_some() {
        pool.release("build").await?;
    }
    pool.clean_up().await
}
