//! Why the last attempt failed, for the next failure signal.

use std::fmt;

use paddock_record::{LOG_MAX, SCRUB, tail};

use crate::{limits, process::Failed};

/// Why the last attempt failed. `reason` is set only where the signal alone is ambiguous.
#[derive(Default)]
pub(super) struct LastError {
    pub reason: &'static str,
    pub detail: String,
    pub log: String,
}

impl LastError {
    pub fn of(error: &anyhow::Error) -> Self {
        let reason = if error.is::<Unscrubbed>() { SCRUB } else { "" };
        let log = error.downcast_ref::<Failed>().map_or("", |failed| failed.log.as_str());
        Self::new(reason, &format!("{error:#}"), log.to_owned())
    }

    pub fn new(reason: &'static str, detail: &str, log: String) -> Self {
        Self { reason, detail: detail.chars().take(limits::DETAIL_MAX_CHARS).collect(), log }
    }

    /// With what the runner has noted about itself, which is removed with its registration.
    pub fn with_diagnostics(mut self, diagnostics: &str) -> Self {
        if !diagnostics.is_empty() {
            let noted = tail(diagnostics, limits::DIAGNOSTICS_MAX);
            let said = tail(&self.log, LOG_MAX - limits::DIAGNOSTICS_MAX - SEPARATOR.len());
            self.log = format!("{said}{SEPARATOR}{noted}");
        }
        self
    }
}

/// Between the end of a log and that of the runner's log about itself.
const SEPARATOR: &str = "\n_diag:\n";

/// Error context that marks a failed scrub between two runs.
#[derive(Debug)]
pub(super) struct Unscrubbed;

impl fmt::Display for Unscrubbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the machine could not be scrubbed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_logs_fit_into_a_signal_and_the_end_of_each_is_there() {
        let log = "said\n".repeat(2000) + "the end";
        let error = LastError::new("", "", log).with_diagnostics(&("noted\n".repeat(2000) + "the cause"));
        assert!(error.log.len() <= LOG_MAX, "{}", error.log.len());
        assert!(error.log.contains("the end\n_diag:\n") && error.log.ends_with("the cause"), "{}", error.log);
    }
}
