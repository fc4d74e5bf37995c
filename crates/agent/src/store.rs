//! The instance's records in DynamoDB: reads its own, writes heartbeats and signals.

use anyhow::{Context, Result};
use aws_config::{BehaviorVersion, Region, timeout::TimeoutConfig};
use aws_sdk_dynamodb::Client;
use jiff::Timestamp;
use paddock_record::{Heartbeat, Instance, PublicKey, WorkerSignal, entity, key};

use crate::{
    files::Said,
    limits::{STORE_CALL, pause},
};

#[derive(Clone)]
pub struct Store {
    client: Client,
    table: String,
    instance_id: String,
}

impl Store {
    /// Connects with this instance's credentials and, unless told another region, in its own, for which it asks as long
    /// as it takes.
    pub async fn connect(region: Option<String>, table: String, instance_id: String) -> Self {
        let timeouts = TimeoutConfig::builder().operation_timeout(STORE_CALL).connect_timeout(STORE_CALL / 2).build();
        let mut failures = 0;
        loop {
            let mut loader = aws_config::defaults(BehaviorVersion::latest()).timeout_config(timeouts.clone());
            if let Some(region) = &region {
                loader = loader.region(Region::new(region.clone()));
            }
            let config = loader.load().await;
            if config.region().is_some() {
                return Self { client: Client::new(&config), table, instance_id };
            }
            tracing::warn!("neither the environment nor the metadata service tells the region; asking again");
            failures += 1;
            tokio::time::sleep(pause(failures)).await;
        }
    }

    /// This instance's record as it is now.
    pub async fn read(&self) -> Result<Option<Instance>> {
        let get = self.client.get_item().table_name(&self.table).consistent_read(true);
        let answer = get.set_key(Some(key(entity::INSTANCE, &self.instance_id))).send().await;
        let item = answer.map_err(plain).context("cannot read this instance's record")?.item;
        Ok(item.map(|item| Instance::from_item(&item)).transpose()?)
    }

    pub async fn beat(&self, public_key: &PublicKey, now: Timestamp) -> Result<()> {
        let (instance_id, public_key) = (self.instance_id.clone(), Some(public_key.clone()));
        let beat = Heartbeat { instance_id, updated_at: now, public_key };
        let put = self.client.put_item().table_name(&self.table).set_item(Some(beat.to_item())).send();
        put.await.map_err(plain).context("cannot write the heartbeat").map(drop)
    }

    pub async fn say(&self, said: &Said, now: Timestamp) -> Result<()> {
        let Said { signal, run_id, reason, detail, .. } = said.clone();
        let said =
            WorkerSignal { instance_id: self.instance_id.clone(), signal, run_id, updated_at: now, reason, detail };
        let put = self.client.put_item().table_name(&self.table).set_item(Some(said.to_item())).send();
        put.await.map_err(plain).context("cannot write the signal").map(drop)
    }
}

/// The SDK's errors say what went wrong only through their sources.
fn plain(error: impl std::error::Error + Send + Sync + 'static) -> anyhow::Error {
    anyhow::anyhow!("{}", aws_sdk_dynamodb::error::DisplayErrorContext(error))
}
