//! Machines of a pool that fail after their launch: how many, why, and when the next warm one is launched.

use std::time::Duration;

use jiff::Timestamp;

use super::pool_status::PoolProblem;
use crate::{api::PoolReason, backoff::Backoff};

/// The pause before a warm machine is launched after others have failed. The first is short, because one machine may
/// fail by chance; the longest leaves a broken pool six launches an hour.
const RELAUNCH: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(600));

/// The failures since a machine of the pool last booted, or the pool was edited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedBoots {
    generation: Option<i64>,
    machines: u32,
    /// Launches after which machines failed. Those of one launch fail together and count once.
    rounds: u32,
    launched_since: bool,
    last_at: Timestamp,
    last_failure: String,
}

impl FailedBoots {
    /// A machine has failed, after `before`.
    pub fn add(before: Option<Self>, generation: Option<i64>, failure: String, now: Timestamp) -> Self {
        let before = before.filter(|before| before.generation == generation);
        let (machines, rounds) = before.as_ref().map_or((0, 0), |before| (before.machines, before.rounds));
        let new_round = before.is_none_or(|before| before.launched_since);
        Self {
            generation,
            machines: machines + 1,
            rounds: rounds + u32::from(new_round),
            launched_since: false,
            last_at: now,
            last_failure: failure,
        }
    }

    /// Machines were launched.
    pub fn launched(&mut self) {
        self.launched_since = true;
    }

    /// When the next warm machine may be launched.
    fn next_launch(&self) -> Timestamp {
        self.last_at + RELAUNCH.delay(self.rounds)
    }

    /// Whether another warm machine may be launched: one at a time, to find out whether machines boot again.
    pub fn may_launch(&self, booting: bool, now: Timestamp) -> bool {
        !booting && now >= self.next_launch()
    }

    /// What is wrong with the pool; nothing if it was edited since.
    pub fn problem(&self, generation: Option<i64>) -> Option<PoolProblem> {
        let (machines, failure) = (self.machines, &self.last_failure);
        let noun = if machines == 1 { "machine has" } else { "machines have" };
        let next = self.next_launch().strftime("%H:%M:%SZ");
        let message = format!(
            "{machines} {noun} failed after the launch; the last one, {failure}. Another warm machine is launched at \
             {next}, or when the pool is edited"
        );
        (self.generation == generation).then_some((PoolReason::MachinesFailing, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ec2::at;

    fn add(before: Option<FailedBoots>, seconds: i64) -> Option<FailedBoots> {
        Some(FailedBoots::add(before, Some(1), "i-1: its pre-runner script failed".into(), at(seconds)))
    }

    #[test]
    fn each_launch_that_fails_doubles_the_pause() {
        let mut boots = None;
        let mut pauses = Vec::new();
        for _ in 0..9 {
            // Three machines of one launch.
            boots = add(add(add(boots, 0), 0), 0);
            pauses.push(boots.as_ref().unwrap().next_launch().duration_since(at(0)).as_secs());
            boots.as_mut().unwrap().launched();
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 600, 600, 600]);
        assert_eq!(boots.unwrap().machines, 27);
    }

    #[test]
    fn after_a_failure_machines_are_launched_one_at_a_time() {
        let boots = add(None, 0).unwrap();
        assert!(!boots.may_launch(false, at(9)) && boots.may_launch(false, at(10)) && !boots.may_launch(true, at(10)));
    }

    #[test]
    fn the_problem_counts_and_explains_until_the_pool_is_edited() {
        let boots = add(add(None, 0), 5).unwrap();
        let (reason, message) = boots.problem(Some(1)).unwrap();
        assert_eq!(reason, PoolReason::MachinesFailing);
        assert!(
            message.starts_with("2 machines have failed after the launch; the last one, i-1: its pre"),
            "{message}"
        );
        assert_eq!(boots.problem(Some(2)), None);
        let edited = FailedBoots::add(Some(boots), Some(2), "i-2: late".into(), at(9));
        assert_eq!((edited.machines, edited.rounds), (1, 1));
    }
}
