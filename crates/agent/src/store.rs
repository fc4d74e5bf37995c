//! DynamoDB access: reads the instance's own record, writes heartbeats and signals.

use anyhow::{Context, Result};
use aws_config::SdkConfig;
use aws_sdk_dynamodb::Client;
use jiff::Timestamp;
use paddock_record::{Heartbeat, Instance, MachineArns, PublicKey, WorkerSignal, instance_key};

use crate::files::Report;

#[derive(Clone)]
pub struct Store {
    client: Client,
    table: String,
    instance_id: String,
    /// What this instance may write has its ARN in the key.
    arns: MachineArns,
}

/// What a heartbeat says.
pub struct Beat<'a> {
    pub public_key: &'a PublicKey,
    /// EC2 takes the machine back.
    pub reclaimed: bool,
    /// When the agent sent its last signal.
    pub signalled_at: Option<Timestamp>,
    /// What is wrong with the machine and does not keep it from serving.
    pub warning: &'a str,
}

impl Store {
    pub fn new(config: &SdkConfig, table: String, instance_id: String, arns: MachineArns) -> Self {
        Self { client: Client::new(config), table, instance_id, arns }
    }

    /// This instance's record, read consistently.
    pub async fn read(&self) -> Result<Option<Instance>> {
        let get = self.client.get_item().table_name(&self.table).consistent_read(true);
        let answer = get.set_key(Some(instance_key(&self.instance_id))).send().await;
        let item = answer.map_err(plain).context("cannot read this instance's record")?.item;
        Ok(item.map(|item| Instance::from_item(&item)))
    }

    pub async fn beat(&self, beat: Beat<'_>, now: Timestamp) -> Result<()> {
        let Beat { public_key, reclaimed, signalled_at, warning } = beat;
        let beat = Heartbeat::new(&self.instance_id, Some(public_key.clone()), now);
        let beat = Heartbeat { reclaimed, signalled_at, warning: warning.to_owned(), ..beat };
        let put = self.client.put_item().table_name(&self.table).set_item(Some(beat.to_item(&self.arns))).send();
        put.await.map_err(plain).context("cannot write the heartbeat").map(drop)
    }

    pub async fn write_signal(&self, report: &Report, now: Timestamp) -> Result<()> {
        let Report { signal, run_id, claims, reason, detail, log } = report.clone();
        let signal = WorkerSignal::new(&self.instance_id, signal, &run_id, claims, now);
        let signal = WorkerSignal { reason, detail, log, ..signal };
        let put = self.client.put_item().table_name(&self.table).set_item(Some(signal.to_item(&self.arns))).send();
        put.await.map_err(plain).context("cannot write the signal").map(drop)
    }
}

/// An SDK error shows its cause only in its source chain.
pub fn plain(error: impl std::error::Error + Send + Sync + 'static) -> anyhow::Error {
    anyhow::anyhow!("{}", aws_sdk_dynamodb::error::DisplayErrorContext(error))
}
