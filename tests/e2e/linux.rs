//! An EC2 pool in a namespace of its own, and what tests do with it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Event;
use kube::api::{DeleteParams, ListParams};
use paddock::api::{
    ClaimPhase, FailureReason, READY, RunnerClaim, RunnerClaimStatus, RunnerPool, RunnerPoolStatus, Worker, WorkerState,
};
use paddock_bed::{
    aws::{Instance, InstanceState, faults::Rule},
    cloud::Cloud,
    stage::CLUSTER,
};
use paddock_record::{Instance as Record, State};
use serde_json::{Value, json};

use crate::support::World;

pub const POOL: &str = "linux";

/// So many machines have a deadline of their own.
const PART: usize = 10;

pub struct Linux<'a> {
    pub world: &'a World,
    pub namespace: String,
    pub cloud: Cloud,
}

impl<'a> Linux<'a> {
    /// A pool with these settings, when it is ready to serve and as warm as it shall be.
    pub async fn new(world: &'a World, settings: Value) -> Result<Self> {
        let warm = usize::try_from(settings["minIdle"].as_u64().unwrap_or(0))?;
        let linux = Self::unready(world, settings).await?;
        for part in parts(warm) {
            let warmer = |status: &RunnerPoolStatus| status.workers.idle as usize >= part;
            linux.until_pool(&format!("warm with {part} machines"), warmer).await?;
        }
        let ready = |status: &RunnerPoolStatus| {
            status.launch_template.is_some() && !status.queues.is_empty() && status.workers.idle as usize == warm
        };
        linux.until_pool("ready", ready).await?;
        linux.until_claimable(warm).await?;
        Ok(linux)
    }

    /// Waits until the operator can give so many idle machines away: it has their keys with their heartbeats.
    async fn until_claimable(&self, count: usize) -> Result<()> {
        let workers = self.world.api::<Worker>(&self.namespace);
        let idle = |worker: &&Worker| {
            let status = worker.status.as_ref();
            status.is_some_and(|status| status.state == Some(WorkerState::Idle) && status.heartbeat.is_some())
        };
        let claimable = async || {
            let workers = workers.list(&ListParams::default()).await?;
            Ok(workers.items.iter().filter(idle).count() >= count)
        };
        self.world.until_true(&format!("{count} machines of {} can be claimed", self.key()), claimable).await
    }

    pub async fn unready(world: &'a World, settings: Value) -> Result<Self> {
        let namespace = world.namespace().await?;
        let linux = Self { world, namespace, cloud: Cloud::new(&world.stage.aws, CLUSTER) };
        linux.set(settings).await?;
        Ok(linux)
    }

    /// How records and tags name the pool; no other test's requests contain it.
    pub fn key(&self) -> String {
        format!("{}/{POOL}", self.namespace)
    }

    /// Applies the pool with these settings, and waits until the operator goes by them.
    pub async fn set(&self, settings: Value) -> Result<()> {
        let pool = self.world.stage.ec2_pool(&self.namespace, POOL, patient(settings));
        self.world.stage.kube.apply(&pool.to_string()).await?;
        let seen = |pool: &RunnerPool| {
            let observed = pool.status.as_ref().and_then(|status| status.observed_generation);
            observed.is_some() && observed == pool.metadata.generation
        };
        self.world.until::<RunnerPool>(&self.namespace, POOL, "seen by the operator", seen).await.map(drop)
    }

    pub async fn claim(&self, name: &str, run_id: &str, settings: Value) -> Result<()> {
        let mut claim = self.world.stage.claim(&self.namespace, name, POOL, run_id, 1);
        if let (Value::Object(spec), Value::Object(settings)) = (&mut claim["spec"], settings) {
            spec.extend(settings);
        }
        self.world.stage.kube.apply(&claim.to_string()).await
    }

    pub async fn pool_status(&self) -> Result<RunnerPoolStatus> {
        Ok(self.world.api::<RunnerPool>(&self.namespace).get(POOL).await?.status.unwrap_or_default())
    }

    pub async fn queue(&self) -> Result<String> {
        Ok(self.pool_status().await?.queues.first().context("a pool has a queue")?.url.clone())
    }

    pub async fn until_pool(&self, what: &str, wanted: impl Fn(&RunnerPoolStatus) -> bool) -> Result<()> {
        let is = |pool: &RunnerPool| pool.status.as_ref().is_some_and(&wanted);
        self.world.until::<RunnerPool>(&self.namespace, POOL, what, is).await.map(drop)
    }

