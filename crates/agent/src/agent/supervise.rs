//! The runner's process: starts it, follows what it does, and finds out why it has ended.

use std::{
    process::ExitStatus,
    time::{Duration, Instant},
};

use anyhow::Result;
use nix::sys::signal::Signal as UnixSignal;
use paddock_record::RUNNER_ENDED;

use super::{Agent, LastError};
use crate::{
    files::Serving,
    limits,
    process::{Alive, end_of},
    runner_log::RunnerLog,
    step::Runner,
    version::is_older,
    words::why,
};

/// How GitHub refuses a version of the runner, and anything else by the same words.
const REFUSAL: &str = "cannot receive messages";
/// The exit status of `run.sh` with which the runner repeats them (actions/runner v2.336.0, `src/Runner.Common/Constants.cs`).
const STATUS_REFUSED: i32 = 7;
/// What a runner says at its start if GitHub has deleted it.
const DELETED: &str = "registration has been deleted from the server";

/// Why the runner has ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// GitHub does not take this version any more.
    Outdated,
    /// GitHub does not have it any more.
    Deleted,
    /// Anything else, such as a crash or an outage of GitHub.
    Other,
}

impl Cause {
    /// The refusal of a version that is not older than the newest means something else: GitHub uses the sentence for every 403.
    fn of(log: &str, status: Option<ExitStatus>, configured: bool, outdated: bool) -> Self {
        let refused = log.contains(REFUSAL) || status.and_then(|status| status.code()) == Some(STATUS_REFUSED);
        if !configured || log.contains(DELETED) {
            Self::Deleted
        } else if refused && outdated {
            Self::Outdated
        } else {
            Self::Other
        }
    }
}

impl Agent {
    pub(super) fn start_runner(&mut self) -> Result<()> {
        let child = self.runner.start()?;
        self.memory.runner = child.id().and_then(Alive::of);
        self.child = Some(child);
        self.status = None;
        self.log = RunnerLog::default();
        self.runner_since = Instant::now();
        self.files.remember(&self.memory)
    }

    /// The runner's phase. If it has ended by itself, notes why.
    pub(super) async fn follow_runner(&mut self) -> Result<Runner> {
        let was_running = self.memory.runner.is_some();
        let phase = self.runner_phase()?;
        if was_running && self.memory.runner.is_none() {
            self.note_end().await?;
            return self.runner_phase();
        }
        Ok(phase)
    }

    /// The runner's phase. If it has exited, kills what is left of its process group and forgets it.
    pub(super) fn runner_phase(&mut self) -> Result<Runner> {
        if let Some(child) = &mut self.child
            && let Ok(Some(status)) = child.try_wait()
        {
            self.status = Some(status);
        }
        let now = Instant::now();
        self.log.read(self.runner.log(), now);
        match (&self.memory.serving, self.memory.runner) {
            (_, Some(process)) if process.runs() => Ok(self.log.phase(self.patience(), now)),
            (_, Some(process)) => {
                tracing::info!(log = %self.runner.log().display(), "run.sh exited");
                process.signal_group(UnixSignal::SIGKILL);
                if self.runner_since.elapsed() > limits::RUNNER_SETTLED_AFTER {
                    self.attempts.failures = 0;
                }
                (self.memory.runner, self.child) = (None, None);
                self.files.remember(&self.memory)?;
                self.runner_phase()
            }
            (Some(Serving { ended: true, .. }), None) => Ok(Runner::Ended),
            (Some(Serving { configured: true, .. }), None) => Ok(Runner::Stopped),
            (Some(Serving { configured: false, .. }) | None, None) => Ok(Runner::Absent),
        }
    }

    /// How long the runner must listen before it counts as registered: only one that may be refused has to wait.
    fn patience(&self) -> Duration {
        let ended_before = self.attempts.failures > 1;
        if self.is_outdated() || ended_before { limits::REFUSAL_WAIT } else { Duration::ZERO }
    }

    /// Whether the runner is older than the newest that GitHub lists.
    fn is_outdated(&self) -> bool {
        let latest = self.config.listed_runner_version.as_deref();
        self.log.version().zip(latest).is_some_and(|(version, latest)| is_older(version, latest))
    }

    async fn note_end(&mut self) -> Result<()> {
        let Some(serving) = &mut self.memory.serving else { return Ok(()) };
        let latest = self.config.listed_runner_version.clone().unwrap_or_default();
        let version = self.log.version().unwrap_or_default().to_owned();
        let log = end_of(self.runner.log());
        let outdated = is_older(&version, &latest);
        let cause = Cause::of(&log, self.status.take(), self.runner.is_configured(), outdated);
        let said = why(&log);
        let detail = match cause {
            Cause::Outdated => format!(
                "GitHub refuses version {version} of the runner, the newest is {latest}: name a newer runnerVersion in \
                 the pool, or update the image ({said})"
            ),
            Cause::Deleted => format!("the runner was deleted at GitHub ({said})"),
            Cause::Other => format!("the runner has ended ({said})"),
        };
        tracing::warn!("{detail}");
        serving.ended = cause != Cause::Other || self.attempts.failures >= limits::RUNNER_FAILURES_MAX;
        let reason = if serving.ended { RUNNER_ENDED } else { "" };
        if serving.ended {
            // A failure that was reported before did not say that it is final.
            self.memory.reported = None;
        }
        let diagnostics = self.runner.diagnostics().await;
        self.last_error = LastError::new(reason, &detail, log).with_diagnostics(&diagnostics);
        self.files.remember(&self.memory)
    }

    /// Sends SIGINT to the runner, then SIGKILL if it is still running after the grace period.
    pub(super) async fn stop_runner(&mut self) -> Result<()> {
        let Some(process) = self.memory.runner else { return Ok(()) };
        tracing::info!("stopping the runner");
        process.signal_group(UnixSignal::SIGINT);
        let interrupted_at = Instant::now();
        while self.memory.runner.is_some() {
            if interrupted_at.elapsed() > limits::RUNNER_STOP_GRACE {
                tracing::warn!("runner still running after SIGINT; killing it");
                process.signal_group(UnixSignal::SIGKILL);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.runner_phase()?;
        }
        Ok(())
    }

    /// Called before the agent exits: stops an idle runner and leaves a busy one to the next agent.
    pub async fn retire(&mut self) -> Result<()> {
        match self.runner_phase()? {
            Runner::Starting | Runner::Idle => self.stop_runner().await,
            Runner::Busy | Runner::Stopped | Runner::Ended | Runner::Absent => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_refusal_means_outdated_only_for_a_version_older_than_the_newest() {
        let refusal = "An error occurred: Runner version v2.330.0 is deprecated and cannot receive messages.";
        let status = |code: i32| Some(ExitStatus::from_raw(code << 8));
        assert_eq!(Cause::of(refusal, None, true, true), Cause::Outdated);
        assert_eq!(Cause::of(refusal, status(7), true, false), Cause::Other, "an outage");
        assert_eq!(Cause::of("", status(7), true, true), Cause::Outdated);
        assert_eq!(Cause::of("", status(137), true, true), Cause::Other);
        assert_eq!(Cause::of("", None, true, true), Cause::Other);
    }

    #[test]
    fn a_runner_that_github_has_deleted_is_not_configured_any_more_or_says_so() {
        let deleted = "Failed to create a session. The runner registration has been deleted from the server, please \
                       re-configure.";
        assert_eq!(Cause::of("The runner no longer exists on the server.", None, false, false), Cause::Deleted);
        assert_eq!(Cause::of(deleted, None, true, true), Cause::Deleted);
    }
}
