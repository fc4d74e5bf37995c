//! The agent's own numbers, each with its reason. What operator and agent both count on is in `paddock_record`.

use std::time::Duration;

/// How often something fails before the operator is told. It gives the instance up when it hears of a failure, and one
/// answer of 502 from GitHub is not worth a machine; three attempts take about 3 s of the 10 s a claimer waits.
pub const ATTEMPTS: u32 = 3;

/// The operator shows why something failed in a status, which has other things to say too.
pub const DETAIL: usize = 300;

/// A runner that worked this long has started well: when it ends, it is started again at once.
pub const SETTLED: Duration = Duration::from_secs(60);

/// How long past its threshold an instance lives that cannot read its record. Within a minute it might have missed a
/// later threshold and be in the middle of a job; after an hour nobody waits for that job any more.
pub const BLIND_SLACK: Duration = Duration::from_secs(3600);

/// `config.sh` talks to GitHub for seconds and retries by itself; one that takes longer than this hangs.
pub const CONFIG: Duration = Duration::from_secs(60);

/// Fetching or unpacking the runner, some 200 MB, where the image has none; the time to be created is 10 minutes.
pub const INSTALL: Duration = Duration::from_secs(240);

/// What a runner gets to end by itself after SIGINT: it cancels its job and reports that, all within the 120 s that the
/// operator waits for a deregistration.
pub const STOP_GRACE: Duration = Duration::from_secs(45);

/// What a scrub script gets, of the same 120 s.
pub const SCRUB: Duration = Duration::from_secs(45);

/// One read or write of a record, with the SDK's own retries; longer, and the next turn of the loop tries again.
pub const STORE_CALL: Duration = Duration::from_secs(5);

/// The longest wait for the next look while the table cannot be reached: long enough not to add to its trouble, short
/// enough to serve a claimer who waits 10 s.
pub const BLIND_POLL: Duration = Duration::from_secs(5);

/// A spot instance hears of its end two minutes ahead.
pub const SPOT_POLL: Duration = Duration::from_secs(5);

/// `shutdown` has been called and the machine is still up: call again after this long.
pub const SHUTDOWN_AGAIN: Duration = Duration::from_secs(30);

/// The longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The pause after the given number of failures in a row: 1, 2, 4, … 30 s.
pub fn pause(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        n => Duration::from_secs(1 << (n - 1).min(5)).min(LONGEST_PAUSE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_stay_bounded() {
        let seconds: Vec<_> = (0..9).map(|n| pause(n).as_secs()).collect();
        assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }
}
