//! Health rules of a board's worker, and when they need an answer from GitHub.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};

use super::worker::{failure, is_up, ready_since, since, state};
use crate::api::{BoardTimeouts, Duration, Failure, FailureReason, Worker, WorkerState};

/// The taint of a node whose kubelet does not respond.
const UNREACHABLE_TAINT: &str = "node.kubernetes.io/unreachable";

/// First poll interval for the runner of a claim without a job, which waits for the runner; starts when its pod runs.
const RUNNER_POLL_MIN: SignedDuration = SignedDuration::from_secs(1);
/// Longest poll interval; also the first one where webhooks report the job, so that polling is only the fallback.
const RUNNER_POLL_MAX: SignedDuration = SignedDuration::from_mins(1);

/// What a worker's runner does, derived from jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// It runs a claim's job.
    Busy,
    /// Its only job ended at this time.
    Done(Timestamp),
}

/// A runner's state in GitHub's list, and when the list was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    pub at: Timestamp,
    pub seen: RunnerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerState {
    /// Not in the list.
    Unknown,
    Offline,
    Idle,
    Busy,
}

/// Facts about a worker's runner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunnerFacts {
    pub binding: Option<Binding>,
    pub sighting: Option<Sighting>,
    /// Webhooks report its claim's job, so that GitHub is rarely polled for the runner.
    pub has_job: bool,
}

impl RunnerFacts {
    /// Whether the runner is, or was, online.
    pub fn is_there(&self) -> bool {
        self.binding.is_some()
            || self.sighting.is_some_and(|sighting| matches!(sighting.seen, RunnerState::Idle | RunnerState::Busy))
    }

    fn since(&self, moment: Timestamp) -> Option<RunnerState> {
        self.sighting.filter(|sighting| sighting.at >= moment).map(|sighting| sighting.seen)
    }
}

/// The outcome of a health check.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HealthCheck {
    /// Why the worker is unhealthy, if it is.
    pub unhealthy: Option<Failure>,
    /// GitHub must be asked; only an answer from this time on counts.
    pub ask: Option<Timestamp>,
    /// When the outcome may change without an event.
    pub next: Option<Timestamp>,
}

impl HealthCheck {
    fn next(at: Timestamp) -> Self {
        Self { next: Some(at), ..Self::default() }
    }

    fn unhealthy(reason: FailureReason, message: &str) -> Self {
        Self { unhealthy: Some(failure(reason, message)), ..Self::default() }
    }
}

/// The three rules: a pod that does not start, a runner that does not register, a runner that gets no job. No runner is
/// unhealthy without an answer from GitHub, and a busy one never is.
pub fn examine(
    worker: &Worker,
    pod: &Pod,
    facts: RunnerFacts,
    timeouts: &BoardTimeouts,
    now: Timestamp,
) -> HealthCheck {
    match state(worker) {
        WorkerState::Pending => pending(pod, timeouts, now),
        WorkerState::Running => running(worker, facts, timeouts, now),
        WorkerState::Created
        | WorkerState::Idle
        | WorkerState::Claimed
        | WorkerState::Terminated
        | WorkerState::Completed
        | WorkerState::Failed => HealthCheck::default(),
    }
}

fn pending(pod: &Pod, timeouts: &BoardTimeouts, now: Timestamp) -> HealthCheck {
    let Some(created) = pod.metadata.creation_timestamp.as_ref() else { return HealthCheck::default() };
    let limit = timeouts.pod_pending.after(created.0);
    if now < limit {
        return HealthCheck::next(limit);
    }
    let message = format!("the pod did not start within {}", timeouts.pod_pending);
    HealthCheck::unhealthy(FailureReason::PodStuckPending, &message)
}

