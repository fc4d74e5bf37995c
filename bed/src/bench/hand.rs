//! What anybody must do who claims machines on this bed, and nothing else: the baseline of every figure.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aws_sdk_dynamodb::{
    Client,
    config::{BehaviorVersion, Credentials, Region},
    types::{AttributeValue, KeysAndAttributes},
};
use futures::future::try_join_all;
use jiff::Timestamp;
use paddock_record::{Signal, State, WorkerSignal, attribute as a, entity, key, stamp};

use super::agents::Agents;

/// How often it looks for the agents' signals.
const LOOK: Duration = Duration::from_millis(10);
const DEADLINE: Duration = Duration::from_secs(60);
/// What DynamoDB takes in one call.
const READS: usize = 100;

/// A DynamoDB client, as the operator's.
pub fn dynamodb(url: &str) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .endpoint_url(url)
        .credentials_provider(Credentials::new("bench", "bench", None, None, "bench"));
    Client::from_conf(config.build())
}

/// A claimer without queue, Kubernetes or memory.
pub struct Hand {
    pub client: Client,
    pub table: String,
}

impl Hand {
    /// One conditional write for each machine, a wait for its agent, and another conditional write.
    pub async fn claim(&self, agents: &Agents, ids: &[String], run_id: &str) -> Result<Duration> {
        let seal = |id: &String| agents.look(|agents| agents.get(id).map(|agent| agent.public.seal("token")));
        let sealed = ids.iter().map(|id| seal(id).with_context(|| format!("{id} has an agent")));
        let sealed = sealed.collect::<Result<Vec<_>>>()?;
        let start = Instant::now();
        let writes = ids.iter().zip(sealed).map(|(id, sealed)| self.write(id, State::Claimed, run_id, sealed));
        try_join_all(writes).await?;
        let mut silent: HashSet<_> = ids.iter().cloned().collect();
        while !silent.is_empty() {
            ensure!(start.elapsed() < DEADLINE, "{} agents did not answer", silent.len());
            let asked: Vec<_> = silent.iter().cloned().collect();
            for said in try_join_all(asked.chunks(READS).map(|ids| self.signals(ids))).await?.into_iter().flatten() {
                if said.signal == Signal::Registered && said.run_id == run_id {
                    silent.remove(&said.instance_id);
                }
            }
            tokio::time::sleep(LOOK).await;
        }
        try_join_all(ids.iter().map(|id| self.write(id, State::Running, run_id, String::new()))).await?;
        Ok(start.elapsed())
    }

    async fn write(&self, id: &str, state: State, run_id: &str, sealed: String) -> Result<()> {
        let now = stamp(Timestamp::now());
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let update = self.client.update_item().table_name(&self.table).set_key(Some(key(entity::INSTANCE, id)));
        let names =
            [("#s", a::STATE), ("#r", a::RUN_ID), ("#x", a::SEALED), ("#u", a::UPDATED_AT), ("#t", a::THRESHOLD)];
        let update =
            names.into_iter().fold(update, |update, (alias, name)| update.expression_attribute_names(alias, name));
        let values = [(":s", state.as_str()), (":r", run_id), (":x", &sealed), (":now", &now)];
        let update = values
            .into_iter()
            .fold(update, |update, (alias, value)| update.expression_attribute_values(alias, text(value)));
        let update = update.update_expression("SET #s = :s, #r = :r, #x = :x, #u = :now");
        update.condition_expression("#t > :now").send().await?;
        Ok(())
    }

    async fn signals(&self, ids: &[String]) -> Result<Vec<WorkerSignal>> {
        let keys = ids.iter().map(|id| key(entity::SIGNAL, id)).collect();
        let wanted = KeysAndAttributes::builder().set_keys(Some(keys)).consistent_read(true).build()?;
        let answer = self.client.batch_get_item().request_items(&self.table, wanted).send().await?;
        let items = answer.responses.unwrap_or_default().remove(&self.table).unwrap_or_default();
        Ok(items.iter().map(WorkerSignal::from_item).collect::<Result<_, _>>()?)
    }
}
