//! The agent's time: it never jumps, whatever sets the machine's clock meanwhile.

use std::{sync::LazyLock, time::Instant};

use jiff::{SignedDuration, Timestamp};

static START: LazyLock<(Timestamp, Instant)> = LazyLock::new(|| (Timestamp::now(), Instant::now()));

/// The machine's clock as of the agent's start, plus the time since then. Instances are often launched with a wrong clock,
/// which is set a moment later. Only for durations on this machine.
pub fn now() -> Timestamp {
    let (start, started) = *START;
    start + SignedDuration::try_from(started.elapsed()).expect("a machine runs for less than 292 years")
}
