//! Boards: claims become workers, workers become pods.
//!
//! [`super::scheduler`] decides for all pools at once which claims get a worker, [`pool`] shows how each pool stands, [`claim`] how
//! each claim does and lets go of it, [`worker`] leads each worker through its life, [`github_poll`] asks GitHub what webhooks
//! did not tell.

mod accounts;
mod claim;
mod github_poll;
pub(super) mod memory;
mod pool;
pub(super) mod quotas;
pub(super) mod reservations;
mod timers;
mod worker;

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{BoardPool, RunnerClaim, RunnerPool, Worker},
    boards::{
        health::{HealthCheck, RunnerFacts, examine, is_unreachable},
        worker as decisions,
    },
    demand::job::{self, JobState},
    names::name_prefix,
};
use paddock_effects::lock;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, broadcast};
use tokio_util::sync::CancellationToken;

use self::{memory::Memory, quotas::Limits, reservations::Reservations, timers::Timers};
use super::{Next, Shared, reference, rush::Rush, time_until};

/// How long anything that is not settled goes without a look.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// How long what there is to show waits while pods are being made, before it looks again.
const GIVE_WAY: Duration = Duration::from_millis(300);
/// Calls to be remembered for a controller that is slow to hear them; it looks again by itself anyway.
const NUDGES: usize = 1024;
/// Workers that are written for at a time: more would only make the API server slower for everybody.
const WRITERS: usize = 24;

pub async fn run(shared: Arc<Shared>, rush: Arc<Rush>, stop: CancellationToken) {
    let board = Arc::new(BoardContext {
        limits: Limits::new(shared.settings.entity_limits_file.clone()),
        prefix: name_prefix(&shared.settings.cluster_name),
        making: tokio::sync::Mutex::default(),
        writers: Semaphore::new(WRITERS),
        rush,
        reservations: Reservations::default(),
        memory: Memory::default(),
        changed: Notify::new(),
        curious: Notify::new(),
        claims: broadcast::Sender::new(NUDGES),
        workers: broadcast::Sender::new(NUDGES),
        timers: Timers::default(),
        shared,
    });
    tokio::join!(
        super::scheduler::run(board.clone(), stop.clone()),
        pool::run(board.clone(), stop.clone()),
        claim::run(board.clone(), stop.clone()),
        worker::run(board.clone(), stop.clone()),
        github_poll::run(board, stop),
    );
}

/// What the controllers share. All of it can be lost: what was reserved is in the API server, what was decided is
/// decided again, and GitHub is asked again.
pub(super) struct BoardContext {
    pub(super) shared: Arc<Shared>,
    pub(super) limits: Limits,
    /// How the names of our workers, and so of our runners, begin.
    pub(super) prefix: String,
    /// Held while workers are made and while claims and pools are let go, so that neither happens behind the other's
    /// back.
    pub(super) making: tokio::sync::Mutex<()>,
    /// Who writes for a worker takes a turn; who waits for GitHub has none.
    pub(super) writers: Semaphore,
    pub(super) rush: Arc<Rush>,
    pub(super) reservations: Reservations,
    pub(super) memory: Memory,
    pub(super) timers: Timers,
    /// Something that decisions rest on has changed.
    pub(super) changed: Notify,
    /// Somebody needs to know what GitHub says.
    pub(super) curious: Notify,
    pub(super) claims: broadcast::Sender<ObjectRef<RunnerClaim>>,
    pub(super) workers: broadcast::Sender<ObjectRef<Worker>>,
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

impl BoardContext {
    fn pool(&self, namespace: &str, name: &str) -> Option<Arc<RunnerPool>> {
        self.shared.stores.pools.store.get(&reference(namespace, name)).filter(|pool| pool.spec.board.is_some())
    }

    /// All workers, those that no cache shows yet included.
    pub(super) fn all_workers(&self) -> Vec<Arc<Worker>> {
        let store = &self.shared.stores.workers.store;
        // First what is hidden: what shows in between is then in both, and never in neither.
        let hidden = self.reservations.beyond(|worker| store.get(&ObjectRef::from_obj(worker)).is_some());
        let mut workers = store.state();
        workers.extend(hidden.into_iter().filter(|worker| store.get(&ObjectRef::from_obj(&**worker)).is_none()));
        workers
    }

    /// The claim's own workers.
    fn workers_of(&self, claim: &RunnerClaim) -> Vec<Arc<Worker>> {
        // First what is hidden, as above; whoever is in the cache is in its group.
        let hidden = self.reservations.beyond(|worker| !decisions::serves(worker, claim));
        let mut own = claim.uid().map_or_else(Vec::new, |uid| self.shared.stores.workers.of(&uid));
        for worker in hidden {
            if !own.iter().any(|own| own.metadata.name == worker.metadata.name) {
                own.push(worker);
            }
        }
        own
    }

    async fn turn(&self) -> SemaphorePermit<'_> {
        self.writers.acquire().await.expect("it is never closed")
    }

    fn pod_of(&self, worker: &Worker) -> Option<Arc<Pod>> {
        self.shared.stores.pods.store.get(&reference(&worker.namespace().unwrap_or_default(), &worker.name_any()))
    }

    fn is_unreachable(&self, pod: &Pod) -> bool {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let node = node.and_then(|node| self.shared.stores.nodes.store.get(&ObjectRef::new(node)));
        node.is_some_and(|node| is_unreachable(&node))
    }

    /// How far the claim's job is, and the worker that has it.
    fn job_of(&self, claim: &RunnerClaim) -> Option<(JobState, Option<Arc<Worker>>)> {
        claim.spec.job.as_ref()?;
        let seen = self.memory.job(claim);
        let worker = job::runner(claim, seen.as_ref())
            .and_then(|runner| self.shared.stores.workers.store.get(&reference(&claim.namespace()?, &runner.name)));
        let ended = worker.as_ref().and_then(|worker| decisions::ended(worker));
        Some((job::state(claim, seen.as_ref(), ended)?, worker))
    }

    /// What the health rules say of a worker with a pod.
    fn exam(&self, worker: &Worker, pool: Option<&BoardPool>, pod: &Pod, now: Timestamp) -> (HealthCheck, RunnerFacts) {
        let Some((pool, spec)) = pool.zip(worker.spec.board.as_ref()) else { return Default::default() };
        let namespace = worker.namespace().unwrap_or_default();
        let claim = self.shared.stores.claims.store.get(&reference(&namespace, &spec.claim));
        let place = accounts::RunnerScope::of(&namespace, pool, &spec.owner, spec.repository.as_deref()).ok();
        let known = RunnerFacts {
            binding: lock(&self.memory.bindings).get(&worker.name_any()).copied(),
            sighting: self.memory.sighting(&worker.name_any(), place.as_ref()),
            has_job: claim.is_some_and(|claim| claim.spec.job.is_some()),
        };
        (examine(worker, pod, known, &pool.timeouts, now), known)
    }
}

/// At this time, but after [`LOOK_AGAIN`] at the latest.
fn look_again(at: Option<Timestamp>) -> Next {
    Next::After(at.map_or(LOOK_AGAIN, |at| time_until(at).min(LOOK_AGAIN)))
}
