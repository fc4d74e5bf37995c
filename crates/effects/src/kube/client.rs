//! The Kubernetes clients that write: the leader's, which the fence stops, and the webhooks', which it does not.
//!
//! Neither watches, so no answer takes long; a reconciliation must not hang on one that never comes.

use std::time::Duration;

use kube::{
    Client, Config,
    client::{ClientBuilder, retry::RetryPolicy},
};
use tower::{buffer::BufferLayer, limit::ConcurrencyLimitLayer, retry::RetryLayer};

use crate::fence::Fence;

/// How long the API server may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests at a time. Each one has a connection, which takes memory on both sides, and more at once are not answered
/// sooner.
pub(crate) const LEADER_REQUESTS: usize = 64;
const WEBHOOK_REQUESTS: usize = 32;

/// The client of the controllers. From the outside in: a request that may be repeated waits without holding room, gets
/// room, and is checked by the fence just before it is sent. So is each repetition.
pub fn leader(mut config: Config, fence: &Fence) -> kube::Result<Client> {
    config.read_timeout = Some(ANSWER_TIMEOUT);
    // kube's own place for this policy is behind the fence.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config)?
        .with_layer(fence)
        // A repetition needs a service that can be cloned. This queue is in front of the fence, and never full.
        .with_layer(&BufferLayer::new(LEADER_REQUESTS))
        .with_layer(&ConcurrencyLimitLayer::new(LEADER_REQUESTS))
        .with_layer(&RetryLayer::new(RetryPolicy::server_retry()));
    Ok(builder.build())
}

/// The client of the webhook intake, which works on every replica.
pub fn webhook(mut config: Config) -> kube::Result<Client> {
    config.read_timeout = Some(ANSWER_TIMEOUT);
    Ok(ClientBuilder::try_from(config)?.with_layer(&ConcurrencyLimitLayer::new(WEBHOOK_REQUESTS)).build())
}
