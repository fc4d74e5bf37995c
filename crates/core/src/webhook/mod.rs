//! GitHub's webhooks: signature, content, and the change of a claim that follows.

pub mod claim_change;
pub mod event;
pub mod outcome;
pub mod redelivery;
pub mod signature;
