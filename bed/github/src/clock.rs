//! The simulator's time: the real clock plus an offset set by tests.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::watch;

/// A clock that tests can advance; sleeping tasks wake when it jumps.
pub struct Clock {
    ahead: watch::Sender<SignedDuration>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { ahead: watch::Sender::new(SignedDuration::ZERO) }
    }
}

impl Clock {
    pub fn now(&self) -> Timestamp {
        Timestamp::now() + *self.ahead.borrow()
    }

    pub fn advance(&self, by: Duration) {
        let by = SignedDuration::try_from(by).expect("a test moves the clock by less than 292 years");
        self.ahead.send_modify(|ahead| *ahead += by);
    }

    pub async fn sleep_until(&self, moment: Timestamp) {
        let mut ahead = self.ahead.subscribe();
        loop {
            ahead.borrow_and_update();
            let Ok(left) = Duration::try_from(moment.duration_since(self.now())) else { return };
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left) => {}
                _ = ahead.changed() => {}
            }
        }
    }
}

/// A time in GitHub's format: UTC, whole seconds.
pub(crate) fn stamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
