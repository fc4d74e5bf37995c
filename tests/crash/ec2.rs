//! Claims on an EC2 pool, and the pool's own upkeep, with the real agent on every machine.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use kube::{ResourceExt, api::ListParams};
use paddock::api::{ClaimPhase, RunnerClaim, RunnerClaimStatus, RunnerPool, RunnerPoolStatus, Worker, WorkerSource};
use paddock_bed::{aws::InstanceState, cloud::Cloud};
use paddock_record::{Instance, State};
use serde_json::{Value, json};

use crate::life::{Life, Scenario};

const POOL: &str = "linux";

/// A pool warms a machine, is edited, serves a claim with that machine and a new one, gets both back, terminates an
/// expired one, and is deleted.
pub const SCENARIO: Scenario = Scenario { name: "ec2", parallel: 10, play: |life| play(life).boxed_local() };

async fn play(life: &Life<'_>) -> Result<()> {
    let scene = Scene::new(life);
    life.begin("warm up");
    scene.pool(json!({ "minIdle": 1, "maxInstances": 2, "lifetimes": lifetimes("20m") })).await?;
    scene.settle(&[State::Idle]).await.context("warming up")?;
    let machines = scene.machines();
    ensure!(machines.len() == 1, "I2: one machine was wanted, these were made: {machines:?}");

    // A new template; and a machine with less than half of the new idle time left is renewed.
    life.begin("edit");
    let edited = json!({ "maxInstances": 2, "preRunnerScript": "true", "lifetimes": lifetimes("1h") });
    let mut warm = edited.clone();
    warm["minIdle"] = json!(1);
    let before = scene.records().await?.first().and_then(|record| record.threshold);
    scene.pool(warm).await?;
    life.until("the pool follows its edit", async || {
        let version = scene.pool_status().await?.launch_template.map(|template| template.version);
        ensure!(version == Some(2), "the edited pool has template {version:?}");
        let records = scene.records().await?;
        ensure!(records.iter().all(|record| record.threshold > before), "not renewed: {records:?}");
        Ok(())
    })
    .await?;
    scene.settle(&[State::Idle]).await.context("renewing")?;

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

/// Long enough that no machine expires before it serves, however slow it is; `idle` is for those in the pool.
fn lifetimes(idle: &str) -> Value {
    json!({ "created": "1h", "claimed": "1h", "idle": idle })
}

struct Scene<'a> {
    life: &'a Life<'a>,
    cloud: Cloud,
}

impl<'a> Scene<'a> {
    fn new(life: &'a Life<'a>) -> Self {
        Self { life, cloud: Cloud::new(&life.stage.aws, &life.namespace) }
    }

    async fn pool(&self, mut settings: Value) -> Result<()> {
        // On busy cores, and with an operator killed meanwhile, a healthy machine answers late. It must not be
        // replaced: every life counts its machines.
        settings["timeouts"] =
            json!({ "registration": "30m", "heartbeat": "30m", "validation": "30m", "deregistration": "30m" });
        self.life.apply::<RunnerPool>(self.life.stage.ec2_pool(&self.life.namespace, POOL, settings)).await
    }

    async fn claim(&self, name: &str, run_id: &str, settings: Value) -> Result<()> {
        let mut claim = self.life.stage.claim(&self.life.namespace, name, POOL, run_id, 1);
        if let (Value::Object(spec), Value::Object(settings)) = (&mut claim["spec"], settings) {
            spec.extend(settings);
        }
        self.life.apply::<RunnerClaim>(claim).await
    }

    async fn pool_status(&self) -> Result<RunnerPoolStatus> {
        Ok(self.life.api::<RunnerPool>().get(POOL).await?.status.unwrap_or_default())
    }

    async fn until_claim(&self, name: &str, phase: ClaimPhase) -> Result<RunnerClaimStatus> {
        self.life
            .until(&format!("claim {name} is {phase:?}"), async || {
                let status = self.life.api::<RunnerClaim>().get(name).await?.status.unwrap_or_default();
                ensure!(status.phase == Some(phase), "{status:#?}");
                Ok(status)
            })
            .await
    }

    /// The records of machines that have not ended.
    async fn records(&self) -> Result<Vec<Instance>> {
        let mut records = self.cloud.records(&format!("{}/{POOL}", self.life.namespace)).await?;
        records.retain(|record| record.state != State::Terminated);
        Ok(records)
    }

