//! GitHub: a client for its REST API, with tokens, rate limits and errors.

pub mod client;
mod concurrency;
pub mod credentials;
pub mod delivery_log;
pub mod error;
mod etags;
mod rate_limits;
mod redirect;
mod runner_list;
mod runs;
mod session;

pub use client::{GitHub, JitConfig, KnownRunner, Removal};
pub use error::GitHubError;
pub use runs::WorkflowJob;
