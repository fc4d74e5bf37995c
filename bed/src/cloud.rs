//! Reads and changes what the operator and the agents have written to AWS, as a person at the console would.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, Result, ensure};
use aws_sdk_dynamodb::{
    Client,
    config::{BehaviorVersion, Credentials, Region},
    operation::scan::ScanError,
    types::AttributeValue,
};
use jiff::Timestamp;
use paddock_record::{
    Heartbeat, IdleMessage, Instance, MachineArns, Signal, WorkerSignal, entity, instance_key, report_key, table_name,
};
use serde_json::{Value, json};

use crate::aws::{ACCOUNT, Aws, PARTITION, REGION, access_key};

/// Receives per listing of a queue: a single one may be empty while another consumer holds the message.
const RECEIVES: usize = 3;

type Item = HashMap<String, AttributeValue>;

/// The ARNs of the machines that the bed's AWS launches.
pub fn machine_arns() -> MachineArns {
    MachineArns { partition: PARTITION.into(), region: REGION.into(), account: ACCOUNT.into() }
}

pub struct Cloud {
    dynamodb: Client,
    http: reqwest::Client,
    endpoint: String,
    table: String,
}

impl Cloud {
    /// A view of one cluster's records, queues and templates.
    pub fn new(aws: &Aws, cluster: &str) -> Self {
        Self::with_key(aws, cluster, "console")
    }

    /// The same with the credentials of an instance's role, as a job on the instance has it.
    pub fn of_machine(aws: &Aws, cluster: &str, id: &str) -> Self {
        Self::with_key(aws, cluster, &access_key(id))
    }

