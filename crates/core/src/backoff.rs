//! Delay after consecutive failures.

use std::time::Duration;

/// Doubles with each failure, up to `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max }
    }

    /// The delay after this many consecutive failures; `first` after the first one.
    pub fn delay(self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_doubles_the_delay_up_to_the_longest() {
        let backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60));
        let delays = [0, 1, 2, 3, 4, 5, u32::MAX].map(|failures| backoff.delay(failures).as_secs());
        assert_eq!(delays, [5, 5, 10, 20, 40, 60, 60]);
    }
}
