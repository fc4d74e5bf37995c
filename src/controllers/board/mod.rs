//! Boards: claims become workers, workers become pods.
//!
//! [`demand`] decides for all pools at once which claims get a worker, [`pool`] shows how each pool stands, [`claim`] how
//! each claim does and lets go of it, [`worker`] leads each worker through its life, [`sync`] asks GitHub what webhooks
//! did not tell.

mod accounts;
mod claim;
mod demand;
mod diagnosis;
mod ending;
mod limits;
mod memory;
mod pool;
mod provision;
mod reservations;
mod sync;
mod worker;

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Resource, ResourceExt,
    runtime::{controller::Action, reflector::ObjectRef},
};
use tokio::sync::{Notify, Semaphore, SemaphorePermit, broadcast};
use tokio_util::sync::CancellationToken;

use self::{limits::Limits, memory::Memory, reservations::Reservations};
use super::{Context, lock, reference, rush::Rush};
use crate::{
    api::{BoardPool, RunnerClaim, RunnerPool, Worker},
    plan::{
        board_worker,
        health::{Exam, Known, examine, is_unreachable},
        jobs::{self, JobState},
        names::name_prefix,
    },
};

/// How long anything that is not settled goes without a look.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// How long what there is to show waits while pods are being made, before it looks again.
const GIVE_WAY: Duration = Duration::from_millis(300);
/// Calls to be remembered for a controller that is slow to hear them; it looks again by itself anyway.
const NUDGES: usize = 1024;
/// Workers that are written for at a time: more would only make the API server slower for everybody.
const WRITERS: usize = 24;

pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    let board = Arc::new(Board {
        limits: Limits::new(context.settings.entity_limits_file.clone()),
        prefix: name_prefix(&context.settings.cluster_name),
        making: tokio::sync::Mutex::default(),
        writers: Semaphore::new(WRITERS),
        rush: context.intake.rush.clone(),
        reservations: Reservations::default(),
        memory: Memory::default(),
        changed: Notify::new(),
        curious: Notify::new(),
        claims: broadcast::Sender::new(NUDGES),
        workers: broadcast::Sender::new(NUDGES),
        context,
    });
    tokio::join!(
        demand::run(board.clone(), stop.clone()),
        pool::run(board.clone(), stop.clone()),
        claim::run(board.clone(), stop.clone()),
        worker::run(board.clone(), stop.clone()),
        sync::run(board, stop),
    );
}

/// What the controllers share. All of it can be lost: what was reserved is in the API server, what was decided is
/// decided again, and GitHub is asked again.
struct Board {
    context: Arc<Context>,
    limits: Limits,
    /// How the names of our workers, and so of our runners, begin.
    prefix: String,
    /// Held while workers are made and while claims and pools are let go, so that neither happens behind the other's
    /// back.
    making: tokio::sync::Mutex<()>,
    /// Who writes for a worker takes a turn; who waits for GitHub has none.
    writers: Semaphore,
    rush: Arc<Rush>,
    reservations: Reservations,
    memory: Memory,
    /// Something that decisions rest on has changed.
    changed: Notify,
    /// Somebody needs to know what GitHub says.
    curious: Notify,
    claims: broadcast::Sender<ObjectRef<RunnerClaim>>,
    workers: broadcast::Sender<ObjectRef<Worker>>,
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

    /// All workers, those that no cache shows yet included.
    fn all_workers(&self) -> Vec<Arc<Worker>> {
        let store = &self.context.stores.workers.store;
        // First what is hidden: what shows in between is then in both, and never in neither.
        let hidden = self.reservations.beyond(|worker| store.get(&ObjectRef::from_obj(worker)).is_some());
        let mut workers = store.state();
        workers.extend(hidden.into_iter().filter(|worker| store.get(&ObjectRef::from_obj(&**worker)).is_none()));
        workers
    }

    /// The claim's own workers.
    fn workers_of(&self, claim: &RunnerClaim) -> Vec<Arc<Worker>> {
        // First what is hidden, as above; whoever is in the cache is in its group.
        let hidden = self.reservations.beyond(|worker| !board_worker::serves(worker, claim));
        let mut own = claim.uid().map_or_else(Vec::new, |uid| self.context.stores.workers.of(&uid));
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
        self.context.stores.pods.store.get(&reference(&worker.namespace().unwrap_or_default(), &worker.name_any()))
    }

    fn is_unreachable(&self, pod: &Pod) -> bool {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let node = node.and_then(|node| self.context.stores.nodes.store.get(&ObjectRef::new(node)));
        node.is_some_and(|node| is_unreachable(&node))
    }

    /// How far the claim's job is, and the worker that has it.
    fn job_of(&self, claim: &RunnerClaim) -> Option<(JobState, Option<Arc<Worker>>)> {
        claim.spec.job.as_ref()?;
        let seen = self.memory.job(claim);
        let worker = jobs::runner(claim, seen.as_ref())
            .and_then(|runner| self.context.stores.workers.store.get(&reference(&claim.namespace()?, &runner.name)));
        let ended = worker.as_ref().and_then(|worker| board_worker::ended(worker));
        Some((jobs::state(claim, seen.as_ref(), ended)?, worker))
    }

    /// What the health rules say of a worker with a pod.
    fn exam(&self, worker: &Worker, pool: Option<&BoardPool>, pod: &Pod, now: Timestamp) -> (Exam, Known) {
        let Some((pool, spec)) = pool.zip(worker.spec.board.as_ref()) else { return Default::default() };
        let namespace = worker.namespace().unwrap_or_default();
        let claim = self.context.stores.claims.store.get(&reference(&namespace, &spec.claim));
        let place = accounts::Place::of(&namespace, pool, &spec.owner, spec.repository.as_deref()).ok();
        let known = Known {
            binding: lock(&self.memory.bindings).get(&worker.name_any()).copied(),
            sighting: self.memory.sighting(&worker.name_any(), place.as_ref()),
            has_job: claim.is_some_and(|claim| claim.spec.job.is_some()),
        };
        (examine(worker, pod, known, &pool.timeouts, now), known)
    }
}

/// Looks again at this moment, or soon enough.
fn look_again(at: Option<Timestamp>) -> Action {
    let wait = at.map(|at| at.duration_since(Timestamp::now()).max(jiff::SignedDuration::ZERO).unsigned_abs());
    // A moment later, so that it has come for sure.
    Action::requeue(wait.map_or(LOOK_AGAIN, |wait| wait.min(LOOK_AGAIN) + Duration::from_millis(50)))
}
