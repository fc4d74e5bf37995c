//! How an instance stands: what its record and its agent's words together mean.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{Heartbeat, IdleMessage, Instance, PublicKey, Signal, State, WorkerSignal};

use crate::api::{Ec2Pool, Ec2Timeouts, FailureReason};

/// How far the clocks of operator and instance may differ.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(5);

/// What the agent of an instance has written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AgentReport {
    pub heartbeat: Option<Heartbeat>,
    pub signal: Option<WorkerSignal>,
}

/// How long after a look the agent of an instance is looked at again, when somebody has waited for it so long, as for
/// `awaited` in all: often at first, because a warm machine answers at once; for few as late as most of them have answered,
/// because each look is a call of its own; less often again when there are many, because a look at all of them is work; and
/// never so seldom that a ready runner is not seen within 250 ms.
pub fn look_again(waited: Duration, awaited: usize) -> Duration {
    let least = if awaited < FEW { 60 } else { 40 * (awaited as u64 / 500 + 1) };
    (waited / 8).max(Duration::from_millis(least)).min(Duration::from_millis(150))
}

const FEW: usize = 10;

/// All that is known of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub record: Instance,
    pub report: AgentReport,
    /// When the report were read: what came later is not known.
    pub read_at: Timestamp,
}

impl Machine {
    /// Whether the next step hangs on what the agent writes, so that its records are worth reading often.
    pub fn awaits_agent(&self) -> bool {
        match self.record.state {
            State::Created | State::Claimed => true,
            State::Idle => !self.record.leaving.is_empty(),
            State::Running | State::Terminated => false,
        }
    }

    pub fn expired(&self, now: Timestamp) -> bool {
        self.record.threshold.is_some_and(|threshold| threshold <= now)
    }

    /// Idle, and through with its last run: it can be claimed.
    pub fn is_free(&self) -> bool {
        self.record.state == State::Idle && self.record.leaving.is_empty()
    }

    /// Whether a claim can have it now: free, in its time, and with a key to seal a token to.
    pub fn is_claimable(&self, now: Timestamp) -> bool {
        self.is_free() && !self.expired(now) && self.has_key()
    }

    /// The key to seal tokens to, which its agent publishes with its first heartbeat.
    pub fn public_key(&self) -> Option<&PublicKey> {
        self.report.heartbeat.as_ref()?.public_key.as_ref()
    }

    pub(super) fn has_key(&self) -> bool {
        self.public_key().is_some()
    }

    pub(super) fn said(&self, signal: Signal, run_id: &str) -> bool {
        self.report.signal.as_ref().is_some_and(|said| said.signal == signal && said.run_id == run_id)
    }

    /// Whether the agent has spoken since the record was last moved: a run can be started again under its old id, and
    /// what was said for its first attempt says nothing of the second.
    pub(super) fn said_since_moved(&self) -> bool {
        let moved = self.record.updated_at - CLOCK_SKEW;
        self.report.signal.as_ref().is_some_and(|said| said.updated_at >= moved)
    }

    /// What failed, and why as far as its agent says: the machine's own log goes with it.
    pub(super) fn told(&self, what: &str) -> String {
        match self.report.signal.as_ref().map(|said| said.detail.as_str()) {
            None | Some("") => what.to_owned(),
            Some(detail) => format!("{what}: {detail}"),
        }
    }

    pub fn heartbeat_is_fresh(&self, timeouts: &Ec2Timeouts, now: Timestamp) -> bool {
        let limit = SignedDuration::from(timeouts.heartbeat);
        self.report.heartbeat.as_ref().is_some_and(|beat| now.duration_since(beat.updated_at) <= limit)
    }

    pub(super) fn half_idle(&self, pool: &Ec2Pool, now: Timestamp) -> bool {
        let half = SignedDuration::from(pool.lifetimes.idle) / 2;
        self.record.threshold.is_some_and(|threshold| threshold.duration_since(now) < half)
    }

    /// The message that offers this instance to claims.
    pub fn idle_message(&self) -> IdleMessage {
        let record = &self.record;
        IdleMessage {
            instance_id: record.instance_id.clone(),
            usage_class: record.usage_class.clone(),
            instance_type: record.instance_type.clone(),
            cpu: record.cpu,
            mem: record.mem,
            resource_class: record.resource_class.clone(),
            threshold: record.threshold.map(paddock_record::stamp).unwrap_or_default(),
        }
    }
}

/// How an instance stands towards the claim that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineCheck {
    /// Booting or registering, within its time.
    Waiting,
    /// Its agent has a key by now, and waits for the token that lets it register.
    NeedsToken,
    /// Registered for this run and alive.
    Confirmed,
    /// In service.
    Working,
    /// Will not come any more.
    Failed(FailureReason, String),
}

/// Judges an instance that a claim holds.
pub fn check(tracked: &Machine, timeouts: &Ec2Timeouts, now: Timestamp) -> MachineCheck {
    let record = &tracked.record;
    let limit = match record.state {
        State::Running => return MachineCheck::Working,
        State::Idle | State::Terminated => {
            return MachineCheck::Failed(FailureReason::InstanceGone, "the instance ended or was given away".into());
        }
        State::Created => timeouts.validation,
        State::Claimed => timeouts.registration,
    };
    let run = record.run_id.as_str();
    let late = now.duration_since(record.updated_at) > SignedDuration::from(limit);
    if tracked.said(Signal::Registered, run) {
        if tracked.heartbeat_is_fresh(timeouts, now) {
            return MachineCheck::Confirmed;
        }
        if late {
            let message = format!("it registered, but its last heartbeat is older than {}", timeouts.heartbeat);
            return MachineCheck::Failed(FailureReason::HeartbeatStale, message);
        }
        return MachineCheck::Waiting;
    }
    if tracked.said(Signal::RegistrationFailed, run) {
        let message = tracked.told("its agent could not register with GitHub");
        return MachineCheck::Failed(FailureReason::RegistrationFailed, message);
    }
    if record.state == State::Created
        && tracked.report.signal.as_ref().is_some_and(|s| s.signal == Signal::ScriptFailed)
    {
        let message = tracked.told("its pre-runner script failed");
        return MachineCheck::Failed(FailureReason::PreRunnerFailed, message);
    }
    if late {
        return match record.state {
            State::Created => MachineCheck::Failed(
                FailureReason::ValidationTimeout,
                format!("it did not come up and register within {limit}"),
            ),
            State::Claimed | State::Running | State::Idle | State::Terminated => {
                MachineCheck::Failed(FailureReason::RegistrationTimeout, format!("it did not register within {limit}"))
            }
        };
    }
    if record.sealed.is_empty() && tracked.has_key() { MachineCheck::NeedsToken } else { MachineCheck::Waiting }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
