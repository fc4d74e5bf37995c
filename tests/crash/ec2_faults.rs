//! Claims that EC2 has too few machines for, machines that fail, a claim that AWS keeps refusing, and a pool that is
//! deleted while its orders are under way.

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use paddock::api::{ClaimPhase, ClaimReason, READY, RunnerClaim};
use paddock_bed::aws::{
    Service, Usage,
    faults::{Effect, Rule},
};
use paddock_record::State;
use serde_json::{Value, json};

use crate::{
    life::{Life, Scenario},
    scene::{Scene, lifetimes},
};

/// A claim falls back from spot, one waits for room and is served, one has a machine that fails, one gets a part of its
/// machines and waits for capacity, and the pool is deleted with two orders under way.
pub const SHORTAGES: Scenario =
    Scenario { name: "faults", parallel: 8, writes: 24, play: |life| play(life).boxed_local() };

/// A claim with an idle machine and a new one is dumped.
pub const DUMP: Scenario = Scenario { name: "dump", parallel: 20, writes: 20, play: |life| dump(life).boxed_local() };

async fn play(life: &Life<'_>) -> Result<()> {
    let scene = Scene::new(life);
    // Machines fail while this file is there. An edit of the script would replace the idle ones.
    let broken = life.stage.aws.dir().join(format!("broken-{}", life.number));
    let script = format!("[ ! -e '{}' ]", broken.display());
    let settings = |max_instances, mut more: Value| {
        more["preRunnerScript"] = json!(script);
        settings(max_instances, more)
    };
    life.begin("prepare");
    scene.pool(settings(2, json!({ "fallback": { "spotToOnDemand": true } }))).await?;
    scene.until_template(1).await?;

    life.begin("fall back");
    let spot = scene.fault(short(&scene, Some(Usage::Spot), 1));
    scene.claim("spot", "4721", json!({ "count": 2, "usageClass": "spot" })).await?;
    let ready = scene.until_claim("spot", ClaimPhase::Ready).await?;
    let attempt = ready.fleet.as_ref().map(|order| order.attempt);
    ensure!((attempt, ready.workers.len()) == (Some(2), 2), "I4: {ready:?}");
    scene.settle(&[State::Running, State::Running]).await.context("fallen back")?;
    let launched = scene.launched_for("4721");
    let on_demand = launched.iter().filter(|instance| instance.usage == Usage::OnDemand).count();
    ensure!((launched.len(), on_demand) == (3, 2), "I2: one spot machine and two others, not {launched:?}");
    drop(spot);

    life.begin("release");
    scene.release(&["spot"]).await?;
    scene.settle(&[State::Idle, State::Idle]).await.context("released")?;

    life.begin("wait for room");
    scene.claim("first", "4722", json!({})).await?;
    scene.until_claim("first", ClaimPhase::Ready).await?;
    scene.claim("second", "4723", json!({ "count": 2 })).await?;
    scene.until_waiting("second", ClaimReason::PoolFull).await?;
    scene.settle(&[State::Idle, State::Running]).await.context("waiting for room")?;

    life.begin("serve what waited");
    scene.release(&["first"]).await?;
    scene.until_claim("second", ClaimPhase::Ready).await?;
    scene.settle(&[State::Running, State::Running]).await.context("served after a wait")?;

    life.begin("release what waited");
    scene.release(&["second"]).await?;
    scene.settle(&[State::Idle, State::Idle]).await.context("served")?;

    // From now on new machines fail.
    std::fs::write(&broken, "")?;
    life.begin("edit");
    scene.pool(settings(4, json!({}))).await?;

    life.begin("fail a check");
    scene.claim("checked", "4724", json!({ "count": 3 })).await?;
    let failed = scene.until_claim("checked", ClaimPhase::Failed).await?;
    ensure!(failed.workers.is_empty(), "I4: a failed claim holds nothing: {failed:?}");
    scene.settle(&[State::Idle, State::Idle]).await.context("failed")?;
    let launched = scene.launched_for("4724");
    ensure!(launched.len() == 1, "I2: one machine was missing, these were launched: {launched:?}");
    scene.release(&["checked"]).await?;

    life.begin("wait for capacity");
    let short = scene.fault(short(&scene, None, 1));
    scene.claim("partial", "4725", json!({ "count": 4 })).await?;
    scene.until_waiting("partial", ClaimReason::InsufficientCapacity).await?;
    scene.settle(&[State::Idle, State::Idle]).await.context("waiting for capacity")?;
    // A new leader asks EC2 again, because it does not remember the shortage. Each order gets one machine.
    life.until("each order has launched one machine", async || {
        let waiting = life.api::<RunnerClaim>().get("partial").await?.status.unwrap_or_default();
        let orders = waiting.shortage.map(|shortage| shortage.attempt);
        let launched = scene.launched_for("4725").len();
        ensure!(Some(launched as u32) == orders, "I2: {launched} machines of {orders:?} orders");
        Ok(())
    })
    .await?;

    life.begin("stop waiting");
    scene.release(&["partial"]).await?;
    scene.settle(&[State::Idle, State::Idle]).await.context("no longer waiting for capacity")?;
    drop(short);

    // The answers to both orders are lost as long as the pool exists. No other order was for these types.
    life.begin("order");
    let lost = scene.fault(Rule::on(Service::Ec2, "CreateFleet", Effect::LostResponse).containing(&scene.key()));
    let others = json!({ "allowedInstanceTypes": ["c5.large"] });
    scene.claim("late", "4726", others.clone()).await?;
    scene.pool(settings(5, json!({ "minIdle": 3, "defaults": others }))).await?;
    life.until("both orders are launched", async || {
        let launched = (scene.launched_for("").len(), scene.launched_for("4726").len());
        ensure!(launched == (1, 1), "I2: launched to be warm and for the claim: {launched:?}");
        Ok(())
    })
    .await?;

    life.begin("delete with orders under way");
    scene.take_down().await?;
    drop(lost);
    scene.release(&["late"]).await
}

