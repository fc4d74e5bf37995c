//! Whether and how jobs that a spot interruption ended are run again at GitHub, at most once in each workflow run.
//!
//! The attempt of the run tells: only the jobs of its first attempt are run again, and a second attempt, whoever asked
//! for it, proves that there is nothing left to do. That covers a crash, a lost answer, and other claims of the run.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use paddock_record::Instance;
use serde::Deserialize;

use super::{
    claim::{ClaimFacts, PoolView},
    machine::Machine,
};
use crate::{
    api::{
        ClaimPhase, ClaimReason, Ec2Pool, FINALIZER, FailureReason, Interruption, READY, RERUN_MESSAGE_MAX, Rerun,
        RerunOutcome, RunnerClaim, RunnerClaimSpec, RunnerClaimStatus, head,
    },
    backoff::Backoff,
    names::rerun_name,
};

/// How long before it is seen EC2 may have announced an interruption: the agent asks every 5 s, its heartbeats are read
/// every 4.6 s at most, and GitHub's clock counts for the end of a job.
const NOTICE_SEEN_LATE: SignedDuration = SignedDuration::from_secs(20);
/// The same of a machine whose end alone is seen: EC2's two minutes, and the period of the sweep.
const END_SEEN_LATE: SignedDuration = SignedDuration::from_secs(150);
/// The jobs of later attempts are not run again.
const FIRST_ATTEMPT: u32 = 1;
/// GitHub shows a new attempt a moment after it has answered.
const ATTEMPT_SHOWN_LATE: SignedDuration = SignedDuration::from_secs(30);
/// The most tries, of half an hour together.
const TRIES: u32 = 10;
const RETRY: Backoff = Backoff::new(Duration::from_secs(15), Duration::from_mins(5));

/// A workflow run, as GitHub has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub completed: bool,
    pub attempt: u32,
    /// The jobs of this attempt.
    pub jobs: Vec<RunJob>,
}

/// A job of a run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RunJob {
    pub id: i64,
    pub name: String,
    /// `success`, `failure`, `cancelled`, `skipped`, `timed_out`, …
    pub conclusion: Option<String>,
    pub completed_at: Option<Timestamp>,
    pub runner_name: Option<String>,
}

/// What a finished claim does about the jobs that were interrupted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RerunStep {
    /// Wait until then, or until the run has completed.
    Wait(Option<Timestamp>),
    /// Look at the run, and have its interrupted jobs run again.
    Ask,
    /// They are not run again, for this reason.
    Skip(String),
}

/// What the state of a run means for its interrupted jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Look again later, for this reason.
    Later(String),
    Call(RerunCall),
    /// The call was carried out.
    Done,
    End(RerunOutcome, String),
}

/// The one call that runs jobs again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RerunCall {
    pub attempt: u32,
    /// The only job to run again; none: all that failed.
    pub job: Option<i64>,
    /// How many interrupted jobs that are, and their names.
    pub jobs: u32,
    pub names: String,
}

/// Why GitHub has not answered, or not done what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    Forbidden(String),
    Refused(String),
    /// A call may have been carried out nevertheless. With the time before which nothing is asked, if GitHub has named one.
    Unavailable(String, Option<Timestamp>),
}

/// Adds the interruptions of the claim's machines that are new.
pub fn note_interruptions<'a>(
    status: &mut RunnerClaimStatus,
    held: impl Iterator<Item = &'a Machine>,
    lost: &[&Instance],
    now: Timestamp,
) {
    let announced = held.filter(|machine| machine.is_reclaimed());
    let announced = announced.map(|machine| (&machine.record.instance_id, now - NOTICE_SEEN_LATE));
    let reclaimed = |record: &&&Instance| record.failure_reason == FailureReason::SpotReclaimed.as_str();
    let ended = lost.iter().filter(reclaimed).map(|record| (&record.instance_id, record.updated_at - END_SEEN_LATE));
    for (worker, since) in announced.chain(ended) {
        if status.interruptions.iter().all(|known| known.worker != *worker) {
            let since = Time(Timestamp::from_second(since.as_second()).unwrap_or(since));
            status.interruptions.push(Interruption { worker: worker.clone(), since });
        }
    }
}

/// Whether a finished claim has yet to see to its interrupted jobs.
pub fn is_open(status: &RunnerClaimStatus) -> bool {
    let decided = status.rerun.as_ref().is_some_and(|rerun| rerun.outcome.is_some());
    status.phase.is_some_and(ClaimPhase::is_over) && !status.interruptions.is_empty() && !decided
}