    /// Waits until the pool's condition says `text`, or an event tells that it did: the condition may have changed since.
    pub async fn until_pool_said(&self, text: &str) -> Result<()> {
        let about = ListParams::default().fields(&format!("involvedObject.kind=RunnerPool,involvedObject.name={POOL}"));
        let events = self.world.api::<Event>(&self.namespace);
        let tells = |event: &Event| event.message.as_deref().is_some_and(|message| message.contains(text));
        let said = async || {
            let status = self.pool_status().await?;
            Ok(pool_why(&status).1.contains(text) || events.list(&about).await?.items.iter().any(tells))
        };
        self.world.until_true(&format!("{} said {text:?}", self.key()), said).await
    }

    pub async fn until_claim(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&RunnerClaimStatus) -> bool,
    ) -> Result<RunnerClaimStatus> {
        let is = |claim: &RunnerClaim| claim.status.as_ref().is_some_and(&wanted);
        let claim = self.world.until::<RunnerClaim>(&self.namespace, name, what, is).await?;
        claim.status.context("a status was waited for")
    }

    pub async fn until_phase(&self, name: &str, phase: ClaimPhase) -> Result<RunnerClaimStatus> {
        self.until_claim(name, phase.as_str(), |status| status.phase == Some(phase)).await
    }

    pub async fn delete_claim(&self, name: &str) -> Result<()> {
        self.world.api::<RunnerClaim>(&self.namespace).delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Deletes a claim and waits until it is gone.
    pub async fn release(&self, name: &str) -> Result<()> {
        self.delete_claim(name).await?;
        self.world.until_gone::<RunnerClaim>(&self.namespace, name).await
    }

    /// The records of machines that have not ended, by id.
    pub async fn records(&self) -> Result<BTreeMap<String, Record>> {
        let records = self.cloud.records(&self.key()).await?.into_iter();
        let live = records.filter(|record| record.state != State::Terminated);
        Ok(live.map(|record| (record.instance_id.clone(), record)).collect())
    }

    /// The ids of machines in a state.
    pub async fn ids(&self, state: State) -> Result<Vec<String>> {
        let records = self.records().await?.into_iter();
        Ok(records.filter(|(_, record)| record.state == state).map(|(id, _)| id).collect())
    }

    /// Waits until one machine, and no more, is in a state.
    pub async fn the(&self, state: State) -> Result<String> {
        let mut only = None;
        let one = async || {
            let mut ids = self.ids(state).await?;
            only = ids.pop().filter(|_| ids.is_empty());
            Ok(only.is_some())
        };
        self.world.until_true(&format!("one machine of {} is {state}", self.key()), one).await?;
        only.context("there is one")
    }

    /// Waits until these many machines, and no others, are idle and have left GitHub.
    pub async fn until_pooled(&self, count: usize) -> Result<()> {
        for part in parts(count) {
            let some = async || Ok(self.records().await?.into_values().filter(is_pooled).count() >= part);
            self.world.until_true(&format!("{part} of {count} machines of {} are pooled", self.key()), some).await?;
        }
        self.world
            .until_true(&format!("{count} machines of {} are pooled", self.key()), async || {
                let records = self.records().await?;
                Ok(records.values().all(is_pooled) && records.len() == count && self.runners().is_empty())
            })
            .await
    }

    pub async fn until_record(&self, id: &str, what: &str, wanted: impl Fn(&Record) -> bool) -> Result<()> {
        let is = async || Ok(self.cloud.record(id).await?.is_some_and(|record| wanted(&record)));
        self.world.until_true(&format!("the record of {id} is {what}"), is).await
    }

    /// Every instance that the pool ever had.
    pub fn instances(&self) -> Vec<Instance> {
        let mut all = self.world.stage.aws.instances();
        all.retain(|instance| instance.tags.get("paddock:pool") == Some(&self.key()));
        all
    }

    /// The instances of the pool that run, in order of their ids.
    pub fn running(&self) -> Vec<String> {
        let runs = |instance: &Instance| instance.state == InstanceState::Running;
        let mut ids: Vec<_> = self.instances().into_iter().filter(runs).map(|instance| instance.id).collect();
        ids.sort();
        ids
    }

    /// Waits until exactly these instances of the pool run.
    pub async fn until_running(&self, ids: &[String]) -> Result<()> {
        let mut wanted = ids.to_vec();
        wanted.sort();
        let runs = async || Ok(self.running() == wanted);
        self.world.until_true(&format!("EC2 runs {ids:?} of {}", self.key()), runs).await
    }

    /// Waits until GitHub has no runner of the pool's machines.
    pub async fn until_no_runners(&self) -> Result<()> {
        let none = async || Ok(self.runners().is_empty());
        self.world.until_true(&format!("GitHub has no runner of {}", self.key()), none).await
    }

    /// Waits until a machine is given up for this reason, by record, Worker and EC2.
    pub async fn until_ended(&self, id: &str, reason: FailureReason) -> Result<()> {
        let ended = |worker: &Worker| {
            let status = worker.status.clone().unwrap_or_default();
            status.state == Some(WorkerState::Terminated) && status.failure.is_some_and(|f| f.reason == reason)
        };
        self.world.until::<Worker>(&self.namespace, id, reason.as_str(), ended).await?;
        self.until_gone_at_ec2(id).await
    }

    pub async fn until_gone_at_ec2(&self, id: &str) -> Result<()> {
        let runs = |instance: &Instance| instance.id == id && instance.state == InstanceState::Running;
        let gone = async || Ok(!self.instances().iter().any(runs));
        self.world.until_true(&format!("EC2 ended {id}"), gone).await
    }

    /// The labels of each runner at GitHub that is one of the pool's machines.
    pub fn runners(&self) -> BTreeMap<String, Vec<String>> {
        let instances = self.instances();
        let runners = self.world.stage.github.runners().into_iter();
        let own = runners.filter(|runner| instances.iter().any(|instance| instance.id == runner.name));
        own.map(|runner| (runner.name, runner.labels)).collect()
    }

    /// A fault at AWS until the answer is dropped.
    pub fn fault(&self, rule: Rule) -> Faulty<'a> {
        Faulty { world: self.world, id: self.world.stage.aws.add_fault(rule) }
    }

    /// Deletes the pool, which leaves nothing at AWS.
    pub async fn clean_up(&self) -> Result<()> {
        self.world.api::<RunnerPool>(&self.namespace).delete(POOL, &DeleteParams::default()).await?;
        let all = self.running().len();
        for part in parts(all) {
            let fewer = async || Ok(self.running().len() <= all - part);
            self.world.until_true(&format!("{part} of {all} machines of {} end", self.key()), fewer).await?;
        }
        self.world.until_gone::<RunnerPool>(&self.namespace, POOL).await?;
        self.until_running(&[]).await
    }
}

