//! The idle queues: one per resource class.
//!
//! A message is a hint that an instance is idle; the record decides. A message is deleted only after its instance was
//! claimed or rejected, and duplicate, late or deleted messages that are delivered anyway are harmless.

use std::{collections::HashMap, time::Duration};

use aws_sdk_sqs::{
    Client,
    error::{ProvideErrorMetadata, SdkError},
    operation::create_queue::CreateQueueError,
    types::{
        ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, QueueAttributeName,
        SendMessageBatchRequestEntry,
    },
};
use futures::future::try_join_all;
use paddock_core::ec2::idle_queue::{BATCH, Received};

use super::{AwsError, word};

/// How long a received message stays hidden while its instance is being claimed. After a crash it reappears.
const VISIBILITY_TIMEOUT: Duration = Duration::from_secs(30);
/// The limits of SQS.
const RETENTION_MIN: Duration = Duration::from_mins(1);
const RETENTION_MAX: Duration = Duration::from_hours(14 * 24);

#[derive(Clone)]
pub struct Queues {
    client: Client,
}

impl Queues {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Creates the queue or updates its attributes, and returns its URL. Messages are retained for the idle time of
    /// their instances, so that expired ones do not accumulate.
    pub async fn ensure(&self, name: &str, idle: Duration) -> Result<String, AwsError> {
        let attributes = HashMap::from([
            (QueueAttributeName::VisibilityTimeout, VISIBILITY_TIMEOUT.as_secs().to_string()),
            (
                QueueAttributeName::MessageRetentionPeriod,
                idle.clamp(RETENTION_MIN, RETENTION_MAX).as_secs().to_string(),
            ),
        ]);
        let create = self.client.create_queue().queue_name(name).set_attributes(Some(attributes.clone()));
        let url = match create.send().await {
            Ok(answer) => answer.queue_url,
            Err(error) if exists_with_other_attributes(&error) => {
                let answer = self.client.get_queue_url().queue_name(name).send().await.map_err(word("GetQueueUrl"))?;
                if let Some(url) = &answer.queue_url {
                    let set = self.client.set_queue_attributes().queue_url(url).set_attributes(Some(attributes));
                    set.send().await.map_err(word("SetQueueAttributes"))?;
                }
                answer.queue_url
            }
            Err(error) => return Err(word("CreateQueue")(error)),
        };
        url.ok_or(AwsError::Unreachable { call: "CreateQueue", message: "the answer has no URL".into() })
    }

    pub async fn send(&self, url: &str, bodies: &[String]) -> Result<(), AwsError> {
        let sends = bodies.chunks(BATCH).map(async |batch| {
            let entries = batch.iter().enumerate().map(|(index, body)| {
                let entry = SendMessageBatchRequestEntry::builder().id(index.to_string()).message_body(body);
                entry.build().expect("id and body are set")
            });
            let send = self.client.send_message_batch().queue_url(url).set_entries(Some(entries.collect()));
            let answer = send.send().await.map_err(word("SendMessageBatch"))?;
            match answer.failed.first() {
                None => Ok(()),
                Some(failed) => {
                    let message = failed.message.clone().unwrap_or_else(|| failed.code.clone());
                    Err(AwsError::Unreachable { call: "SendMessageBatch", message })
                }
            }
        });
        try_join_all(sends).await.map(drop)
    }

    /// Receives messages with one short poll.
    pub async fn receive(&self, url: &str) -> Result<Vec<Received>, AwsError> {
        let receive = self.client.receive_message().queue_url(url).max_number_of_messages(BATCH as i32);
        let answer = receive.wait_time_seconds(0).send().await.map_err(word("ReceiveMessage"))?;
        let messages = answer.messages.unwrap_or_default().into_iter();
        let read = |message: aws_sdk_sqs::types::Message| {
            Some(Received { receipt: message.receipt_handle?, body: message.body.unwrap_or_default() })
        };
        Ok(messages.filter_map(read).collect())
    }

    /// Makes messages visible again after `delay`. One that fails becomes visible after its visibility timeout.
    pub async fn put_back(&self, url: &str, messages: &[Received], delay: Duration) -> Result<(), AwsError> {
        let seconds = i32::try_from(delay.as_secs()).unwrap_or(i32::MAX);
        let changes = messages.chunks(BATCH).map(async |batch| {
            let entries = batch.iter().enumerate().map(|(index, message)| {
                ChangeMessageVisibilityBatchRequestEntry::builder()
                    .id(index.to_string())
                    .receipt_handle(&message.receipt)
                    .visibility_timeout(seconds)
                    .build()
                    .expect("id and receipt are set")
            });
            let change = self.client.change_message_visibility_batch().queue_url(url);
            let change = change.set_entries(Some(entries.collect())).send().await;
            change.map_err(word("ChangeMessageVisibilityBatch"))
        });
        try_join_all(changes).await.map(drop)
    }

    pub async fn delete(&self, url: &str, messages: &[Received]) -> Result<(), AwsError> {
        let deletes = messages.chunks(BATCH).map(async |batch| {
            let entries = batch.iter().enumerate().map(|(index, message)| {
                DeleteMessageBatchRequestEntry::builder()
                    .id(index.to_string())
                    .receipt_handle(&message.receipt)
                    .build()
                    .expect("id and receipt are set")
            });
            let delete = self.client.delete_message_batch().queue_url(url).set_entries(Some(entries.collect()));
            delete.send().await.map_err(word("DeleteMessageBatch"))
        });
        try_join_all(deletes).await.map(drop)
    }

    /// The approximate number of messages, including hidden and delayed ones.
    pub async fn size(&self, url: &str) -> Result<u32, AwsError> {
        use QueueAttributeName::{
            ApproximateNumberOfMessages as Visible, ApproximateNumberOfMessagesDelayed as Delayed,
            ApproximateNumberOfMessagesNotVisible as Hidden,
        };
        let names = vec![Visible, Hidden, Delayed];
        let get = self.client.get_queue_attributes().queue_url(url).set_attribute_names(Some(names));
        let answer = get.send().await.map_err(word("GetQueueAttributes"))?;
        Ok(answer.attributes.unwrap_or_default().values().filter_map(|text| text.parse::<u32>().ok()).sum())
    }

    pub async fn remove(&self, url: &str) -> Result<(), AwsError> {
        match self.client.delete_queue().queue_url(url).send().await.map_err(word("DeleteQueue")) {
            Err(error) if !error.is_queue_gone() => Err(error),
            _ => Ok(()),
        }
    }
}

/// SQS names the error in a header, from which the SDK makes the typed error and its code `QueueAlreadyExists`; without
/// that header the error has only a code, `QueueNameExists`.
fn exists_with_other_attributes<R>(error: &SdkError<CreateQueueError, R>) -> bool {
    let code = |error: &CreateQueueError| matches!(error.code(), Some("QueueAlreadyExists" | "QueueNameExists"));
    error.as_service_error().is_some_and(|error| error.is_queue_name_exists() || code(error))
}

#[cfg(test)]
#[path = "sqs_tests.rs"]
mod tests;
