//! How long a runner that cannot be removed at GitHub holds up the deletion of its worker.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::backoff::Backoff;

/// The longest pause between two attempts.
const RETRY_MAX: Duration = Duration::from_mins(5);
/// How long GitHub may refuse before the runner is left to it.
const REFUSED_MAX: SignedDuration = SignedDuration::from_mins(10);
/// How long GitHub may not answer. It is an outage, which usually ends.
const OUTAGE_MAX: SignedDuration = SignedDuration::from_hours(1);

/// Why a runner was not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The credentials were deleted with the pool, or no runner can exist: nothing will change that.
    Final,
    /// The credentials are missing, or GitHub refuses, or its answer is unknown.
    Refused,
    /// GitHub does not answer, or a limit is reached.
    Outage,
}

/// Whether the runner is left to GitHub, which forgets offline JIT runners within a day: a worker that can never be
/// deleted would be worse. `since` is when the worker ended or was deleted.
pub fn is_abandoned(obstacle: Obstacle, since: Option<Timestamp>, now: Timestamp) -> bool {
    let after = |limit| since.is_some_and(|since| now.duration_since(since) > limit);
    match obstacle {
        Obstacle::Final => true,
        Obstacle::Refused => after(REFUSED_MAX),
        Obstacle::Outage => after(OUTAGE_MAX),
    }
}

/// The pause after this many failures in a row; at least `first`, which GitHub may have named.
pub fn retry(first: Duration, failures: u32) -> Duration {
    Backoff::new(first, RETRY_MAX.max(first)).delay(failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_nothing_that_github_answers_holds_up_a_deletion_for_ever() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let abandoned = |obstacle, second| is_abandoned(obstacle, Some(at(0)), at(second));
        for (obstacle, last) in [(Obstacle::Refused, 600), (Obstacle::Outage, 3600)] {
            assert!(!abandoned(obstacle, last) && abandoned(obstacle, last + 1), "{obstacle:?}");
            assert!(!is_abandoned(obstacle, None, at(9999)), "a worker that is not deleted keeps its runner");
        }
        assert!(is_abandoned(Obstacle::Final, None, at(0)));
    }

    #[test]
    fn attempts_become_rarer() {
        let pauses = |first| [1, 2, 3, 99].map(|failures| retry(Duration::from_secs(first), failures).as_secs());
        assert_eq!(pauses(15), [15, 30, 60, 300]);
        assert_eq!(pauses(600), [600; 4]);
    }
}
