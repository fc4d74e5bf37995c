//! The worker of a board: what it is, what its pod says about it, and what to do next.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::api::{
    BoardWorker, ContainerEnd, Duration, FAILURE_MESSAGE_MAX, FINALIZER, Failure, FailureReason, LABEL_CLAIM,
    LABEL_ENTITY, LABEL_POOL, RunnerClaim, Worker, WorkerSpec, WorkerState, clip,
};

/// The label that tells a claim's workers from those of an earlier claim of the same name.
pub const LABEL_CLAIM_UID: &str = "paddock.dev/claim-uid";

/// A worker as it is first written. Its finalizer says that a runner may be registered for it; it goes as soon as there
/// is none, so that a finished worker is a mere record.
///
/// It has no owner: a claim that is deleted must leave a busy worker alone, and a finished one is kept for its logs.
pub fn worker(name: String, claim: &RunnerClaim, pool: &str, board: BoardWorker) -> Worker {
    let labels = [
        (LABEL_POOL, pool),
        (LABEL_CLAIM, &board.claim),
        (LABEL_ENTITY, &board.entity),
        (LABEL_CLAIM_UID, claim.metadata.uid.as_deref().unwrap_or_default()),
    ];
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: claim.metadata.namespace.clone(),
        labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
        finalizers: Some(vec![FINALIZER.into()]),
        ..ObjectMeta::default()
    };
    let spec = WorkerSpec { pool: pool.into(), ec2: None, board: Some(board) };
    Worker { metadata, spec, status: None }
}

/// Whether the worker was made for exactly this claim.
pub fn serves(worker: &Worker, claim: &RunnerClaim) -> bool {
    let uid = label(&worker.metadata.labels, LABEL_CLAIM_UID);
    worker.metadata.namespace == claim.metadata.namespace
        && worker.spec.board.as_ref().is_some_and(|board| Some(&board.claim) == claim.metadata.name.as_ref())
        && uid.is_some()
        && uid == claim.metadata.uid.as_deref()
}

fn label<'a>(labels: &'a Option<BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    labels.as_ref()?.get(key).map(String::as_str)
}

/// A worker that nobody has looked at yet is pending.
pub fn state(worker: &Worker) -> WorkerState {
    worker.status.as_ref().and_then(|status| status.state).unwrap_or(WorkerState::Pending)
}

