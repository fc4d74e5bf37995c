//! Reconciles workers: a JIT config, a Secret, a pod, and their removal.
//!
//! The operator can crash after any action, so the next one follows from what exists. No Secret: the config is lost,
//! and a runner of the worker's name at GitHub is stale. A Secret owned by the worker: the pod is missing. A Secret
//! owned by the pod: the pod was created.

mod create;
mod diagnosis;
mod end;
mod settle;

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    runtime::{
        controller::{Config, Controller},
        events::EventType,
        reflector::ObjectRef,
    },
};
use paddock_core::{
    api::{
        BoardPool, BoardTimeouts, BoardWorker, ClaimReason, FIELD_MANAGER, Failure, Worker, WorkerState, WorkerStatus,
    },
    boards::{
        health::{RunnerFacts, is_unreachable},
        pod::adoption,
        worker::{self, ClaimView, FAILURES_KEPT, Keep, Observed, WorkerAction, WorkerFacts, is_failed},
        worker_status,
    },
    demand::schedule::is_open,
};
use paddock_effects::{
    clock,
    kube::objects::{self, KubeError, Written},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{BoardContext, RESYNC_PERIOD, accounts::AccountError, enqueued, lock, requeue_by};
use crate::controllers::{Error, Next, drive, reference, retention};

/// How long a new pod may be pending before the status reports it: most start sooner, which saves a write.
const PENDING_REPORT_DELAY: jiff::SignedDuration = jiff::SignedDuration::from_secs(2);

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let stores = &board.shared.stores;
    let worker_of_pod = |pod: Arc<Pod>| Some(reference(&pod.namespace().unwrap_or_default(), &pod.name_any()));
    let (pods, nodes) = (stores.pods.store.clone(), stores.nodes.store.clone());
    let workers_of_lost_node = move |node: Arc<Node>| -> Vec<_> {
        if !is_unreachable(&node) && nodes.get(&ObjectRef::from_obj(&*node)).is_some() {
            return vec![];
        }
        let name = node.metadata.name.as_deref();
        let on_node = pods.state_filter(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == name);
        on_node.iter().map(|pod| reference(&pod.namespace().unwrap_or_default(), &pod.name_any())).collect()
    };
    // Unlimited concurrency: a worker that waits for GitHub must not delay another.
    let controller = Controller::for_shared_stream(stores.workers.stream(), stores.workers.store.clone())
        .with_config(Config::default().concurrency(0))
        .watches_shared_stream(stores.pods.stream(), worker_of_pod)
        .watches_shared_stream(stores.nodes.stream(), workers_of_lost_node)
        .reconcile_on(enqueued(&board.workers))
        .reconcile_on(expired(&board));
    let metrics = board.shared.metrics.clone();
    drive("board-worker", controller, board, metrics, stop, reconcile).await;
}

/// Workers past their retention time: a periodic scan instead of one timer per worker.
fn expired(board: &BoardContext) -> impl Stream<Item = ObjectRef<Worker>> + Send + use<> {
    let (workers, retention) = (board.shared.stores.workers.store.clone(), board.shared.settings.retention);
    let period = retention::period(retention);
    let ticks = stream::repeat(()).then(move |()| tokio::time::sleep(period));
    ticks
        .flat_map(move |()| {
            let latest = clock::now().saturating_sub(retention).unwrap_or(Timestamp::MIN);
            let expired = workers.state_filter(|worker| worker::ended(worker).is_some_and(|end| end <= latest));
            stream::iter(expired.into_iter().map(|worker| ObjectRef::from_obj(&*worker)))
        })
        .boxed()
}

