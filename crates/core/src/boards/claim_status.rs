//! The status of a claim that boards serve.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    slots::is_active,
    worker::{is_up, since, state},
};
use crate::{
    api::{
        ClaimPhase, ClaimReason, ClaimWorker, READY, Runner, RunnerClaim, RunnerClaimStatus, Worker, WorkerSource,
        WorkerState, ready_condition, set_condition,
    },
    demand::{job::JobState, schedule::Wait, supply::name},
};

/// How many ended workers are listed, latest first, so that the status stays small.
const ENDED_WORKERS_LISTED: usize = 16;

/// Facts about a claim besides the object itself.
#[derive(Clone, Debug, Default)]
pub struct BoardClaimFacts<'a> {
    pub pool: Option<&'a str>,
    /// Its own workers.
    pub workers: &'a [&'a Worker],
    /// The names of those whose runner took another claim's job.
    pub taken: BTreeSet<&'a str>,
    /// The scheduler's last decision; none for a claim that has all it needs.
    pub wait: Option<&'a Wait>,
    /// Progress of its job; none for a claim without one.
    pub job: Option<JobState>,
    /// The runner that has the job.
    pub runner: Option<Runner>,
}

pub fn status(claim: &RunnerClaim, facts: BoardClaimFacts<'_>, now: Timestamp) -> RunnerClaimStatus {
    let mut status = claim.status.clone().unwrap_or_default();
    let BoardClaimFacts { pool, workers, taken, wait, job, runner } = facts;
    let count = claim.spec.count;
    let serving: Vec<_> = workers.iter().filter(|worker| !taken.contains(name(worker))).copied().collect();
    let number = |wanted: &dyn Fn(&Worker) -> bool| {
        u32::try_from(serving.iter().filter(|worker| wanted(worker)).count()).unwrap_or(u32::MAX)
    };
    let active = number(&is_active);
    // A completed worker may have run any job, so it counts only for a claim without a job of its own.
    let served = if job.is_none() { number(&|worker| state(worker) == WorkerState::Completed) } else { 0 };
    let ready = match job {
        Some(JobState::Running) => count,
        _ => (served + number(&|worker| state(worker) == WorkerState::Running && is_up(worker))).min(count),
    };

    let held = workers.iter().find(|worker| is_active(worker)).map(|worker| worker.spec.pool.as_str());
    status.pool = held.or(pool).map(str::to_owned).or(status.pool);
    status.workers = listed(workers);
    status.runner = runner.or(status.runner);
    status.retry_at = wait.and_then(|wait| wait.retry_at).map(Time);
    status.observed_generation = claim.metadata.generation;
    let over = status.phase.filter(|phase| phase.is_over());
    if over.is_none() {
        status.set_progress(ready, count);
    }

    let wait_message = |default: &str| wait.map_or(default.to_owned(), |wait| wait.message.clone());
    let (phase, reason, message) = if let Some(phase) = over {
        status.retry_at = None;
        return RunnerClaimStatus { phase: Some(phase), ..status };
    } else if claim.metadata.deletion_timestamp.is_some() {
        (ClaimPhase::Releasing, ClaimReason::Releasing, releasing(workers))
    } else if job == Some(JobState::Gone) {
        (ClaimPhase::Failed, ClaimReason::JobNotFound, "GitHub does not know the job".into())
    } else if job == Some(JobState::Stuck) {
        let message = "its workflow run is over although the job is still queued";
        (ClaimPhase::Failed, ClaimReason::JobStuckQueued, message.into())
    } else if job == Some(JobState::Completed) {
        (ClaimPhase::Completed, ClaimReason::Completed, "the job is done".into())
    } else if job.is_none() && served >= count {
        (ClaimPhase::Completed, ClaimReason::Completed, "every runner has served its job".into())
    } else if let (Some(JobState::Running), Some(runner)) = (job, &status.runner) {
        (ClaimPhase::Ready, ClaimReason::Ready, format!("runner {} has the job", runner.name))
    } else if ready >= count {
        (ClaimPhase::Ready, ClaimReason::Ready, "every runner is registered".into())
    } else if active == 0 {
        let reason = wait.map_or(ClaimReason::Creating, |wait| wait.reason);
        (ClaimPhase::Pending, reason, wait_message("a worker is about to be created"))
    } else if active + served < count || serving.iter().any(|worker| is_active(worker) && !has_pod(worker)) {
        let reason = wait.map_or(ClaimReason::Creating, |wait| wait.reason);
        (
            ClaimPhase::Creating,
            reason,
            not_ready_message(&serving).unwrap_or_else(|| wait_message("the pod is being created")),
        )
    } else {
        let message =
            not_ready_message(&serving).unwrap_or_else(|| format!("{ready} of {count} runners are registered"));
        (ClaimPhase::Validating, ClaimReason::Validating, message)
    };
    status.enter(phase, now);
    let condition = ready_condition(phase == ClaimPhase::Ready, reason, message, claim.metadata.generation, now);
    set_condition(&mut status.conditions, condition);
    status
}