pub fn since(worker: &Worker) -> Option<Timestamp> {
    Some(worker.status.as_ref()?.state_since.as_ref()?.0)
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

/// The next thing to do for a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Get a JIT config, and make the Secret and the pod.
    Create,
    /// Write down what the pod says.
    Mirror(Observed),
    /// Write down that it failed.
    Fail(Failure),
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

pub fn next(worker: &Worker, pod: Option<&Pod>, claim: ClaimView, keep: Keep, now: Timestamp) -> Step {
    if worker.metadata.deletion_timestamp.is_some() {
        return if holds_runner(worker) { Step::Remove } else { Step::Rest(None) };
    }
    let seen = worker.status.as_ref().and_then(|status| status.pod.as_ref()).is_some();
    let due = |time: Duration, step: Step| match since(worker).map_or(now, |end| time.after(end)) {
        end if end <= now => step,
        end => Step::Rest(Some(end)),
    };
    match (state(worker).is_over(), pod) {
        (true, _) if holds_runner(worker) => Step::Deregister,
        (true, Some(_)) => due(keep.pod, Step::DeletePod),
        // An open claim still counts what its workers have done.
        (true, None) if claim == ClaimView::Open => Step::Rest(None),
        (true, None) => due(keep.record, Step::Forget),
        (false, _) if claim == ClaimView::Gone => Step::Delete,
        (false, None) if seen => Step::Fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else")),
        (false, None) => Step::Create,
        (false, Some(pod)) => Step::Mirror(observe(state(worker), pod)),
    }
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
    let containers: Vec<_> = status
        .and_then(|status| status.container_statuses.as_deref())
        .unwrap_or_default()
        .iter()
        .map(container_end)
        .collect();
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
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::samples::{board_worker, claim, pod, with};

    const KEEP: Keep = Keep { pod: Duration::from_secs(60), record: Duration::from_secs(3600) };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn in_state(state: &str) -> Worker {
        with(&board_worker("w", "p", "c"), json!({"status": {"state": state, "stateSince": "1970-01-01T00:00:00Z"}}))
    }

    #[test]
    fn each_state_has_its_next_step() {
        let fresh = board_worker("w", "p", "c");
        let seen = with(&fresh, json!({"status": {"pod": {"name": "w"}}}));
        let record = with(&in_state("completed"), json!({"metadata": {"finalizers": null}}));
        let deleted = json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}});
        let running = pod("w", "p", Some("n"), "Running");
        let mirror = Step::Mirror(observe(WorkerState::Pending, &running));
        let missing = Step::Fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else"));
        let none = None::<&Pod>;
        use ClaimView::{Gone, Open, Over};
        for (name, worker, pod, claim, now, expected) in [
            ("nothing made yet", &fresh, none, Open, 0, Step::Create),
            ("its pod is there", &fresh, Some(&running), Open, 0, mirror),
            ("its pod was there and is gone", &seen, none, Open, 0, missing),
            ("its claim is over, a spare serves others", &fresh, none, Over, 0, Step::Create),
            ("its claim is gone", &fresh, Some(&running), Gone, 0, Step::Delete),
            ("it failed", &in_state("failed"), none, Open, 0, Step::Deregister),
            ("it completed and its claim is gone", &in_state("completed"), none, Gone, 0, Step::Deregister),
            ("a record with a pod", &record, Some(&running), Gone, 59, Step::Rest(Some(at(60)))),
            ("a record with an old pod", &record, Some(&running), Open, 60, Step::DeletePod),
            ("a record that counts", &record, none, Open, 9999, Step::Rest(None)),
            ("a record", &record, none, Over, 3599, Step::Rest(Some(at(3600)))),
            ("an old record", &record, none, Gone, 3600, Step::Forget),
            ("it is being deleted", &with(&fresh, deleted.clone()), Some(&running), Open, 0, Step::Remove),
            ("a record is being deleted", &with(&record, deleted), Some(&running), Open, 0, Step::Rest(None)),
        ] {
            assert_eq!(next(worker, pod, claim, KEEP, at(now)), expected, "{name}");
        }
    }

    #[test]
    fn a_pod_that_cannot_start_says_why() {
        let unscheduled =
            json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]);
        let pending = with(&pod("w", "p", None, "Pending"), json!({"status": {"conditions": unscheduled}}));
        assert_eq!(observe(WorkerState::Pending, &pending).waiting.as_deref(), Some("Unschedulable: 0/1 nodes"));
        let pulling = json!([{
            "name": "runner", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "no image"}},
        }]);
        let pulling = with(&pending, json!({"status": {"containerStatuses": pulling}}));
        assert_eq!(observe(WorkerState::Pending, &pulling).waiting.as_deref(), Some("ErrImageNeverPull: no image"));
        assert_eq!(observe(WorkerState::Pending, &pod("w", "p", None, "Running")).waiting, None);
    }

    #[test]
    fn states_move_only_along_their_arrows() {
        use WorkerState::{Completed, Failed, Pending, Running};
        for (before, phase, after) in [
            (Pending, "Pending", Pending),
            (Pending, "Running", Running),
            (Pending, "Succeeded", Running),
            (Pending, "Failed", Failed),
            (Running, "Pending", Running),
            (Running, "Running", Running),
            (Running, "Succeeded", Completed),
            (Running, "Failed", Failed),
            (Running, "Unknown", Running),
        ] {
            assert_eq!(observe(before, &pod("w", "p", None, phase)).state, after, "{before:?} and {phase}");
        }
    }

    #[test]
    fn a_failure_says_how_the_pod_ended() {
        let terminated = json!({"exitCode": 137, "reason": "OOMKilled"});
        let status = json!({"containerStatuses": [
            {"name": "runner", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": terminated}},
        ]});
        let failed = with(&pod("w", "p", None, "Failed"), json!({"status": status}));
        let failure = observe(WorkerState::Running, &failed).failure.unwrap();
        assert_eq!(failure.message, "container runner ended with exit code 137 (OOMKilled)");
        assert_eq!(failure.containers[0].exit_code, Some(137));
        let late = with(&failed, json!({"status": {"reason": "DeadlineExceeded", "message": "too long"}}));
        assert_eq!(observe(WorkerState::Running, &late).failure.unwrap().message, "DeadlineExceeded: too long");
    }

    #[test]
    fn a_new_claim_of_an_old_name_does_not_inherit_its_workers() {
        let old = claim("c", 0);
        let board = board_worker("w", "p", "c").spec.board.unwrap();
        let worker = worker("w".into(), &old, "p", board);
        assert!(serves(&worker, &old) && holds_runner(&worker));
        assert!(!serves(&worker, &with(&old, json!({"metadata": {"uid": "another"}}))));
        assert!(!serves(&worker, &claim("d", 0)));
    }
}
