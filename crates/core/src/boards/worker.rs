//! The worker of a board: its object, its state according to its pod, and its next action.

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

/// How many failed workers of an open claim are kept: enough to reach the longest backoff.
pub const FAILURES_KEPT: usize = 8;
/// How long a kubelet may take to end a pod after its deadline.
const POD_END_GRACE: SignedDuration = SignedDuration::from_mins(1);

/// A new worker. Its finalizer means that a runner may be registered for it, and is removed after that runner.
///
/// It has no owner reference: a busy worker outlives its deleted claim, and a finished one is kept for its logs.
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

/// Labels of a worker and of the objects created for it.
pub fn labels(pool: &str, board: &BoardWorker) -> BTreeMap<String, String> {
    let labels = [(LABEL_POOL, pool), (LABEL_CLAIM, &board.claim), (LABEL_ENTITY, &board.entity)];
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// Whether the worker was created for exactly this claim.
pub fn serves(worker: &Worker, claim: &RunnerClaim) -> bool {
    let uid = worker.claim_uid();
    uid.is_some() && uid == claim.metadata.uid.as_deref()
}

/// The worker's number among its claim's workers.
pub fn attempt(worker: &Worker) -> u32 {
    worker.spec.board.as_ref().map_or(0, |board| board.attempt)
}

/// A worker without a status is pending.
pub fn state(worker: &Worker) -> WorkerState {
    worker.status.as_ref().and_then(|status| status.state).unwrap_or(WorkerState::Pending)
}

pub fn since(worker: &Worker) -> Option<Timestamp> {
    Some(worker.status.as_ref()?.state_since.as_ref()?.0)
}

/// When the worker ended.
pub fn ended(worker: &Worker) -> Option<Timestamp> {
    since(worker).filter(|_| state(worker).is_over())
}

/// Whether its runner has been online, as its `Ready` condition records.
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

/// A worker's state according to its pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    pub state: WorkerState,
    pub node: Option<String>,
    /// Why the pod does not run yet, such as an image that cannot be pulled.
    pub waiting: Option<String>,
    pub failure: Option<Failure>,
}

/// State of a worker's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimView {
    Open,
    Over,
    Gone,
}

/// Facts about a worker besides the object itself.
#[derive(Clone, Debug)]
pub struct WorkerFacts<'a> {
    pub pod: Option<&'a Pod>,
    pub claim: ClaimView,
    /// No open claim needs it.
    pub surplus: bool,
    /// What happened to its pod's node.
    pub lost: Option<LostNode>,
    /// What the health rules found.
    pub unhealthy: Option<Failure>,
    /// Its claim has enough newer failures for the backoff.
    pub outdated: bool,
    /// Its runner is known to have taken a job.
    pub took_job: bool,
}

/// Why no kubelet ends a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostNode {
    Unreachable,
    Deleted,
}

/// The next action for a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerAction {
    /// Get a JIT config, then create the Secret and the pod.
    Create,
    /// Write the pod's state to the worker's status.
    Mirror(Observed),
    /// The pod ended well, and no webhook named its runner: ask GitHub whether it took a job.
    Settle(Observed),
    /// Mark the worker failed.
    Fail(Failure),
    /// Unhealthy: remove its runner unless that is busy, then mark the worker failed.
    GiveUp(Failure),
    /// Surplus: remove its runner unless that is busy, then delete the worker.
    Retire,
    /// The worker has ended and its pod has not: let the kubelet end it, which keeps its log.
    EndPod,
    /// The node is unreachable and its kubelet will not end the pod: delete it by force.
    ForcePod,
    /// The worker has ended: remove its runner, then the finalizer.
    Deregister,
    /// Being deleted: remove its runner unless that is busy, then the pod, then the finalizer.
    Remove,
    /// Its claim is gone: delete it.
    Delete,
    /// The worker has ended and its pod is no longer needed: delete the pod.
    DeletePod,
    /// The record is no longer needed: delete it.
    Forget,
    /// Nothing to do until this time, or until a change.
    Wait(Option<Timestamp>),
}

/// How long the pods and records of ended workers are kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    pub pod: Duration,
    pub record: Duration,
}

