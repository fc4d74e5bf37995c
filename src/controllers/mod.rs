//! Wiring: each controller watches, asks [`paddock_core`] what to do, and does it through [`paddock_effects`].

pub mod boards;
pub mod ec2;
mod retention;
mod runtime;
mod scheduler;
mod stale_runners;

use std::sync::Arc;

use kube::Client;
use paddock_effects::{
    fence::Fence,
    github::{GitHub, credentials::CredentialStore},
    kube::{
        client::LeaderClients,
        events::Events,
        lanes::{Background, Lanes},
        stores::Stores,
    },
    metrics::Metrics,
};
use tokio_util::sync::CancellationToken;

use self::ec2::Ec2Context;
pub use self::runtime::{
    CONFLICT_RETRY, ERROR_RETRY, Error, Failures, Next, REFUSAL_RETRY, drive, every, paced, reference, time_until,
};
use crate::{settings::Settings, webhook::intake::Intake};

/// State shared by every controller.
pub struct Shared {
    pub settings: Settings,
    /// The urgent lane. Writes only while this replica leads.
    pub client: Client,
    /// The background lane of the same.
    pub background: Background,
    pub lanes: Lanes,
    pub stores: Stores,
    pub metrics: Metrics,
    pub github: GitHub,
    pub credentials: CredentialStore,
    pub events: Events,
}

impl Shared {
    pub fn new(
        settings: Settings,
        clients: LeaderClients,
        lanes: Lanes,
        fence: &Fence,
        stores: Stores,
        metrics: Metrics,
    ) -> Self {
        let LeaderClients { urgent: client, background } = clients;
        Self {
            github: GitHub::new(&settings.github_api_url, fence.clone()),
            credentials: CredentialStore::new(client.clone()),
            events: Events::new(background.clone()),
            settings,
            client,
            background,
            lanes,
            stores,
            metrics,
        }
    }
}

/// Runs every controller until `stop`.
pub async fn run(ec2: Arc<Ec2Context>, intake: Intake, stop: CancellationToken) {
    let shared = ec2.shared.clone();
    tokio::join!(
        shared.events.publish(stop.clone()),
        stale_runners::run(ec2.clone(), stop.clone()),
        ec2::run(ec2.clone(), stop.clone()),
        boards::run(shared.clone(), stop.clone()),
        crate::webhook::redelivery::run(shared.clone(), intake, stop.clone()),
        retention::run(shared.clone(), stop.clone()),
    );
}
