//! In-memory state of the board controllers: the last decision and GitHub's last answers. It is rebuilt after a crash.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Mutex,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use paddock_core::{
    api::RunnerClaim,
    backoff::Backoff,
    boards::health::{Binding, RunnerState, Sighting},
    demand::{
        job::JobSeen,
        schedule::{OwnerBackoff, Wait},
    },
    names::PoolKey,
};
use paddock_effects::github::KnownRunner;

use super::{accounts::RunnerScope, lock};

/// The backoff of an owner for whom GitHub creates no runner.
const OWNER_BACKOFF: Backoff = Backoff::new(Duration::from_secs(15), Duration::from_secs(600));
/// How long the removal of a runner is not retried after GitHub reported it busy.
const BUSY_BACKOFF: SignedDuration = SignedDuration::from_mins(1);

#[derive(Default)]
pub struct Memory {
    /// What each claim waits for, by its uid.
    pub waits: Mutex<BTreeMap<String, Wait>>,
    /// The jobs that the runners of workers have, as known from webhooks and polls.
    pub bindings: Mutex<BTreeMap<String, Binding>>,
    /// Workers that no open claim needs.
    pub surplus: Mutex<BTreeSet<String>>,
    /// The last polled state of each claim's job, by the claim's uid.
    pub jobs: Mutex<BTreeMap<String, JobSeen>>,
    /// What keeps each reconciled pool from creating workers.
    pub obstacles: Mutex<BTreeMap<PoolKey, Option<String>>>,
    /// Workers created by this process that have no Secret or pod yet, by name.
    pub fresh: Mutex<HashSet<String>>,
    /// Workers whose pod owns its Secret, by uid.
    pub adopted: Mutex<HashSet<String>>,
    /// Workers whose runner was removed at GitHub, by uid.
    pub unregistered: Mutex<HashSet<String>>,
    /// By entity, with the number of failures.
    owner_backoffs: Mutex<BTreeMap<String, (OwnerBackoff, u32)>>,
    runner_lists: Mutex<HashMap<RunnerScope, RunnerList>>,
    /// Runners that GitHub refused to remove, by name.
    busy: Mutex<HashMap<String, Timestamp>>,
}

/// The runners of one scope, as GitHub listed them.
struct RunnerList {
    at: Timestamp,
    runners: HashMap<String, RunnerState>,
}

impl Memory {
    pub fn job(&self, claim: &RunnerClaim) -> Option<JobSeen> {
        lock(&self.jobs).get(claim.metadata.uid.as_ref()?).cloned()
    }

    pub fn note_runners(&self, runner_scope: RunnerScope, at: Timestamp, runners: &[KnownRunner]) {
        let seen = |runner: &KnownRunner| match (runner.busy, runner.is_up()) {
            (true, _) => RunnerState::Busy,
            (false, true) => RunnerState::Idle,
            (false, false) => RunnerState::Offline,
        };
        let runners = runners.iter().map(|runner| (runner.name.clone(), seen(runner))).collect();
        lock(&self.runner_lists).insert(runner_scope, RunnerList { at, runners });
    }

    /// The last observed state of a runner.
    pub fn sighting(&self, name: &str, runner_scope: Option<&RunnerScope>) -> Option<Sighting> {
        let runner_lists = lock(&self.runner_lists);
        let listed = runner_scope.and_then(|runner_scope| runner_lists.get(runner_scope)).map(|list| {
            let seen = list.runners.get(name).copied().unwrap_or(RunnerState::Unknown);
            Sighting { at: list.at, seen }
        });
        let refused = lock(&self.busy).get(name).map(|at| Sighting { at: *at, seen: RunnerState::Busy });
        listed.into_iter().chain(refused).max_by_key(|sighting| sighting.at)
    }

    pub fn note_busy(&self, name: &str, now: Timestamp) {
        lock(&self.busy).insert(name.to_owned(), now);
    }

    /// Whether GitHub recently reported the runner busy.
    pub fn is_backing_off(&self, name: &str, now: Timestamp) -> bool {
        lock(&self.busy).get(name).is_some_and(|at| now.duration_since(*at) < BUSY_BACKOFF)
    }

    pub fn owner_backoffs(&self) -> BTreeMap<String, OwnerBackoff> {
        lock(&self.owner_backoffs).iter().map(|(entity, (backoff, _))| (entity.clone(), backoff.clone())).collect()
    }

    /// Backs off an owner after GitHub refused a runner for a worker that was created at `created`. Workers created
    /// before the last failure do not count: they were in flight.
    pub fn back_off_owner(&self, entity: &str, why: String, created: Timestamp, least: Duration, now: Timestamp) {
        let mut backoffs = lock(&self.owner_backoffs);
        let failures = match backoffs.get(entity) {
            Some((last, _)) if created < last.since => return,
            Some((_, failures)) => failures + 1,
            None => 1,
        };
        let wait = OWNER_BACKOFF.delay(failures).max(least.min(Duration::from_secs(3600)));
        let retry_at = now.saturating_add(wait).unwrap_or(Timestamp::MAX);
        backoffs.insert(entity.to_owned(), (OwnerBackoff { why, since: now, retry_at }, failures));
    }

    pub fn clear_owner_backoff(&self, entity: &str) -> bool {
        lock(&self.owner_backoffs).remove(entity).is_some()
    }

    /// Drops the state of objects that no longer exist.
    pub fn tidy(&self, claims: &[std::sync::Arc<RunnerClaim>], workers: &[std::sync::Arc<paddock_core::api::Worker>]) {
        let claims: HashSet<_> = claims.iter().filter_map(|claim| claim.metadata.uid.as_deref()).collect();
        lock(&self.jobs).retain(|uid, _| claims.contains(uid.as_str()));
        let uids: HashSet<_> = workers.iter().filter_map(|worker| worker.metadata.uid.as_deref()).collect();
        for known in [&self.adopted, &self.unregistered] {
            lock(known).retain(|uid| uids.contains(uid.as_str()));
        }
        let names: HashSet<_> = workers.iter().map(|worker| worker.name_any()).collect();
        lock(&self.fresh).retain(|name| names.contains(name));
        lock(&self.busy).retain(|name, _| names.contains(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn owner_backoff_grows_with_each_attempt_and_ignores_those_in_flight() {
        let memory = Memory::default();
        let wait = || memory.owner_backoffs()["1"].retry_at.as_second();
        memory.back_off_owner("1", "x".into(), at(0), Duration::ZERO, at(10));
        memory.back_off_owner("1", "x".into(), at(9), Duration::ZERO, at(11));
        assert_eq!(wait(), 25);
        memory.back_off_owner("1", "x".into(), at(25), Duration::ZERO, at(30));
        assert_eq!(wait(), 60);
        memory.back_off_owner("1", "x".into(), at(60), Duration::from_secs(500), at(60));
        assert_eq!(wait(), 560, "GitHub sets the delay");
        assert!(memory.clear_owner_backoff("1") && memory.owner_backoffs().is_empty());
    }

    #[test]
    fn a_refusal_counts_as_a_sighting() {
        let memory = Memory::default();
        assert_eq!(memory.sighting("w", None), None);
        memory.note_busy("w", at(5));
        assert_eq!(memory.sighting("w", None), Some(Sighting { at: at(5), seen: RunnerState::Busy }));
        assert!(memory.is_backing_off("w", at(64)) && !memory.is_backing_off("w", at(65)));
    }
}
