//! Decides the agent's next action. No I/O and no clock.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{EXPIRY_SLACK, Instance, Signal, State};

use crate::limits::{FAILURES_BEFORE_REPORT, UNREADABLE_RECORD_SLACK};

/// The instance's own record, as last read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// None was ever found.
    Never,
    /// It was found before and is now missing.
    Gone,
    /// The record as of `read_at`, which is in the past while the table cannot be reached. Its threshold and `updatedAt`
    /// were first read at `since`.
    Seen { instance: Box<Instance>, read_at: Timestamp, since: Timestamp },
}

/// The pre-runner script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Script {
    NotRun,
    Running,
    Succeeded,
    Failed,
}

/// The GitHub runner on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// Not configured: nothing to start, nothing to remove.
    Absent,
    /// Configured; `run.sh` is not running.
    Stopped,
    /// It has ended, and starting it again does not help.
    Ended,
    /// `run.sh` is running but not yet listening for jobs.
    Starting,
    /// Listening for jobs.
    Idle,
    /// Running a job.
    Busy,
}

/// The inputs of a decision. All instants are by the machine's own clock, except those within the record.
#[derive(Debug, Clone)]
pub struct Facts<'a> {
    pub record: &'a Record,
    pub script: Script,
    /// The run this machine was last set up for, until it is scrubbed.
    pub serving: Option<&'a str>,
    pub runner: Runner,
    /// The last signal reported to the operator, with its run and the record's number of claims.
    pub reported: Option<(Signal, &'a str, u32)>,
    /// EC2 has announced a spot interruption.
    pub reclaimed: bool,
    /// Consecutive failures of the current action, and when it may be retried.
    pub failures: u32,
    pub retry_at: Timestamp,
    /// When the agent started for the first time on this machine.
    pub first_start: Timestamp,
    pub created_lifetime: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Nothing to do until the record is read again.
    Wait,
    RunScript,
    /// Configure the runner for this run, with the record's token.
    Register(&'a Instance),
    StartRunner,
    StopRunner,
    /// Remove the runner from GitHub if there is a token, and scrub the machine.
    Deregister {
        run: &'a str,
        sealed: Option<&'a str>,
    },
    Report(Signal, &'a str),
    ShutDown(End),
}

/// Why an instance shuts itself down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Unclaimed,
    RecordGone,
    Terminated,
    Expired,
    RecordUnreadable,
}

impl End {
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Unclaimed => "no record of this instance has appeared in its time to be created",
            Self::RecordGone => "the record of this instance was removed",
            Self::Terminated => "the record says terminated",
            Self::Expired => "the time of this instance ended more than a minute ago",
            Self::RecordUnreadable => {
                "the time of this instance ended more than an hour ago and the record cannot be read"
            }
        }
    }
}

pub fn step<'a>(facts: &Facts<'a>, now: Timestamp) -> Action<'a> {
    if let Some(end) = end(facts, now) {
        return Action::ShutDown(end);
    }
    match (facts.script, facts.record) {
        (Script::NotRun, _) => Action::RunScript,
        (Script::Running | Script::Failed, _) => Action::Wait,
        (Script::Succeeded, Record::Never | Record::Gone) => Action::Wait,
        (Script::Succeeded, Record::Seen { instance, .. }) => serve(facts, instance, now),
    }
}

/// Whether the instance must shut down. Its time ends as long after it has read a threshold as that is ahead of
/// `updatedAt`: the record's instants are by another clock. The end is compared with the time of the last read, because the
/// operator may have extended it during an outage of the table.
fn end(facts: &Facts, now: Timestamp) -> Option<End> {
    let passed = |since: Timestamp, slack: Duration, at: Timestamp| {
        at.duration_since(since) > SignedDuration::try_from(slack).unwrap_or(SignedDuration::MAX)
    };
    match facts.record {
        Record::Never => passed(facts.first_start, facts.created_lifetime.saturating_add(EXPIRY_SLACK), now)
            .then_some(End::Unclaimed),
        Record::Gone => Some(End::RecordGone),
        Record::Seen { instance, read_at, since } => match (instance.state, instance.threshold) {
            (State::Terminated, _) => Some(End::Terminated),
            (State::Created | State::Running | State::Idle | State::Claimed | State::Unknown, None) => None,
            (State::Created | State::Running | State::Idle | State::Claimed | State::Unknown, Some(threshold)) => {
                // Another version may have left out `updatedAt`; then there is only this machine's clock.
                let written = Some(instance.updated_at).filter(|at| *at != Timestamp::UNIX_EPOCH).unwrap_or(*since);
                let lifetime = threshold.duration_since(written).max(SignedDuration::ZERO);
                let end = since.saturating_add(lifetime).unwrap_or(Timestamp::MAX);
                if passed(end, EXPIRY_SLACK, *read_at) {
                    Some(End::Expired)
                } else {
                    passed(end, UNREADABLE_RECORD_SLACK, now).then_some(End::RecordUnreadable)
                }
            }
        },
    }
}

