//! Workflow jobs: from GitHub's webhook to a claim and its runner.

pub mod burst;
pub mod claim;
pub mod owner;
pub mod round_trip;
pub mod webhook;
