//! Adapters: one for each outside system. Each maps that system's words to ours once.

pub mod aws;
pub mod cache;
pub mod fence;
pub mod github;
pub mod kube;
pub mod ledger;
pub mod metrics;
pub mod watched_file;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex that never guards half-done work, so a panic elsewhere does not matter.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
