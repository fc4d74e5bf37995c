//! Whose turn it is: GitHub takes so many requests at a time, and one owner for whom it does not answer must not take
//! them all.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::GitHubError;
use crate::plan::entity::Scope;

/// GitHub refuses more than 100 requests at a time; some are left to whoever else uses the credentials.
const AT_ONCE: usize = 90;
/// As many of them for one owner: enough for a burst of its jobs, and ten owners that get no answer do not stop the rest.
const AT_ONCE_FOR_ONE: usize = 8;
/// How long an owner for whom GitHub did not answer in time is left alone; it doubles while that goes on.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub struct Turns {
    all: Arc<Semaphore>,
    lines: Mutex<HashMap<(String, String), Arc<Line>>>,
}

/// The requests for one owner.
pub struct Line {
    turns: Semaphore,
    silence: Mutex<Silence>,
}

#[derive(Default)]
struct Silence {
    until: Option<Instant>,
    strikes: u32,
}

impl Turns {
    pub fn new() -> Self {
        Self { all: Arc::new(Semaphore::new(AT_ONCE)), lines: Mutex::default() }
    }

    pub fn line(&self, credential: &str, scope: &Scope) -> Arc<Line> {
        let key = (credential.to_owned(), scope.owner().to_lowercase());
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Line { turns: Semaphore::new(AT_ONCE_FOR_ONE), silence: Mutex::default() };
        lines.entry(key).or_insert_with(|| Arc::new(new())).clone()
    }

    /// A place among all requests.
    pub async fn one(&self) -> OwnedSemaphorePermit {
        self.all.clone().acquire_owned().await.expect("it is never closed")
    }
}

impl Line {
    /// Runs `call` when it is this owner's turn, and not while GitHub is silent for it.
    pub async fn run<T>(&self, call: impl Future<Output = Result<T, GitHubError>>) -> Result<T, GitHubError> {
        self.check()?;
        let _turn = self.turns.acquire().await.expect("it is never closed");
        self.check()?;
        let outcome = call.await;
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Err(GitHubError::NoAnswer(_)) => {
                let pause = (FIRST_PAUSE * (1 << silence.strikes.min(8))).min(LONGEST_PAUSE);
                *silence = Silence { until: Some(Instant::now() + pause), strikes: silence.strikes + 1 };
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
