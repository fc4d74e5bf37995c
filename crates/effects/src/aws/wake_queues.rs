//! The queues that wake agents: one per machine. See `paddock_record::wakes`.

use std::{collections::HashMap, time::Duration};

use aws_sdk_sqs::{Client, types::QueueAttributeName};
use paddock_record::{MACHINE_TAG, machine_of_wake_queue, wake_queue, wake_queue_prefix};

use super::{AwsError, word};

/// A message that an agent has not received for so long tells it nothing: it has read its record since. The least that SQS
/// takes.
const RETENTION: Duration = Duration::from_mins(1);
/// The most queues in one answer of SQS.
const PAGE: i32 = 1000;

#[derive(Clone)]
pub struct WakeQueues {
    client: Client,
    cluster: String,
}

impl WakeQueues {
    pub fn new(client: Client, cluster: &str) -> Self {
        Self { client, cluster: cluster.to_owned() }
    }

    /// The URLs of all queues of the cluster's machines, by machine. SQS may show a new queue, or hide a deleted one, a
    /// minute late.
    pub async fn list(&self) -> Result<HashMap<String, String>, AwsError> {
        let (mut found, mut next) = (HashMap::new(), None);
        loop {
            let list = self.client.list_queues().queue_name_prefix(wake_queue_prefix(&self.cluster));
            let list = list.max_results(PAGE).set_next_token(next);
            let page = list.send().await.map_err(word("ListQueues"))?;
            found.extend(page.queue_urls.unwrap_or_default().into_iter().filter_map(|url| {
                let machine = machine_of_wake_queue(&self.cluster, url.rsplit('/').next()?)?;
                Some((machine, url))
            }));
            next = page.next_token;
            if next.is_none() {
                return Ok(found);
            }
        }
    }

    /// Creates the queue of a machine with this ARN, unless it exists, and returns its URL.
    pub async fn create(&self, id: &str, arn: &str) -> Result<String, AwsError> {
        let create = self.client.create_queue().queue_name(wake_queue(&self.cluster, id));
        let create = create.attributes(QueueAttributeName::MessageRetentionPeriod, RETENTION.as_secs().to_string());
        let answer = create.tags(MACHINE_TAG, arn).send().await.map_err(word("CreateQueue"))?;
        answer.queue_url.ok_or(AwsError::Unreachable { call: "CreateQueue", message: "the answer has no URL".into() })
    }

    /// Tells the machine's agent to read its record.
    pub async fn wake(&self, url: &str) -> Result<(), AwsError> {
        self.client.send_message().queue_url(url).message_body("{}").send().await.map_err(word("SendMessage")).map(drop)
    }
}
