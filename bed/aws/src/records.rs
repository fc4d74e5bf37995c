//! Reports which instances' records are written, so that a simulation of many agents need not poll each record.

use std::sync::Mutex;

use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::call::{Answer, Call};

#[derive(Default)]
pub struct Records(Mutex<Vec<UnboundedSender<String>>>);

impl Records {
    pub fn watch(&self) -> UnboundedReceiver<String> {
        let (watcher, written) = unbounded_channel();
        self.0.lock().unwrap().push(watcher);
        written
    }

    /// Records a call that DynamoDB has answered.
    pub fn note(&self, call: &Call, answer: &Answer) {
        let mut watchers = self.0.lock().unwrap();
        if watchers.is_empty() || !answer.ok() {
            return;
        }
        for id in written(&call.action, &call.body) {
            watchers.retain(|watcher| watcher.send(id.clone()).is_ok());
        }
    }
}

/// The instances whose records a call writes.
fn written(action: &str, body: &[u8]) -> Vec<String> {
    if !matches!(action, "PutItem" | "UpdateItem" | "TransactWriteItems") {
        return Vec::new();
    }
    let request: Value = serde_json::from_slice(body).unwrap_or_default();
    let parts: Vec<&Value> = match request["TransactItems"].as_array() {
        Some(items) => items.iter().filter_map(|item| item.as_object()?.values().next()).collect(),
        None => vec![&request],
    };
    let id = |part: &&Value| {
        let key = if part["Key"].is_object() { &part["Key"] } else { &part["Item"] };
        (key["PK"]["S"] == "TYPE#INSTANCE").then(|| key["SK"]["S"].as_str()?.strip_prefix("ID#").map(str::to_owned))?
    };
    parts.iter().filter_map(id).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_writes_of_instance_records_are_reported() {
        let key = |entity: &str| json!({ "PK": { "S": format!("TYPE#{entity}") }, "SK": { "S": "ID#i-1" } });
        let written_by = |action: &str, body: Value| written(action, body.to_string().as_bytes());
        assert_eq!(written_by("UpdateItem", json!({ "Key": key("INSTANCE") })), ["i-1"]);
        assert_eq!(written_by("PutItem", json!({ "Item": key("INSTANCE") })), ["i-1"]);
        assert!(written_by("PutItem", json!({ "Item": key("WS") })).is_empty());
        assert!(written_by("GetItem", json!({ "Key": key("INSTANCE") })).is_empty());
        let two = json!({ "TransactItems": [{ "Update": { "Key": key("INSTANCE") } }, { "Put": { "Item": key("INSTANCE") } }] });
        assert_eq!(written_by("TransactWriteItems", two), ["i-1", "i-1"]);
        assert!(written_by("UpdateItem", json!("no object")).is_empty());
    }
}
