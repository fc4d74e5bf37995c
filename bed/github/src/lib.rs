//! A simulated GitHub: the parts of the REST API that runners need, signed webhooks, jobs, rate limits and fault
//! injection; and the stand-in for the Actions runner ([`runner`]).
//!
//! With [`Options::validate`] every request, response and webhook is validated against GitHub's published schemas
//! ([`schema`]).

mod admin;
mod api;
mod assign;
mod auth;
mod clock;
mod control;
mod faults;
mod gate;
mod hooks;
mod hub;
mod jobs;
mod json;
mod model;
mod pages;
mod protocol;
mod rate;
pub mod runner;
pub mod schema;
mod world;

use std::{
    net::{Ipv4Addr, SocketAddr},
    ops::Deref,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
pub use clock::Clock;
pub use control::{Calls, Control};
pub use faults::{Effect, Fault};
pub use hooks::{Delivery, HookEffect, HookFault, HookSource, Outcome, signature};
pub use model::*;
pub use rate::Secondary;
use tokio::{net::TcpListener, task::JoinHandle};

pub use crate::{gate::API_VERSION, world::CANARY};
use crate::{
    hub::Hub,
    world::{OfflineTimeouts, World},
};

#[derive(Clone, Debug)]
pub struct Options {
    /// The listen address; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The external URL, if it differs from the listen address.
    pub url: Option<String>,
    /// Validate everything against GitHub's published schemas; see [`Control::violations`].
    pub validate: bool,
    /// Calls per hour for each installation.
    pub hourly_limit: u64,
    /// Optional secondary rate limits.
    pub secondary: Option<Secondary>,
    /// GitHub waits this long for the response to a webhook and does not retry.
    pub hook_timeout: Duration,
    /// A runner without a connection is offline after this time.
    pub offline_after: Duration,
    /// The job of a runner that stays offline fails after this time.
    pub lost_after: Duration,
    /// Decides which of several idle runners takes a job.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            url: None,
            validate: false,
            hourly_limit: 5000,
            secondary: None,
            hook_timeout: Duration::from_secs(10),
            offline_after: Duration::from_secs(2),
            lost_after: Duration::from_secs(600),
            seed: 0,
        }
    }
}

/// The running simulator, stopped on drop. [`Control`] has the methods for tests.
pub struct GitHub {
    control: Control,
    tasks: [JoinHandle<()>; 2],
}

impl GitHub {
    pub async fn start(options: Options) -> Result<Self> {
        let listener = TcpListener::bind(options.listen).await;
        let listener = listener.with_context(|| format!("the GitHub simulator cannot listen on {}", options.listen))?;
        let html = match &options.url {
            Some(url) => url.trim_end_matches('/').to_owned(),
            None => format!("http://{}", listener.local_addr()?),
        };
        let timeouts = OfflineTimeouts { offline_after: options.offline_after, lost_after: options.lost_after };
        let hub = Arc::new(Hub::new(World::new(html, timeouts, options.seed), options));
        let router = axum::Router::new()
            .nest(gate::PREFIX, api::router(&hub))
            .merge(api::router(&hub))
            .merge(admin::router())
            .merge(protocol::router(&hub))
            .with_state(Arc::clone(&hub));
        let serve = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!("GitHub simulator stopped: {error}");
            }
        });
        let time = tokio::spawn(Arc::clone(&hub).keep_time());
        Ok(Self { control: Control { hub }, tasks: [serve, time] })
    }

    pub fn control(&self) -> Control {
        self.control.clone()
    }
}

impl Deref for GitHub {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Drop for GitHub {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
