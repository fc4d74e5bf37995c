//! Whether a board's worker is well, and when GitHub has to be asked to know.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};

use super::worker::{failure, is_up, ready_since, since, state};
use crate::api::{BoardTimeouts, Duration, Failure, FailureReason, Worker, WorkerState};

/// The taint of a node whose kubelet is silent.
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

/// When GitHub is first asked for the runner of a claim that somebody waits for, once its pod runs.
const FIRST_LOOK: SignedDuration = SignedDuration::from_secs(1);
/// When it is first asked for a runner whose job tells by webhook that it is there, and how far apart looks are at most.
const SLOW_LOOK: SignedDuration = SignedDuration::from_mins(1);

/// What a worker's runner does, as far as jobs tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// It runs a claim's job.
    Busy,
    /// The one job that it could run was over at this moment.
    Done(Timestamp),
}

/// What GitHub's list of runners said of one, and when it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    pub at: Timestamp,
    pub seen: RunnerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerState {
    /// It is not in the list.
    Unknown,
    Offline,
    Idle,
    Busy,
}

/// What is known of a worker's runner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunnerFacts {
    pub binding: Option<Binding>,
    pub sighting: Option<Sighting>,
    /// Webhooks tell of its claim's job, so that GitHub need not be asked whether the runner is there.
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

/// The outcome of an examination.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HealthCheck {
    /// What is wrong with it.
    pub unhealthy: Option<Failure>,
    /// GitHub must be asked: nothing that it said before this moment helps.
    pub ask: Option<Timestamp>,
    /// When something may change by itself.
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

/// The three rules: a pod that does not start, a runner that does not come, a runner that gets no job. Without an answer
/// from GitHub nobody is unhealthy, and a busy runner never is.
pub fn examine(
    worker: &Worker,
    pod: &Pod,
    known: RunnerFacts,
    timeouts: &BoardTimeouts,
    now: Timestamp,
) -> HealthCheck {
    match state(worker) {
        WorkerState::Pending => pending(pod, timeouts, now),
        WorkerState::Running => running(worker, known, timeouts, now),
        WorkerState::Created
        | WorkerState::Idle
        | WorkerState::Claimed
        | WorkerState::Terminated
        | WorkerState::Completed
        | WorkerState::Failed => HealthCheck::default(),
    }
}

fn pending(pod: &Pod, timeouts: &BoardTimeouts, now: Timestamp) -> HealthCheck {
    let Some(made) = pod.metadata.creation_timestamp.as_ref() else { return HealthCheck::default() };
    let limit = timeouts.pod_pending.after(made.0);
    if now < limit {
        return HealthCheck::next(limit);
    }
    let message = format!("the pod did not start within {}", timeouts.pod_pending);
    HealthCheck::unhealthy(FailureReason::PodStuckPending, &message)
}

