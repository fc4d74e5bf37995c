//! A transition as a conditional update of DynamoDB.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use jiff::Timestamp;

use crate::{Instance, Transition, attribute as a, entity, key, stamp};

type Item = HashMap<String, AttributeValue>;

/// What `UpdateItem` and the updates of `TransactWriteItems` take.
#[derive(Debug, Clone, PartialEq)]
pub struct Expression {
    pub key: Item,
    pub update: String,
    pub condition: String,
    pub names: HashMap<String, String>,
    pub values: Item,
}

impl Transition {
    /// The update, and the condition of [`Transition::holds`]. Attributes go by an alias each, because `state` and others
    /// are reserved words.
    pub fn expression(&self, now: Timestamp) -> Expression {
        let (mut names, mut values, mut assignments) = (HashMap::new(), Item::new(), Vec::new());
        for (name, value) in self.assigned(self.next()) {
            assignments.push(format!("#{name} = :{name}"));
            names.insert(format!("#{name}"), name.clone());
            values.insert(format!(":{name}"), value);
        }
        let mut condition = Vec::new();
        match self.seen() {
            None => condition.push("attribute_not_exists(PK)"),
            Some(seen) => {
                condition.extend(["#state = :seenState", "#runId = :seenRun"]);
                // A record without `leaving` reads as one where it is empty.
                condition.push(match seen.leaving.is_empty() {
                    true => "(attribute_not_exists(#leaving) OR #leaving = :seenLeaving)",
                    false => "#leaving = :seenLeaving",
                });
                let expected =
                    [(":seenState", seen.state.as_str()), (":seenRun", &seen.run_id), (":seenLeaving", &seen.leaving)];
                values.extend(expected.map(|(name, text)| (name.to_owned(), AttributeValue::S(text.to_owned()))));
                if self.needs_time() {
                    condition.push("#threshold > :now");
                    values.insert(":now".to_owned(), AttributeValue::S(stamp(now)));
                }
            }
        }
        Expression {
            key: key(entity::INSTANCE, &self.next().instance_id),
            update: format!("SET {}", assignments.join(", ")),
            condition: condition.join(" AND "),
            names,
            values,
        }
    }

    /// Whether what is stored is what this transition writes. A write that is retried fails because its first try won
    /// and only the answer was lost.
    pub fn is_stored(&self, stored: &Instance) -> bool {
        self.assigned(stored) == self.assigned(self.next())
    }

    /// The attributes that are written, with their values in `instance`: all of a first record, later those that any
    /// transition may set.
    fn assigned(&self, instance: &Instance) -> Vec<(String, AttributeValue)> {
        let mut item = instance.to_item();
        item.retain(|name, _| match self.seen() {
            None => ![a::PK, a::SK].contains(&name.as_str()),
            Some(_) => CHANGING.contains(&name.as_str()),
        });
        let mut assigned: Vec<_> = item.into_iter().collect();
        assigned.sort_by(|(left, _), (right, _)| left.cmp(right));
        assigned
    }
}

const CHANGING: [&str; 10] = [
    a::STATE,
    a::RUN_ID,
    a::THRESHOLD,
    a::UPDATED_AT,
    a::CLAIM,
    a::SEALED,
    a::LEAVING,
    a::CLAIMS,
    a::FAILURE_REASON,
    a::FAILURE_MESSAGE,
];

#[cfg(test)]
#[path = "expression_tests.rs"]
mod tests;