fn listed(workers: &[&Worker]) -> Vec<ClaimWorker> {
    let (active, mut over): (Vec<&Worker>, Vec<&Worker>) = workers.iter().partition(|worker| is_active(worker));
    over.sort_by_key(|worker| std::cmp::Reverse((since(worker), worker.metadata.name.clone())));
    over.truncate(ENDED_WORKERS_LISTED);
    let mut listed: Vec<_> = active.iter().chain(&over).map(claim_worker).collect();
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    listed
}

fn claim_worker(worker: &&Worker) -> ClaimWorker {
    let name = worker.metadata.name.clone().unwrap_or_default();
    ClaimWorker { name, state: state(worker), source: WorkerSource::Created }
}

fn has_pod(worker: &Worker) -> bool {
    worker.status.as_ref().is_some_and(|status| status.pod.is_some())
}

/// Why an active worker is not ready, from its condition.
fn not_ready_message(workers: &[&Worker]) -> Option<String> {
    workers.iter().filter(|worker| is_active(worker)).find_map(|worker| {
        let conditions = &worker.status.as_ref()?.conditions;
        let condition = conditions.iter().find(|c| c.type_ == READY && c.status == "False" && !c.message.is_empty())?;
        Some(format!("{}: {}", worker.metadata.name.as_deref().unwrap_or_default(), condition.message))
    })
}

/// Workers that a claim waits for while it is being deleted. Ended workers are not waited for.
pub fn holding<'a>(workers: &[&'a Worker]) -> Vec<&'a Worker> {
    workers.iter().copied().filter(|worker| is_active(worker)).collect()
}

