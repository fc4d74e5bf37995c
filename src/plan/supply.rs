//! The workers as demand looks for them: whose they are, what their runners do, and whether they take a job.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;

use super::{
    board_worker::{claim_uid, ended},
    capacity::is_active,
    demand::is_open,
    health::Binding,
    jobs::{self, JobSeen, JobState},
};
use crate::api::{ClaimPhase, RunnerClaim, Worker};

/// The workers, as they are looked for.
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
            if let Some(uid) = claim_uid(worker) {
                by_claim.entry(uid).or_default().push(worker);
            }
            by_name.insert(name(worker), worker);
        }
        let mut index = Self { by_claim, by_name, taken: BTreeSet::new(), jobs };
        let taken = claims.iter().filter_map(|claim| Some(jobs::runner(claim, index.seen(claim))?.name));
        index.taken = taken.collect();
        index
    }

    /// What GitHub said of the claim's job.
    pub fn seen(&self, claim: &RunnerClaim) -> Option<&'a JobSeen> {
        claim.metadata.uid.as_ref().and_then(|uid| self.jobs.get(uid))
    }

    pub fn own(&self, claim: &RunnerClaim) -> &[&'a Worker] {
        let own = claim.metadata.uid.as_deref().and_then(|uid| self.by_claim.get(uid));
        own.map_or(&[], Vec::as_slice)
    }

    /// How far the claim's job is, and the worker that has it.
    pub fn job(&self, claim: &RunnerClaim) -> Option<(JobState, Option<&'a Worker>)> {
        claim.spec.job.as_ref()?;
        let seen = self.seen(claim);
        let worker = jobs::runner(claim, seen).and_then(|runner| self.by_name.get(runner.name.as_str()).copied());
        let ended = worker.and_then(ended);
        Some((jobs::state(claim, seen, ended)?, worker))
    }

    /// What the runners of active workers do, as far as jobs tell, by the worker's name.
    pub fn bindings(&self, claims: &[Arc<RunnerClaim>], now: Timestamp) -> BTreeMap<String, Binding> {
        let mut bindings = BTreeMap::new();
        for claim in claims {
            let Some((job, Some(worker))) = self.job(claim) else { continue };
            let at = |phase| claim.status.as_ref()?.phase_times.of(phase).map(|time| time.0);
            let binding = match job {
                JobState::Running if is_open(claim) || claim.metadata.deletion_timestamp.is_some() => Binding::Busy,
                // The job went back to the line, and its runner with it or not at all.
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

/// Whether the worker's runner takes a further job. One that is being deleted does not, and a runner runs one job alone.
pub fn takes_jobs(worker: &Worker, bindings: &BTreeMap<String, Binding>) -> bool {
    is_active(worker) && worker.metadata.deletion_timestamp.is_none() && !bindings.contains_key(name(worker))
}

pub fn name(worker: &Worker) -> &str {
    worker.metadata.name.as_deref().unwrap_or_default()
}
