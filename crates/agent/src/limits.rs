//! The agent's limits. Those shared with the operator are in `paddock_record`.

use std::time::Duration;

/// Consecutive failures before the agent reports one. The operator gives the instance up on a failure, which a single
/// 502 from GitHub does not justify. Three attempts take about 3 s, and what `config.sh` needs, of the
/// 60 s a claimer waits.
pub const FAILURES_BEFORE_REPORT: u32 = 3;

/// Length limit of an error detail, which the operator copies into a status.
pub const DETAIL_MAX_CHARS: usize = 800;

/// Consecutive failures before a runner that served its claim counts as ended for good, about 8 minutes with their pauses.
/// Until then GitHub may be down: the sentence that refuses a version is also that of other refusals.
pub const RUNNER_FAILURES_MAX: u32 = 20;

/// How long a runner that GitHub may refuse must listen before it counts as registered. The first poll tells.
pub const REFUSAL_WAIT: Duration = Duration::from_secs(5);

/// A runner that ran this long started correctly: when it exits, it is restarted without backoff.
pub const RUNNER_SETTLED_AFTER: Duration = Duration::from_secs(60);

/// How long an instance that cannot read its record outlives its threshold. The operator may have extended it for a
/// running job; after an hour that job is presumed lost.
pub const UNREADABLE_RECORD_SLACK: Duration = Duration::from_secs(3600);

/// `config.sh` takes seconds and retries by itself; one that takes longer than this hangs.
pub const CONFIG_TIMEOUT: Duration = Duration::from_secs(60);

/// Loading all of the runner's code once. Not measured on a real machine; it may be cut off without harm.
pub const WARM_UP_TIMEOUT: Duration = Duration::from_secs(60);

/// How many bytes of that go with a failure.
pub const DIAGNOSTICS_MAX: usize = 1536;

/// One call of `iptables` or `nft`, which wait for others to finish.
pub const FIREWALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Length limit of a warning, which goes with every heartbeat.
pub const WARNING_MAX_CHARS: usize = 300;

/// Reading the end of the runner's log.
pub const DIAGNOSTICS_TIMEOUT: Duration = Duration::from_secs(5);

/// Downloading or unpacking the runner, about 200 MB. It fits into the 10 minutes an instance may stay `created`.
pub const INSTALL_TIMEOUT: Duration = Duration::from_secs(240);

/// Time between SIGINT and SIGKILL for the runner, which cancels its job and reports that to GitHub. It is part of the
/// 120 s that the operator waits for a deregistration.
pub const RUNNER_STOP_GRACE: Duration = Duration::from_secs(45);

/// Time limit of a scrub script, part of the same 120 s.
pub const SCRUB_TIMEOUT: Duration = Duration::from_secs(45);

/// One read or write of a record, including the SDK's retries. After that the next iteration of the loop retries.
pub const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest pause between reads while the table cannot be reached: long enough not to add load, short enough for a
/// claimer that waits 60 s.
pub const READ_RETRY_MAX: Duration = Duration::from_secs(5);

/// EC2 announces a spot interruption two minutes ahead.
pub const SPOT_POLL: Duration = Duration::from_secs(5);

/// Pause before `shutdown` is called again if the machine is still running.
pub const SHUTDOWN_RETRY: Duration = Duration::from_secs(30);

/// The longest pause between attempts.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// The pause after the given number of consecutive failures: 1, 2, 4, … 30 s.
pub fn backoff(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        n => Duration::from_secs(1 << (n - 1).min(5)).min(BACKOFF_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_stay_bounded() {
        let seconds: Vec<_> = (0..9).map(|n| backoff(n).as_secs()).collect();
        assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }
}
