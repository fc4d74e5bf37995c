//! What the board's controllers remember: the last decision, and what GitHub said. Nothing of it is missed after a crash.

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

/// How long an owner that GitHub gives no runner is left alone.
const OWNER_BACKOFF: Backoff = Backoff::new(Duration::from_secs(15), Duration::from_secs(600));
/// How long a runner that GitHub called busy is not asked to go again.
const LEAVE_ALONE: SignedDuration = SignedDuration::from_mins(1);

#[derive(Default)]
pub struct Memory {
    /// What each claim waits for, by its uid.
    pub waits: Mutex<BTreeMap<String, Wait>>,
    /// What the runners of workers do, as far as jobs tell.
    pub bindings: Mutex<BTreeMap<String, Binding>>,
    /// Workers that no open claim needs.
    pub surplus: Mutex<BTreeSet<String>>,
    /// What GitHub said of each claim's job, by the claim's uid.
    pub jobs: Mutex<BTreeMap<String, JobSeen>>,
    /// What keeps each pool that was looked at from making workers.
    pub obstacles: Mutex<BTreeMap<PoolKey, Option<String>>>,
    /// Workers that are made by this process and have nothing yet, by name.
    pub fresh: Mutex<HashSet<String>>,
    /// Workers whose pod owns its Secret, by uid.
    pub adopted: Mutex<HashSet<String>>,
    /// Workers whose runner was removed at GitHub, by uid.
    pub unregistered: Mutex<HashSet<String>>,
    troubles: Mutex<BTreeMap<String, (OwnerBackoff, u32)>>,
    rosters: Mutex<HashMap<RunnerScope, Roster>>,
    /// Runners that GitHub refused to remove, by name.
    busy: Mutex<HashMap<String, Timestamp>>,
}

/// The runners of one place, as GitHub listed them.
struct Roster {
    at: Timestamp,
    runners: HashMap<String, RunnerState>,
}

impl Memory {
    pub fn job(&self, claim: &RunnerClaim) -> Option<JobSeen> {
        lock(&self.jobs).get(claim.metadata.uid.as_ref()?).cloned()
    }

    pub fn list(&self, place: RunnerScope, at: Timestamp, runners: &[KnownRunner]) {
        let seen = |runner: &KnownRunner| match (runner.busy, runner.is_up()) {
            (true, _) => RunnerState::Busy,
            (false, true) => RunnerState::Idle,
            (false, false) => RunnerState::Offline,
        };
        let runners = runners.iter().map(|runner| (runner.name.clone(), seen(runner))).collect();
        lock(&self.rosters).insert(place, Roster { at, runners });
    }

    /// What GitHub last said of a runner.
    pub fn sighting(&self, name: &str, place: Option<&RunnerScope>) -> Option<Sighting> {
        let rosters = lock(&self.rosters);
        let listed = place.and_then(|place| rosters.get(place)).map(|roster| {
            let seen = roster.runners.get(name).copied().unwrap_or(RunnerState::Unknown);
            Sighting { at: roster.at, seen }
        });
        let refused = lock(&self.busy).get(name).map(|at| Sighting { at: *at, seen: RunnerState::Busy });
        listed.into_iter().chain(refused).max_by_key(|sighting| sighting.at)
    }

    pub fn refused(&self, name: &str, now: Timestamp) {
        lock(&self.busy).insert(name.to_owned(), now);
    }

    /// Whether GitHub said a moment ago that the runner is busy.
    pub fn is_left_alone(&self, name: &str, now: Timestamp) -> bool {
        lock(&self.busy).get(name).is_some_and(|at| now.duration_since(*at) < LEAVE_ALONE)
    }

    pub fn troubles(&self) -> BTreeMap<String, OwnerBackoff> {
        lock(&self.troubles).iter().map(|(entity, (trouble, _))| (entity.clone(), trouble.clone())).collect()
    }

    /// GitHub gives the owner no runner, and did not give one to a worker that was made at `made`. Those that were made
    /// before the last trouble say nothing new.
    pub fn trouble(&self, entity: &str, why: String, made: Timestamp, least: Duration, now: Timestamp) {
        let mut troubles = lock(&self.troubles);
        let failures = match troubles.get(entity) {
            Some((last, _)) if made < last.since => return,
            Some((_, failures)) => failures + 1,
            None => 1,
        };
        let wait = OWNER_BACKOFF.delay(failures).max(least.min(Duration::from_secs(3600)));
        let retry_at = now.saturating_add(wait).unwrap_or(Timestamp::MAX);
        troubles.insert(entity.to_owned(), (OwnerBackoff { why, since: now, retry_at }, failures));
    }

    pub fn no_trouble(&self, entity: &str) -> bool {
        lock(&self.troubles).remove(entity).is_some()
    }

    /// Forgets what is about objects that do not exist any more.
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
    fn trouble_grows_with_each_try_and_not_with_those_that_were_under_way() {
        let memory = Memory::default();
        let wait = || memory.troubles()["1"].retry_at.as_second();
        memory.trouble("1", "x".into(), at(0), Duration::ZERO, at(10));
        memory.trouble("1", "x".into(), at(9), Duration::ZERO, at(11));
        assert_eq!(wait(), 25);
        memory.trouble("1", "x".into(), at(25), Duration::ZERO, at(30));
        assert_eq!(wait(), 60);
        memory.trouble("1", "x".into(), at(60), Duration::from_secs(500), at(60));
        assert_eq!(wait(), 560, "GitHub said when");
        assert!(memory.no_trouble("1") && memory.troubles().is_empty());
    }

    #[test]
    fn a_refusal_counts_as_a_sighting() {
        let memory = Memory::default();
        assert_eq!(memory.sighting("w", None), None);
        memory.refused("w", at(5));
        assert_eq!(memory.sighting("w", None), Some(Sighting { at: at(5), seen: RunnerState::Busy }));
        assert!(memory.is_left_alone("w", at(64)) && !memory.is_left_alone("w", at(65)));
    }
}
