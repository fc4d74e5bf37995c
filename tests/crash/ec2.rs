//! Claims on an EC2 pool, and the pool's own upkeep, with the real agent on every machine.

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use paddock::api::{ClaimPhase, RunnerClaim, WorkerSource};
use paddock_record::State;
use serde_json::json;

use crate::{
    life::{Life, Scenario},
    scene::{Scene, lifetimes},
};

/// A pool warms a machine, is edited, serves a claim with that machine and a new one, gets both back, terminates an
/// expired one, and is deleted.
pub const SCENARIO: Scenario =
    Scenario { name: "ec2", parallel: 10, writes: 24, play: |life| play(life).boxed_local() };

async fn play(life: &Life<'_>) -> Result<()> {
    let scene = Scene::new(life);
    life.begin("warm up");
    scene.pool(json!({ "minIdle": 1, "maxInstances": 2, "lifetimes": lifetimes("20m") })).await?;
    scene.settle(&[State::Idle]).await.context("warming up")?;
    let machines = scene.machines();
    ensure!(machines.len() == 1, "I2: one machine was wanted, these were made: {machines:?}");

    // A machine with less than half of the new idle time left is renewed.
    life.begin("edit");
    let before = scene.records().await?.first().and_then(|record| record.threshold);
    scene.pool(json!({ "minIdle": 1, "maxInstances": 2, "lifetimes": lifetimes("1h") })).await?;
    life.until("the pool follows its edit", async || {
        let records = scene.records().await?;
        ensure!(records.iter().all(|record| record.threshold > before), "not renewed: {records:?}");
        Ok(())
    })
    .await?;
    scene.settle(&[State::Idle]).await.context("renewing")?;

    // A new template, and another machine, made from it.
    life.begin("replace");
    let edited = json!({ "maxInstances": 2, "preRunnerScript": "true", "lifetimes": lifetimes("1h") });
    let mut warm = edited.clone();
    warm["minIdle"] = json!(1);
    scene.pool(warm).await?;
    scene.until_template(2).await?;
    life.until("the idle machine is replaced", async || {
        let records = scene.records().await?;
        let old = machines.keys().filter(|id| records.iter().any(|record| record.instance_id == **id)).count();
        ensure!((old, records.len()) == (0, 1), "not replaced: {records:?}");
        Ok(())
    })
    .await?;
    scene.settle(&[State::Idle]).await.context("replacing")?;

    // The pool has room for one more machine: in every life the claim takes the warm one and launches one.
    life.begin("claim");
    scene.pool(edited).await?;
    scene.claim("build", "4711", json!({ "count": 2 })).await?;
    let ready = scene.until_claim("build", ClaimPhase::Ready).await?;
    ensure!(ready.progress == "2/2", "I4: {ready:?}");
    let of = |source| ready.workers.iter().filter(|worker| worker.source == source).count();
    ensure!((of(WorkerSource::Pool), of(WorkerSource::Created)) == (1, 1), "{ready:?}");
    scene.settle(&[State::Running, State::Running]).await.context("serving")?;

    life.begin("release");
    life.delete::<RunnerClaim>("build").await?;
    life.until_none::<RunnerClaim>("claims", |_| true).await?;
    scene.settle(&[State::Idle, State::Idle]).await.context("released")?;

    // Long enough that the next operator finds the machine if this one is killed right after the claim is Ready.
    life.begin("expire");
    scene.claim("short", "4712", json!({ "maxRuntime": "20s" })).await?;
    let over = scene.until_claim("short", ClaimPhase::Completed).await?;
    ensure!(over.workers.is_empty(), "I4: a completed claim holds nothing: {over:?}");
    scene.settle(&[State::Idle]).await.context("expired")?;
    life.delete::<RunnerClaim>("short").await?;
    life.until_none::<RunnerClaim>("claims", |_| true).await?;

    life.begin("delete");
    scene.take_down().await
}
