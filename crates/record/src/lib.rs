//! What operator and instance write for each other.
//!
//! The two never talk directly. Everything they say lies in one DynamoDB table per cluster: the operator writes
//! `INSTANCE` records, the agent on the instance writes `Heartbeat` and `WS` (worker signal) records, and each reads
//! the other's. This crate is the one description of those records, of every change of an `INSTANCE` record, and of the
//! messages in the idle pool.

mod config;
mod expression;
mod item;
mod message;
mod seal;
mod state;
mod time;
pub mod transition;

pub use config::{AgentConfig, EXPIRY_SLACK, HEARTBEAT, POLL};
pub use expression::Expression;
pub use item::{Heartbeat, Instance, ItemError, SCRUB, WorkerSignal, attribute, key};
pub use message::{Discard, IdleMessage};
pub use seal::{KeyPair, PublicKey, SealError};
pub use state::{Signal, State, UnknownWord};
pub use time::{instant, stamp};
pub use transition::{ClaimRef, Identity, Transition};

/// The entities of the table: the `<entity>` of `PK=TYPE#<entity>`.
pub mod entity {
    pub const INSTANCE: &str = "INSTANCE";
    pub const HEARTBEAT: &str = "Heartbeat";
    pub const SIGNAL: &str = "WS";
}

/// The one table of a cluster.
pub fn table_name(cluster: &str) -> String {
    format!("paddock-{cluster}")
}
