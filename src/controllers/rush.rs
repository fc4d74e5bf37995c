//! Many jobs at once: until each has its claim and its pod, the API server is theirs, and what there is to show waits.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use paddock_effects::lock;

/// How long showing waits at most.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Default)]
pub struct Rush(Mutex<State>);

#[derive(Default)]
struct State {
    /// Claims and pods that are to be made and need nothing but the API server.
    open: usize,
    since: Option<Instant>,
}

/// One of them; dropped when it was made, or cannot be.
pub struct Ticket<'a>(&'a Rush);

impl Rush {
    pub fn enter(&self) -> Ticket<'_> {
        let mut state = lock(&self.0);
        state.open += 1;
        state.since.get_or_insert_with(Instant::now);
        Ticket(self)
    }

    pub fn is_on(&self) -> bool {
        lock(&self.0).since.is_some_and(|since| since.elapsed() < PATIENCE)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.0);
        state.open -= 1;
        if state.open == 0 {
            state.since = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rush_is_on_until_the_last_ticket_is_given_back() {
        let rush = Rush::default();
        assert!(!rush.is_on());
        let (first, second) = (rush.enter(), rush.enter());
        drop(first);
        assert!(rush.is_on());
        drop(second);
        assert!(!rush.is_on());
    }
}