    fn with_key(aws: &Aws, cluster: &str, key: &str) -> Self {
        let config = aws_sdk_dynamodb::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new(REGION))
            .endpoint_url(aws.endpoint())
            .credentials_provider(Credentials::new(key, "secret", None, None, "bed"))
            .build();
        Self {
            dynamodb: Client::from_conf(config),
            http: reqwest::Client::new(),
            endpoint: aws.endpoint().to_owned(),
            table: table_name(cluster),
        }
    }

    /// The record of every instance of a pool (`namespace/name`).
    pub async fn records(&self, pool: &str) -> Result<Vec<Instance>> {
        let query = self.dynamodb.query().table_name(&self.table).key_condition_expression("PK = :pk");
        let pk = AttributeValue::S(format!("TYPE#{}", entity::INSTANCE));
        let pages = query.expression_attribute_values(":pk", pk).consistent_read(true).into_paginator().items().send();
        let items = pages.collect::<Result<Vec<_>, _>>().await?;
        let records = items.iter().map(Instance::from_item);
        Ok(records.filter(|record| record.pool == pool).collect())
    }

    pub async fn record(&self, id: &str) -> Result<Option<Instance>> {
        Ok(self.item(instance_key(id)).await?.as_ref().map(Instance::from_item))
    }

    pub async fn heartbeat(&self, id: &str) -> Result<Option<Heartbeat>> {
        let item = self.item(report_key(entity::HEARTBEAT, &machine_arns(), id)).await?;
        Ok(item.as_ref().map(Heartbeat::from_item).transpose()?)
    }

    pub async fn signal(&self, id: &str) -> Result<Option<WorkerSignal>> {
        let item = self.item(report_key(entity::SIGNAL, &machine_arns(), id)).await?;
        Ok(item.as_ref().map(WorkerSignal::from_item).transpose()?)
    }

    async fn item(&self, key: Item) -> Result<Option<Item>> {
        let get = self.dynamodb.get_item().table_name(&self.table).set_key(Some(key));
        Ok(get.consistent_read(true).send().await?.item)
    }

    /// The whole table; empty if no pool has created it yet.
    pub async fn dump(&self) -> Result<String> {
        let items = self.dynamodb.scan().table_name(&self.table).into_paginator().items().send();
        match items.collect::<Result<Vec<_>, _>>().await {
            Ok(items) => Ok(format!("{items:?}")),
            Err(error) if error.as_service_error().is_some_and(ScanError::is_resource_not_found_exception) => {
                Ok(String::new())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a signal in the name of an agent.
    pub async fn forge_signal(&self, id: &str, signal: Signal, run_id: &str) -> Result<()> {
        let claims = self.record(id).await?.map_or(0, |record| record.claims);
        self.forge(&WorkerSignal::new(id, signal, run_id, claims, Timestamp::now())).await
    }

    /// Writes this signal in the name of its agent.
    pub async fn forge(&self, signal: &WorkerSignal) -> Result<()> {
        self.put(signal.to_item(&machine_arns())).await
    }

    /// Writes any item.
    pub async fn put(&self, item: Item) -> Result<()> {
        self.dynamodb.put_item().table_name(&self.table).set_item(Some(item)).send().await?;
        Ok(())
    }

    /// Changes the record of an instance: sets attributes, and removes others.
    pub async fn edit_record(&self, id: &str, set: &[(&str, &str)], remove: &[&str]) -> Result<()> {
        let mut item = self.item(instance_key(id)).await?.context("the instance has a record")?;
        item.retain(|name, _| !remove.contains(&name.as_str()));
        item.extend(set.iter().map(|(name, text)| ((*name).to_owned(), AttributeValue::S((*text).to_owned()))));
        self.dynamodb.put_item().table_name(&self.table).set_item(Some(item)).send().await?;
        Ok(())
    }

    /// An attribute of an instance's record.
    pub async fn attribute(&self, id: &str, name: &str) -> Result<Option<String>> {
        let item = self.item(instance_key(id)).await?.unwrap_or_default();
        Ok(item.get(name).and_then(|value| value.as_s().ok()).cloned())
    }

    /// Removes the record of an instance.
    pub async fn delete_record(&self, id: &str) -> Result<()> {
        let delete = self.dynamodb.delete_item().table_name(&self.table);
        delete.set_key(Some(instance_key(id))).send().await?;
        Ok(())
    }

    pub async fn delete_table(&self) -> Result<()> {
        self.dynamodb.delete_table().table_name(&self.table).send().await?;
        Ok(())
    }

    /// The instance ids in a queue's visible messages, which stay there.
    pub async fn queued_ids(&self, queue: &str) -> Result<BTreeSet<String>> {
        let mut ids = BTreeSet::new();
        for _ in 0..RECEIVES {
            let request = json!({ "QueueUrl": queue, "MaxNumberOfMessages": 10, "VisibilityTimeout": 0 });
            let answer = self.sqs("ReceiveMessage", request).await?;
            let bodies =
                answer["Messages"].as_array().into_iter().flatten().filter_map(|message| message["Body"].as_str());
            ids.extend(bodies.filter_map(|body| serde_json::from_str::<IdleMessage>(body).ok()).map(|m| m.instance_id));
        }
        Ok(ids)
    }

    /// The number of messages in a queue, including hidden ones.
    pub async fn queue_size(&self, queue: &str) -> Result<u64> {
        let request = json!({ "QueueUrl": queue, "AttributeNames": ["All"] });
        let answer = self.sqs("GetQueueAttributes", request).await?;
        let count = |name| answer["Attributes"][name].as_str().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        Ok(count("ApproximateNumberOfMessages") + count("ApproximateNumberOfMessagesNotVisible"))
    }

    pub async fn send(&self, queue: &str, body: &str) -> Result<()> {
        self.sqs("SendMessage", json!({ "QueueUrl": queue, "MessageBody": body })).await.map(drop)
    }

    /// Whether there is a queue with this URL or name.
    pub async fn has_queue(&self, queue: &str) -> Result<bool> {
        let queues = self.sqs("ListQueues", json!({})).await?;
        let mut urls = queues["QueueUrls"].as_array().into_iter().flatten().filter_map(Value::as_str);
        Ok(urls.any(|url| url == queue || url.rsplit('/').next() == Some(queue)))
    }

    pub async fn delete_queue(&self, queue: &str) -> Result<()> {
        self.sqs("DeleteQueue", json!({ "QueueUrl": queue })).await.map(drop)
    }

    async fn sqs(&self, action: &str, request: Value) -> Result<Value> {
        let post = self.http.post(&self.endpoint).header("x-amz-target", format!("AmazonSQS.{action}"));
        let post = post.header("content-type", "application/x-amz-json-1.0").body(request.to_string());
        let answer = post.send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status.is_success(), "SQS does not {action}: {text}");
        Ok(if text.is_empty() { json!({}) } else { serde_json::from_str(&text).context("SQS speaks JSON")? })
    }

    /// The ids of all launch templates.
    pub async fn templates(&self) -> Result<String> {
        self.ec2(&[("Action", "DescribeLaunchTemplates")]).await
    }

    pub async fn delete_template(&self, id: &str) -> Result<()> {
        self.ec2(&[("Action", "DeleteLaunchTemplate"), ("LaunchTemplateId", id)]).await.map(drop)
    }

    async fn ec2(&self, form: &[(&str, &str)]) -> Result<String> {
        let answer = self.http.post(&self.endpoint).form(form).send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status.is_success(), "EC2 does not {form:?}: {text}");
        Ok(text)
    }
}
