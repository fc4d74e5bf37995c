//! The API and the decisions: values in, values out. No I/O and no clock; `now` is an argument.

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "tests may read files and clocks")
)]

pub mod api;
pub mod backoff;
pub mod boards;
pub mod clock_skew;
pub mod demand;
pub mod ec2;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod names;
pub mod next;
pub mod redaction;
pub mod retention;
pub mod stale_runner;
pub mod webhook;