fn releasing(workers: &[&Worker]) -> String {
    match holding(workers)[..] {
        [] => "everything is released".into(),
        ref left => match not_ready_message(left) {
            Some(message) => message,
            None => format!("waiting for {} of its workers to be removed", left.len()),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures::boards::{board_worker, claim, with};

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn worker(name: &str, status: Value) -> Worker {
        with(&board_worker(name, "p", "c"), json!({"status": status}))
    }

    fn up(name: &str) -> Worker {
        let ready = ready_condition(true, ClaimReason::Ready, "", None, NOW);
        worker(name, json!({"state": "running", "pod": {"name": name}, "conditions": [ready]}))
    }

    fn summary(claim: &RunnerClaim, facts: BoardClaimFacts<'_>) -> (ClaimPhase, String, String) {
        let status = status(claim, facts, NOW);
        let ready = &status.conditions[0];
        assert_eq!(ready.status == "True", status.phase == Some(ClaimPhase::Ready));
        (status.phase.unwrap(), ready.reason.clone(), status.progress)
    }

    #[test]
    fn the_phase_follows_the_workers() {
        let two = with(&claim("c", 0), json!({"spec": {"count": 2}}));
        let wait = Wait { reason: ClaimReason::NoFreeSlot, message: "no free slot".into(), retry_at: None };
        let fresh = board_worker("a", "p", "c");
        let starting = worker("a", json!({"state": "pending", "pod": {"name": "a"}}));
        let booting = worker("b", json!({"state": "running", "pod": {"name": "b"}}));
        let done = worker("a", json!({"state": "completed", "pod": {"name": "a"}}));
        let failed = worker("a", json!({"state": "failed"}));
        use ClaimPhase::{Completed, Creating, Pending, Ready, Validating};
        for (name, workers, waits, expected) in [
            ("nothing yet", vec![], true, (Pending, "NoFreeSlot", "0/2")),
            ("one of two reserved", vec![&fresh], true, (Creating, "NoFreeSlot", "0/2")),
            ("both, one without a pod", vec![&fresh, &booting], false, (Creating, "Creating", "0/2")),
            ("both with pods", vec![&starting, &booting], false, (Validating, "Validating", "0/2")),
            ("one is up", vec![&starting, &up("b")], false, (Validating, "Validating", "1/2")),
            ("both are up", vec![&up("a"), &up("b")], false, (Ready, "Ready", "2/2")),
            ("one has served already", vec![&done, &up("b")], false, (Ready, "Ready", "2/2")),
            ("one failed", vec![&failed, &up("b")], true, (Creating, "NoFreeSlot", "1/2")),
            (
                "both have served",
                vec![&done, &worker("b", json!({"state": "completed"}))],
                false,
                (Completed, "Completed", "2/2"),
            ),
        ] {
            let facts = BoardClaimFacts {
                pool: Some("p"),
                workers: &workers,
                wait: waits.then_some(&wait),
                ..BoardClaimFacts::default()
            };
            let (phase, reason, progress) = summary(&two, facts);
            assert_eq!((phase, reason.as_str(), progress.as_str()), expected, "{name}");
        }
    }

    #[test]
    fn the_phase_follows_the_job_on_any_worker() {
        let with_job = with(&claim("c", 0), json!({"spec": {"job": {"id": 5}}}));
        let done = worker("a", json!({"state": "completed"}));
        let mine = up("b");
        for (name, workers, job, phase) in [
            ("its worker ran another job", &[&done][..], JobState::Queued, ClaimPhase::Pending),
            ("its runner is up", &[&done, &mine][..], JobState::Queued, ClaimPhase::Ready),
            ("another's worker has it", &[][..], JobState::Running, ClaimPhase::Ready),
            ("it is done", &[&done][..], JobState::Completed, ClaimPhase::Completed),
            ("it was cancelled before there was a worker", &[][..], JobState::Completed, ClaimPhase::Completed),
            ("GitHub does not know it", &[&mine][..], JobState::Gone, ClaimPhase::Failed),
            ("it is stuck", &[&mine][..], JobState::Stuck, ClaimPhase::Failed),
        ] {
            let facts = BoardClaimFacts { workers, job: Some(job), ..BoardClaimFacts::default() };
            assert_eq!(summary(&with_job, facts).0, phase, "{name}");
        }
        let taken = BoardClaimFacts {
            workers: &[&mine],
            taken: ["b"].into(),
            job: Some(JobState::Queued),
            ..BoardClaimFacts::default()
        };
        assert_eq!(summary(&with_job, taken).0, ClaimPhase::Pending, "its runner took another job");
        let runner = Runner { id: Some(7), name: "w".into() };
        let facts = BoardClaimFacts {
            job: Some(JobState::Running),
            runner: Some(runner.clone()),
            ..BoardClaimFacts::default()
        };
        let status = status(&with_job, facts, NOW);
        assert_eq!(status.runner, Some(runner));
        assert_eq!(status.conditions[0].message, "runner w has the job");
    }

    #[test]
    fn the_list_of_workers_has_an_end() {
        let failed: Vec<_> = (0..600)
            .map(|second| {
                let since = Timestamp::from_second(second).unwrap();
                worker(&format!("w{second:03}"), json!({"state": "failed", "stateSince": since}))
            })
            .collect();
        let mine = up("active");
        let all: Vec<_> = failed.iter().chain([&mine]).collect();
        let listed =
            status(&claim("c", 0), BoardClaimFacts { workers: &all, ..BoardClaimFacts::default() }, NOW).workers;
        assert_eq!(listed.len(), ENDED_WORKERS_LISTED + 1);
        assert_eq!((listed[0].name.as_str(), listed[1].name.as_str()), ("active", "w584"));
    }

    #[test]
    fn what_is_over_stays_over_and_a_settled_claim_is_not_written() {
        fn facts<'a>(workers: &'a [&'a Worker]) -> BoardClaimFacts<'a> {
            BoardClaimFacts { pool: Some("p"), workers, ..BoardClaimFacts::default() }
        }
        let mut claim = claim("c", 0);
        let done = worker("a", json!({"state": "completed"}));
        claim.status = Some(status(&claim, facts(&[&done]), NOW));
        let later = NOW + jiff::SignedDuration::from_secs(9);
        assert_eq!(Some(status(&claim, facts(&[&done]), later)), claim.status);
        assert_eq!(status(&claim, facts(&[]), later).phase, Some(ClaimPhase::Completed));
        claim.status = None;
        let (a, b) = (up("a"), up("b"));
        claim.status = Some(status(&claim, facts(&[&a, &b]), NOW));
        assert_eq!(Some(status(&claim, facts(&[&b, &a]), later)), claim.status);
    }

    #[test]
    fn a_claim_that_is_being_deleted_says_which_worker_it_waits_for() {
        let going = with(&claim("c", 0), json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}}));
        let condition = ready_condition(false, ClaimReason::Releasing, "its runner is busy", None, NOW);
        let busy = worker("a", json!({"state": "running", "conditions": [condition]}));
        let status = status(&going, BoardClaimFacts { workers: &[&busy], ..BoardClaimFacts::default() }, NOW);
        assert_eq!(status.phase, Some(ClaimPhase::Releasing));
        assert_eq!(status.conditions[0].message, "a: its runner is busy");
        assert!(holding(&[&worker("a", json!({"state": "completed"}))]).is_empty());
    }
}
