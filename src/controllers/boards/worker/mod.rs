//! The life of a worker: a JIT config, a Secret, a pod, and nothing left behind.
//!
//! Every step can be the last before a crash. What there is decides what comes next: no Secret, then there is no config
//! that anybody could use, and a runner of the worker's name at GitHub is a leftover; a Secret of the worker's, then the
//! pod is missing; a Secret of the pod's, then the pod was made.

mod create;
mod diagnosis;
mod end;

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Node, Pod, Secret},
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{
        controller::{Config, Controller},
        events::EventType,
        reflector::ObjectRef,
    },
};
use paddock_core::{
    api::{
        BoardPool, BoardTimeouts, BoardWorker, ClaimReason, FIELD_MANAGER, Failure, PodPlace, Runner, Worker,
        WorkerState, WorkerStatus, ready_condition, set_condition,
    },
    boards::{
        health::{RunnerFacts, RunnerState, is_unreachable},
        pod::{adoption, runner_id},
        worker::{self, ClaimView, FAILURES_KEPT, Keep, Observed, WorkerAction, WorkerFacts, is_failed},
    },
    demand::schedule::is_open,
};
use paddock_effects::kube::objects::{self, KubeError, Written};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{BoardContext, GIVE_WAY, LOOK_AGAIN, accounts::AccountError, lock, look_again, nudges};
use crate::controllers::{Error, Next, drive, reference, retention};

/// How long a pod that was just made may be pending before that is worth a word: most are not for long.
const STARTING: jiff::SignedDuration = jiff::SignedDuration::from_secs(2);

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let stores = &board.shared.stores;
    let worker_of_pod = |pod: Arc<Pod>| Some(reference(&pod.namespace().unwrap_or_default(), &pod.name_any()));
    let pods = stores.pods.store.clone();
    let workers_of_lost_node = move |node: Arc<Node>| -> Vec<_> {
        if !is_unreachable(&node) {
            return vec![];
        }
        let name = node.metadata.name.as_deref();
        let here = pods.state_filter(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == name);
        here.iter().map(|pod| reference(&pod.namespace().unwrap_or_default(), &pod.name_any())).collect()
    };
    // As many at a time as there are: one that GitHub keeps waiting must not keep another.
    let controller = Controller::for_shared_stream(stores.workers.stream(), stores.workers.store.clone())
        .with_config(Config::default().concurrency(0))
        .watches_shared_stream(stores.pods.stream(), worker_of_pod)
        .watches_shared_stream(stores.nodes.stream(), workers_of_lost_node)
        .reconcile_on(nudges(&board.workers))
        .reconcile_on(outdated(&board));
    let metrics = board.shared.metrics.clone();
    drive("board-worker", controller, board, metrics, stop, reconcile).await;
}

/// Records whose time is up: one look at all of them now and then, not a timer for each.
fn outdated(board: &BoardContext) -> impl Stream<Item = ObjectRef<Worker>> + Send + use<> {
    let (workers, retention) = (board.shared.stores.workers.store.clone(), board.shared.settings.retention);
    let period = retention::period(retention);
    let looks = stream::repeat(()).then(move |()| tokio::time::sleep(period));
    looks
        .flat_map(move |()| {
            let latest = Timestamp::now().saturating_sub(retention).unwrap_or(Timestamp::MIN);
            let outdated = workers.state_filter(|worker| worker::ended(worker).is_some_and(|end| end <= latest));
            stream::iter(outdated.into_iter().map(|worker| ObjectRef::from_obj(&*worker)))
        })
        .boxed()
}

