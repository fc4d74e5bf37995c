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
    boards::{
        health::{Binding, RunnerState, Sighting},
        removal,
    },
    demand::{
        job::JobSeen,
        refusals::{Refusal, Subject},
        schedule::Wait,
    },
    names::PoolKey,
};
use paddock_effects::github::KnownRunner;

use super::{accounts::RunnerScope, lock};

/// The backoff of a question about one job that GitHub does not answer.
const JOB_BACKOFF: Backoff = Backoff::new(Duration::from_secs(15), Duration::from_secs(600));
/// The longest pause that a refusal may ask for.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// How long a refusal counts after its pause, so that the next pause is longer.
const REFUSAL_MEMORY: SignedDuration = SignedDuration::from_hours(1);
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
    /// When this process first saw the end of a worker's pod, by the worker's uid.
    pod_ends: Mutex<HashMap<String, Timestamp>>,
    /// With the number of failures.
    refusals: Mutex<BTreeMap<Subject, (Refusal, u32)>>,
    /// Runners that could not be removed, by their worker's uid.
    removals: Mutex<HashMap<String, Pause>>,
    /// Jobs that GitHub did not answer for, by their claim's uid.
    job_pauses: Mutex<HashMap<String, Pause>>,
    runner_lists: Mutex<HashMap<RunnerScope, RunnerList>>,
    /// Runners that GitHub refused to remove, by name.
    busy: Mutex<HashMap<String, Timestamp>>,
}

/// Nothing is tried until then, after so many failures in a row.
#[derive(Clone, Copy)]
struct Pause {
    until: Timestamp,
    failures: u32,
}

/// Counts a failure; `delay` is the pause after so many of them.
fn pause(
    pauses: &Mutex<HashMap<String, Pause>>,
    uid: &str,
    now: Timestamp,
    delay: impl Fn(u32) -> Duration,
) -> Duration {
    let mut pauses = lock(pauses);
    let failures = pauses.get(uid).map_or(0, |pause| pause.failures) + 1;
    let until = now.saturating_add(delay(failures)).unwrap_or(now);
    pauses.insert(uid.to_owned(), Pause { until, failures });
    delay(failures)
}

