//! Index of workers for the scheduler: their claims, what their runners do, and whether they can take a job.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use jiff::Timestamp;

use super::{
    job::{self, JobSeen, JobState},
    schedule::is_open,
};
use crate::{
    api::{ClaimPhase, RunnerClaim, Worker},
    boards::{health::Binding, slots::is_active, worker::ended},
};

/// Workers by claim and by name.
pub struct Index<'a> {
    by_claim: BTreeMap<&'a str, Vec<&'a Worker>>,
    by_name: BTreeMap<&'a str, &'a Worker>,
    /// Runners that are known to have taken a job.
    pub taken: BTreeSet<String>,
    jobs: &'a BTreeMap<String, JobSeen>,
}

impl<'a> Index<'a> {
    pub fn of(claims: &[Arc<RunnerClaim>], workers: &'a [Arc<Worker>], jobs: &'a BTreeMap<String, JobSeen>) -> Self {
        let mut by_claim: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let mut by_name = BTreeMap::new();
        for worker in workers.iter().map(Arc::as_ref).filter(|worker| worker.spec.board.is_some()) {
            if let Some(uid) = worker.claim_uid() {
                by_claim.entry(uid).or_default().push(worker);
            }
            by_name.insert(name(worker), worker);
        }
        let mut index = Self { by_claim, by_name, taken: BTreeSet::new(), jobs };
        let taken = claims.iter().filter_map(|claim| Some(job::runner(claim, index.seen(claim))?.name));
        index.taken = taken.collect();
        index
    }

    /// GitHub's last answer about the claim's job.
    pub fn seen(&self, claim: &RunnerClaim) -> Option<&'a JobSeen> {
        claim.metadata.uid.as_ref().and_then(|uid| self.jobs.get(uid))
    }

    pub fn own(&self, claim: &RunnerClaim) -> &[&'a Worker] {
        let own = claim.metadata.uid.as_deref().and_then(|uid| self.by_claim.get(uid));
        own.map_or(&[], Vec::as_slice)
    }

    /// Progress of the claim's job, and the worker that has it.
    pub fn job(&self, claim: &RunnerClaim) -> Option<(JobState, Option<&'a Worker>)> {
        claim.spec.job.as_ref()?;
        let seen = self.seen(claim);
        let worker = job::runner(claim, seen).and_then(|runner| self.by_name.get(runner.name.as_str()).copied());
        let ended = worker.and_then(ended);
        Some((job::state(claim, seen, ended)?, worker))
    }

    /// What the runners of active workers do, derived from jobs, by worker name.
    pub fn bindings(&self, claims: &[Arc<RunnerClaim>], now: Timestamp) -> BTreeMap<String, Binding> {
        let mut bindings = BTreeMap::new();
        for claim in claims {
            let Some((job, Some(worker))) = self.job(claim) else { continue };
            let at = |phase| claim.status.as_ref()?.phase_times.of(phase).map(|time| time.0);
            let binding = match job {
                JobState::Running if is_open(claim) || claim.metadata.deletion_timestamp.is_some() => Binding::Busy,
                // GitHub requeued the job, so it binds no runner.
                JobState::Queued => continue,
                JobState::Running | JobState::Completed | JobState::Gone | JobState::Stuck => {
                    let end = at(ClaimPhase::Completed).or_else(|| at(ClaimPhase::Failed));
                    Binding::Done(end.unwrap_or(now))
                }
            };
            if is_active(worker) {
                bindings.insert(name(worker).to_owned(), binding);
            }
        }
        bindings
    }
}

/// Drops finished claims and workers that affect no decision; there may be thousands.
pub fn drop_records(
    claims: &mut Vec<Arc<RunnerClaim>>,
    workers: &mut Vec<Arc<Worker>>,
    jobs: &BTreeMap<String, JobSeen>,
) {
    let runner = |claim: &RunnerClaim| {
        let seen = claim.metadata.uid.as_ref().and_then(|uid| jobs.get(uid));
        Some(job::runner(claim, seen)?.name)
    };
    let open: Vec<_> = claims.iter().filter(|claim| is_open(claim)).collect();
    let uids: HashSet<_> = open.iter().filter_map(|claim| claim.metadata.uid.as_deref()).collect();
    let runners: HashSet<_> = open.iter().filter_map(|claim| runner(claim)).collect();
    let is_needed =
        |worker: &Worker| worker.claim_uid().is_some_and(|uid| uids.contains(uid)) || runners.contains(name(worker));
    workers.retain(|worker| is_active(worker) || is_needed(worker));
    let names: HashSet<_> = workers.iter().map(|worker| name(worker)).collect();
    claims.retain(|claim| is_open(claim) || runner(claim).is_some_and(|name| names.contains(name.as_str())));
}

/// Whether the worker's runner can take a job. One that is being deleted cannot, and a runner runs only one job.
pub fn takes_jobs(worker: &Worker, bindings: &BTreeMap<String, Binding>) -> bool {
    is_active(worker) && worker.metadata.deletion_timestamp.is_none() && !bindings.contains_key(name(worker))
}

pub fn name(worker: &Worker) -> &str {
    worker.metadata.name.as_deref().unwrap_or_default()
}
