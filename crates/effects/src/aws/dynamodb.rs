//! The DynamoDB table: the source of truth for who owns an instance.

use std::{collections::HashMap, time::Duration};

use aws_sdk_dynamodb::{
    Client,
    operation::{transact_write_items::TransactWriteItemsError, update_item::UpdateItemError},
    types::{
        AttributeDefinition, AttributeValue, BillingMode, CancellationReason, KeySchemaElement, KeyType,
        KeysAndAttributes, ReturnValue, ReturnValuesOnConditionCheckFailure, ScalarAttributeType, TableStatus,
        TransactWriteItem, Update,
    },
};
use paddock_core::ec2::machine::AgentReport;
use paddock_record::{Heartbeat, Instance, Transition, WorkerSignal, attribute as a, entity, key};

use super::{AwsError, word};
use crate::clock;

type Item = HashMap<String, AttributeValue>;

/// The limit of `BatchGetItem`.
const KEYS_PER_READ: usize = 100;
/// DynamoDB allows 100, but one failed condition cancels the whole transaction.
pub const MOVES_PER_WRITE: usize = 25;
/// Retries of a transaction that conflicts with another write, and the increment of the delay between them. A write
/// takes milliseconds.
const CONFLICT_RETRIES: u32 = 4;
const CONFLICT_BACKOFF: Duration = Duration::from_millis(20);

#[derive(Clone)]
pub struct Records {
    client: Client,
    table: String,
}

/// The result of a conditional write. `Lost` is a normal outcome and has the stored record.
#[derive(Debug, Clone, PartialEq)]
pub enum WriteOutcome {
    Won(Instance),
    Lost(Option<Instance>),
}

/// Which records of an agent to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportQuery {
    pub id: String,
    /// Whether to read the heartbeat in addition to the signal.
    pub heartbeat: bool,
}

impl Records {
    pub fn new(client: Client, table: String) -> Self {
        Self { client, table }
    }