async fn reconcile(worker: Arc<Worker>, board: Arc<BoardContext>) -> Result<Next, Error> {
    let Some(spec) = worker.spec.board.clone() else { return Ok(Next::AwaitChange) };
    let (namespace, name) = (worker.namespace().unwrap_or_default(), worker.name_any());
    let pool = board.pool(&namespace, &worker.spec.pool);
    let pool = pool.as_ref().and_then(|pool| pool.spec.board.as_ref());
    let pod = board.pod_of(&worker);
    let now = clock::now();
    let (health, runner_facts) = match &pod {
        Some(pod) => board.health_check(&worker, pool, pod, now),
        None => Default::default(),
    };
    if health.ask.is_some() {
        board.poll_requested.notify_one();
    }
    let lost = match &pod {
        Some(pod) => board.lost_node(pod).await?,
        None => None,
    };
    let claim = board.claim_view(&worker, &spec);
    let backing_off = board.memory.is_backing_off(&name, now);
    let facts = WorkerFacts {
        pod: pod.as_deref(),
        claim,
        surplus: !backing_off && lock(&board.memory.surplus).contains(&name),
        lost,
        unhealthy: health.unhealthy.filter(|_| !backing_off),
        outdated: claim == ClaimView::Open && board.is_outdated(&worker),
        took_job: runner_facts.binding.is_some(),
    };
    let keep = Keep {
        pod: pool.map_or_else(|| BoardTimeouts::default().pod_grace, |pool| pool.timeouts.pod_grace),
        record: paddock_core::api::Duration::from_secs(board.shared.settings.retention.as_secs()),
    };
    let action = worker::next(&worker, facts, keep, now);
    tracing::debug!(worker = name, ?action, "next action");
    let work = Work { board: &board, worker: &worker, spec: &spec, pool, pod: pod.as_deref(), name, namespace };
    // Boxed: thousands of reconciliations start at once, and most end here.
    Box::pin(work.apply(action, lost.is_some(), runner_facts, health.next)).await
}

impl BoardContext {
    fn claim_view(&self, worker: &Worker, spec: &BoardWorker) -> ClaimView {
        let claim =
            self.shared.stores.claims.store.get(&reference(&worker.namespace().unwrap_or_default(), &spec.claim));
        match claim.filter(|claim| worker::serves(worker, claim)) {
            None => ClaimView::Gone,
            Some(claim) if is_open(&claim) => ClaimView::Open,
            Some(_) => ClaimView::Over,
        }
    }

    /// Whether at least [`FAILURES_KEPT`] later workers of its claim failed too.
    fn is_outdated(&self, worker: &Worker) -> bool {
        is_failed(worker) && {
            let own = worker.claim_uid().map_or_else(Vec::new, |claim| self.shared.stores.workers.of(claim));
            let is_later = |other: &&Arc<Worker>| is_failed(other) && worker::attempt(other) > worker::attempt(worker);
            own.iter().filter(is_later).count() >= FAILURES_KEPT
        }
    }
}

/// One reconciliation of one worker.
pub struct Work<'a> {
    pub board: &'a BoardContext,
    pub worker: &'a Worker,
    pub spec: &'a BoardWorker,
    /// Its pool. A pool with workers keeps its finalizer, so it is missing only if the finalizer was removed by force.
    pub pool: Option<&'a BoardPool>,
    pub pod: Option<&'a Pod>,
    pub name: String,
    pub namespace: String,
}

