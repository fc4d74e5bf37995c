//! GitHub: one client for all of its API, with tokens, limits and errors behind it.

pub mod client;
mod concurrency;
pub mod credentials;
pub mod delivery_log;
pub mod error;
mod session;

pub use client::{GitHub, JitConfig, KnownRunner, Removal, WorkflowJob};
pub use error::GitHubError;