async fn reconcile(worker: Arc<Worker>, board: Arc<BoardContext>) -> Result<Next, Error> {
    let Some(spec) = worker.spec.board.clone() else { return Ok(Next::AwaitChange) };
    let (namespace, name) = (worker.namespace().unwrap_or_default(), worker.name_any());
    let pool = board.pool(&namespace, &worker.spec.pool);
    let pool = pool.as_ref().and_then(|pool| pool.spec.board.as_ref());
    let pod = board.pod_of(&worker);
    let now = Timestamp::now();
    let (exam, known) = match &pod {
        Some(pod) => board.exam(&worker, pool, pod, now),
        None => Default::default(),
    };
    if exam.ask.is_some() {
        board.curious.notify_one();
    }
    let claim = board.claim_view(&worker, &spec);
    let left_alone = board.memory.is_left_alone(&name, now);
    let view = WorkerFacts {
        pod: pod.as_deref(),
        claim,
        surplus: !left_alone && lock(&board.memory.surplus).contains(&name),
        unreachable: pod.as_ref().is_some_and(|pod| board.is_unreachable(pod)),
        unhealthy: exam.unhealthy.filter(|_| !left_alone),
        outdated: claim == ClaimView::Open && board.is_outdated(&worker),
    };
    let keep = Keep {
        pod: pool.map_or_else(|| BoardTimeouts::default().pod_grace, |pool| pool.timeouts.pod_grace),
        record: paddock_core::api::Duration::from_secs(board.shared.settings.retention.as_secs()),
    };
    let unreachable = view.unreachable;
    let step = worker::next(&worker, view, keep, now);
    tracing::debug!(worker = name, ?step, "next step");
    let life = Life { board: &board, worker: &worker, spec: &spec, pool, pod: pod.as_deref(), name, namespace };
    match step {
        WorkerAction::Create => life.create().await,
        WorkerAction::Mirror(observed) => life.mirror(observed, known, exam.next).await,
        WorkerAction::Fail(failure) => life.fail(failure).await,
        WorkerAction::GiveUp(failure) => life.give_up(failure).await,
        WorkerAction::Retire => life.retire().await,
        WorkerAction::EndPod => life.end_pod().await,
        WorkerAction::ForcePod => life.force_pod().await,
        WorkerAction::Deregister => life.deregister().await,
        WorkerAction::Remove => life.remove(unreachable).await,
        WorkerAction::Delete | WorkerAction::Forget => {
            objects::delete(&objects::api(&board.shared.client, &*worker), &life.name).await?;
            Ok(Next::AwaitChange)
        }
        WorkerAction::DeletePod => {
            objects::delete(&life.pods(), &life.name).await?;
            Ok(Next::After(LOOK_AGAIN))
        }
        WorkerAction::Rest(None) => Ok(Next::AwaitChange),
        WorkerAction::Rest(Some(until)) => Ok(Next::At(until)),
    }
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

    /// Whether enough later workers of its claim failed too.
    fn is_outdated(&self, worker: &Worker) -> bool {
        is_failed(worker) && {
            let own = worker.claim_uid().map_or_else(Vec::new, |claim| self.shared.stores.workers.of(claim));
            let is_later = |other: &&Arc<Worker>| is_failed(other) && worker::attempt(other) > worker::attempt(worker);
            own.iter().filter(is_later).count() >= FAILURES_KEPT
        }
    }
}

/// One look at one worker.
pub struct Life<'a> {
    pub board: &'a BoardContext,
    pub worker: &'a Worker,
    pub spec: &'a BoardWorker,
    /// Its pool; one with workers stays, so that it is missing only where somebody forced it away.
    pub pool: Option<&'a BoardPool>,
    pub pod: Option<&'a Pod>,
    pub name: String,
    pub namespace: String,
}

