//! The status of a worker on a board.

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time};

use super::{
    health::{RunnerFacts, RunnerState},
    pod::runner_id,
    worker::{self, Observed},
};
use crate::api::{
    ClaimReason, Failure, PodPlace, Runner, RunnerClaim, Worker, WorkerState, WorkerStatus, ready_condition,
    set_condition,
};

/// The worker's status with the fields filled in that never change.
pub fn current(worker: &Worker, claim: Option<&RunnerClaim>, pod: Option<&Pod>, now: Timestamp) -> WorkerStatus {
    let mut status = worker.status.clone().unwrap_or_default();
    let (name, spec) = (worker.metadata.name.clone().unwrap_or_default(), worker.spec.board.as_ref());
    status.claim = spec.map(|spec| spec.claim.clone());
    status.run_id = status.run_id.or_else(|| claim.map(|claim| claim.spec.run_id.clone()));
    let runner = status.runner.get_or_insert(Runner { id: None, name });
    runner.id = runner.id.or_else(|| pod.and_then(runner_id));
    status.observed_generation = worker.metadata.generation;
    enter(&mut status, worker::state(worker), now);
    status
}

/// The status of a worker that waits for something outside.
pub fn waiting(
    worker: &Worker,
    mut status: WorkerStatus,
    reason: ClaimReason,
    message: &str,
    now: Timestamp,
) -> WorkerStatus {
    set_ready(worker, &mut status, false, reason, message, now);
    status
}

/// The status of a worker as its pod and GitHub show it. A failure of the pod is left to [`failed`].
pub fn observed(
    worker: &Worker,
    mut status: WorkerStatus,
    observed: &Observed,
    runner: RunnerFacts,
    now: Timestamp,
) -> WorkerStatus {
    let name = worker.metadata.name.clone().unwrap_or_default();
    status.set_pod(PodPlace { name, node: observed.node.clone() });
    if observed.failure.is_some() {
        return status;
    }
    enter(&mut status, observed.state, now);
    let mut ready = |ready, reason, message: &str| set_ready(worker, &mut status, ready, reason, message, now);
    match observed.state {
        // Ready means that GitHub reports the runner online; a running pod is not enough.
        WorkerState::Running if runner.is_there() => ready(true, ClaimReason::Ready, "its runner is online"),
        WorkerState::Running if worker::is_up(worker) => {}
        WorkerState::Running => {
            let unknown = runner.sighting.is_some_and(|sighting| sighting.seen == RunnerState::Unknown);
            let what = if unknown { "GitHub does not know its runner" } else { "its runner is not online yet" };
            ready(false, ClaimReason::Validating, &format!("the pod runs; {what}"));
        }
        WorkerState::Completed => ready(false, ClaimReason::Completed, "its job is done"),
        WorkerState::Pending => {
            ready(false, ClaimReason::Validating, observed.waiting.as_deref().unwrap_or("the pod is starting"));
        }
        // A board's worker has no other state.
        WorkerState::Failed
        | WorkerState::Created
        | WorkerState::Idle
        | WorkerState::Claimed
        | WorkerState::Terminated => {}
    }
    status
}

pub fn failed(worker: &Worker, mut status: WorkerStatus, failure: Failure, now: Timestamp) -> WorkerStatus {
    enter(&mut status, WorkerState::Failed, now);
    set_ready(worker, &mut status, false, ClaimReason::WorkerLost, &failure.message, now);
    status.failure = Some(failure.into());
    status
}

fn enter(status: &mut WorkerStatus, state: WorkerState, now: Timestamp) {
    if status.state != Some(state) {
        status.state = Some(state);
        status.state_since = Some(Time(now));
    }
}

fn set_ready(
    worker: &Worker,
    status: &mut WorkerStatus,
    ready: bool,
    reason: ClaimReason,
    message: &str,
    now: Timestamp,
) {
    let condition = ready_condition(ready, reason, message, worker.metadata.generation, now);
    set_condition(&mut status.conditions, condition);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{FailureReason, READY},
        boards::health::{Binding, Sighting},
        fixtures::boards::{board_worker, claim, pod},
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn ready(status: &WorkerStatus) -> (&str, &str, &str) {
        let ready = status.conditions.iter().find(|condition| condition.type_ == READY).unwrap();
        (&ready.status, &ready.reason, &ready.message)
    }

    #[test]
    fn a_running_pod_is_ready_when_github_reports_its_runner() {
        let (worker, claim, pod) = (board_worker("w", "p", "c"), claim("c", 0), pod("w", "p", Some("n"), "Running"));
        let sighting = |seen| RunnerFacts { sighting: Some(Sighting { at: at(1), seen }), ..RunnerFacts::default() };
        let bound = RunnerFacts { binding: Some(Binding::Busy), ..RunnerFacts::default() };
        let pod_runs = |state| Observed { state, node: Some("n".into()), waiting: None, failure: None };
        for (state, runner, expected) in [
            (WorkerState::Pending, RunnerFacts::default(), ("False", "Validating", "the pod is starting")),
            (
                WorkerState::Running,
                sighting(RunnerState::Unknown),
                ("False", "Validating", "the pod runs; GitHub does not know its runner"),
            ),
            (
                WorkerState::Running,
                RunnerFacts::default(),
                ("False", "Validating", "the pod runs; its runner is not online yet"),
            ),
            (WorkerState::Running, sighting(RunnerState::Idle), ("True", "Ready", "its runner is online")),
            (WorkerState::Running, bound, ("True", "Ready", "its runner is online")),
            (WorkerState::Completed, RunnerFacts::default(), ("False", "Completed", "its job is done")),
        ] {
            let status = current(&worker, Some(&claim), Some(&pod), at(0));
            let status = observed(&worker, status, &pod_runs(state), runner, at(5));
            assert_eq!((status.state, ready(&status)), (Some(state), expected), "{runner:?}");
            assert_eq!((status.claim.as_deref(), status.run_id.as_deref()), (Some("c"), Some("1")));
        }
    }

    #[test]
    fn a_state_keeps_the_time_at_which_it_was_entered() {
        let mut worker = board_worker("w", "p", "c");
        let first = current(&worker, None, None, at(0));
        worker.status = Some(first.clone());
        assert_eq!(current(&worker, None, None, at(9)).state_since, first.state_since);
        let failure = worker::failure(FailureReason::PodMissing, "gone");
        let status = failed(&worker, first, failure, at(9));
        assert_eq!((status.state, status.state_since.clone()), (Some(WorkerState::Failed), Some(Time(at(9)))));
        assert_eq!(ready(&status), ("False", "WorkerLost", "gone"));
    }
}
