//! What GitHub or the API server refused, and what that was about: a claim, credentials, or an owner at GitHub.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;

use super::{
    quota::{Registration, Scope},
    schedule::Wait,
    supply::name,
};
use crate::{
    api::{BoardPool, BoardWorker, ClaimReason, RunnerPool, Worker},
    backoff::Backoff,
    boards::{slots::is_active, worker::since},
};

/// How long a claim waits after its workers failed.
const FAILURE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_mins(10));
/// The same for credentials or an owner for which GitHub creates no runner.
const GITHUB_BACKOFF: Backoff = Backoff::new(Duration::from_secs(15), Duration::from_mins(10));

/// What was refused. Only claims that share it wait.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// The API server refuses a Worker for the claim with this uid.
    Claim(String),
    /// GitHub does not accept what is in this Secret.
    Credentials { namespace: String, secret: String },
    /// GitHub creates no runner for this owner with these credentials: the App was removed, a limit is reached, …
    Owner(Registration),
}

impl Subject {
    pub fn credentials(registration: &Registration) -> Self {
        Self::Credentials { namespace: registration.namespace.clone(), secret: registration.secret.clone() }
    }

    /// The delay after this many refusals in a row.
    pub fn delay(&self, failures: u32) -> Duration {
        match self {
            Self::Claim(_) => FAILURE_BACKOFF.delay(failures),
            Self::Credentials { .. } | Self::Owner(_) => GITHUB_BACKOFF.delay(failures),
        }
    }

    fn concerns(&self, registration: &Registration) -> bool {
        match self {
            Self::Claim(_) => false,
            Self::Credentials { namespace, secret } => {
                *namespace == registration.namespace && *secret == registration.secret
            }
            Self::Owner(owner) => owner == registration,
        }
    }
}

/// Nothing is tried until `retry_at`, and then with one worker, so that others do not wait for its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub why: String,
    pub since: Timestamp,
    pub retry_at: Timestamp,
}

/// All refusals, and the subjects that get their one worker in this pass.
pub struct Refusals<'a> {
    pub all: &'a BTreeMap<Subject, Refusal>,
    pub pools: &'a [Arc<RunnerPool>],
    pub workers: &'a [Arc<Worker>],
    pub now: Timestamp,
    trying: BTreeSet<Subject>,
}

impl<'a> Refusals<'a> {
    pub fn new(
        all: &'a BTreeMap<Subject, Refusal>,
        pools: &'a [Arc<RunnerPool>],
        workers: &'a [Arc<Worker>],
        now: Timestamp,
    ) -> Self {
        Self { all, pools, workers, now, trying: BTreeSet::new() }
    }

    /// What a claim waits for whose worker the API server refused.
    pub fn of_claim(&self, uid: Option<&str>) -> Option<Wait> {
        if self.all.is_empty() {
            return None;
        }
        let refusal = self.all.get(&Subject::Claim(uid?.to_owned()))?;
        let retry_at = Some(refusal.retry_at).filter(|at| *at > self.now)?;
        Some(Wait { reason: ClaimReason::InternalError, message: refusal.why.clone(), retry_at: Some(retry_at) })
    }

    /// What claims wait for that register their runners there.
    pub fn at_github(&self, registration: &Registration) -> Option<Wait> {
        self.subjects(registration).find_map(|(subject, refusal)| {
            let retry_at = Some(refusal.retry_at).filter(|at| *at > self.now);
            let waits = retry_at.is_some() || self.trying.contains(subject) || self.is_tried(subject, refusal);
            waits.then(|| Wait { reason: ClaimReason::GitHubUnavailable, message: refusal.why.clone(), retry_at })
        })
    }

    /// A worker is created that registers there.
    pub fn note_trial(&mut self, registration: &Registration) {
        let subjects: Vec<_> = self.subjects(registration).map(|(subject, _)| subject.clone()).collect();
        self.trying.extend(subjects);
    }

    fn subjects(&self, registration: &Registration) -> impl Iterator<Item = (&'a Subject, &'a Refusal)> {
        self.all.iter().filter(|(subject, _)| subject.concerns(registration))
    }

    /// Whether a worker was created since the refusal: one trial is enough.
    fn is_tried(&self, subject: &Subject, refusal: &Refusal) -> bool {
        active_boards(self.workers).any(|(worker, spec)| {
            let created = worker.metadata.creation_timestamp.as_ref();
            created.is_none_or(|created| created.0 >= refusal.since)
                && self.registration(worker, spec).is_some_and(|registration| subject.concerns(&registration))
        })
    }

    fn registration(&self, worker: &Worker, spec: &BoardWorker) -> Option<Registration> {
        let namespace = worker.metadata.namespace.as_deref()?;
        let is_its = |pool: &&Arc<RunnerPool>| {
            pool.metadata.name.as_ref() == Some(&worker.spec.pool)
                && pool.metadata.namespace.as_deref() == Some(namespace)
        };
        let pool: &BoardPool = self.pools.iter().find(is_its)?.spec.board.as_ref()?;
        let scope = Scope::of(&spec.owner, spec.repository.as_deref()).ok()?;
        Some(Registration::new(namespace, pool, &spec.owner, scope))
    }
}

/// A claim whose workers fail backs off, and later claims do not wait for it.
pub fn after_failures(failures: &[&Worker], now: Timestamp) -> Option<Wait> {
    let last = failures.iter().max_by_key(|worker| since(worker))?;
    let delay = FAILURE_BACKOFF.delay(failures.len() as u32);
    let retry_at = since(last)?.saturating_add(delay).ok()?;
    let failure = last.status.as_ref().and_then(|status| status.failure.as_ref());
    let why = failure
        .map_or("for no known reason".into(), |failure| format!("({}): {}", failure.reason.as_str(), failure.message));
    (retry_at > now).then(|| Wait {
        reason: ClaimReason::WorkerLost,
        message: format!("worker {} failed {why}; the next one is created at {retry_at:.0}", name(last)),
        retry_at: Some(retry_at),
    })
}

pub fn active_boards(workers: &[Arc<Worker>]) -> impl Iterator<Item = (&Worker, &BoardWorker)> {
    workers
        .iter()
        .filter(|worker| is_active(worker))
        .filter_map(|worker| Some((&**worker, worker.spec.board.as_ref()?)))
}
