//! The last run of periodic work.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use paddock_effects::lock;

#[derive(Default)]
pub struct Timers(Mutex<HashMap<String, Instant>>);

impl Timers {
    /// Whether `name` did not run within `period`; if so it counts as run now.
    pub fn due(&self, name: &str, period: Duration) -> bool {
        let mut last = lock(&self.0);
        let due = last.get(name).is_none_or(|then| then.elapsed() >= period);
        if due {
            last.insert(name.to_owned(), Instant::now());
        }
        due
    }
}
