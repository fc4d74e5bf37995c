//! An EC2 pool in a life of its own, with the real agent on every machine: what users do with it, and what every side
//! must agree on afterwards.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use kube::{ResourceExt, api::ListParams};
use paddock::api::{
    ClaimPhase, ClaimReason, READY, RunnerClaim, RunnerClaimStatus, RunnerPool, RunnerPoolStatus, Worker,
};
use paddock_bed::{
    aws::{Aws, Instance as Ec2Instance, InstanceState, faults::Rule},
    cloud::Cloud,
};
use paddock_record::{Instance, State};
use serde_json::{Value, json};

use crate::life::Life;

const POOL: &str = "linux";

/// Long enough that no machine expires before it serves, however slow it is; `idle` is for those in the pool.
pub fn lifetimes(idle: &str) -> Value {
    json!({ "created": "1h", "claimed": "1h", "idle": idle })
}

pub struct Scene<'a> {
    life: &'a Life<'a>,
    cloud: Cloud,
}

/// A fault at AWS, until it is dropped.
pub struct Fault<'a> {
    aws: &'a Aws,
    id: u64,
}

impl Drop for Fault<'_> {
    fn drop(&mut self) {
        self.aws.remove_fault(self.id);
    }
}

impl<'a> Scene<'a> {
    pub fn new(life: &'a Life<'a>) -> Self {
        Self { life, cloud: Cloud::new(&life.stage.aws, &life.namespace) }
    }

    pub async fn pool(&self, mut settings: Value) -> Result<()> {
        // On busy cores, and with an operator killed meanwhile, a healthy machine answers late. It must not be
        // replaced: every life counts its machines.
        settings["timeouts"] =
            json!({ "registration": "30m", "heartbeat": "30m", "validation": "30m", "deregistration": "30m" });
        // No more zones than one order has: the next leader does not know which ones the last has asked.
        let subnets = self.life.stage.aws.subnets().into_iter().map(|(subnet, _)| subnet).take(4);
        settings["subnetIds"] = subnets.collect();
        self.life.apply::<RunnerPool>(self.life.stage.ec2_pool(&self.life.namespace, POOL, settings)).await
    }

    pub async fn claim(&self, name: &str, run_id: &str, settings: Value) -> Result<()> {
        let mut claim = self.life.stage.claim(&self.life.namespace, name, POOL, run_id, 1);
        if let (Value::Object(spec), Value::Object(settings)) = (&mut claim["spec"], settings) {
            spec.extend(settings);
        }
        self.life.apply::<RunnerClaim>(claim).await
    }

    pub async fn pool_status(&self) -> Result<RunnerPoolStatus> {
        Ok(self.life.api::<RunnerPool>().get(POOL).await?.status.unwrap_or_default())
    }

    pub async fn until_claim(&self, name: &str, phase: ClaimPhase) -> Result<RunnerClaimStatus> {
        self.life
            .until(&format!("claim {name} is {phase:?}"), async || {
                let status = self.life.api::<RunnerClaim>().get(name).await?.status.unwrap_or_default();
                ensure!(status.phase == Some(phase), "{status:#?}");
                Ok(status)
            })
            .await
    }

    /// Waits until the claim says that it waits for this reason, and holds nothing.
    pub async fn until_waiting(&self, name: &str, reason: ClaimReason) -> Result<RunnerClaimStatus> {
        self.life
            .until(&format!("claim {name} waits: {}", reason.as_str()), async || {
                let status = self.life.api::<RunnerClaim>().get(name).await?.status.unwrap_or_default();
                let ready = status.conditions.iter().find(|condition| condition.type_ == READY);
                let waits = ready.is_some_and(|ready| ready.reason == reason.as_str());
                ensure!(waits && status.workers.is_empty() && status.fleet.is_none(), "{status:#?}");
                Ok(status)
            })
            .await
    }

    /// Deletes all claims.
    pub async fn release(&self, names: &[&str]) -> Result<()> {
        for name in names {
            self.life.delete::<RunnerClaim>(name).await?;
        }
        let released = |claim: &RunnerClaim| names.contains(&claim.name_any().as_str());
        self.life.until_none::<RunnerClaim>("released claims", released).await
    }

    /// A fault at AWS; the rule names this life alone.
    pub fn fault(&self, rule: Rule) -> Fault<'a> {
        let aws = &self.life.stage.aws;
        Fault { aws, id: aws.add_fault(rule) }
    }

    /// `namespace/name` of the pool, which launches name in a tag.
    pub fn key(&self) -> String {
        format!("{}/{POOL}", self.life.namespace)
    }

    /// Every machine that was ever launched for this run, or to be kept warm.
    pub fn launched_for(&self, run_id: &str) -> Vec<Ec2Instance> {
        let of_run = |instance: &Ec2Instance| {
            let tag = |name| instance.tags.get(name).map(String::as_str);
            tag("paddock:pool") == Some(&self.key()) && tag("InitialRunId").unwrap_or_default() == run_id
        };
        self.life.stage.aws.instances().into_iter().filter(of_run).collect()
    }

    /// Waits until the pool has a launch template of this version.
    pub async fn until_template(&self, wanted: i64) -> Result<()> {
        self.life
            .until(&format!("the pool has template {wanted}"), async || {
                let version = self.pool_status().await?.launch_template.map(|template| template.version);
                ensure!(version == Some(wanted), "the edited pool has template {version:?}");
                Ok(())
            })
            .await
    }

    /// The records of machines that have not ended.
    pub async fn records(&self) -> Result<Vec<Instance>> {
        let mut records = self.cloud.records(&self.key()).await?;
        records.retain(|record| record.state != State::Terminated);
        Ok(records)
    }

    /// Every machine of this life, and whether it still runs.
    pub fn machines(&self) -> BTreeMap<String, bool> {
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

    /// Waits until there are machines in these states, by name, and no others, and every side agrees on it: the table, EC2, the
    /// queue, the Workers and GitHub.
    pub async fn settle(&self, wanted: &[State]) -> Result<()> {
        self.life
            .until(&format!("all sides agree on machines in {wanted:?}"), async || {
                let records = self.records().await?;
                let mut states: Vec<_> = records.iter().map(|record| record.state).collect();
                states.sort_by_key(|state| state.as_str());
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
    pub async fn take_down(&self) -> Result<()> {
        let status = self.pool_status().await?;
        self.life.delete::<RunnerPool>(POOL).await?;
        self.life.until_none::<RunnerPool>("pools", |_| true).await?;
        self.life.until_none::<Worker>("workers", |_| true).await?;
        let records = self.cloud.records(&self.key()).await?;
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