    /// Creates the table if it does not exist; true once it is active.
    pub async fn ensure_table(&self) -> Result<bool, AwsError> {
        let described =
            self.client.describe_table().table_name(&self.table).send().await.map_err(word("DescribeTable"));
        match described {
            Ok(answer) => {
                let status = answer.table.and_then(|table| table.table_status);
                return Ok(matches!(status, Some(TableStatus::Active | TableStatus::Updating)));
            }
            Err(error) if error.code() == Some("ResourceNotFoundException") => {}
            Err(error) => return Err(error),
        }
        let mut create = self.client.create_table().table_name(&self.table).billing_mode(BillingMode::PayPerRequest);
        for (name, role) in [(a::PK, KeyType::Hash), (a::SK, KeyType::Range)] {
            let attribute = AttributeDefinition::builder().attribute_name(name).attribute_type(ScalarAttributeType::S);
            let element = KeySchemaElement::builder().attribute_name(name).key_type(role);
            create = create
                .attribute_definitions(attribute.build().expect("name and type are set"))
                .key_schema(element.build().expect("name and role are set"));
        }
        match create.send().await.map_err(word("CreateTable")) {
            Ok(_) => Ok(false),
            Err(error) if error.code() == Some("ResourceInUseException") => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Stores up to [`MOVES_PER_WRITE`] transitions in one transaction, each under its own condition. DynamoDB stores
    /// all or none, so after a failed condition the others are sent again without it.
    pub async fn apply(&self, transitions: &[Transition]) -> Result<Vec<WriteOutcome>, AwsError> {
        let mut outcomes: Vec<Option<WriteOutcome>> = vec![None; transitions.len()];
        let mut conflicts = 0;
        loop {
            let open: Vec<_> = (0..transitions.len()).filter(|index| outcomes[*index].is_none()).collect();
            if let [] | [_] = open[..] {
                for index in open {
                    outcomes[index] = Some(self.apply_one(&transitions[index]).await?);
                }
                return Ok(outcomes.into_iter().flatten().collect());
            }
            let writes = open.iter().map(|index| self.transact_item(&transitions[*index]));
            let answer = self.client.transact_write_items().set_transact_items(Some(writes.collect())).send().await;
            let error = match answer {
                Ok(_) => {
                    for index in open {
                        outcomes[index] = Some(WriteOutcome::Won(transitions[index].next().clone()));
                    }
                    continue;
                }
                Err(error) => error,
            };
            let Some(TransactWriteItemsError::TransactionCanceledException(cancelled)) = error.as_service_error()
            else {
                return Err(word("TransactWriteItems")(error));
            };
            let lost = |reason: &CancellationReason| reason.code() == Some("ConditionalCheckFailed");
            let reasons = cancelled.cancellation_reasons();
            if !reasons.iter().any(lost) {
                // Conflict with a concurrent write.
                conflicts += 1;
                if conflicts > CONFLICT_RETRIES {
                    return Err(word("TransactWriteItems")(error));
                }
                tokio::time::sleep(CONFLICT_BACKOFF * conflicts).await;
                continue;
            }
            for (index, reason) in open.into_iter().zip(reasons).filter(|(_, reason)| lost(reason)) {
                outcomes[index] = Some(condition_failed(reason.item(), &transitions[index]));
            }
        }
    }

    async fn apply_one(&self, transition: &Transition) -> Result<WriteOutcome, AwsError> {
        let write = transition.expression(clock::now());
        let update = self
            .client
            .update_item()
            .table_name(&self.table)
            .set_key(Some(write.key))
            .update_expression(write.update)
            .condition_expression(write.condition)
            .set_expression_attribute_names(Some(write.names))
            .set_expression_attribute_values(Some(write.values))
            .return_values(ReturnValue::AllNew)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match update.send().await {
            Ok(answer) => {
                let stored = answer.attributes.as_ref().map(Instance::from_item);
                Ok(WriteOutcome::Won(stored.unwrap_or_else(|| transition.next().clone())))
            }
            Err(error) => match error.as_service_error() {
                Some(UpdateItemError::ConditionalCheckFailedException(failed)) => {
                    Ok(condition_failed(failed.item(), transition))
                }
                _ => Err(word("UpdateItem")(error)),
            },
        }
    }

    fn transact_item(&self, transition: &Transition) -> TransactWriteItem {
        let write = transition.expression(clock::now());
        let update = Update::builder()
            .table_name(&self.table)
            .set_key(Some(write.key))
            .update_expression(write.update)
            .condition_expression(write.condition)
            .set_expression_attribute_names(Some(write.names))
            .set_expression_attribute_values(Some(write.values))
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        TransactWriteItem::builder().update(update.build().expect("table, key and expression are set")).build()
    }

    /// Every instance of the cluster.
    pub async fn instances(&self) -> Result<Vec<Instance>, AwsError> {
        Ok(self.query(entity::INSTANCE, true).await?.iter().map(Instance::from_item).collect())
    }

    /// The reports of all agents.
    pub async fn all_reports(&self) -> Result<HashMap<String, AgentReport>, AwsError> {
        let (heartbeats, signals) =
            tokio::try_join!(self.query(entity::HEARTBEAT, true), self.query(entity::SIGNAL, true))?;
        Ok(group_by_instance(heartbeats.into_iter().chain(signals)))
    }

    /// The heartbeats of all agents. One that is missed is read the next time.
    pub async fn heartbeats(&self) -> Result<HashMap<String, Heartbeat>, AwsError> {
        let reports = group_by_instance(self.query(entity::HEARTBEAT, false).await?.into_iter());
        Ok(reports.into_iter().filter_map(|(id, report)| Some((id, report.heartbeat?))).collect())
    }

    /// The reports of the agents in `queries`.
    pub async fn report(&self, queries: &[ReportQuery]) -> Result<HashMap<String, AgentReport>, AwsError> {
        let signals = queries.iter().map(|query| key(entity::SIGNAL, &query.id));
        let heartbeats = queries.iter().filter(|query| query.heartbeat).map(|query| key(entity::HEARTBEAT, &query.id));
        let keys: Vec<_> = signals.chain(heartbeats).collect();
        let items = futures::future::try_join_all(keys.chunks(KEYS_PER_READ).map(|keys| self.batch_get(keys))).await?;
        Ok(group_by_instance(items.into_iter().flatten()))
    }

    /// Deletes the report of a terminated instance's agent.
    pub async fn forget_report(&self, id: &str) -> Result<(), AwsError> {
        for entity in [entity::HEARTBEAT, entity::SIGNAL] {
            self.delete(entity, id).await?;
        }
        Ok(())
    }

    /// Deletes the record of a terminated instance.
    pub async fn forget(&self, id: &str) -> Result<(), AwsError> {
        self.delete(entity::INSTANCE, id).await
    }

    async fn delete(&self, entity: &str, id: &str) -> Result<(), AwsError> {
        let delete = self.client.delete_item().table_name(&self.table).set_key(Some(key(entity, id)));
        delete.send().await.map_err(word("DeleteItem")).map(drop)
    }

    /// All records of an entity. A page has about 4,500.
    async fn query(&self, entity: &str, consistent: bool) -> Result<Vec<Item>, AwsError> {
        let mut items = Vec::new();
        let mut from = None;
        loop {
            let query = self
                .client
                .query()
                .table_name(&self.table)
                .key_condition_expression("PK = :pk")
                .expression_attribute_values(":pk", AttributeValue::S(format!("TYPE#{entity}")))
                .consistent_read(consistent)
                .set_exclusive_start_key(from);
            let answer = query.send().await.map_err(word("Query"))?;
            items.extend(answer.items.unwrap_or_default());
            from = answer.last_evaluated_key;
            if from.is_none() {
                return Ok(items);
            }
        }
    }

    async fn batch_get(&self, keys: &[Item]) -> Result<Vec<Item>, AwsError> {
        let mut wanted = KeysAndAttributes::builder().set_keys(Some(keys.to_vec())).consistent_read(true).build().ok();
        let mut items = Vec::new();
        while let Some(keys) = wanted.take() {
            let read = self.client.batch_get_item().request_items(&self.table, keys);
            let answer = read.send().await.map_err(word("BatchGetItem"))?;
            items.extend(answer.responses.unwrap_or_default().remove(&self.table).unwrap_or_default());
            wanted = answer.unprocessed_keys.unwrap_or_default().remove(&self.table);
        }
        Ok(items)
    }
}

/// The outcome of a failed condition. A retried write counts as won if its first attempt succeeded and only the
/// response was lost.
fn condition_failed(stored: Option<&Item>, transition: &Transition) -> WriteOutcome {
    let stored = stored.map(Instance::from_item);
    match stored.as_ref().is_some_and(|stored| transition.is_stored(stored)) {
        true => WriteOutcome::Won(transition.next().clone()),
        false => WriteOutcome::Lost(stored),
    }
}

fn group_by_instance(items: impl Iterator<Item = Item>) -> HashMap<String, AgentReport> {
    let mut reports: HashMap<String, AgentReport> = HashMap::new();
    for item in items {
        let is_heartbeat = item.get(a::PK).and_then(|pk| pk.as_s().ok()).is_some_and(|pk| pk == "TYPE#Heartbeat");
        let parsed = if is_heartbeat {
            Heartbeat::from_item(&item).map(|beat| {
                let id = beat.instance_id.clone();
                reports.entry(id).or_default().heartbeat = Some(beat);
            })
        } else {
            WorkerSignal::from_item(&item).map(|signal| {
                let id = signal.instance_id.clone();
                reports.entry(id).or_default().signal = Some(signal);
            })
        };
        if let Err(error) = parsed {
            tracing::warn!(%error, "agent record unreadable");
        }
    }
    reports
}
