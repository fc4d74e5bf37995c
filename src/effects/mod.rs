//! Adapters: one per outside system, each mapping its words to ours once.

pub mod aws;
pub mod credentials;
pub mod fence;
pub mod github;
pub mod ledger;
pub mod machines;
pub mod queues;
pub mod records;