pub fn next(worker: &Worker, facts: WorkerFacts<'_>, keep: Keep, now: Timestamp) -> WorkerAction {
    if worker.metadata.deletion_timestamp.is_some() {
        return if holds_runner(worker) { WorkerAction::Remove } else { WorkerAction::Wait(None) };
    }
    if state(worker).is_over() {
        return after_end(worker, &facts, keep, now);
    }
    let had_pod = worker.status.as_ref().and_then(|status| status.pod.as_ref()).is_some();
    match (facts.pod, facts.unhealthy) {
        _ if facts.claim == ClaimView::Gone => WorkerAction::Delete,
        (Some(pod), _) if facts.lost.is_some() && !has_ended(pod) => WorkerAction::Fail(lost_node(pod, facts.lost)),
        _ if facts.surplus => WorkerAction::Retire,
        (None, _) if had_pod => {
            WorkerAction::Fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else"))
        }
        (None, _) => WorkerAction::Create,
        (Some(pod), Some(unhealthy)) if observe(state(worker), pod).state == state(worker) => {
            WorkerAction::GiveUp(Failure { containers: containers(pod), ..unhealthy })
        }
        (Some(pod), _) => match observe(state(worker), pod) {
            ended if ended.state == WorkerState::Completed && !facts.took_job => WorkerAction::Settle(ended),
            observed => WorkerAction::Mirror(observed),
        },
    }
}

/// The next action for a worker that has ended.
fn after_end(worker: &Worker, facts: &WorkerFacts<'_>, keep: Keep, now: Timestamp) -> WorkerAction {
    let end = since(worker).unwrap_or(now);
    let due = |at: Timestamp, action: WorkerAction| if at <= now { action } else { WorkerAction::Wait(Some(at)) };
    match facts.pod {
        Some(pod) if !has_ended(pod) => {
            let spec = pod.spec.as_ref();
            let deadline = spec.and_then(|spec| spec.active_deadline_seconds);
            let placed = spec.is_some_and(|spec| spec.node_name.is_some());
            if facts.lost.is_some() {
                WorkerAction::ForcePod
            } else if pod.metadata.deletion_timestamp.is_some() {
                WorkerAction::Wait(None)
            } else if !placed {
                // It is not scheduled, so it has no log.
                WorkerAction::DeletePod
            } else if deadline != Some(1) {
                WorkerAction::EndPod
            } else {
                due(end.saturating_add(POD_END_GRACE).unwrap_or(now), WorkerAction::DeletePod)
            }
        }
        _ if holds_runner(worker) => WorkerAction::Deregister,
        _ if facts.outdated => WorkerAction::Forget,
        Some(_) => due(pod_grace(worker, keep).after(end), WorkerAction::DeletePod),
        // An open claim still counts its finished workers.
        None if facts.claim == ClaimView::Open => WorkerAction::Wait(None),
        None if now < keep.record.after(end) => WorkerAction::Wait(None),
        None => WorkerAction::Forget,
    }
}

fn lost_node(pod: &Pod, lost: Option<LostNode>) -> Failure {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    let failure = match lost {
        Some(LostNode::Deleted) => failure(FailureReason::NodeDeleted, &format!("node {node} was deleted")),
        _ => failure(FailureReason::NodeUnreachable, &format!("node {node} does not answer")),
    };
    Failure { containers: containers(pod), ..failure }
}

/// A pod whose runner took no job tells nothing that its worker does not tell.
fn pod_grace(worker: &Worker, keep: Keep) -> Duration {
    let failure = worker.status.as_ref().and_then(|status| status.failure.as_ref());
    let empty = failure.is_some_and(|failure| failure.reason == FailureReason::RunnerWithoutJob);
    if empty { Duration::from_secs(0) } else { keep.pod }
}

pub fn failure(reason: FailureReason, message: &str) -> Failure {
    let message = clip(message, FAILURE_MESSAGE_MAX);
    Failure { reason, message, containers: vec![], events: vec![], log_tail: None }
}

/// The worker's state according to its pod, one transition ahead at most: the worker of a pod that ended before it was
/// seen running becomes running first.
pub fn observe(before: WorkerState, pod: &Pod) -> Observed {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let (state, failure) = match (before, phase) {
        (WorkerState::Pending, "Running" | "Succeeded") => (WorkerState::Running, None),
        (WorkerState::Running, "Succeeded") => (WorkerState::Completed, None),
        (WorkerState::Pending | WorkerState::Running, "Failed") => (WorkerState::Failed, Some(pod_failure(pod))),
        // The pod of an unreachable kubelet is `Unknown`. States never move back.
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
    let reported = status.and_then(|status| match (&status.reason, &status.message) {
        (Some(reason), Some(message)) => Some(format!("{reason}: {message}")),
        (reason, message) => reason.clone().or_else(|| message.clone()),
    });
    let ended = containers.iter().find(|container| container.exit_code.is_some_and(|code| code != 0));
    let message = reported.or_else(|| {
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
