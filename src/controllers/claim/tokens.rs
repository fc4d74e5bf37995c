//! Registration tokens: one for each claim, for as long as it waits for machines.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use secrecy::SecretString;

/// GitHub lets a registration token live for an hour; a machine that got one late has time left to use it.
const LIFE: Duration = Duration::from_secs(30 * 60);

/// By the claim's uid.
#[derive(Default)]
pub struct Tokens(Mutex<HashMap<String, (SecretString, Instant)>>);

impl Tokens {
    fn known(&self) -> MutexGuard<'_, HashMap<String, (SecretString, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, uid: &str) -> Option<SecretString> {
        let mut known = self.known();
        known.retain(|_, (_, since)| since.elapsed() < LIFE);
        known.get(uid).map(|(token, _)| token.clone())
    }

    pub fn keep(&self, uid: &str, token: &SecretString) {
        self.known().insert(uid.to_owned(), (token.clone(), Instant::now()));
    }

    /// The claim needs it no more, or it did not do.
    pub fn forget(&self, uid: &str) {
        self.known().remove(uid);
    }
}
