//! The status of a claim that boards serve.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    board_worker::state,
    capacity::is_active,
    demand::{JobSeen, JobState, Wait},
};
use crate::api::{
    ClaimPhase, ClaimReason, ClaimWorker, READY, RunnerClaim, RunnerClaimStatus, Worker, WorkerSource, WorkerState,
    ready_condition, set_condition,
};

/// What is known about a claim beside its own object.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing<'a> {
    pub pool: Option<&'a str>,
    /// Its own workers.
    pub workers: &'a [&'a Worker],
    /// What the last decision said; nothing for a claim that has all it needs.
    pub wait: Option<&'a Wait>,
    pub job: Option<JobSeen>,
}

/// Whether a worker's runner is up: its pod runs and GitHub says that the runner is online, which the worker's own
/// `Ready` condition repeats. One that has served and ended was up too.
fn was_up(worker: &Worker) -> bool {
    let conditions = worker.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    match state(worker) {
        WorkerState::Completed => true,
        WorkerState::Running => conditions.iter().any(|c| c.type_ == READY && c.status == "True"),
        WorkerState::Pending
        | WorkerState::Failed
        | WorkerState::Created
        | WorkerState::Idle
        | WorkerState::Claimed
        | WorkerState::Terminated => false,
    }
}

pub fn status(claim: &RunnerClaim, standing: Standing<'_>, now: Timestamp) -> RunnerClaimStatus {
    let mut status = claim.status.clone().unwrap_or_default();
    let Standing { pool, workers, wait, job } = standing;
    let count = claim.spec.count;
    let number = |wanted: fn(&Worker) -> bool| {
        u32::try_from(workers.iter().filter(|worker| wanted(worker)).count()).unwrap_or(u32::MAX)
    };
    let active = number(is_active);
    let completed = number(|worker| state(worker) == WorkerState::Completed);
    let ready = number(was_up).min(count);

    status.pool = status.pool.or_else(|| pool.map(str::to_owned));
    status.workers = workers.iter().map(as_seen).collect();
    status.workers.sort_by(|a, b| a.name.cmp(&b.name));
    status.retry_at = wait.and_then(|wait| wait.retry_at).map(Time);
    status.observed_generation = claim.metadata.generation;
    let over = status.phase.filter(|phase| phase.is_over());
    if over.is_none() {
        status.set_progress(ready, count);
    }

    let told = |default: &str| wait.map_or(default.to_owned(), |wait| wait.message.clone());
    let (phase, reason, message) = if let Some(phase) = over {
        status.retry_at = None;
        return RunnerClaimStatus { phase: Some(phase), ..status };
    } else if claim.metadata.deletion_timestamp.is_some() {
        (ClaimPhase::Releasing, ClaimReason::Releasing, releasing(workers))
    } else if job.is_some_and(|job| job.state == JobState::Gone) {
        (ClaimPhase::Failed, ClaimReason::JobNotFound, "GitHub does not know the job".into())
    } else if job.is_some_and(|job| job.state == JobState::Completed) {
        (ClaimPhase::Completed, ClaimReason::Completed, "the job is done".into())
    } else if claim.spec.job.is_none() && completed >= count {
        (ClaimPhase::Completed, ClaimReason::Completed, "every runner has served its job".into())
    } else if ready >= count {
        (ClaimPhase::Ready, ClaimReason::Ready, "every runner is registered".into())
    } else if active == 0 {
        let reason = wait.map_or(ClaimReason::Creating, |wait| wait.reason);
        (ClaimPhase::Pending, reason, told("a worker is about to be made"))
    } else if active + completed < count || workers.iter().any(|worker| is_active(worker) && !has_pod(worker)) {
        let reason = wait.map_or(ClaimReason::Creating, |wait| wait.reason);
        (ClaimPhase::Creating, reason, complaint(workers).unwrap_or_else(|| told("the pod is being made")))
    } else {
        let message = complaint(workers).unwrap_or_else(|| format!("{ready} of {count} runners are registered"));
        (ClaimPhase::Validating, ClaimReason::Validating, message)
    };
    status.enter(phase, now);
    let condition = ready_condition(phase == ClaimPhase::Ready, reason, message, claim.metadata.generation, now);
    set_condition(&mut status.conditions, condition);
    status
}

fn as_seen(worker: &&Worker) -> ClaimWorker {
    let name = worker.metadata.name.clone().unwrap_or_default();
    ClaimWorker { name, state: state(worker), source: WorkerSource::Created }
}

