//! GitHub's rate limits, as pure functions.

use std::{collections::VecDeque, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::signed;

/// The window of the primary limit.
pub const WINDOW: Duration = Duration::from_secs(3600);

/// One caller's use of its primary limit.
#[derive(Clone, Debug)]
pub struct Window {
    pub reset: Timestamp,
    pub used: u64,
}

impl Window {
    pub fn new(now: Timestamp) -> Self {
        Self { reset: now + signed(WINDOW), used: 0 }
    }

    /// Counts a call; returns false if the limit was already reached.
    pub fn take(&mut self, limit: u64, now: Timestamp) -> bool {
        if now >= self.reset {
            *self = Self::new(now);
        }
        let allowed = self.used < limit;
        self.used += u64::from(allowed);
        allowed
    }
}

/// Secondary limits. GitHub does not publish all of them; these two were measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Secondary {
    pub jit_configs_per_minute: usize,
    pub concurrent: usize,
    /// Sent as `retry-after`, in seconds; GitHub does not always send one.
    pub retry_after: Option<u64>,
}

impl Default for Secondary {
    fn default() -> Self {
        Self { jit_configs_per_minute: 180, concurrent: 100, retry_after: Some(60) }
    }
}

/// Counts an event in a sliding minute; returns false if there are already `limit`.
pub fn within_a_minute(times: &mut VecDeque<Timestamp>, limit: usize, now: Timestamp) -> bool {
    while times.front().is_some_and(|&first| first + signed(Duration::from_secs(60)) <= now) {
        times.pop_front();
    }
    let allowed = times.len() < limit;
    if allowed {
        times.push_back(now);
    }
    allowed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spent_window_refuses_until_its_reset() {
        let start = Timestamp::UNIX_EPOCH;
        let mut window = Window::new(start);
        assert!(window.take(2, start) && window.take(2, start));
        assert!(!window.take(2, window.reset - signed(Duration::from_secs(1))));
        assert!(window.take(2, window.reset));
        assert_eq!(window.used, 1);
    }

    #[test]
    fn the_minute_slides() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let mut times = VecDeque::new();
        assert!(within_a_minute(&mut times, 2, at(0)) && within_a_minute(&mut times, 2, at(30)));
        assert!(!within_a_minute(&mut times, 2, at(59)));
        assert!(within_a_minute(&mut times, 2, at(60)));
        assert!(!within_a_minute(&mut times, 2, at(61)));
    }
}
