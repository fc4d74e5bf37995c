//! Whose turn it is: GitHub takes so many requests at a time, and one owner for whom it does not answer must not take
//! them all.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use paddock_core::{backoff::Backoff, demand::quota::Scope};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::GitHubError;

/// GitHub refuses more than 100 requests at a time; some are left to whoever else uses the credentials.
const AT_ONCE: usize = 90;
/// As many of them for one owner: enough for a burst of its jobs, and ten owners that get no answer do not stop the rest.
const AT_ONCE_FOR_ONE: usize = 8;
/// How long an owner for whom GitHub did not answer in time is left alone; it doubles while that goes on.
const SILENCE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60));

pub struct Concurrency {
    all: Arc<Semaphore>,
    lines: Mutex<HashMap<(String, String), Arc<OwnerLimit>>>,
}

/// The requests for one owner.
pub struct OwnerLimit {
    turns: Semaphore,
    silence: Mutex<Silence>,
}

#[derive(Default)]
struct Silence {
    until: Option<Instant>,
    failures: u32,
}

impl Concurrency {
    pub fn new() -> Self {
        Self { all: Arc::new(Semaphore::new(AT_ONCE)), lines: Mutex::default() }
    }

    pub fn line(&self, credential: &str, scope: &Scope) -> Arc<OwnerLimit> {
        let key = (credential.to_owned(), scope.owner().to_lowercase());
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || OwnerLimit { turns: Semaphore::new(AT_ONCE_FOR_ONE), silence: Mutex::default() };
        lines.entry(key).or_insert_with(|| Arc::new(new())).clone()
    }

    /// A place among all requests.
    pub async fn one(&self) -> OwnedSemaphorePermit {
        self.all.clone().acquire_owned().await.expect("it is never closed")
    }
}

impl OwnerLimit {
    /// Runs `call` when it is this owner's turn, and not while GitHub is silent for it.
    pub async fn run<T>(&self, call: impl Future<Output = Result<T, GitHubError>>) -> Result<T, GitHubError> {
        self.check()?;
        let _turn = self.turns.acquire().await.expect("it is never closed");
        self.check()?;
        let outcome = call.await;
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Err(GitHubError::NoAnswer(_)) => {
                let failures = silence.failures + 1;
                let pause = SILENCE_BACKOFF.delay(failures);
                *silence = Silence { until: Some(Instant::now() + pause), failures };
                Err(GitHubError::NoAnswer(pause))
            }
            outcome => {
                *silence = Silence::default();
                outcome
            }
        }
    }

    fn check(&self) -> Result<(), GitHubError> {
        let until = self.silence.lock().unwrap_or_else(PoisonError::into_inner).until;
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            Some(left) if !left.is_zero() => Err(GitHubError::NoAnswer(left)),
            _ => Ok(()),
        }
    }
}
