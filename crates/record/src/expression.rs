//! Translates a transition into a conditional DynamoDB update.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use jiff::Timestamp;

use crate::{Instance, State, Transition, attribute as a, instance_key, stamp};

type Item = HashMap<String, AttributeValue>;

/// The parameters of `UpdateItem` and of an update in `TransactWriteItems`.
#[derive(Debug, Clone, PartialEq)]
pub struct Expression {
    pub key: Item,
    pub update: String,
    pub condition: String,
    pub names: HashMap<String, String>,
    pub values: Item,
}

impl Transition {
    /// The update, under the condition of [`Transition::holds`]. Every attribute has an alias, because some names, such
    /// as `state`, are reserved words.
    pub fn expression(&self, now: Timestamp) -> Expression {
        let (mut names, mut values, mut assignments) = (HashMap::new(), Item::new(), Vec::new());
        for (name, value) in self.assigned(self.next()) {
            assignments.push(format!("#{name} = :{name}"));
            names.insert(format!("#{name}"), name.clone());
            values.insert(format!(":{name}"), value);
        }
        let mut condition = Vec::new();
        match self.seen() {
            None => condition.push("attribute_not_exists(PK)".to_owned()),
            Some(seen) => {
                let state = |state: State| (format!(":{state}"), AttributeValue::S(state.to_string()));
                if seen.state == State::Unknown {
                    // Its text is not kept.
                    let known: Vec<_> = State::ALL.iter().filter(|known| **known != State::Unknown).collect();
                    let list = known.iter().map(|known| format!(":{known}")).collect::<Vec<_>>().join(", ");
                    condition.push(format!("NOT #state IN ({list})"));
                    values.extend(known.into_iter().map(|known| state(*known)));
                } else {
                    condition.push(format!("#state = :{}", seen.state));
                    values.extend([state(seen.state)]);
                }
                let expected =
                    [(a::RUN_ID, &seen.run_id), (a::CLAIM_UID, &seen.claim_uid), (a::LEAVING, &seen.leaving)];
                for (name, text) in expected {
                    let same = format!("#{name} = :seen_{name}");
                    // A missing attribute is read as empty.
                    condition.push(match text.as_str() {
                        "" => format!("(attribute_not_exists(#{name}) OR {same})"),
                        _ => same,
                    });
                    values.insert(format!(":seen_{name}"), AttributeValue::S(text.to_owned()));
                }
                let same = "#claims = :seen_claims";
                condition.push(match seen.claims {
                    0 => format!("(attribute_not_exists(#claims) OR {same})"),
                    _ => same.to_owned(),
                });
                values.insert(":seen_claims".to_owned(), AttributeValue::N(seen.claims.to_string()));
                if self.requires_unexpired() {
                    condition.push("#threshold > :now".to_owned());
                    values.insert(":now".to_owned(), AttributeValue::S(stamp(now)));
                }
            }
        }
        Expression {
            key: instance_key(&self.next().instance_id),
            update: format!("SET {}", assignments.join(", ")),
            condition: condition.join(" AND "),
            names,
            values,
        }
    }

    /// Whether the stored record is what this transition writes. The condition of a retried write fails if the first
    /// attempt succeeded and only its response was lost.
    pub fn is_stored(&self, stored: &Instance) -> bool {
        self.assigned(stored) == self.assigned(self.next())
    }

    /// The attributes to write, with their values in `instance`: all of them for a first record, later only
    /// [`MUTABLE_ATTRIBUTES`].
    fn assigned(&self, instance: &Instance) -> Vec<(String, AttributeValue)> {
        let mut item = instance.to_item();
        item.retain(|name, _| match self.seen() {
            None => ![a::PK, a::SK].contains(&name.as_str()),
            Some(_) => MUTABLE_ATTRIBUTES.contains(&name.as_str()),
        });
        let mut assigned: Vec<_> = item.into_iter().collect();
        assigned.sort_by(|(left, _), (right, _)| left.cmp(right));
        assigned
    }
}

/// What transitions of an existing record may set.
const MUTABLE_ATTRIBUTES: [&str; 15] = [
    a::STATE,
    a::RUN_ID,
    a::THRESHOLD,
    a::UPDATED_AT,
    a::CLAIM,
    a::CLAIM_UID,
    a::SEALED,
    a::PUBLIC_KEY,
    a::LEAVING,
    a::CLAIMS,
    a::SCOPE,
    a::RUNNER_GROUP,
    a::FAILURE_REASON,
    a::FAILURE_MESSAGE,
    a::FAILURE_LOG,
];

#[cfg(test)]
#[path = "expression_tests.rs"]
mod tests;
