//! The worker of a board: what it is, what its pod says about it, and what to do next.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::slots::has_ended;
use crate::api::{
    BoardWorker, ContainerEnd, Duration, FAILURE_MESSAGE_MAX, FINALIZER, Failure, FailureReason, LABEL_CLAIM,
    LABEL_ENTITY, LABEL_POOL, READY, RunnerClaim, Worker, WorkerSpec, WorkerState, clip,
};

/// As many failed workers of an open claim are kept: enough for the longest wait before the next one.
pub const FAILURES_KEPT: usize = 8;
/// How long a kubelet may take to end a pod whose deadline has come.
const ENDING: SignedDuration = SignedDuration::from_mins(1);

/// A worker as it is first written. Its finalizer says that a runner may be registered for it; it goes as soon as there
/// is none, so that a finished worker is a mere record.
///
/// It has no owner: a claim that is deleted must leave a busy worker alone, and a finished one is kept for its logs.
pub fn worker(name: String, claim: &RunnerClaim, pool: &str, board: BoardWorker) -> Worker {
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: claim.metadata.namespace.clone(),
        labels: Some(labels(pool, &board)),
        finalizers: Some(vec![FINALIZER.into()]),
        ..ObjectMeta::default()
    };
    let spec = WorkerSpec { pool: pool.into(), ec2: None, board: Some(board) };
    Worker { metadata, spec, status: None }
}

/// By which people find workers, and what is made for them.
pub fn labels(pool: &str, board: &BoardWorker) -> BTreeMap<String, String> {
    let labels = [(LABEL_POOL, pool), (LABEL_CLAIM, &board.claim), (LABEL_ENTITY, &board.entity)];
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// Whether the worker was made for exactly this claim.
pub fn serves(worker: &Worker, claim: &RunnerClaim) -> bool {
    let uid = worker.claim_uid();
    uid.is_some() && uid == claim.metadata.uid.as_deref()
}

/// Which of its claim's workers it is.
pub fn attempt(worker: &Worker) -> u32 {
    worker.spec.board.as_ref().map_or(0, |board| board.attempt)
}

/// A worker that nobody has looked at yet is pending.
pub fn state(worker: &Worker) -> WorkerState {
    worker.status.as_ref().and_then(|status| status.state).unwrap_or(WorkerState::Pending)
}

pub fn since(worker: &Worker) -> Option<Timestamp> {
    Some(worker.status.as_ref()?.state_since.as_ref()?.0)
}

/// When it was over.
pub fn ended(worker: &Worker) -> Option<Timestamp> {
    since(worker).filter(|_| state(worker).is_over())
}

/// Whether its runner was seen online, which its own `Ready` condition remembers.
pub fn is_up(worker: &Worker) -> bool {
    ready_since(worker).is_some()
}

/// Since when its runner is online.
pub fn ready_since(worker: &Worker) -> Option<Timestamp> {
    let conditions = &worker.status.as_ref()?.conditions;
    let ready = conditions.iter().find(|condition| condition.type_ == READY && condition.status == "True")?;
    Some(ready.last_transition_time.0)
}

pub fn is_failed(worker: &Worker) -> bool {
    state(worker) == WorkerState::Failed
}

/// Whether a runner may be registered for it.
pub fn holds_runner(worker: &Worker) -> bool {
    worker.metadata.finalizers.as_deref().unwrap_or_default().iter().any(|finalizer| finalizer == FINALIZER)
}

/// What a pod says about its worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    pub state: WorkerState,
    pub node: Option<String>,
    /// What holds a pod up that does not run yet, such as an image that cannot be pulled.
    pub waiting: Option<String>,
    pub failure: Option<Failure>,
}

/// How the claim of a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimView {
    Open,
    Over,
    Gone,
}

/// What is known about a worker beside its own object.
#[derive(Clone, Debug)]
pub struct WorkerFacts<'a> {
    pub pod: Option<&'a Pod>,
    pub claim: ClaimView,
    /// No open claim needs it.
    pub surplus: bool,
    /// The kubelet of its pod's node is silent.
    pub unreachable: bool,
    /// What the health rules found.
    pub unhealthy: Option<Failure>,
    /// Its claim has newer failures than need to be remembered.
    pub outdated: bool,
}

/// The next thing to do for a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerAction {
    /// Get a JIT config, and make the Secret and the pod.
    Create,
    /// Write down what the pod says.
    Mirror(Observed),
    /// Write down that it failed.
    Fail(Failure),
    /// It is unhealthy: remove its runner unless that is busy, then write down that it failed.
    GiveUp(Failure),
    /// Nobody needs it: remove its runner unless that is busy, then delete it.
    Retire,
    /// It is over and its pod is not: have the kubelet end it, so that its log stays.
    EndPod,
    /// Nobody will ever end its pod.
    ForcePod,
    /// It is over: remove its runner, then the finalizer.
    Deregister,
    /// It is to go: remove its runner unless that is busy, then the pod, then the finalizer.
    Remove,
    /// Its claim is gone: delete it.
    Delete,
    /// It is over and its pod was kept long enough.
    DeletePod,
    /// Nobody needs the record any more: delete it.
    Forget,
    /// Nothing before this moment, if there is one.
    Rest(Option<Timestamp>),
}

/// How long things that are over are kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    pub pod: Duration,
    pub record: Duration,
}