fn running(worker: &Worker, known: RunnerFacts, timeouts: &BoardTimeouts, now: Timestamp) -> HealthCheck {
    let Some(start) = since(worker) else { return HealthCheck::default() };
    match known.binding {
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
    if is_up(worker) || known.is_there() {
        return serving(ready_since(worker).unwrap_or(start), known, timeouts.idle, now);
    }
    let limit = timeouts.registration.after(start);
    if now < limit {
        let (last, next) = looks(start, if known.has_job { SLOW_LOOK } else { FIRST_LOOK }, now);
        let ask = last.filter(|last| known.since(*last).is_none());
        return HealthCheck { ask, next: Some(next.min(limit)), ..HealthCheck::default() };
    }
    match known.since(limit) {
        None => HealthCheck { ask: Some(limit), ..HealthCheck::default() },
        Some(seen) => {
            let what =
                if seen == RunnerState::Unknown { "GitHub does not know its runner" } else { "its runner is offline" };
            let message = format!("the pod ran for {}, and {what}", timeouts.registration);
            HealthCheck::unhealthy(FailureReason::RunnerNeverRegistered, &message)
        }
    }
}

/// A runner that is there, and has not been heard to have a job.
fn serving(start: Timestamp, known: RunnerFacts, idle: Duration, now: Timestamp) -> HealthCheck {
    let first = idle.after(start);
    if now < first {
        return HealthCheck::next(first);
    }
    match known.sighting.filter(|sighting| sighting.at >= first) {
        None => HealthCheck { ask: Some(first), ..HealthCheck::default() },
        // Its job was not heard of. It is looked after again when as much time has passed.
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

/// The last look that is due, if any is, and the one after it: further and further apart.
fn looks(start: Timestamp, first: SignedDuration, now: Timestamp) -> (Option<Timestamp>, Timestamp) {
    let (mut last, mut next, mut step) = (None, start + first, first);
    while next <= now {
        (last, next, step) = (Some(next), next + step, (step * 2).min(SLOW_LOOK));
    }
    (last, next)
}

/// Whether the node's kubelet is silent, so that nobody there can end a pod.
pub fn is_unreachable(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    taints.iter().any(|taint| taint.key == UNREACHABLE)
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

    fn exam(worker: &Worker, known: RunnerFacts, now: i64) -> HealthCheck {
        examine(worker, &pod("w", "p", None, "Running"), known, &BoardTimeouts::default(), at(now))
    }

    fn reason(exam: &HealthCheck) -> Option<FailureReason> {
        exam.unhealthy.as_ref().map(|failure| failure.reason)
    }

    #[test]
    fn a_pod_may_be_pending_for_so_long() {
        let made = with(&pod("w", "p", None, "Pending"), json!({"metadata": {"creationTimestamp": at(0)}}));
        let look = |now| {
            examine(&board_worker("w", "p", "c"), &made, RunnerFacts::default(), &BoardTimeouts::default(), at(now))
        };
        assert_eq!(look(599), HealthCheck::next(at(600)));
        assert_eq!(reason(&look(600)), Some(FailureReason::PodStuckPending));
    }

    #[test]
    fn a_runner_that_does_not_come_is_given_up_only_when_github_says_so() {
        let never = Some(FailureReason::RunnerNeverRegistered);
        let late = exam(&runs(), RunnerFacts::default(), 120);
        assert_eq!((reason(&late), late.ask), (None, Some(at(120))), "GitHub has not been asked");
        for (known, expected) in [
            (seen(RunnerState::Unknown, 119), None),
            (seen(RunnerState::Unknown, 120), never),
            (seen(RunnerState::Offline, 120), never),
            (seen(RunnerState::Idle, 120), None),
            (seen(RunnerState::Busy, 120), None),
            (RunnerFacts { binding: Some(Binding::Busy), ..seen(RunnerState::Unknown, 120) }, None),
        ] {
            assert_eq!(reason(&exam(&runs(), known, 500)), expected, "{known:?}");
        }
    }

    #[test]
    fn a_runner_without_a_job_is_given_up_and_a_busy_one_never() {
        let idle = Some(FailureReason::RunnerIdle);
        assert_eq!(exam(&up(), RunnerFacts::default(), 609), HealthCheck::next(at(610)));
        assert_eq!(exam(&up(), RunnerFacts::default(), 610).ask, Some(at(610)));
        for (known, expected) in [
            (seen(RunnerState::Idle, 609), None),
            (seen(RunnerState::Idle, 610), idle),
            (seen(RunnerState::Offline, 610), idle),
            (seen(RunnerState::Unknown, 610), idle),
            (seen(RunnerState::Busy, 610), None),
            (RunnerFacts { binding: Some(Binding::Busy), ..seen(RunnerState::Idle, 610) }, None),
        ] {
            assert_eq!(reason(&exam(&up(), known, 100_000)), expected, "{known:?}");
        }
        assert_eq!(exam(&up(), seen(RunnerState::Busy, 700), 1299), HealthCheck::next(at(1300)));
        assert_eq!(exam(&up(), seen(RunnerState::Busy, 700), 1300).ask, Some(at(1300)), "as long again");
        let busy = RunnerFacts { binding: Some(Binding::Busy), ..RunnerFacts::default() };
        assert_eq!(exam(&up(), busy, 100_000), HealthCheck::default(), "nobody is asked about a job that runs");
    }

    #[test]
    fn a_pod_that_outlives_its_job_for_long_is_ended() {
        let done = RunnerFacts { binding: Some(Binding::Done(at(50))), ..RunnerFacts::default() };
        assert_eq!(exam(&up(), done, 169), HealthCheck::next(at(170)));
        assert_eq!(reason(&exam(&up(), done, 170)), Some(FailureReason::RunnerIdle));
    }

    #[test]
    fn looks_for_a_runner_are_further_and_further_apart() {
        let mut asked = vec![];
        let mut known = RunnerFacts::default();
        for now in 0..120 {
            if exam(&runs(), known, now).ask.is_some() {
                asked.push(now);
                known = seen(RunnerState::Offline, now);
            }
        }
        assert_eq!(asked, [1, 2, 4, 8, 16, 32, 64]);
        let told = |now| exam(&runs(), RunnerFacts { has_job: true, ..RunnerFacts::default() }, now).ask;
        assert_eq!((told(59), told(60)), (None, Some(at(60))), "a webhook will tell");
    }

    #[test]
    fn a_node_is_unreachable_by_its_taint() {
        let taint = json!({"spec": {"taints": [{"key": UNREACHABLE, "effect": "NoExecute"}]}});
        assert!(is_unreachable(&with(&node("n", 1), taint)) && !is_unreachable(&node("n", 1)));
    }
}