/// The repository and number of a claim's run; none if they are not known.
pub fn run_of(claim: &RunnerClaim, pool: &Ec2Pool) -> Option<(String, i64)> {
    let of_pool = || pool.github.repository.as_ref().map(|name| format!("{}/{name}", pool.github.owner));
    Some((claim.spec.repository.clone().or_else(of_pool)?, claim.spec.run_id.parse().ok()?))
}

/// The next step of a finished claim; none if there is nothing to do.
pub(super) fn step(facts: &ClaimFacts, now: Timestamp) -> Option<RerunStep> {
    let status = facts.status;
    if !is_open(status) || matches!(facts.pool, PoolView::Deleting) {
        return None;
    }
    let ready = status.conditions.iter().find(|condition| condition.type_ == READY);
    let ended_with_run = ready.is_some_and(|condition| condition.reason == ClaimReason::Completed.as_str());
    Some(if !facts.reruns {
        let workers: Vec<_> = status.interruptions.iter().map(|it| it.worker.as_str()).collect();
        let message = "jobs that failed by that are not run again: the pool's rerunInterrupted is not set";
        RerunStep::Skip(format!("EC2 took {} back; {message}", workers.join(", ")))
    } else if !facts.run_completed && !ended_with_run {
        RerunStep::Wait(None)
    } else {
        match status.rerun.as_ref().and_then(|rerun| rerun.retry_at.as_ref()) {
            Some(at) if at.0 > now => RerunStep::Wait(Some(at.0)),
            Some(_) | None => RerunStep::Ask,
        }
    })
}

/// The interruptions of all claims of the claim's run, in its namespace. An error is the name of the claim that sees to
/// them, if it is another one: the oldest of those that have yet to.
pub fn of_run(claim: &RunnerClaim, claims: &[Arc<RunnerClaim>]) -> Result<Vec<Interruption>, String> {
    let repository = |claim: &RunnerClaim| claim.spec.repository.as_deref().map(str::to_lowercase);
    let of_run: Vec<_> = claims
        .iter()
        .filter(|other| {
            other.metadata.namespace == claim.metadata.namespace
                && other.metadata.deletion_timestamp.is_none()
                && other.spec.run_id == claim.spec.run_id
                && repository(other) == repository(claim)
        })
        .filter_map(|other| Some((other, other.status.as_ref()?)))
        .collect();
    let open = of_run.iter().filter(|(_, status)| is_open(status)).map(|(claim, _)| &claim.metadata);
    let first = open.min_by_key(|metadata| (metadata.creation_timestamp.as_ref().map(|at| at.0), &metadata.name));
    match first {
        Some(first) if first.name != claim.metadata.name => Err(first.name.clone().unwrap_or_default()),
        Some(_) | None => Ok(of_run.iter().flat_map(|(_, status)| status.interruptions.clone()).collect()),
    }
}

/// What to do about the jobs of `run` that these interruptions ended. `rerun`: what is known so far.
pub fn plan(run: &Run, interruptions: &[Interruption], rerun: &Rerun, now: Timestamp) -> Plan {
    let asked = rerun.attempt.zip(rerun.requested_at.as_ref());
    match asked {
        Some((attempt, _)) if run.attempt > attempt => return Plan::Done,
        None if run.attempt > FIRST_ATTEMPT => {
            let message = format!("the run is in attempt {} already, and Paddock runs jobs of the first", run.attempt);
            return Plan::End(RerunOutcome::Skipped, format!("{message} one again only"));
        }
        Some((_, at)) if now.duration_since(at.0) < ATTEMPT_SHOWN_LATE => {
            return Plan::Later("GitHub was asked to run them again, and does not show it yet".into());
        }
        Some(_) | None => {}
    }
    if !run.completed {
        return Plan::Later("the run has not completed".into());
    }
    let (interrupted, others): (Vec<_>, Vec<_>) =
        run.jobs.iter().filter(|job| has_failed(job)).partition(|job| is_interrupted(job, interruptions));
    let cancelled = |jobs: &[&RunJob]| jobs.iter().any(|job| job.conclusion.as_deref() == Some("cancelled"));
    let call = |job| {
        let (jobs, names) = (interrupted.len() as u32, names(&interrupted));
        Plan::Call(RerunCall { attempt: run.attempt, job, jobs, names })
    };
    let skip = |why: &str| {
        let message = format!("interrupted jobs are not run again ({}): {why}", names(&interrupted));
        Plan::End(RerunOutcome::Skipped, message)
    };
    match (&interrupted[..], &others[..]) {
        ([], _) => Plan::End(RerunOutcome::Unneeded, "no job was interrupted".into()),
        (_, []) => call(None),
        (_, others) if cancelled(&interrupted) && cancelled(others) => {
            skip("other jobs were cancelled too, so somebody may have cancelled the run")
        }
        ([one], _) => call(Some(one.id)),
        (_, others) => {
            let why =
                format!("{} other jobs failed, and GitHub runs either one job again or all that failed", others.len());
            skip(&why)
        }
    }
}

