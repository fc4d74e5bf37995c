//! Waits for a condition; see [`Wait`].

use anyhow::Error;
pub use paddock_bed_process::wait::{Check, Wait};

/// Whether the request itself failed, rather than a check of its response: a restarting server answers again soon.
pub fn request_failed(error: &Error) -> bool {
    error.chain().any(|cause| cause.is::<kube::Error>() || cause.is::<reqwest::Error>())
}
