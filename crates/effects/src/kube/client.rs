//! The Kubernetes clients that write: the leader's, which are fenced, and the webhook's, which is not.
//!
//! None is used for watches, so a timeout applies to every request.

use std::time::Duration;

use kube::{
    Client, Config,
    client::{ClientBuilder, retry::RetryPolicy},
};
use tower::{limit::ConcurrencyLimitLayer, retry::Retry};

use super::lanes::{Background, Lane, Lanes};
use crate::fence::Fence;

/// Timeout of a request to the API server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum concurrent requests. Each has a connection, which takes memory on both sides, and more would not be answered
/// sooner.
pub(crate) const LEADER_REQUESTS: usize = 64;
const WEBHOOK_REQUESTS: usize = 32;

/// The clients of the controllers, one per lane.
pub struct LeaderClients {
    pub urgent: Client,
    pub background: Background,
}

/// The layers, from the outside in: retry, lane, concurrency limit, fence. So a request that waits for a retry or in its
/// lane holds no permit, and the fence checks every attempt right before it is sent.
pub fn leader(mut config: Config, fence: &Fence, lanes: &Lanes) -> kube::Result<LeaderClients> {
    config.read_timeout = Some(ANSWER_TIMEOUT);
    // kube would put its retry layer behind the fence.
    config.default_retry = false;
    let limit = ConcurrencyLimitLayer::new(LEADER_REQUESTS);
    let fenced = ClientBuilder::try_from(config)?.with_layer(fence).with_layer(&limit).build();
    let client = |lane| {
        let service = Retry::new(RetryPolicy::server_retry(), lanes.service(lane, fenced.clone()));
        Client::new(service, fenced.default_namespace())
    };
    Ok(LeaderClients {
        urgent: client(Lane::Urgent),
        background: Background::new(client(Lane::Background), client(Lane::InTurn), lanes.clone()),
    })
}

/// The client of the webhook receiver, which runs on every replica. Its requests are urgent.
pub fn webhook(mut config: Config, lanes: &Lanes) -> kube::Result<Client> {
    config.read_timeout = Some(ANSWER_TIMEOUT);
    let limited = ClientBuilder::try_from(config)?.with_layer(&ConcurrencyLimitLayer::new(WEBHOOK_REQUESTS)).build();
    Ok(Client::new(lanes.service(Lane::Urgent, limited.clone()), limited.default_namespace()))
}