fn running(worker: &Worker, facts: RunnerFacts, timeouts: &BoardTimeouts, now: Timestamp) -> HealthCheck {
    let Some(start) = since(worker) else { return HealthCheck::default() };
    match facts.binding {
        Some(Binding::Busy) => return HealthCheck::default(),
        Some(Binding::Done(end)) => {
            let limit = timeouts.registration.after(end);
            let message = format!("its job is done, and its pod has not ended within {}", timeouts.registration);
            return if now < limit {
                HealthCheck::next(limit)
            } else {
                HealthCheck::unhealthy(FailureReason::RunnerIdle, &message)
            };
        }
        None => {}
    }
    if is_up(worker) || facts.is_there() {
        return serving(ready_since(worker).unwrap_or(start), facts, timeouts.idle, now);
    }
    let limit = timeouts.registration.after(start);
    if now < limit {
        let (last, next) = polls(start, if facts.has_job { RUNNER_POLL_MAX } else { RUNNER_POLL_MIN }, now);
        let ask = last.filter(|last| facts.since(*last).is_none());
        return HealthCheck { ask, next: Some(next.min(limit)), ..HealthCheck::default() };
    }
    match facts.since(limit) {
        None => HealthCheck { ask: Some(limit), ..HealthCheck::default() },
        Some(seen) => {
            let what =
                if seen == RunnerState::Unknown { "GitHub does not know its runner" } else { "its runner is offline" };
            let message = format!("the pod ran for {}, and {what}", timeouts.registration);
            HealthCheck::unhealthy(FailureReason::RunnerNeverRegistered, &message)
        }
    }
}

/// A registered runner that no webhook has reported a job for.
fn serving(start: Timestamp, facts: RunnerFacts, idle: Duration, now: Timestamp) -> HealthCheck {
    let first = idle.after(start);
    if now < first {
        return HealthCheck::next(first);
    }
    match facts.sighting.filter(|sighting| sighting.at >= first) {
        None => HealthCheck { ask: Some(first), ..HealthCheck::default() },
        // The webhook of its job was lost. It is checked again after the same time.
        Some(Sighting { at, seen: RunnerState::Busy }) => match idle.after(at) {
            next if now < next => HealthCheck::next(next),
            next => HealthCheck { ask: Some(next), ..HealthCheck::default() },
        },
        Some(Sighting { seen: RunnerState::Idle, .. }) => {
            HealthCheck::unhealthy(FailureReason::RunnerIdle, &format!("its runner got no job within {idle}"))
        }
        Some(Sighting { seen: RunnerState::Offline, .. }) => HealthCheck::unhealthy(
            FailureReason::RunnerIdle,
            &format!("its runner got no job within {idle}, and is offline"),
        ),
        Some(Sighting { seen: RunnerState::Unknown, .. }) => HealthCheck::unhealthy(
            FailureReason::RunnerIdle,
            "GitHub does not know its runner any more, and its pod still runs",
        ),
    }
}

/// The last poll that is due, if any, and the next one. Intervals double up to the maximum.
fn polls(start: Timestamp, first: SignedDuration, now: Timestamp) -> (Option<Timestamp>, Timestamp) {
    let (mut last, mut next, mut step) = (None, start + first, first);
    while next <= now {
        (last, next, step) = (Some(next), next + step, (step * 2).min(RUNNER_POLL_MAX));
    }
    (last, next)
}

