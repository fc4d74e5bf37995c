//! Objects for the tests of the board path.

use k8s_openapi::api::core::v1::{Node, Pod};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::api::{
    APP, BoardPool, Hardware, LABEL_APP, LABEL_BOARD, LABEL_POOL, RUNNER_RESOURCE, RunnerClaim, RunnerPool, Worker,
};

pub fn make<K: DeserializeOwned>(json: Value) -> K {
    serde_json::from_value(json).expect("a sample fits its type")
}

/// `object` with the fields of `change`; lists are replaced, objects merged, nulls remove.
pub fn with<K: Serialize + DeserializeOwned>(object: &K, change: Value) -> K {
    let mut json = json!(object);
    merge(&mut json, change);
    make(json)
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                match value {
                    Value::Null => drop(into.remove(&key)),
                    value => merge(into.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (into, Value::Object(change)) => {
            *into = json!({});
            merge(into, Value::Object(change));
        }
        (into, change) => *into = change,
    }
}

pub fn board(pool: &RunnerPool) -> &BoardPool {
    match pool.spec.hardware() {
        Some(Hardware::Board(board)) => board,
        Some(Hardware::Ec2(_)) | None => panic!("not a board pool"),
    }
}

/// A pool on the board `b`, serving the label `rv`.
pub fn board_pool(name: &str) -> RunnerPool {
    make(json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
        "metadata": {"name": name, "namespace": "default", "uid": format!("pool-{name}")},
        "spec": {"board": {
            "board": "b", "labels": [["rv"]], "image": "runner:1", "github": {"credentialsRef": {"name": "app"}},
        }},
    }))
}

/// A claim of the organisation 1 for one runner with the label `rv`, made `second` seconds into 2025.
pub fn claim(name: &str, second: i64) -> RunnerClaim {
    let created = jiff::Timestamp::from_second(1_735_689_600 + second).unwrap();
    make(json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim",
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "creationTimestamp": created},
        "spec": {"runId": "1", "count": 1, "labels": ["rv"], "owner": {"id": 1, "login": "acme", "type": "Organization"}},
    }))
}

/// A worker of the organisation 1 with the label `rv`, without a state.
pub fn board_worker(name: &str, pool: &str, claim: &str) -> Worker {
    make(json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "Worker",
        "metadata": {"name": name, "namespace": "default", "uid": format!("worker-{name}"), "finalizers": ["paddock.dev/release"]},
        "spec": {"pool": pool, "board": {
            "claim": claim, "claimUid": format!("uid-{claim}"), "attempt": 1, "entity": "1", "labels": ["rv"],
            "owner": {"id": 1, "login": "acme", "type": "Organization"},
        }},
    }))
}

pub fn pod(name: &str, pool: &str, node: Option<&str>, phase: &str) -> Pod {
    make(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("pod-{name}"), "labels": {LABEL_APP: APP, LABEL_POOL: pool}},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "runner", "resources": {"limits": {RUNNER_RESOURCE: "1"}}}],
        },
        "status": {"phase": phase},
    }))
}

/// A ready node of the board `b`.
pub fn node(name: &str, slots: u32) -> Node {
    make(json!({
        "metadata": {"name": name, "labels": {LABEL_BOARD: "b"}},
        "status": {
            "allocatable": {RUNNER_RESOURCE: slots.to_string()},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
}