/// The numbers on the way to `count` at which it is looked how far things are.
pub fn parts(count: usize) -> impl Iterator<Item = usize> {
    (PART..count).step_by(PART)
}

/// Settings of a pool that gives no healthy machine up while a test waits for it, however slow the computer is. What a
/// test sets itself stays.
pub fn patient(mut settings: Value) -> Value {
    let mut timeouts = json!({ "registration": "4m", "validation": "9m", "deregistration": "9m" });
    if let (Value::Object(timeouts), Some(Value::Object(own))) = (&mut timeouts, settings.get("timeouts").cloned()) {
        timeouts.extend(own);
    }
    settings["timeouts"] = timeouts;
    settings
}

/// Idle, and through with its last run.
pub fn is_pooled(record: &Record) -> bool {
    record.state == State::Idle && record.leaving.is_empty()
}

pub struct Faulty<'a> {
    world: &'a World,
    id: u64,
}

impl Faulty<'_> {
    /// How many calls it has hit.
    pub fn hits(&self) -> u32 {
        let faults = self.world.stage.aws.faults();
        faults.iter().find(|fault| fault.id == self.id).map_or(0, |fault| fault.hit)
    }
}

impl Drop for Faulty<'_> {
    fn drop(&mut self) {
        self.world.stage.aws.remove_fault(self.id);
    }
}

/// Why a claim is or is not ready: the reason and the message of its condition.
pub fn why(status: &RunnerClaimStatus) -> (&str, &str) {
    let ready = status.conditions.iter().find(|condition| condition.type_ == READY);
    ready.map_or(("", ""), |condition| (condition.reason.as_str(), condition.message.as_str()))
}

/// The same of a pool.
pub fn pool_why(status: &RunnerPoolStatus) -> (&str, &str) {
    let ready = status.conditions.iter().find(|condition| condition.type_ == READY);
    ready.map_or(("", ""), |condition| (condition.reason.as_str(), condition.message.as_str()))
}

/// A script that takes longer than any test.
pub fn never_done() -> Value {
    json!("sleep 600")
}
