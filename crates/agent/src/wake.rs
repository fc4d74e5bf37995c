//! The machine's queue: a message says that the operator has changed the record.

use std::{convert::Infallible, time::Duration};

use anyhow::{Context, Result};
use aws_config::{SdkConfig, timeout::TimeoutConfig};
use aws_sdk_sqs::{
    Client,
    types::{DeleteMessageBatchRequestEntry, Message},
};
use paddock_record::wake_queue;
use tokio::sync::watch;

use crate::{limits::STORE_CALL_TIMEOUT, store::plain};

/// How long a call waits for a message. The longest that SQS allows: most calls of an idle machine bring nothing.
const WAIT: Duration = Duration::from_secs(20);
/// The pause before the queue is looked for again. The operator creates it within seconds of the launch.
const RETRY: Duration = Duration::from_secs(5);
/// The most messages of one call.
const BATCH: i32 = 10;

/// What the queue has told.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// Every change of the record from now on is told.
    pub connected: bool,
    changes: u64,
}

pub struct WakeQueue {
    client: Client,
    name: String,
}

impl WakeQueue {
    pub fn new(config: &SdkConfig, cluster: &str, instance_id: &str) -> Self {
        let timeouts = TimeoutConfig::builder().operation_timeout(WAIT + STORE_CALL_TIMEOUT);
        let config = aws_sdk_sqs::config::Builder::from(config)
            .timeout_config(timeouts.connect_timeout(STORE_CALL_TIMEOUT / 2).build())
            .build();
        Self { client: Client::from_conf(config), name: wake_queue(cluster, instance_id) }
    }

    /// Listens until dropped.
    pub async fn listen(self, told: watch::Sender<Told>) {
        let mut is_new = true;
        loop {
            let Err(error) = self.follow(&told).await;
            is_new |= told.send_if_modified(|told| std::mem::take(&mut told.connected));
            if std::mem::take(&mut is_new) {
                tracing::info!("{error:#}; reading the record until there is a queue");
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn follow(&self, told: &watch::Sender<Told>) -> Result<Infallible> {
        let found = self.client.get_queue_url().queue_name(&self.name).send().await.map_err(plain);
        let url = found.with_context(|| format!("no queue {}", self.name))?.queue_url.context("it has no URL")?;
        tracing::info!(url, "waiting for changes of the record");
        told.send_modify(|told| told.connected = true);
        loop {
            let receive = self.client.receive_message().queue_url(&url).max_number_of_messages(BATCH);
            let answer = receive.wait_time_seconds(WAIT.as_secs() as i32).send().await.map_err(plain);
            let messages = answer.context("cannot wait for messages")?.messages.unwrap_or_default();
            if !messages.is_empty() {
                told.send_modify(|told| told.changes += 1);
                self.delete(&url, messages).await?;
            }
        }
    }

    async fn delete(&self, url: &str, messages: Vec<Message>) -> Result<()> {
        let entries = messages.into_iter().enumerate().map(|(index, message)| {
            let entry = DeleteMessageBatchRequestEntry::builder().id(index.to_string());
            entry.receipt_handle(message.receipt_handle.unwrap_or_default()).build().expect("id and receipt are set")
        });
        let delete = self.client.delete_message_batch().queue_url(url).set_entries(Some(entries.collect()));
        delete.send().await.map_err(plain).context("cannot delete messages").map(drop)
    }
}
