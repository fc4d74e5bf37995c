//! The Kubernetes clients that write: the leader's, which is fenced, and the webhook's, which is not.
//!
//! Neither is used for watches, so a timeout applies to every request.

use std::time::Duration;

use kube::{
    Client, Config,
    client::{ClientBuilder, retry::RetryPolicy},
};
use tower::{buffer::BufferLayer, limit::ConcurrencyLimitLayer, retry::RetryLayer};

use crate::fence::Fence;

/// Timeout of a request to the API server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum concurrent requests. Each has a connection, which takes memory on both sides, and more would not be answered
/// sooner.
pub(crate) const LEADER_REQUESTS: usize = 64;
const WEBHOOK_REQUESTS: usize = 32;

/// The client of the controllers. Its layers, from the outside in: retry, concurrency limit, fence. So a request that
/// waits for a retry holds no permit, and the fence checks every attempt right before it is sent.
pub fn leader(mut config: Config, fence: &Fence) -> kube::Result<Client> {
    config.read_timeout = Some(ANSWER_TIMEOUT);
    // kube would put its retry layer behind the fence.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config)?
        .with_layer(fence)
        // The retry layer needs a service that is `Clone`. This buffer is in front of the fence and never full.
        .with_layer(&BufferLayer::new(LEADER_REQUESTS))
        .with_layer(&ConcurrencyLimitLayer::new(LEADER_REQUESTS))
        .with_layer(&RetryLayer::new(RetryPolicy::server_retry()));
    Ok(builder.build())
}

/// The client of the webhook receiver, which runs on every replica.
pub fn webhook(mut config: Config) -> kube::Result<Client> {
    config.read_timeout = Some(ANSWER_TIMEOUT);
    Ok(ClientBuilder::try_from(config)?.with_layer(&ConcurrencyLimitLayer::new(WEBHOOK_REQUESTS)).build())
}