fn has_pod(worker: &Worker) -> bool {
    worker.status.as_ref().is_some_and(|status| status.pod.is_some())
}

/// What holds an active worker up, in its own words.
fn complaint(workers: &[&Worker]) -> Option<String> {
    workers.iter().filter(|worker| is_active(worker)).find_map(|worker| {
        let conditions = &worker.status.as_ref()?.conditions;
        let told = conditions.iter().find(|c| c.type_ == READY && c.status == "False" && !c.message.is_empty())?;
        Some(format!("{}: {}", worker.metadata.name.as_deref().unwrap_or_default(), told.message))
    })
}

/// Workers that a claim which is being deleted still waits for. What is over goes its own way.
pub fn holding<'a>(workers: &[&'a Worker]) -> Vec<&'a Worker> {
    workers.iter().copied().filter(|worker| is_active(worker)).collect()
}

fn releasing(workers: &[&Worker]) -> String {
    match holding(workers)[..] {
        [] => "everything is given back".into(),
        ref left => match complaint(left) {
            Some(complaint) => complaint,
            None => format!("waiting for {} of its workers to go", left.len()),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::plan::samples::{board_worker, claim, with};

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn worker(name: &str, status: Value) -> Worker {
        with(&board_worker(name, "p", "c"), json!({"status": status}))
    }

    fn up(name: &str) -> Worker {
        let ready = ready_condition(true, ClaimReason::Ready, "", None, NOW);
        worker(name, json!({"state": "running", "pod": {"name": name}, "conditions": [ready]}))
    }

    fn told(claim: &RunnerClaim, standing: Standing<'_>) -> (ClaimPhase, String, String) {
        let status = status(claim, standing, NOW);
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
            let standing = Standing { pool: Some("p"), workers: &workers, wait: waits.then_some(&wait), job: None };
            let (phase, reason, progress) = told(&two, standing);
            assert_eq!((phase, reason.as_str(), progress.as_str()), expected, "{name}");
        }
    }

    #[test]
    fn a_job_is_done_when_github_says_so_whoever_ran_it() {
        let with_job = with(&claim("c", 0), json!({"spec": {"job": {"id": 5}}}));
        let done = worker("a", json!({"state": "completed"}));
        let asked = |state| Some(JobSeen { state, at: NOW });
        for (job, phase) in [
            (None, ClaimPhase::Ready),
            (asked(JobState::Queued), ClaimPhase::Ready),
            (asked(JobState::Completed), ClaimPhase::Completed),
            (asked(JobState::Gone), ClaimPhase::Failed),
        ] {
            let standing = Standing { workers: &[&done], job, ..Standing::default() };
            assert_eq!(told(&with_job, standing).0, phase, "{job:?}");
        }
    }

    #[test]
    fn what_is_over_stays_over_and_a_settled_claim_is_not_written() {
        fn standing<'a>(workers: &'a [&'a Worker]) -> Standing<'a> {
            Standing { pool: Some("p"), workers, ..Standing::default() }
        }
        let mut claim = claim("c", 0);
        let done = worker("a", json!({"state": "completed"}));
        claim.status = Some(status(&claim, standing(&[&done]), NOW));
        let later = NOW + jiff::SignedDuration::from_secs(9);
        assert_eq!(Some(status(&claim, standing(&[&done]), later)), claim.status);
        assert_eq!(status(&claim, standing(&[]), later).phase, Some(ClaimPhase::Completed));
        claim.status = None;
        let (a, b) = (up("a"), up("b"));
        claim.status = Some(status(&claim, standing(&[&a, &b]), NOW));
        assert_eq!(Some(status(&claim, standing(&[&b, &a]), later)), claim.status);
    }

    #[test]
    fn a_claim_that_is_being_deleted_says_which_worker_it_waits_for() {
        let going = with(&claim("c", 0), json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}}));
        let condition = ready_condition(false, ClaimReason::Releasing, "its runner is busy", None, NOW);
        let busy = worker("a", json!({"state": "running", "conditions": [condition]}));
        let status = status(&going, Standing { workers: &[&busy], ..Standing::default() }, NOW);
        assert_eq!(status.phase, Some(ClaimPhase::Releasing));
        assert_eq!(status.conditions[0].message, "a: its runner is busy");
        assert!(holding(&[&worker("a", json!({"state": "completed"}))]).is_empty());
    }
}