impl Work<'_> {
    async fn apply(
        &self,
        action: WorkerAction,
        lost: bool,
        runner_facts: RunnerFacts,
        next_check: Option<Timestamp>,
    ) -> Result<Next, Error> {
        match action {
            WorkerAction::Create => self.create().await,
            WorkerAction::Mirror(observed) => self.mirror(observed, runner_facts, next_check).await,
            WorkerAction::Settle(observed) => self.settle(observed, runner_facts).await,
            WorkerAction::Fail(failure) => self.fail(failure).await,
            WorkerAction::GiveUp(failure) => self.give_up(failure).await,
            WorkerAction::Retire => self.retire().await,
            WorkerAction::EndPod => self.end_pod().await,
            WorkerAction::ForcePod => self.force_pod().await,
            WorkerAction::Deregister => self.deregister().await,
            WorkerAction::Remove => self.remove(lost).await,
            WorkerAction::Delete | WorkerAction::Forget => {
                objects::delete(&objects::api(&self.board.shared.client, self.worker), &self.name).await?;
                Ok(Next::AwaitChange)
            }
            WorkerAction::DeletePod => {
                self.delete_pod(DeleteParams::default()).await?;
                Ok(Next::After(RESYNC_PERIOD))
            }
            WorkerAction::Wait(None) => Ok(Next::AwaitChange),
            WorkerAction::Wait(Some(until)) => Ok(Next::At(until)),
        }
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.board.shared.client.clone(), &self.namespace)
    }

    pub fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.board.shared.client.clone(), &self.namespace)
    }

    /// Makes the pod the owner of the Secret, so that both are deleted together.
    async fn adopt(&self, pod: &Pod) -> Result<(), Error> {
        let patch = json!({"metadata": {"ownerReferences": [adoption(pod)]}});
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let secrets: Api<Secret> = Api::namespaced(self.board.shared.background.client.clone(), &self.namespace);
        match secrets.patch(&self.name, &parameters, &Patch::Merge(patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(KubeError::new("cannot make the pod the owner of the Secret")(error).into()),
        }
        lock(&self.board.memory.adopted).extend(self.worker.uid());
        Ok(())
    }

    fn is_adopted(&self) -> bool {
        let uid = self.worker.uid().unwrap_or_default();
        let reported = self.worker.status.as_ref().is_some_and(|status| status.pod.is_some());
        reported || lock(&self.board.memory.adopted).contains(&uid)
    }

    /// The current status with the constant fields filled in.
    pub fn status(&self) -> WorkerStatus {
        let claim = self.board.shared.stores.claims.store.get(&reference(&self.namespace, &self.spec.claim));
        worker_status::current(self.worker, claim.as_deref(), self.pod, clock::now())
    }

    /// The state of a running or pending worker is progress; its end is what others wait for.
    pub async fn write(&self, status: &WorkerStatus) -> Result<Written, Error> {
        let (shared, before) = (&self.board.shared, self.worker.status.as_ref());
        let over = status.state.is_some_and(WorkerState::is_over);
        let client = if over { &shared.client } else { &shared.background.client };
        Ok(objects::write_status(client, self.worker, before, status).await?)
    }

    pub async fn wait(&self, reason: ClaimReason, error: &AccountError, retry: Duration) -> Result<Next, Error> {
        let status = worker_status::waiting(self.worker, self.status(), reason, &error.to_string(), clock::now());
        self.write(&status).await?;
        Ok(Next::After(retry))
    }

    async fn mirror(
        &self,
        observed: Observed,
        runner_facts: RunnerFacts,
        next: Option<Timestamp>,
    ) -> Result<Next, Error> {
        let Some(pod) = self.pod else { return Ok(Next::AwaitChange) };
        if !self.is_adopted() {
            self.adopt(pod).await?;
        }
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let starting = created.is_some_and(|created| clock::now().duration_since(created) < PENDING_REPORT_DELAY);
        if observed.state == WorkerState::Pending && self.worker.status.is_none() && starting {
            return Ok(Next::After(Duration::from_secs(1)));
        }
        let status = worker_status::observed(self.worker, self.status(), &observed, runner_facts, clock::now());
        if let Some(failure) = observed.failure {
            return self.fail_with(status, failure).await;
        }
        self.write(&status).await?;
        Ok(requeue_by(next))
    }

    pub async fn fail(&self, failure: Failure) -> Result<Next, Error> {
        self.fail_with(self.status(), failure).await
    }

    async fn fail_with(&self, status: WorkerStatus, failure: Failure) -> Result<Next, Error> {
        let failure = self.diagnose(failure).await;
        let (reason, message) = (failure.reason.as_str(), failure.message.clone());
        let status = worker_status::failed(self.worker, status, failure, clock::now());
        if self.write(&status).await? == Written::Yes {
            tracing::warn!(worker = self.name, reason, why = message, "worker failed");
            self.board.shared.events.record(self.worker, EventType::Warning, "Fail", reason, message);
        }
        Ok(Next::After(RESYNC_PERIOD))
    }
}
