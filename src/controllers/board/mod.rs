//! Boards: claims become workers, workers become pods.
//!
//! Three controllers share what is here. [`demand`] decides for all pools at once which claims get a worker, [`claim`]
//! shows how each claim stands and lets go of it, [`worker`] leads each worker through its life.

mod claim;
mod demand;
mod limits;
mod reservations;
mod worker;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use jiff::Timestamp;
use kube::{
    Resource,
    runtime::{controller::Action, reflector::ObjectRef},
};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use self::{limits::Limits, reservations::Reservations};
use super::{Context, reference};
use crate::{
    api::{BoardPool, BoardWorker, RunnerClaim, RunnerPool, Worker},
    effects::{
        credentials::{Credentials, CredentialsError},
        github::{GitHubError, Scope},
    },
    plan::{
        board_worker,
        capacity::PoolKey,
        demand::{JobSeen, Wait},
        entity::{self, NoRepository},
    },
};

/// How long anything that is not settled goes without a look.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// Calls to be remembered for a controller that is slow to hear them; it looks again by itself anyway.
const NUDGES: usize = 1024;

pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    let board = Arc::new(Board {
        limits: Limits::new(context.settings.entity_limits_file.clone()),
        reservations: tokio::sync::Mutex::default(),
        waits: Mutex::default(),
        jobs: Mutex::default(),
        not_ready: Mutex::default(),
        claims: broadcast::Sender::new(NUDGES),
        pools: broadcast::Sender::new(NUDGES),
        context,
    });
    tokio::join!(
        demand::run(board.clone(), stop.clone()),
        claim::run(board.clone(), stop.clone()),
        worker::run(board, stop),
    );
}

/// What the three controllers share. All of it can be lost: what was reserved is in the API server, what was decided is
/// decided again, and GitHub is asked again.
struct Board {
    context: Arc<Context>,
    limits: Limits,
    /// Held while workers are made and while claims are let go, so that neither happens behind the other's back.
    reservations: tokio::sync::Mutex<Reservations>,
    /// What each claim waits for, by its uid.
    waits: Mutex<BTreeMap<String, Wait>>,
    /// What GitHub said of each claim's job, by the claim's uid.
    jobs: Mutex<BTreeMap<String, JobSeen>>,
    not_ready: Mutex<BTreeMap<PoolKey, String>>,
    claims: broadcast::Sender<ObjectRef<RunnerClaim>>,
    pools: broadcast::Sender<ObjectRef<RunnerPool>>,
}

/// Nothing is ever left half-done under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nudges<K: Resource<DynamicType = ()> + 'static>(
    sender: &broadcast::Sender<ObjectRef<K>>,
) -> impl Stream<Item = ObjectRef<K>> + Send + use<K> {
    stream::unfold(sender.subscribe(), async |mut nudges| {
        loop {
            match nudges.recv().await {
                Ok(object) => return Some((object, nudges)),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    })
    .boxed()
}

impl Board {
    fn pool(&self, namespace: &str, name: &str) -> Option<Arc<RunnerPool>> {
        self.context.stores.pools.store.get(&reference(namespace, name)).filter(|pool| pool.spec.board.is_some())
    }

    /// The claim's own workers, those that no cache shows yet included.
    fn workers_of(&self, claim: &RunnerClaim, reservations: &Reservations) -> Vec<Arc<Worker>> {
        let mut workers = self.context.stores.workers.store.state();
        workers.extend(reservations.beyond(&workers));
        workers.retain(|worker| board_worker::serves(worker, claim));
        workers
    }

    /// In whose name, and where, a worker's runner is registered.
    async fn account(&self, namespace: &str, pool: &BoardPool, worker: &BoardWorker) -> Result<Account, AccountError> {
        let scope = Scope::of(&worker.owner, worker.repository.as_deref())?;
        let secret = entity::credentials_ref(pool, &worker.owner);
        let credentials = self.context.credentials.get_or_last(namespace, &secret.name).await?;
        Ok(Account { credentials: credentials.for_installation(worker.installation_id), scope })
    }
}

struct Account {
    credentials: Credentials,
    scope: Scope,
}

/// Why a runner cannot be spoken of with GitHub.
#[derive(Debug, thiserror::Error)]
enum AccountError {
    #[error(transparent)]
    NoRepository(#[from] NoRepository),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error(transparent)]
    GitHub(#[from] GitHubError),
}

impl AccountError {
    /// When it makes sense to try again.
    fn retry(&self) -> Duration {
        match self {
            Self::GitHub(GitHubError::RateLimited { until }) => {
                let wait = until.duration_since(Timestamp::now()).max(jiff::SignedDuration::from_secs(1));
                wait.unsigned_abs().min(Duration::from_secs(600))
            }
            Self::NoRepository(_) | Self::Credentials(_) | Self::GitHub(_) => LOOK_AGAIN,
        }
    }
}

/// Looks again at this moment, or soon enough.
fn look_again(at: Option<Timestamp>) -> Action {
    let wait = at.map(|at| at.duration_since(Timestamp::now()).max(jiff::SignedDuration::ZERO).unsigned_abs());
    // A moment later, so that it has come for sure.
    Action::requeue(wait.map_or(LOOK_AGAIN, |wait| wait + Duration::from_millis(50)))
}
