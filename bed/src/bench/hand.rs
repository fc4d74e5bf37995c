//! The baseline: the minimum of writes and reads that any claimer needs on this bed.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aws_sdk_dynamodb::{
    Client,
    config::{BehaviorVersion, Credentials, Region},
    types::{AttributeValue, KeysAndAttributes},
};
use futures::future::try_join_all;
use jiff::{SignedDuration, Timestamp};
use paddock_record::{
    ClaimRef, Instance, PublicKey, Signal, Transition, WorkerSignal, entity, instance_key, report_key, transition,
};

use super::agents::{Agent, Agents};
use crate::cloud::machine_arns;

/// How often the agents' signals are polled.
const SIGNAL_POLL: Duration = Duration::from_millis(10);
const DEADLINE: Duration = Duration::from_secs(60);
/// DynamoDB's batch limit.
const READ_BATCH: usize = 100;
/// Longer than the benchmark takes, so that nothing expires.
const LIFETIME: SignedDuration = SignedDuration::from_hours(2);

type Item = HashMap<String, AttributeValue>;

/// A DynamoDB client like the operator's.
pub fn dynamodb(url: &str) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .endpoint_url(url)
        .credentials_provider(Credentials::new("bench", "bench", None, None, "bench"));
    Client::from_conf(config.build())
}

/// A claimer without queue, Kubernetes or state.
pub struct Hand {
    pub client: Client,
    pub table: String,
}

impl Hand {
    /// For each machine: a conditional write, a wait for its agent, and another conditional write. The transitions are
    /// the operator's own, each in a separate call.
    pub async fn claim(&self, agents: &Agents, ids: &[String], run_id: &str) -> Result<Duration> {
        let free = self.free(agents, ids).await?;
        let claim = ClaimRef { name: run_id, uid: run_id, run: run_id };
        let (now, threshold) = times();
        let claimed = free.iter().map(|seen| {
            let sealed = public_key(agents, seen)?.seal("token");
            transition::claim(seen, claim, &seen.scope, "", Some(sealed), threshold, now).context("it is free")
        });
        let claimed = claimed.collect::<Result<Vec<_>>>()?;
        let start = Instant::now();
        try_join_all(claimed.iter().map(|claimed| self.write(claimed))).await?;
        let mut silent: HashSet<_> = ids.iter().cloned().collect();
        while !silent.is_empty() {
            ensure!(start.elapsed() < DEADLINE, "{} agents did not answer", silent.len());
            let asked = silent.iter().map(|id| report_key(entity::SIGNAL, &machine_arns(), id));
            for item in self.read(asked.collect()).await? {
                let signal = WorkerSignal::from_item(&item)?;
                if signal.signal == Signal::Registered && signal.run_id == run_id {
                    silent.remove(&signal.instance_id);
                }
            }
            tokio::time::sleep(SIGNAL_POLL).await;
        }
        let (now, threshold) = times();
        let started = claimed.iter().map(|claimed| transition::start(claimed.next(), threshold, now));
        let started = started.collect::<Option<Vec<_>>>().context("they have a run")?;
        try_join_all(started.iter().map(|started| self.write(started))).await?;
        Ok(start.elapsed())
    }

    /// Releases machines left running by an earlier round or the operator, and waits for their agents. Not measured.
    async fn free(&self, agents: &Agents, ids: &[String]) -> Result<Vec<Instance>> {
        let stored = self.read(ids.iter().map(|id| instance_key(id)).collect()).await?;
        let stored = stored.iter().map(Instance::from_item);
        let (now, threshold) = times();
        let freed = stored.map(async |seen| {
            let sealed = public_key(agents, &seen)?.seal("token");
            let Some(released) = transition::release(&seen, Some(sealed), threshold, now) else { return Ok(seen) };
            let pooled = transition::pool(released.next()).context("it leaves its run")?;
            self.write(&released).await?;
            self.write(&pooled).await?;
            anyhow::Ok(pooled.next().clone())
        });
        let freed = try_join_all(freed).await?;
        let start = Instant::now();
        while !agents.read(|agents| ids.iter().all(|id| agents.get(id).is_some_and(Agent::is_free))) {
            ensure!(start.elapsed() < DEADLINE, "the agents did not see that their machines are free");
            tokio::time::sleep(SIGNAL_POLL).await;
        }
        Ok(freed)
    }

    async fn write(&self, transition: &Transition) -> Result<()> {
        let write = transition.expression(Timestamp::now());
        let update = self
            .client
            .update_item()
            .table_name(&self.table)
            .set_key(Some(write.key))
            .update_expression(write.update)
            .condition_expression(write.condition)
            .set_expression_attribute_names(Some(write.names))
            .set_expression_attribute_values(Some(write.values));
        update.send().await?;
        Ok(())
    }

    async fn read(&self, keys: Vec<Item>) -> Result<Vec<Item>> {
        let reads = keys.chunks(READ_BATCH).map(async |keys| {
            let wanted = KeysAndAttributes::builder().set_keys(Some(keys.to_vec())).consistent_read(true).build()?;
            let answer = self.client.batch_get_item().request_items(&self.table, wanted).send().await?;
            anyhow::Ok(answer.responses.unwrap_or_default().remove(&self.table).unwrap_or_default())
        });
        Ok(try_join_all(reads).await?.into_iter().flatten().collect())
    }
}

/// The current time and the threshold for a change made now.
fn times() -> (Timestamp, Timestamp) {
    let now = Timestamp::now();
    (now, now + LIFETIME)
}

fn public_key(agents: &Agents, instance: &Instance) -> Result<PublicKey> {
    let id = &instance.instance_id;
    let key = agents.read(|agents| agents.get(id).map(|agent| agent.public.clone()));
    key.with_context(|| format!("{id} has an agent"))
}
