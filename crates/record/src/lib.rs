//! The records that the operator and the agents exchange.
//!
//! The two never talk directly. They share one DynamoDB table per cluster: the operator writes `INSTANCE` records, the
//! agent on the instance writes `Heartbeat` and `WS` (worker signal) records, and each reads the other's. This crate
//! defines those records, every transition of an `INSTANCE` record, and the messages of the queues.

mod config;
mod expression;
mod item;
mod key;
mod message;
mod seal;
mod state;
mod time;
pub mod transition;
mod wake;

pub use config::{AgentConfig, EXPIRY_SLACK, HEARTBEAT, POLL, RunnerArchive};
pub use expression::Expression;
pub use item::{
    Heartbeat, Instance, ItemError, LOG_MAX, REPORT_ATTRIBUTES, RUNNER_ENDED, SCRUB, WorkerSignal, attribute,
    is_oversized, log_tail, tail,
};
pub use key::{MachineArns, instance_key, report_key};
pub use message::{Discard, IdleMessage};
pub use seal::{KeyPair, PublicKey, SealError};
pub use state::{Signal, State, UnknownValue};
pub use time::{instant, stamp};
pub use transition::{ClaimRef, Identity, Transition};
pub use wake::{MACHINE_TAG, RECORD_REFRESH, machine_of_wake_queue, wake_queue, wake_queue_prefix, wakes};

/// Entities of the table: the `<entity>` in `PK=TYPE#<entity>`, which what an agent writes continues with its instance's
/// ARN.
pub mod entity {
    pub const INSTANCE: &str = "INSTANCE";
    pub const HEARTBEAT: &str = "Heartbeat";
    pub const SIGNAL: &str = "WS";
}

/// The name of a cluster's table.
pub fn table_name(cluster: &str) -> String {
    format!("paddock-{cluster}")
}