async fn dump(life: &Life<'_>) -> Result<()> {
    let scene = Scene::new(life);
    life.begin("warm up");
    scene.pool(settings(2, json!({ "minIdle": 1 }))).await?;
    scene.settle(&[State::Idle]).await.context("warming up")?;

    life.begin("refuse");
    scene.pool(settings(2, json!({}))).await?;
    // The table refuses whatever is done with the claim's machines. No other life has this run.
    let run_id = (5000 + life.number).to_string();
    let refused = Rule::all(Service::DynamoDb, Effect::error("ValidationException"));
    let refused = scene.fault(refused.containing(&format!("\":seen_runId\":{{\"S\":\"{run_id}\"}}")));
    scene.claim("build", &run_id, json!({ "count": 2 })).await?;
    for (tries, next) in [(1, "retry"), (5, "dump")] {
        life.until(&format!("the claim is tried {tries} times"), async || {
            let status = life.api::<RunnerClaim>().get("build").await?.status.unwrap_or_default();
            ensure!(status.failed_tries >= Some(tries), "{status:#?}");
            Ok(())
        })
        .await?;
        life.begin(next);
    }
    drop(refused);
    let failed = scene.until_claim("build", ClaimPhase::Failed).await?;
    let ready = failed.conditions.iter().find(|condition| condition.type_ == READY);
    ensure!(ready.is_some_and(|ready| ready.reason == ClaimReason::InternalError.as_str()), "{failed:?}");
    ensure!(failed.workers.is_empty(), "I4: a failed claim holds nothing: {failed:?}");
    scene.settle(&[]).await.context("dumped")?;
    let launched = scene.launched_for(&run_id);
    ensure!(launched.len() == 1, "I2: one machine was missing, these were launched: {launched:?}");
    scene.release(&["build"]).await?;

    life.begin("delete");
    scene.take_down().await
}

fn settings(max_instances: u32, more: Value) -> Value {
    let mut settings = json!({
        "maxInstances": max_instances, "lifetimes": lifetimes("1h"),
        "defaults": { "allowedInstanceTypes": ["m5.large"] },
        // Machines that have served a claim count for `minIdle`.
        "reuse": { "scope": "Pool" },
    });
    if let (Value::Object(settings), Value::Object(more)) = (&mut settings, more) {
        settings.extend(more);
    }
    settings
}

/// EC2 has so many machines for each order of this life.
fn short(scene: &Scene, usage: Option<Usage>, available: u32) -> Rule {
    Rule::on(Service::Ec2, "CreateFleet", Effect::Short { available, usage }).containing(&scene.key())
}