fn paused(pauses: &Mutex<HashMap<String, Pause>>, uid: &str, now: Timestamp) -> Option<Timestamp> {
    lock(pauses).get(uid).map(|pause| pause.until).filter(|until| *until > now)
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

    /// Since when the worker's pod has ended, as far as this process knows.
    pub fn pod_end(&self, uid: &str, now: Timestamp) -> Timestamp {
        *lock(&self.pod_ends).entry(uid.to_owned()).or_insert(now)
    }

    /// The runner of this worker could not be removed; returns the pause before the next attempt.
    pub fn pause_removal(&self, uid: &str, least: Duration, now: Timestamp) -> Duration {
        pause(&self.removals, uid, now, |failures| removal::retry(least, failures))
    }

    pub fn removal_paused(&self, uid: &str, now: Timestamp) -> Option<Timestamp> {
        paused(&self.removals, uid, now)
    }

    /// The runner of this worker is gone at GitHub.
    pub fn note_removed(&self, uid: String) {
        lock(&self.removals).remove(&uid);
        lock(&self.unregistered).insert(uid);
    }

    /// GitHub did not answer for the job of this claim.
    pub fn pause_job(&self, uid: &str, now: Timestamp) {
        pause(&self.job_pauses, uid, now, |failures| JOB_BACKOFF.delay(failures));
    }

    pub fn job_paused(&self, uid: &str, now: Timestamp) -> Option<Timestamp> {
        paused(&self.job_pauses, uid, now)
    }

    pub fn note_job(&self, uid: String, seen: JobSeen) {
        lock(&self.job_pauses).remove(&uid);
        lock(&self.jobs).insert(uid, seen);
    }

    pub fn refusals(&self) -> BTreeMap<Subject, Refusal> {
        lock(&self.refusals).iter().map(|(subject, (refusal, _))| (subject.clone(), refusal.clone())).collect()
    }

    /// Notes that nothing could be created for `subject`, tried at `tried`; returns when the next attempt is due. Attempts
    /// that began before the last refusal do not count: they were in flight.
    pub fn refuse(
        &self,
        subject: Subject,
        why: String,
        tried: Timestamp,
        least: Duration,
        now: Timestamp,
    ) -> Timestamp {
        let mut refusals = lock(&self.refusals);
        let failures = match refusals.get(&subject) {
            Some((last, _)) if tried < last.since => return last.retry_at,
            Some((_, failures)) => failures + 1,
            None => 1,
        };
        let wait = subject.delay(failures).max(least.min(MAX_PAUSE));
        let retry_at = now.saturating_add(wait).unwrap_or(Timestamp::MAX);
        refusals.insert(subject, (Refusal { why, since: now, retry_at }, failures));
        retry_at
    }

    /// Something was created for them; returns whether it had been refused before.
    pub fn accept(&self, subjects: &[Subject]) -> bool {
        let mut refusals = lock(&self.refusals);
        subjects.iter().filter(|subject| refusals.remove(subject).is_some()).count() > 0
    }

    /// Drops the state of objects that no longer exist.
    pub fn tidy(
        &self,
        claims: &[std::sync::Arc<RunnerClaim>],
        workers: &[std::sync::Arc<paddock_core::api::Worker>],
        now: Timestamp,
    ) {
        let claims: HashSet<_> = claims.iter().filter_map(|claim| claim.metadata.uid.as_deref()).collect();
        lock(&self.jobs).retain(|uid, _| claims.contains(uid.as_str()));
        lock(&self.job_pauses).retain(|uid, _| claims.contains(uid.as_str()));
        lock(&self.refusals).retain(|_, (refusal, _)| now.duration_since(refusal.retry_at) <= REFUSAL_MEMORY);
        let uids: HashSet<_> = workers.iter().filter_map(|worker| worker.metadata.uid.as_deref()).collect();
        for known in [&self.adopted, &self.unregistered] {
            lock(known).retain(|uid| uids.contains(uid.as_str()));
        }
        lock(&self.pod_ends).retain(|uid, _| uids.contains(uid.as_str()));
        lock(&self.removals).retain(|uid, _| uids.contains(uid.as_str()));
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
    fn a_refusal_counts_for_longer_each_time_and_ignores_attempts_in_flight() {
        let memory = Memory::default();
        let subject = || Subject::Credentials { namespace: "a".into(), secret: "b".into() };
        let refuse = |tried, least, now| {
            let least = Duration::from_secs(least);
            memory.refuse(subject(), "x".into(), at(tried), least, at(now)).as_second()
        };
        assert_eq!([refuse(0, 0, 10), refuse(9, 0, 11)], [25, 25]);
        assert_eq!(refuse(25, 0, 30), 60);
        assert_eq!(refuse(60, 500, 60), 560, "GitHub sets the delay");
        memory.tidy(&[], &[], at(560 + 3600));
        assert_eq!(refuse(9000, 0, 9000), 9120);
        memory.tidy(&[], &[], at(9120 + 3601));
        assert!(memory.refusals().is_empty(), "it is forgotten an hour later");
        refuse(0, 0, 0);
        assert!(memory.accept(&[subject()]) && !memory.accept(&[subject()]));
    }

    #[test]
    fn a_removal_that_fails_is_retried_less_and_less_often() {
        let memory = Memory::default();
        let least = Duration::from_secs(15);
        let pauses = [1, 2, 3].map(|_| memory.pause_removal("w", least, at(100)).as_secs());
        assert_eq!(pauses, [15, 30, 60]);
        assert_eq!(memory.removal_paused("w", at(159)), Some(at(160)));
        assert_eq!(memory.removal_paused("w", at(160)), None);
        memory.note_removed("w".into());
        assert_eq!(memory.pause_removal("w", least, at(200)).as_secs(), 15);
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