fn has_failed(job: &RunJob) -> bool {
    !matches!(job.conclusion.as_deref(), Some("success" | "skipped" | "neutral"))
}

/// Whether a job that failed ran on one of these machines, and did not end before.
fn is_interrupted(job: &RunJob, interruptions: &[Interruption]) -> bool {
    let ran_on =
        |it: &&Interruption| job.runner_name.as_ref().is_some_and(|name| name.eq_ignore_ascii_case(&it.worker));
    interruptions.iter().find(ran_on).is_some_and(|it| job.completed_at.is_none_or(|ended| ended >= it.since.0))
}

fn names(jobs: &[&RunJob]) -> String {
    jobs.iter().map(|job| job.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The record of a call that is about to be sent.
pub fn requested(rerun: Rerun, call: &RerunCall, now: Timestamp) -> Rerun {
    let requested_at = Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now)));
    let message = format!("EC2 took back the machines of jobs, which are run again: {}", call.names);
    let message = head(&message, RERUN_MESSAGE_MAX);
    Rerun { attempt: Some(call.attempt), requested_at, jobs: call.jobs, retry_at: None, message, ..rerun }
}

/// The claim for jobs that run again. A re-run does not repeat jobs that have succeeded, such as one that claims machines,
/// and those of `claim` are returned. After a crash its name is the same.
pub fn next_claim(claim: &RunnerClaim, rerun: &Rerun) -> RunnerClaim {
    let count = rerun.jobs.clamp(1, claim.spec.count);
    let mut next = RunnerClaim::new(&rerun_name(claim), RunnerClaimSpec { count, ..claim.spec.clone() });
    next.metadata.namespace = claim.metadata.namespace.clone();
    next.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    next
}

/// They run again on the machines of this claim.
pub fn done(rerun: Rerun, claim: &RunnerClaim) -> Rerun {
    let (claim, message) = (claim.metadata.name.clone(), rerun.message.clone());
    ended(Rerun { claim, ..rerun }, RerunOutcome::Done, &message)
}

/// What it means that GitHub did not answer as it should. The messages are GitHub's: <https://github.com/NVIDIA-NeMo/RL/pull/1193>, <https://github.com/metabase/metabase/pull/70916>.
pub fn failed(rerun: Rerun, trouble: Trouble, now: Timestamp) -> Rerun {
    const PERMISSION: &str = "grant the GitHub App, or the token, the repository permission Actions: read and write";
    match trouble {
        // Another claim or a person was faster, or GitHub does not know yet that the run has completed.
        Trouble::Forbidden(why) if why.contains("already running") => later(rerun, &why, None, now),
        Trouble::Forbidden(why) if why.contains("not accessible") => {
            ended(rerun, RerunOutcome::Skipped, &format!("interrupted jobs are not run again: {PERMISSION} ({why})"))
        }
        // As it does for jobs that call a reusable workflow, and for runs that are too old.
        Trouble::Forbidden(why) | Trouble::Refused(why) => {
            ended(rerun, RerunOutcome::Skipped, &format!("GitHub does not run the interrupted jobs again: {why}"))
        }
        Trouble::Unavailable(why, until) => later(rerun, &why, until, now),
    }
}

/// Another try later, unless this was the last one.
pub fn later(rerun: Rerun, why: &str, until: Option<Timestamp>, now: Timestamp) -> Rerun {
    let tries = rerun.tries + 1;
    if tries >= TRIES {
        let message = format!("interrupted jobs are not run again, after {tries} tries: {why}");
        return ended(Rerun { tries, ..rerun }, RerunOutcome::Skipped, &message);
    }
    let soonest = now.saturating_add(RETRY.delay(tries)).unwrap_or(Timestamp::MAX);
    let at = until.map_or(soonest, |until| until.max(soonest));
    let retry_at = Some(Time(Timestamp::from_second(at.as_second() + 1).unwrap_or(at)));
    Rerun { tries, retry_at, message: head(why, RERUN_MESSAGE_MAX), ..rerun }
}

/// Nothing more is done.
pub fn ended(rerun: Rerun, outcome: RerunOutcome, message: &str) -> Rerun {
    Rerun { outcome: Some(outcome), retry_at: None, message: head(message, RERUN_MESSAGE_MAX), ..rerun }
}

#[cfg(test)]
#[path = "rerun_tests.rs"]
mod tests;