/// Moves the machine from the run it serves to the run in its record.
fn serve<'a>(facts: &Facts<'a>, record: &'a Instance, now: Timestamp) -> Action<'a> {
    let wanted = Some(record.run_id.as_str()).filter(|run| !run.is_empty());
    match (facts.serving, wanted) {
        (None, None) if record.leaving.is_empty() => Action::Wait,
        // The run may have been released before it was registered.
        (None, None) => facts.report(Signal::Deregistered, &record.leaving, Action::Wait),
        (None, Some(run)) => start_serving(facts, record, run, now),
        (Some(own), Some(run)) if own == run => keep_serving(facts, record, own, now),
        (Some(own), Some(_) | None) => stop_serving(facts, record, own, now),
    }
}

fn start_serving<'a>(facts: &Facts<'a>, record: &'a Instance, run: &'a str, now: Timestamp) -> Action<'a> {
    if facts.reclaimed {
        facts.report(Signal::RegistrationFailed, run, Action::Wait)
    } else if record.sealed.is_empty() {
        Action::Wait
    } else {
        facts.attempt(Action::Register(record), Signal::RegistrationFailed, run, now)
    }
}

fn keep_serving<'a>(facts: &Facts<'a>, record: &'a Instance, own: &'a str, now: Timestamp) -> Action<'a> {
    match facts.runner {
        Runner::Absent => start_serving(facts, record, own, now),
        Runner::Stopped | Runner::Ended if facts.reclaimed => Action::Wait,
        Runner::Ended => facts.report(Signal::RegistrationFailed, own, Action::Wait),
        Runner::Stopped => facts.attempt(Action::StartRunner, Signal::RegistrationFailed, own, now),
        Runner::Starting => Action::Wait,
        Runner::Idle if facts.reclaimed => Action::StopRunner,
        Runner::Idle | Runner::Busy => facts.report(Signal::Registered, own, Action::Wait),
    }
}

fn stop_serving<'a>(facts: &Facts<'a>, record: &'a Instance, own: &'a str, now: Timestamp) -> Action<'a> {
    // If the record names another run, its token is a registration token; registering with it replaces GitHub's entry.
    let sealed = match facts.runner {
        Runner::Starting | Runner::Idle | Runner::Busy => return Action::StopRunner,
        Runner::Stopped | Runner::Ended if record.run_id.is_empty() && record.sealed.is_empty() => return Action::Wait,
        Runner::Stopped | Runner::Ended if record.run_id.is_empty() => Some(record.sealed.as_str()),
        Runner::Stopped | Runner::Ended | Runner::Absent => None,
    };
    facts.attempt(Action::Deregister { run: own, sealed }, Signal::DeregistrationFailed, own, now)
}

impl<'a> Facts<'a> {
    /// Reports the signal unless it was the last one reported, for the same claim of the same run; then continues with `next`.
    fn report(&self, signal: Signal, run: &'a str, next: Action<'a>) -> Action<'a> {
        let claims = match self.record {
            Record::Never | Record::Gone => 0,
            Record::Seen { instance, .. } => instance.claims,
        };
        if self.reported == Some((signal, run, claims)) { next } else { Action::Report(signal, run) }
    }

    /// Retries after the backoff, and reports the failure once it has repeated often enough.
    fn attempt(&self, action: Action<'a>, failed: Signal, run: &'a str, now: Timestamp) -> Action<'a> {
        let next = if now >= self.retry_at { action } else { Action::Wait };
        if self.failures >= FAILURES_BEFORE_REPORT { self.report(failed, run, next) } else { next }
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