    /// Every machine of this life, and whether it still runs.
    fn machines(&self) -> BTreeMap<String, bool> {
        let instances = self.life.stage.aws.instances().into_iter();
        let own = instances.filter(|instance| instance.tags.get("paddock:cluster") == Some(&self.life.namespace));
        own.map(|instance| (instance.id, instance.state == InstanceState::Running)).collect()
    }

    /// The machines that GitHub knows as runners, with their labels, whether they still run or not.
    fn runners(&self) -> BTreeMap<String, Vec<String>> {
        let machines = self.machines();
        let runners = self.life.stage.github.runners().into_iter();
        let own = runners.filter(|runner| machines.contains_key(&runner.name));
        own.map(|runner| (runner.name, runner.labels)).collect()
    }

    /// Waits until there are machines in these states and no others, and every side agrees on it: the table, EC2, the
    /// queue, the Workers and GitHub.
    async fn settle(&self, wanted: &[State]) -> Result<()> {
        self.life
            .until(&format!("all sides agree on machines in {wanted:?}"), async || {
                let records = self.records().await?;
                let states: Vec<_> = records.iter().map(|record| record.state).collect();
                ensure!(states == wanted, "machines are not {wanted:?}: {records:#?}");
                let ids: BTreeSet<_> = records.iter().map(|record| record.instance_id.clone()).collect();
                let running = self.machines().into_iter().filter(|(_, runs)| *runs).map(|(id, _)| id);
                let running: BTreeSet<_> = running.collect();
                ensure!(running == ids, "I2: EC2 runs {running:?}, the records are of {ids:?}");

                let idle = records.iter().filter(|record| record.state == State::Idle);
                let idle: BTreeSet<_> = idle.map(|record| record.instance_id.clone()).collect();
                let leaving = records.iter().find(|record| !record.leaving.is_empty());
                ensure!(leaving.is_none(), "one has not deregistered yet: {leaving:?}");
                let queue = self.pool_status().await?.queues.first().context("a pool has a queue")?.url.clone();
                let offered = self.cloud.queued_ids(&queue).await?;
                ensure!(offered.is_superset(&idle), "I3: {idle:?} are idle, {offered:?} have a message");

                let workers = self.life.api::<Worker>().list(&ListParams::default()).await?.items;
                let shown = workers.iter().filter_map(|worker| {
                    let state = worker.status.as_ref()?.state?.as_str();
                    (state != State::Terminated.as_str()).then(|| (worker.name_any(), state.to_owned()))
                });
                let shown: BTreeMap<_, _> = shown.collect();
                let states = records.iter().map(|record| (record.instance_id.clone(), record.state.to_string()));
                let states: BTreeMap<_, _> = states.collect();
                ensure!(shown == states, "the Workers show {shown:?}, the records {states:?}");

                let serving = records.iter().filter(|record| record.state == State::Running);
                let serving: BTreeMap<_, _> =
                    serving.map(|record| (record.instance_id.clone(), vec![record.run_id.clone()])).collect();
                // Those of ended machines go when GitHub has seen that they are offline, at the latest with the pool.
                let mut runners = self.runners();
                runners.retain(|id, _| running.contains(id));
                ensure!(runners == serving, "GitHub has the runners {runners:?}, the records {serving:?}");
                Ok(())
            })
            .await
    }

    /// Deletes the pool, and checks that nothing is left.
    async fn take_down(&self) -> Result<()> {
        let status = self.pool_status().await?;
        self.life.delete::<RunnerPool>(POOL).await?;
        self.life.until_none::<RunnerPool>("pools", |_| true).await?;
        self.life.until_none::<Worker>("workers", |_| true).await?;
        let records = self.cloud.records(&format!("{}/{POOL}", self.life.namespace)).await?;
        ensure!(records.is_empty(), "records are left: {records:#?}");
        for queue in status.queues {
            ensure!(!self.cloud.has_queue(&queue.url).await?, "the queue {} is left", queue.url);
        }
        let template = status.launch_template.context("a pool has a template")?.id;
        ensure!(!self.cloud.templates().await?.contains(&template), "the template {template} is left");
        let machines = self.machines();
        ensure!(machines.values().all(|runs| !runs), "I2: machines are left: {machines:?}");
        let runners = self.runners();
        ensure!(runners.is_empty(), "I2: runners are left: {runners:?}");
        Ok(())
    }
}
