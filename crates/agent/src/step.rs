//! What the agent does next, decided from what it knows. No I/O and no clock.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{EXPIRY_SLACK, Instance, Signal, State};

use crate::limits::{ATTEMPTS, BLIND_SLACK};

/// What is known of the instance's own record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// None was ever found.
    Never,
    /// There was one, and now there is none.
    Gone,
    /// The record as it was at `read_at`, which lies back while the table cannot be reached.
    Seen { instance: Box<Instance>, read_at: Timestamp },
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
    /// Configured; `run.sh` does not run.
    Stopped,
    /// `run.sh` runs and has not yet said that it listens.
    Starting,
    /// Listens for jobs.
    Idle,
    /// In the middle of a job.
    Busy,
}

/// Everything a decision stands on.
#[derive(Debug, Clone)]
pub struct Facts<'a> {
    pub record: &'a Record,
    pub script: Script,
    /// The run that this machine was last set up for, until nothing of it is left.
    pub serving: Option<&'a str>,
    pub runner: Runner,
    /// What the operator was last told.
    pub said: Option<(Signal, &'a str)>,
    pub said_at: Timestamp,
    /// EC2 has announced that it takes the spot instance back.
    pub reclaimed: bool,
    /// Failures in a row of what is being attempted, and when it may be tried again.
    pub failures: u32,
    pub retry_at: Timestamp,
    /// When the agent started for the first time on this machine.
    pub first_start: Timestamp,
    pub created_lifetime: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Nothing until the next look at the record.
    Wait,
    RunScript,
    /// Configure the runner for this run, with the token that the record holds.
    Register(&'a Instance),
    StartRunner,
    StopRunner,
    /// Take the runner from GitHub, with the token if there is one, and everything of the run from the machine.
    Deregister {
        run: &'a str,
        sealed: Option<&'a str>,
    },
    Say(Signal, &'a str),
    ShutDown(End),
}

/// Why an instance ends itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Unclaimed,
    RecordGone,
    Terminated,
    Expired,
    Blind,
}

impl End {
    pub const fn why(self) -> &'static str {
        match self {
            Self::Unclaimed => "no record of this instance has appeared in its time to be created",
            Self::RecordGone => "the record of this instance was removed",
            Self::Terminated => "the record says terminated",
            Self::Expired => "the threshold is more than a minute past",
            Self::Blind => "the threshold is more than an hour past and the record cannot be read",
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

/// Whether this instance's time is over. A threshold is judged at the time it was read, so that an outage of the table
/// ends no instance whose threshold may have moved meanwhile.
fn end(facts: &Facts, now: Timestamp) -> Option<End> {
    let passed = |since: Timestamp, slack: Duration, at: Timestamp| {
        at.duration_since(since) > SignedDuration::try_from(slack).unwrap_or(SignedDuration::MAX)
    };
    match facts.record {
        Record::Never => passed(facts.first_start, facts.created_lifetime.saturating_add(EXPIRY_SLACK), now)
            .then_some(End::Unclaimed),
        Record::Gone => Some(End::RecordGone),
        Record::Seen { instance, read_at } => match (instance.state, instance.threshold) {
            (State::Terminated, _) => Some(End::Terminated),
            (State::Created | State::Running | State::Idle | State::Claimed, None) => None,
            (State::Created | State::Running | State::Idle | State::Claimed, Some(threshold)) => {
                if passed(threshold, EXPIRY_SLACK, *read_at) {
                    Some(End::Expired)
                } else {
                    passed(threshold, BLIND_SLACK, now).then_some(End::Blind)
                }
            }
        },
    }
}

/// Brings the machine from the run it serves to the run its record shows.
fn serve<'a>(facts: &Facts<'a>, record: &'a Instance, now: Timestamp) -> Action<'a> {
    let wanted = Some(record.run_id.as_str()).filter(|run| !run.is_empty());
    match (facts.serving, wanted) {
        (None, None) if record.leaving.is_empty() => Action::Wait,
        // Nothing of it is here: perhaps it was given up before it was registered. A run that is started again keeps its
        // id, so what was said before this release says nothing of it.
        (None, None) if facts.said_at < record.updated_at => Action::Say(Signal::Deregistered, &record.leaving),
        (None, None) => facts.say(Signal::Deregistered, &record.leaving, Action::Wait),
        (None, Some(run)) => take_up(facts, record, run, now),
        (Some(own), Some(run)) if own == run => keep(facts, record, own, now),
        (Some(own), Some(_) | None) => leave(facts, record, own, now),
    }
}

fn take_up<'a>(facts: &Facts<'a>, record: &'a Instance, run: &'a str, now: Timestamp) -> Action<'a> {
    if facts.reclaimed {
        facts.say(Signal::RegistrationFailed, run, Action::Wait)
    } else if record.sealed.is_empty() {
        Action::Wait
    } else {
        facts.attempt(Action::Register(record), Signal::RegistrationFailed, run, now)
    }
}

fn keep<'a>(facts: &Facts<'a>, record: &'a Instance, own: &'a str, now: Timestamp) -> Action<'a> {
    match facts.runner {
        Runner::Absent => take_up(facts, record, own, now),
        Runner::Stopped if facts.reclaimed => Action::Wait,
        Runner::Stopped => facts.attempt(Action::StartRunner, Signal::RegistrationFailed, own, now),
        Runner::Starting => Action::Wait,
        Runner::Idle if facts.reclaimed => Action::StopRunner,
        Runner::Idle | Runner::Busy => facts.say(Signal::Registered, own, Action::Wait),
    }
}

fn leave<'a>(facts: &Facts<'a>, record: &'a Instance, own: &'a str, now: Timestamp) -> Action<'a> {
    // Beside another run the record holds that run's registration token; registering with it takes over GitHub's entry.
    let sealed = match facts.runner {
        Runner::Starting | Runner::Idle | Runner::Busy => return Action::StopRunner,
        Runner::Stopped if record.run_id.is_empty() && record.sealed.is_empty() => return Action::Wait,
        Runner::Stopped if record.run_id.is_empty() => Some(record.sealed.as_str()),
        Runner::Stopped | Runner::Absent => None,
    };
    facts.attempt(Action::Deregister { run: own, sealed }, Signal::DeregistrationFailed, own, now)
}

impl<'a> Facts<'a> {
    /// Says it, unless it was the last thing said; then goes on with `next`.
    fn say(&self, signal: Signal, run: &'a str, next: Action<'a>) -> Action<'a> {
        if self.said == Some((signal, run)) { next } else { Action::Say(signal, run) }
    }

    /// Tries again when it is time, and says that it fails once that is more than a hiccup.
    fn attempt(&self, action: Action<'a>, failed: Signal, run: &'a str, now: Timestamp) -> Action<'a> {
        let next = if now >= self.retry_at { action } else { Action::Wait };
        if self.failures >= ATTEMPTS { self.say(failed, run, next) } else { next }
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