/// Whether the node's kubelet does not respond, so that it cannot end a pod.
pub fn is_unreachable(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    taints.iter().any(|taint| taint.key == UNREACHABLE_TAINT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        api::{ClaimReason, ready_condition},
        fixtures::boards::{board_worker, node, pod, with},
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Running since 0.
    fn runs() -> Worker {
        with(&board_worker("w", "p", "c"), json!({"status": {"state": "running", "stateSince": at(0)}}))
    }

    /// Online since 10.
    fn up() -> Worker {
        let ready = ready_condition(true, ClaimReason::Ready, "", None, at(10));
        with(&runs(), json!({"status": {"conditions": [ready]}}))
    }

    fn seen(seen: RunnerState, second: i64) -> RunnerFacts {
        RunnerFacts { sighting: Some(Sighting { at: at(second), seen }), ..RunnerFacts::default() }
    }

    fn check(worker: &Worker, facts: RunnerFacts, now: i64) -> HealthCheck {
        examine(worker, &pod("w", "p", None, "Running"), facts, &BoardTimeouts::default(), at(now))
    }

    fn reason(check: &HealthCheck) -> Option<FailureReason> {
        check.unhealthy.as_ref().map(|failure| failure.reason)
    }

    #[test]
    fn a_pod_may_be_pending_for_so_long() {
        let created = with(&pod("w", "p", None, "Pending"), json!({"metadata": {"creationTimestamp": at(0)}}));
        let checked_at = |now| {
            examine(&board_worker("w", "p", "c"), &created, RunnerFacts::default(), &BoardTimeouts::default(), at(now))
        };
        assert_eq!(checked_at(599), HealthCheck::next(at(600)));
        assert_eq!(reason(&checked_at(600)), Some(FailureReason::PodStuckPending));
    }

    #[test]
    fn a_runner_that_does_not_come_is_given_up_only_when_github_says_so() {
        let never = Some(FailureReason::RunnerNeverRegistered);
        let late = check(&runs(), RunnerFacts::default(), 120);
        assert_eq!((reason(&late), late.ask), (None, Some(at(120))), "GitHub has not been asked");
        for (facts, expected) in [
            (seen(RunnerState::Unknown, 119), None),
            (seen(RunnerState::Unknown, 120), never),
            (seen(RunnerState::Offline, 120), never),
            (seen(RunnerState::Idle, 120), None),
            (seen(RunnerState::Busy, 120), None),
            (RunnerFacts { binding: Some(Binding::Busy), ..seen(RunnerState::Unknown, 120) }, None),
        ] {
            assert_eq!(reason(&check(&runs(), facts, 500)), expected, "{facts:?}");
        }
    }

    #[test]
    fn a_runner_without_a_job_is_given_up_and_a_busy_one_never() {
        let idle = Some(FailureReason::RunnerIdle);
        assert_eq!(check(&up(), RunnerFacts::default(), 609), HealthCheck::next(at(610)));
        assert_eq!(check(&up(), RunnerFacts::default(), 610).ask, Some(at(610)));
        for (facts, expected) in [
            (seen(RunnerState::Idle, 609), None),
            (seen(RunnerState::Idle, 610), idle),
            (seen(RunnerState::Offline, 610), idle),
            (seen(RunnerState::Unknown, 610), idle),
            (seen(RunnerState::Busy, 610), None),
            (RunnerFacts { binding: Some(Binding::Busy), ..seen(RunnerState::Idle, 610) }, None),
        ] {
            assert_eq!(reason(&check(&up(), facts, 100_000)), expected, "{facts:?}");
        }
        assert_eq!(check(&up(), seen(RunnerState::Busy, 700), 1299), HealthCheck::next(at(1300)));
        assert_eq!(check(&up(), seen(RunnerState::Busy, 700), 1300).ask, Some(at(1300)), "as long again");
        let busy = RunnerFacts { binding: Some(Binding::Busy), ..RunnerFacts::default() };
        assert_eq!(check(&up(), busy, 100_000), HealthCheck::default(), "GitHub is not asked about a running job");
    }

    #[test]
    fn a_pod_that_outlives_its_job_for_long_is_ended() {
        let done = RunnerFacts { binding: Some(Binding::Done(at(50))), ..RunnerFacts::default() };
        assert_eq!(check(&up(), done, 169), HealthCheck::next(at(170)));
        assert_eq!(reason(&check(&up(), done, 170)), Some(FailureReason::RunnerIdle));
    }

    #[test]
    fn polls_for_a_runner_back_off() {
        let mut asked = vec![];
        let mut facts = RunnerFacts::default();
        for now in 0..120 {
            if check(&runs(), facts, now).ask.is_some() {
                asked.push(now);
                facts = seen(RunnerState::Offline, now);
            }
        }
        assert_eq!(asked, [1, 2, 4, 8, 16, 32, 64]);
        let asked_at = |now| check(&runs(), RunnerFacts { has_job: true, ..RunnerFacts::default() }, now).ask;
        assert_eq!((asked_at(59), asked_at(60)), (None, Some(at(60))), "a webhook will report it");
    }

    #[test]
    fn a_node_is_unreachable_by_its_taint() {
        let taint = json!({"spec": {"taints": [{"key": UNREACHABLE_TAINT, "effect": "NoExecute"}]}});
        assert!(is_unreachable(&with(&node("n", 1), taint)) && !is_unreachable(&node("n", 1)));
    }
}
