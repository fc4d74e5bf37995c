//! When something was last done.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

#[derive(Default)]
pub struct Timers(Mutex<HashMap<String, Instant>>);

impl Timers {
    /// Whether `name` was not done within `period`; if so it counts as done now.
    pub fn due(&self, name: &str, period: Duration) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.get(name).is_none_or(|then| then.elapsed() >= period);
        if due {
            last.insert(name.to_owned(), Instant::now());
        }
        due
    }

    /// It was not done after all.
    pub fn reset(&self, name: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}
