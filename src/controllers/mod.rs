//! Wiring: each controller watches, asks [`crate::plan`] what to do, and does it through [`crate::effects`].

pub mod board;
pub mod claim;
mod deliveries;
mod events;
mod instances;
pub mod intake;
mod launches;
mod mirror;
mod objects;
mod offers;
pub mod pickup;
pub mod pool;
mod registrations;
mod retention;
mod rush;
mod timers;
mod troubles;

use std::{
    collections::HashMap,
    fmt::Debug,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Result;
use futures::{StreamExt, TryFutureExt};
use kube::{
    Client, Resource, ResourceExt,
    runtime::{
        controller::{Action, Controller},
        reflector::ObjectRef,
    },
};
use paddock_record::table_name;
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::{
    claim::{runs::Runs, tokens::Tokens},
    events::Events,
    intake::Intake,
    launches::Launches,
    offers::Offers,
    pickup::Pickups,
    pool::{Trouble, at_aws},
    timers::Timers,
    troubles::Troubles,
};
use crate::{
    api::RunnerPool,
    effects::{
        aws::Clients, credentials::CredentialStore, fence::Fence, github::GitHub, ledger::Ledger, machines::Machines,
        queues::Queues, records::Records,
    },
    metrics::{ControllerLabel, Metrics},
    plan::{fleet::pool_key, shortage::Shortages},
    settings::Settings,
    stores::Stores,
};

/// What every controller works with.
pub struct Context {
    pub settings: Settings,
    /// Writes only while this replica leads.
    pub client: Client,
    pub stores: Stores,
    pub intake: Intake,
    pub metrics: Metrics,
    pub github: GitHub,
    pub credentials: CredentialStore,
    pub ledger: Arc<Ledger>,
    pub queues: Queues,
    pub machines: Machines,
    pub pickups: Arc<Pickups>,
    pub timers: Timers,
    /// The last sweep of each pool.
    pub sweeps: Mutex<HashMap<String, JoinHandle<()>>>,
    pub troubles: Troubles,
    pub launches: Arc<Launches>,
    pub offers: Offers,
    pub runs: Runs,
    pub tokens: Tokens,
    /// Held by each claim that is being provided for.
    pub claims_under_way: Arc<()>,
    shortages: Mutex<Shortages>,
    pub events: Events,
}

impl Context {
    pub async fn new(
        settings: Settings,
        client: Client,
        fence: &Fence,
        stores: Stores,
        metrics: Metrics,
        intake: Intake,
    ) -> Self {
        let aws = Clients::new(fence).await;
        let queues = Queues::new(aws.sqs);
        let ledger = Arc::new(Ledger::new(Records::new(aws.dynamodb, table_name(&settings.cluster_name))));
        Self {
            github: GitHub::new(&settings.github_api_url, fence.clone()),
            credentials: CredentialStore::new(client.clone()),
            machines: Machines::new(aws.ec2),
            pickups: Pickups::new(queues.clone(), ledger.clone(), metrics.clone()),
            ledger,
            queues,
            timers: Timers::default(),
            sweeps: Mutex::default(),
            troubles: Troubles::default(),
            launches: Arc::default(),
            offers: Offers::default(),
            runs: Runs::default(),
            tokens: Tokens::default(),
            claims_under_way: Arc::default(),
            shortages: Mutex::new(Shortages::new(settings.capacity_memory)),
            events: Events::new(client.clone()),
            settings,
            client,
            stores,
            intake,
            metrics,
        }
    }

    /// Where EC2 had no capacity a moment ago.
    pub fn shortages(&self) -> MutexGuard<'_, Shortages> {
        lock(&self.shortages)
    }

    /// How the last launch for a pool went.
    pub fn launched(&self, pool: Option<&RunnerPool>, trouble: Option<Trouble>) {
        if let Some(pool) = pool {
            let key = pool_key(&pool.namespace().unwrap_or_default(), &pool.name_any());
            self.troubles.launched(&key, pool.metadata.generation, trouble);
        }
    }
}

/// Nothing is ever left half-done under these locks.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often everything is read anew, which also judges who has been silent for too long.
const RELOAD: Duration = Duration::from_secs(30);

/// Runs every controller until `stop`.
pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    let reload = async {
        let mut pause = RELOAD;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if !context.ledger.is_loaded() {
                continue;
            }
            let read = async {
                context.ledger.reload().await?;
                mirror::find_strays(&context);
                context.end_strays().await
            };
            let trouble = read.await.err();
            if let Some(error) = &trouble {
                tracing::warn!(%error, "the records could not be gone through");
            }
            pause = if trouble.is_some() { RETRY } else { RELOAD };
            context.troubles.read(trouble.map(at_aws));
        }
    };
    tokio::join!(
        reload,
        context.ledger.listen(stop.clone()),
        mirror::run(context.clone(), stop.clone()),
        pool::run(context.clone(), stop.clone()),
        claim::run(context.clone(), stop.clone()),
        board::run(context.clone(), stop.clone()),
        deliveries::run(context.clone(), stop.clone()),
        registrations::run(context.clone(), stop.clone()),
        retention::run(context.clone(), stop.clone()),
        context.events.publish(&context.ledger, stop.clone()),
    );
}

/// Runs one controller until `stop`, its outcomes counted and its failures logged.
pub async fn drive<K, F>(
    name: &'static str,
    controller: Controller<K>,
    context: Arc<Context>,
    stop: CancellationToken,
    mut reconcile: impl FnMut(Arc<K>, Arc<Context>) -> F,
) where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
    F: Future<Output = Result<Action>> + Send + 'static,
{
    let label = ControllerLabel { controller: name };
    let metrics = context.metrics.clone();
    controller
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(
            move |object, context| reconcile(object, context).map_err(Failed),
            move |_, _, _| Action::requeue(RETRY),
            context,
        )
        .for_each(|outcome| {
            metrics.reconciles.get_or_create(&label).inc();
            match outcome {
                Ok(_) => {}
                // Gone before its turn came: nothing to do.
                Err(kube::runtime::controller::Error::ObjectNotFound(_)) => {}
                Err(error) => {
                    metrics.reconcile_errors.get_or_create(&label).inc();
                    tracing::warn!(controller = name, %error, "reconciliation failed");
                }
            }
            std::future::ready(())
        })
        .await;
}

/// What stopped a reconciliation; `anyhow` gathers the causes, the runtime wants an error type.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
struct Failed(anyhow::Error);

/// How long a failed reconciliation waits; what failed is mostly somebody else's outage.
const RETRY: Duration = Duration::from_secs(5);

/// The object that a name in `namespace` stands for.
pub fn reference<K: Resource<DynamicType = ()>>(namespace: &str, name: &str) -> ObjectRef<K> {
    ObjectRef::new(name).within(namespace)
}
