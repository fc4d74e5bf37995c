//! The DynamoDB table: the source of truth for who owns an instance.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use aws_sdk_dynamodb::{
    Client,
    operation::{transact_write_items::TransactWriteItemsError, update_item::UpdateItemError},
    types::{
        AttributeDefinition, AttributeValue, BillingMode, CancellationReason, KeySchemaElement, KeyType, ReturnValue,
        ReturnValuesOnConditionCheckFailure, ScalarAttributeType, TableStatus, TransactWriteItem, Update,
    },
};
use paddock_record::{Instance, MachineArns, Transition, attribute as a, entity, instance_key};

use super::{AwsError, word};
use crate::clock;

type Item = HashMap<String, AttributeValue>;

/// DynamoDB allows 100, but one failed condition cancels the whole transaction.
pub const MOVES_PER_WRITE: usize = 25;
/// Retries of a transaction that conflicts with another write, and the increment of the delay between them. A write
/// takes milliseconds.
const CONFLICT_RETRIES: u32 = 4;
const CONFLICT_BACKOFF: Duration = Duration::from_millis(20);

#[derive(Clone)]
pub struct Records {
    pub(super) client: Client,
    pub(super) table: String,
    /// The machines' ARNs, once the table is known.
    arns: Arc<OnceLock<MachineArns>>,
}

/// The result of a conditional write. `Lost` is a normal outcome and has the stored record.
#[derive(Debug, Clone, PartialEq)]
pub enum WriteOutcome {
    Won(Instance),
    Lost(Option<Instance>),
}

impl Records {
    pub fn new(client: Client, table: String) -> Self {
        Self { client, table, arns: Arc::default() }
    }

    /// The ARNs of the cluster's machines. Nothing is read before the table is known.
    pub fn arns(&self) -> Result<&MachineArns, AwsError> {
        let message = || format!("the ARN of table {} is unknown", self.table);
        self.arns.get().ok_or_else(|| AwsError::Unreachable { call: "DescribeTable", message: message() })
    }

    /// Creates the table if it does not exist; true once it is active.
    pub async fn ensure_table(&self) -> Result<bool, AwsError> {
        let described =
            self.client.describe_table().table_name(&self.table).send().await.map_err(word("DescribeTable"));
        match described {
            Ok(answer) => {
                let table = answer.table;
                let arn = table.as_ref().and_then(|table| table.table_arn.as_deref()).unwrap_or_default();
                let Some(arns) = MachineArns::of_table(arn) else {
                    let message = format!("{arn:?} is not the ARN of a table");
                    return Err(AwsError::Unreachable { call: "DescribeTable", message });
                };
                let _ = self.arns.set(arns);
                let status = table.and_then(|table| table.table_status);
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
        Ok(self.query().await?.iter().map(Instance::from_item).collect())
    }

    /// Deletes the record of a terminated instance.
    pub async fn forget(&self, id: &str) -> Result<(), AwsError> {
        self.delete(instance_key(id)).await
    }

    pub(super) async fn delete(&self, key: Item) -> Result<(), AwsError> {
        let delete = self.client.delete_item().table_name(&self.table).set_key(Some(key));
        delete.send().await.map_err(word("DeleteItem")).map(drop)
    }

    /// The items of all instances, which only the operator writes. A page has about 1,500.
    async fn query(&self) -> Result<Vec<Item>, AwsError> {
        let mut items = Vec::new();
        let mut from = None;
        loop {
            let query = self
                .client
                .query()
                .table_name(&self.table)
                .key_condition_expression("PK = :pk")
                .expression_attribute_values(":pk", AttributeValue::S(format!("TYPE#{}", entity::INSTANCE)))
                .consistent_read(true)
                .set_exclusive_start_key(from);
            let answer = query.send().await.map_err(word("Query"))?;
            items.extend(answer.items.unwrap_or_default());
            from = answer.last_evaluated_key;
            if from.is_none() {
                return Ok(items);
            }
        }
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
