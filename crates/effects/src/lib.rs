//! Adapters: one for each external system. Each maps that system's types and errors to Paddock's.

pub mod aws;
pub mod cache;
pub mod clock;
pub mod fence;
pub mod github;
pub mod kube;
pub mod ledger;
pub mod metrics;
pub mod watched_file;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex and ignores poisoning: no critical section here leaves its data inconsistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
