//! Webhooks: from the HTTP request, or GitHub's log of deliveries, to claims.

pub mod intake;
pub mod receiver;
pub mod redelivery;
mod secrets;
