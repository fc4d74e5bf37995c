//! Boards: claims become workers, workers become pods.
//!
//! [`super::scheduler`] decides for all pools at once which claims get a worker. [`pool`] and [`claim`] reconcile the
//! status and deletion of pools and claims, [`worker`] reconciles workers, and [`github_poll`] polls GitHub for what
//! webhooks missed.

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
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Resource, ResourceExt, api::ListParams, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{BoardPool, RunnerClaim, RunnerPool, Worker},
    boards::{
        health::{HealthCheck, RunnerFacts, examine, is_unreachable},
        pod::is_pod_of,
        slots::has_ended,
        worker::{self as decisions, LostNode},
    },
    demand::job::{self, JobState},
    names::name_prefix,
};
use paddock_effects::{kube::objects::KubeError, lock};
use tokio::sync::{Notify, broadcast};
use tokio_util::sync::CancellationToken;

use self::{memory::Memory, quotas::Limits, reservations::Reservations, timers::Timers};
use super::{Error, Next, Shared, reference, time_until};

/// How often objects that are not in a final state are reconciled without an event.
pub(super) const RESYNC_PERIOD: Duration = Duration::from_secs(15);
/// Enqueued objects buffered for a slow controller; it also resyncs periodically, so older ones may be dropped.
const ENQUEUE_BUFFER: usize = 1024;

pub async fn run(shared: Arc<Shared>, stop: CancellationToken) {
    let board = Arc::new(BoardContext {
        limits: Limits::new(shared.settings.entity_limits_file.clone()),
        prefix: name_prefix(&shared.settings.cluster_name),
        creation_lock: tokio::sync::Mutex::default(),
        reservations: Reservations::default(),
        memory: Memory::default(),
        changed: Notify::new(),
        poll_requested: Notify::new(),
        claims: broadcast::Sender::new(ENQUEUE_BUFFER),
        workers: broadcast::Sender::new(ENQUEUE_BUFFER),
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

/// State shared by the board controllers. None of it is persisted: reservations are in the API server, and a new leader
/// decides and polls GitHub again.
pub(super) struct BoardContext {
    pub(super) shared: Arc<Shared>,
    pub(super) limits: Limits,
    /// The name prefix of our workers, and so of our runners.
    pub(super) prefix: String,
    /// Held while workers are created and while claims and pools are released, so that none is created for one that is
    /// being released.
    pub(super) creation_lock: tokio::sync::Mutex<()>,
    pub(super) reservations: Reservations,
    pub(super) memory: Memory,
    pub(super) timers: Timers,
    /// An input of the demand decision has changed.
    pub(super) changed: Notify,
    /// A GitHub poll may be due.
    pub(super) poll_requested: Notify,
    pub(super) claims: broadcast::Sender<ObjectRef<RunnerClaim>>,
    pub(super) workers: broadcast::Sender<ObjectRef<Worker>>,
}

fn enqueued<K: Resource<DynamicType = ()> + 'static>(
    sender: &broadcast::Sender<ObjectRef<K>>,
) -> impl Stream<Item = ObjectRef<K>> + Send + use<K> {
    stream::unfold(sender.subscribe(), async |mut receiver| {
        loop {
            match receiver.recv().await {
                Ok(object) => return Some((object, receiver)),
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

    /// All workers, including those that are not cached yet.
    pub(super) fn all_workers(&self) -> Vec<Arc<Worker>> {
        let store = &self.shared.stores.workers.store;
        // Read the uncached ones first: a worker that is cached in between is then in both, never in neither.
        let uncached = self.reservations.except(|worker| store.get(&ObjectRef::from_obj(worker)).is_some());
        let mut workers = store.state();
        workers.extend(uncached.into_iter().filter(|worker| store.get(&ObjectRef::from_obj(&**worker)).is_none()));
        workers
    }

    /// The claim's own workers.
    fn workers_of(&self, claim: &RunnerClaim) -> Vec<Arc<Worker>> {
        // Read the uncached ones first, as above; the owner index has every cached one.
        let uncached = self.reservations.except(|worker| !decisions::serves(worker, claim));
        let mut own = claim.uid().map_or_else(Vec::new, |uid| self.shared.stores.workers.of(&uid));
        for worker in uncached {
            if !own.iter().any(|own| own.metadata.name == worker.metadata.name) {
                own.push(worker);
            }
        }
        own
    }

    fn pod_of(&self, worker: &Worker) -> Option<Arc<Pod>> {
        self.pod_named_as(worker).filter(|pod| is_pod_of(pod, worker))
    }

    /// The worker's pod, or that of an earlier worker of its name.
    fn pod_named_as(&self, worker: &Worker) -> Option<Arc<Pod>> {
        self.shared.stores.pods.store.get(&reference(&worker.namespace().unwrap_or_default(), &worker.name_any()))
    }

    /// What happened to the node of a pod that has not ended. The cache may not show a new node yet, so the API server is
    /// asked whether one is gone.
    async fn lost_node(&self, pod: &Pod) -> Result<Option<LostNode>, Error> {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).filter(|_| !has_ended(pod));
        let Some(name) = node else { return Ok(None) };
        if let Some(node) = self.shared.stores.nodes.store.get(&ObjectRef::new(name)) {
            return Ok(is_unreachable(&node).then_some(LostNode::Unreachable));
        }
        let nodes: Api<Node> = Api::all(self.shared.client.clone());
        let named = ListParams::default().fields(&format!("metadata.name={name}"));
        // Boxed: it is rare.
        let found =
            Box::pin(nodes.list_metadata(&named)).await.map_err(KubeError::new(format!("cannot read node {name}")))?;
        Ok(found.items.is_empty().then_some(LostNode::Deleted))
    }

    /// The state of the claim's job, and the worker that has it.
    fn job_of(&self, claim: &RunnerClaim) -> Option<(JobState, Option<Arc<Worker>>)> {
        claim.spec.job.as_ref()?;
        let seen = self.memory.job(claim);
        let worker = job::runner(claim, seen.as_ref())
            .and_then(|runner| self.shared.stores.workers.store.get(&reference(&claim.namespace()?, &runner.name)));
        let ended = worker.as_ref().and_then(|worker| decisions::ended(worker));
        Some((job::state(claim, seen.as_ref(), ended)?, worker))
    }

    /// The health check of a worker with a pod.
    fn health_check(
        &self,
        worker: &Worker,
        pool: Option<&BoardPool>,
        pod: &Pod,
        now: Timestamp,
    ) -> (HealthCheck, RunnerFacts) {
        let Some((pool, spec)) = pool.zip(worker.spec.board.as_ref()) else { return Default::default() };
        let namespace = worker.namespace().unwrap_or_default();
        let claim = self.shared.stores.claims.store.get(&reference(&namespace, &spec.claim));
        let runner_scope = accounts::RunnerScope::of(&namespace, pool, &spec.owner, spec.repository.as_deref()).ok();
        let facts = RunnerFacts {
            binding: lock(&self.memory.bindings).get(&worker.name_any()).copied(),
            sighting: self.memory.sighting(&worker.name_any(), runner_scope.as_ref()),
            has_job: claim.is_some_and(|claim| claim.spec.job.is_some()),
        };
        (examine(worker, pod, facts, &pool.timeouts, now), facts)
    }
}

/// Requeues at this time, but after [`RESYNC_PERIOD`] at the latest.
fn requeue_by(at: Option<Timestamp>) -> Next {
    Next::After(at.map_or(RESYNC_PERIOD, |at| time_until(at).min(RESYNC_PERIOD)))
}
