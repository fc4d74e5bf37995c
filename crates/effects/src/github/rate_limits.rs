//! Rate limits of accounts, as GitHub's answers tell them.

use std::{collections::HashMap, sync::Mutex};

use http::HeaderMap;
use jiff::Timestamp;

use super::error::GitHubError;
use crate::{clock, lock};

/// What GitHub's rate limits apply to: an App itself, one of its installations, or a token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Account {
    pub fingerprint: String,
    pub installation: Option<u64>,
}

/// The priority of a call while little of the hourly limit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// A job waits for it, or it releases something.
    Urgent,
    /// It can be retried later. The last tenth of the limit is reserved for urgent calls.
    Background,
}

#[derive(Default)]
pub struct RateLimits(Mutex<HashMap<Account, RateLimitState>>);

/// The rate limit of an account.
#[derive(Clone, Copy, Default)]
struct RateLimitState {
    /// No request is sent before.
    until: Option<Timestamp>,
    /// Consecutive rate limited responses.
    failures: u32,
    budget: Option<Budget>,
}

/// The remaining hourly limit, according to the last response.
#[derive(Clone, Copy)]
struct Budget {
    limit: i64,
    remaining: i64,
    reset: Timestamp,
}

impl Budget {
    fn of(headers: &HeaderMap) -> Option<Self> {
        let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<i64>().ok();
        let reset = Timestamp::from_second(number("x-ratelimit-reset")?).ok()?;
        Some(Self { limit: number("x-ratelimit-limit")?, remaining: number("x-ratelimit-remaining")?, reset })
    }

    fn allows(self, lane: Lane, now: Timestamp) -> bool {
        let required = match lane {
            Lane::Urgent => 1,
            Lane::Background => self.limit / 10,
        };
        now >= self.reset || self.remaining >= required
    }
}

impl RateLimits {
    /// The consecutive rate limited responses so far; an error while the account is limited.
    pub fn check(&self, account: &Account, lane: Lane) -> Result<u32, GitHubError> {
        let rate_limit = lock(&self.0).get(account).copied().unwrap_or_default();
        let now = clock::now();
        match (rate_limit.until, rate_limit.budget) {
            (Some(until), _) if now < until => Err(GitHubError::RateLimited { until }),
            (_, Some(budget)) if !budget.allows(lane, now) => Err(GitHubError::RateLimited { until: budget.reset }),
            _ => Ok(rate_limit.failures),
        }
    }

    pub fn note_budget(&self, account: &Account, headers: &HeaderMap) {
        if let Some(budget) = Budget::of(headers) {
            lock(&self.0).entry(account.clone()).or_default().budget = Some(budget);
        }
    }

    pub fn record(&self, account: &Account, limited: Option<Timestamp>) {
        let mut rate_limits = lock(&self.0);
        let rate_limit = rate_limits.entry(account.clone()).or_default();
        rate_limit.failures = if limited.is_some() { rate_limit.failures + 1 } else { 0 };
        rate_limit.until = limited;
    }
}