impl Life<'_> {
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.board.shared.client.clone(), &self.namespace)
    }

    pub fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.board.shared.client.clone(), &self.namespace)
    }

    /// Gives the Secret to the pod, so that it goes with it.
    async fn adopt(&self, pod: &Pod) -> Result<(), Error> {
        let _turn = self.board.turn().await;
        let patch = json!({"metadata": {"ownerReferences": [adoption(pod)]}});
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.secrets().patch(&self.name, &parameters, &Patch::Merge(patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(KubeError::new("cannot make the pod the owner of the Secret")(error).into()),
        }
        lock(&self.board.memory.adopted).extend(self.worker.uid());
        Ok(())
    }

    fn is_adopted(&self) -> bool {
        let uid = self.worker.uid().unwrap_or_default();
        let known = self.worker.status.as_ref().is_some_and(|status| status.pod.is_some());
        known || lock(&self.board.memory.adopted).contains(&uid)
    }

    /// The status with what never changes filled in.
    pub fn status(&self) -> WorkerStatus {
        let mut status = self.worker.status.clone().unwrap_or_default();
        let claim = self.board.shared.stores.claims.store.get(&reference(&self.namespace, &self.spec.claim));
        status.claim = Some(self.spec.claim.clone());
        status.run_id = status.run_id.or_else(|| claim.map(|claim| claim.spec.run_id.clone()));
        let runner = status.runner.get_or_insert_with(|| Runner { id: None, name: self.name.clone() });
        runner.id = runner.id.or_else(|| self.pod.and_then(runner_id));
        status.observed_generation = self.worker.metadata.generation;
        self.enter(&mut status, worker::state(self.worker));
        status
    }

    fn enter(&self, status: &mut WorkerStatus, state: WorkerState) {
        if status.state != Some(state) {
            status.state = Some(state);
            status.state_since = Some(Time(Timestamp::now()));
        }
    }

    pub fn say(&self, status: &mut WorkerStatus, ready: bool, reason: ClaimReason, message: &str) {
        let generation = self.worker.metadata.generation;
        set_condition(&mut status.conditions, ready_condition(ready, reason, message, generation, Timestamp::now()));
    }

    pub async fn write(&self, status: &WorkerStatus) -> Result<Written, Error> {
        let _turn = self.board.turn().await;
        let (client, before) = (&self.board.shared.client, self.worker.status.as_ref());
        Ok(objects::write_status(client, self.worker, before, status).await?)
    }

    pub async fn wait(&self, reason: ClaimReason, error: &AccountError) -> Result<Next, Error> {
        let mut status = self.status();
        self.say(&mut status, false, reason, &error.to_string());
        self.write(&status).await?;
        Ok(Next::After(error.retry()))
    }

    async fn mirror(&self, observed: Observed, known: RunnerFacts, next: Option<Timestamp>) -> Result<Next, Error> {
        let Some(pod) = self.pod else { return Ok(Next::AwaitChange) };
        if self.board.rush.is_on() {
            return Ok(Next::After(GIVE_WAY));
        }
        if !self.is_adopted() {
            self.adopt(pod).await?;
        }
        let made = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let starting = made.is_some_and(|made| Timestamp::now().duration_since(made) < STARTING);
        if observed.state == WorkerState::Pending && self.worker.status.is_none() && starting {
            return Ok(Next::After(Duration::from_secs(1)));
        }
        let mut status = self.status();
        status.set_pod(PodPlace { name: self.name.clone(), node: observed.node });
        if let Some(failure) = observed.failure {
            return self.fail_with(status, failure).await;
        }
        self.enter(&mut status, observed.state);
        match observed.state {
            // Ready is a runner that GitHub has seen online; a pod that runs is not enough.
            WorkerState::Running if known.is_there() => {
                self.say(&mut status, true, ClaimReason::Ready, "its runner is online");
            }
            WorkerState::Running if worker::is_up(self.worker) => {}
            WorkerState::Running => {
                let unknown = known.sighting.is_some_and(|sighting| sighting.seen == RunnerState::Unknown);
                let what = if unknown { "GitHub does not know its runner" } else { "its runner is not online yet" };
                self.say(&mut status, false, ClaimReason::Validating, &format!("the pod runs; {what}"));
            }
            WorkerState::Completed => self.say(&mut status, false, ClaimReason::Completed, "its job is done"),
            WorkerState::Pending => {
                let message = observed.waiting.unwrap_or_else(|| "the pod is starting".into());
                self.say(&mut status, false, ClaimReason::Validating, &message);
            }
            _ => {}
        }
        self.write(&status).await?;
        Ok(look_again(next))
    }

    pub async fn fail(&self, failure: Failure) -> Result<Next, Error> {
        self.fail_with(self.status(), failure).await
    }

    async fn fail_with(&self, mut status: WorkerStatus, failure: Failure) -> Result<Next, Error> {
        let failure = self.diagnose(failure).await;
        let (reason, message) = (failure.reason.as_str(), failure.message.clone());
        self.enter(&mut status, WorkerState::Failed);
        self.say(&mut status, false, ClaimReason::WorkerLost, &message);
        status.failure = Some(failure.into());
        if self.write(&status).await? == Written::Yes {
            tracing::warn!(worker = self.name, reason, why = message, "a worker failed");
            self.board.shared.events.tell(self.worker, EventType::Warning, "Fail", reason, message);
        }
        Ok(Next::After(LOOK_AGAIN))
    }
}