pub fn next(worker: &Worker, view: WorkerFacts<'_>, keep: Keep, now: Timestamp) -> WorkerAction {
    if worker.metadata.deletion_timestamp.is_some() {
        return if holds_runner(worker) { WorkerAction::Remove } else { WorkerAction::Rest(None) };
    }
    if state(worker).is_over() {
        return after(worker, &view, keep, now);
    }
    let seen = worker.status.as_ref().and_then(|status| status.pod.as_ref()).is_some();
    match (view.pod, view.unhealthy) {
        _ if view.claim == ClaimView::Gone => WorkerAction::Delete,
        (Some(pod), _) if view.unreachable && !has_ended(pod) => WorkerAction::Fail(lost_node(pod)),
        _ if view.surplus => WorkerAction::Retire,
        (None, _) if seen => {
            WorkerAction::Fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else"))
        }
        (None, _) => WorkerAction::Create,
        (Some(pod), Some(unhealthy)) if observe(state(worker), pod).state == state(worker) => {
            WorkerAction::GiveUp(Failure { containers: containers(pod), ..unhealthy })
        }
        (Some(pod), _) => WorkerAction::Mirror(observe(state(worker), pod)),
    }
}

/// What is left to do for a worker that is over.
fn after(worker: &Worker, view: &WorkerFacts<'_>, keep: Keep, now: Timestamp) -> WorkerAction {
    let end = since(worker).unwrap_or(now);
    let due = |at: Timestamp, step: WorkerAction| if at <= now { step } else { WorkerAction::Rest(Some(at)) };
    match view.pod {
        Some(pod) if !has_ended(pod) => {
            let spec = pod.spec.as_ref();
            let deadline = spec.and_then(|spec| spec.active_deadline_seconds);
            let placed = spec.is_some_and(|spec| spec.node_name.is_some());
            if view.unreachable {
                WorkerAction::ForcePod
            } else if pod.metadata.deletion_timestamp.is_some() {
                WorkerAction::Rest(None)
            } else if !placed {
                // No kubelet has it, so that it has no log.
                WorkerAction::DeletePod
            } else if deadline != Some(1) {
                WorkerAction::EndPod
            } else {
                due(end.saturating_add(ENDING).unwrap_or(now), WorkerAction::DeletePod)
            }
        }
        _ if holds_runner(worker) => WorkerAction::Deregister,
        _ if view.outdated => WorkerAction::Forget,
        Some(_) => due(keep.pod.after(end), WorkerAction::DeletePod),
        // An open claim still counts what its workers have done.
        None if view.claim == ClaimView::Open => WorkerAction::Rest(None),
        None if now < keep.record.after(end) => WorkerAction::Rest(None),
        None => WorkerAction::Forget,
    }
}

fn lost_node(pod: &Pod) -> Failure {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    let message = format!("node {node} does not answer");
    Failure { containers: containers(pod), ..failure(FailureReason::NodeUnreachable, &message) }
}

pub fn failure(reason: FailureReason, message: &str) -> Failure {
    let message = clip(message, FAILURE_MESSAGE_MAX);
    Failure { reason, message, containers: vec![], events: vec![], log_tail: None }
}

/// What the pod says, one arrow further at most: a pod that ran and ended unseen makes its worker running first.
pub fn observe(before: WorkerState, pod: &Pod) -> Observed {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let (state, failure) = match (before, phase) {
        (WorkerState::Pending, "Running" | "Succeeded") => (WorkerState::Running, None),
        (WorkerState::Running, "Succeeded") => (WorkerState::Completed, None),
        (WorkerState::Pending | WorkerState::Running, "Failed") => (WorkerState::Failed, Some(pod_failure(pod))),
        // An unreachable kubelet says `Unknown`; nothing goes back.
        (before, _) => (before, None),
    };
    let waiting = if phase == "Pending" { waiting(pod) } else { None };
    Observed { state, node, waiting, failure }
}

fn waiting(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    let container = containers.iter().find_map(|container| {
        let waits = container.state.as_ref()?.waiting.as_ref()?;
        Some((waits.reason.clone()?, waits.message.clone()?))
    });
    let unscheduled = status.conditions.as_deref().unwrap_or_default().iter().find_map(|condition| {
        let waits = condition.type_ == "PodScheduled" && condition.status == "False";
        waits.then_some((condition.reason.clone()?, condition.message.clone()?))
    });
    container.or(unscheduled).map(|(reason, message)| format!("{reason}: {message}"))
}

fn pod_failure(pod: &Pod) -> Failure {
    let status = pod.status.as_ref();
    let containers = containers(pod);
    let told = status.and_then(|status| match (&status.reason, &status.message) {
        (Some(reason), Some(message)) => Some(format!("{reason}: {message}")),
        (reason, message) => reason.clone().or_else(|| message.clone()),
    });
    let ended = containers.iter().find(|container| container.exit_code.is_some_and(|code| code != 0));
    let message = told.or_else(|| {
        let container = ended?;
        let reason = container.reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        Some(format!("container {} ended with exit code {}{reason}", container.name, container.exit_code?))
    });
    Failure { containers, ..failure(FailureReason::PodFailed, &message.unwrap_or_else(|| "the pod failed".into())) }
}

fn containers(pod: &Pod) -> Vec<ContainerEnd> {
    let containers = pod.status.as_ref().and_then(|status| status.container_statuses.as_deref());
    containers.unwrap_or_default().iter().take(16).map(container_end).collect()
}

fn container_end(container: &ContainerStatus) -> ContainerEnd {
    let state = container.state.as_ref();
    let ended = state.and_then(|state| state.terminated.as_ref());
    let waits = state.and_then(|state| state.waiting.as_ref());
    let reason = ended.and_then(|end| end.reason.clone()).or_else(|| waits?.reason.clone());
    let message = ended.and_then(|end| end.message.clone()).or_else(|| waits?.message.clone());
    ContainerEnd {
        name: container.name.clone(),
        exit_code: ended.map(|end| end.exit_code),
        reason: reason.map(|reason| clip(&reason, 256)),
        message: message.map(|message| clip(&message, FAILURE_MESSAGE_MAX)),
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
