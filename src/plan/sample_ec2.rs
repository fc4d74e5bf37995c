//! Values for the tests of the EC2 path.

use jiff::Timestamp;
use paddock_record::{Heartbeat, Instance, Signal, State, WorkerSignal};
use serde_json::json;

use super::instance::{Tracked, Vitals};
use crate::api::Ec2Pool;

/// That many seconds after the start of the story.
pub fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_750_000_000 + seconds).unwrap()
}

/// A pool with nothing but what it must have: every limit is the default.
pub fn pool() -> Ec2Pool {
    serde_json::from_value(json!({
        "amiId": "ami-12345678",
        "instanceProfile": "runner",
        "securityGroupIds": ["sg-12345678"],
        "subnetIds": ["subnet-12345678"],
        "runnerVersion": "2.330.0",
        "agent": { "url": "https://example.com/agent", "sha256": "0".repeat(64) },
        "resourceClasses": [{ "name": "medium", "cpu": 2, "memoryMiB": 4096 }],
        "github": { "owner": "acme", "credentialsRef": { "name": "github" } },
    }))
    .unwrap()
}

/// A record that was written at `updated_at` and lives for ten minutes from then.
pub fn record(id: &str, state: State, run_id: &str, updated_at: Timestamp) -> Instance {
    Instance {
        instance_id: id.into(),
        state,
        run_id: run_id.into(),
        threshold: (state != State::Terminated).then(|| updated_at + jiff::SignedDuration::from_mins(10)),
        updated_at,
        pool: "ci/linux".into(),
        claim: String::new(),
        resource_class: "medium".into(),
        instance_type: "c6i.large".into(),
        usage_class: "on-demand".into(),
        zone: "us-east-1a".into(),
        cpu: 2,
        mem: 4096,
        github_url: "https://github.com/acme".into(),
        sealed: String::new(),
        leaving: String::new(),
        initial_run_id: String::new(),
        claims: 0,
        failure_reason: String::new(),
        failure_message: String::new(),
    }
}

pub fn tracked(record: Instance) -> Tracked {
    Tracked { record, vitals: Vitals::default(), read_at: at(0) }
}

pub fn beat(updated_at: Timestamp) -> Heartbeat {
    Heartbeat { instance_id: "i-1".into(), updated_at, public_key: None }
}

pub fn said(signal: Signal, run_id: &str) -> WorkerSignal {
    WorkerSignal::new("i-1", signal, run_id, at(0))
}
