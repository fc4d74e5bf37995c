//! Limits concurrent requests to GitHub, in total and per owner, so that timeouts of one owner do not block others.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use paddock_core::{backoff::Backoff, demand::quota::Scope};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::GitHubError;

/// GitHub allows 100 concurrent requests; the rest is left to other users of the credentials.
const MAX_REQUESTS: usize = 90;
/// Enough for a burst of an owner's jobs, and few enough that ten owners with timeouts do not block the others.
const MAX_REQUESTS_PER_OWNER: usize = 8;
/// Delay for an owner after a timeout; doubles with each further one.
const TIMEOUT_BACKOFF: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60));

pub struct Concurrency {
    all: Arc<Semaphore>,
    owners: Mutex<HashMap<(String, String), Arc<OwnerLimit>>>,
}

/// The concurrency limit and backoff of one owner.
pub struct OwnerLimit {
    permits: Semaphore,
    backoff: Mutex<BackoffState>,
}

#[derive(Default)]
struct BackoffState {
    until: Option<Instant>,
    failures: u32,
}

impl Concurrency {
    pub fn new() -> Self {
        Self { all: Arc::new(Semaphore::new(MAX_REQUESTS)), owners: Mutex::default() }
    }

    pub fn owner_limit(&self, credential: &str, scope: &Scope) -> Arc<OwnerLimit> {
        let key = (credential.to_owned(), scope.owner().to_lowercase());
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || OwnerLimit { permits: Semaphore::new(MAX_REQUESTS_PER_OWNER), backoff: Mutex::default() };
        owners.entry(key).or_insert_with(|| Arc::new(new())).clone()
    }

    /// A permit of the total limit.
    pub async fn acquire(&self) -> OwnedSemaphorePermit {
        self.all.clone().acquire_owned().await.expect("it is never closed")
    }
}

impl OwnerLimit {
    /// Runs `call` within the owner's limit; fails at once during the backoff.
    pub async fn run<T>(&self, call: impl Future<Output = Result<T, GitHubError>>) -> Result<T, GitHubError> {
        self.check()?;
        let _permit = self.permits.acquire().await.expect("it is never closed");
        self.check()?;
        let outcome = call.await;
        let mut backoff = self.backoff.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Err(GitHubError::NoAnswer(_)) => {
                let failures = backoff.failures + 1;
                let delay = TIMEOUT_BACKOFF.delay(failures);
                *backoff = BackoffState { until: Some(Instant::now() + delay), failures };
                Err(GitHubError::NoAnswer(delay))
            }
            outcome => {
                *backoff = BackoffState::default();
                outcome
            }
        }
    }

    fn check(&self) -> Result<(), GitHubError> {
        let until = self.backoff.lock().unwrap_or_else(PoisonError::into_inner).until;
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            Some(left) if !left.is_zero() => Err(GitHubError::NoAnswer(left)),
            _ => Ok(()),
        }
    }
}
