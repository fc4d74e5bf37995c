//! Waits for what becomes true later; see [`Wait`].

use anyhow::Error;
pub use paddock_bed_process::wait::{Look, Wait};

/// Whether a request failed, rather than a check of its answer: a server that restarts answers again soon.
pub fn request_failed(error: &Error) -> bool {
    error.chain().any(|cause| cause.is::<kube::Error>() || cause.is::<reqwest::Error>())
}
