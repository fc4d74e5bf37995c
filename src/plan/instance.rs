//! How an instance stands: what its record and its agent's words together mean.

use jiff::{SignedDuration, Timestamp};
use paddock_record::{Heartbeat, IdleMessage, Instance, Signal, State, WorkerSignal};

use crate::api::{Ec2Pool, Ec2Timeouts, FailureReason};

/// How far the clocks of operator and instance may differ.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(5);

/// What the agent of an instance has written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Vitals {
    pub heartbeat: Option<Heartbeat>,
    pub signal: Option<WorkerSignal>,
}

/// All that is known of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracked {
    pub record: Instance,
    pub vitals: Vitals,
    /// When the vitals were read: what came later is not known.
    pub read_at: Timestamp,
}

impl Tracked {
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

    fn said(&self, signal: Signal, run_id: &str) -> bool {
        self.vitals.signal.as_ref().is_some_and(|said| said.signal == signal && said.run_id == run_id)
    }

    /// Whether the agent has spoken since the record was last moved: a run can be started again under its old id, and
    /// what was said for its first attempt says nothing of the second.
    fn said_since_moved(&self) -> bool {
        let moved = self.record.updated_at - CLOCK_SKEW;
        self.vitals.signal.as_ref().is_some_and(|said| said.updated_at >= moved)
    }

    pub fn heartbeat_is_fresh(&self, timeouts: &Ec2Timeouts, now: Timestamp) -> bool {
        let limit = SignedDuration::from(timeouts.heartbeat);
        self.vitals.heartbeat.as_ref().is_some_and(|beat| now.duration_since(beat.updated_at) <= limit)
    }

    fn half_idle(&self, pool: &Ec2Pool, now: Timestamp) -> bool {
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
pub enum Standing {
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
pub fn standing(tracked: &Tracked, timeouts: &Ec2Timeouts, now: Timestamp) -> Standing {
    let record = &tracked.record;
    let limit = match record.state {
        State::Running => return Standing::Working,
        State::Idle | State::Terminated => {
            return Standing::Failed(FailureReason::InstanceGone, "the instance ended or was given away".into());
        }
        State::Created => timeouts.validation,
        State::Claimed => timeouts.registration,
    };
    let run = record.run_id.as_str();
    let late = now.duration_since(record.updated_at) > SignedDuration::from(limit);
    if tracked.said(Signal::Registered, run) {
        if tracked.heartbeat_is_fresh(timeouts, now) {
            return Standing::Confirmed;
        }
        if late {
            let message = format!("it registered, but its last heartbeat is older than {}", timeouts.heartbeat);
            return Standing::Failed(FailureReason::HeartbeatStale, message);
        }
        return Standing::Waiting;
    }
    if tracked.said(Signal::RegistrationFailed, run) {
        let message = "its agent could not register with GitHub; the agent's log on the machine says why";
        return Standing::Failed(FailureReason::RegistrationFailed, message.into());
    }
    if record.state == State::Created
        && tracked.vitals.signal.as_ref().is_some_and(|s| s.signal == Signal::ScriptFailed)
    {
        let message = "its pre-runner script failed; the agent's log on the machine says why";
        return Standing::Failed(FailureReason::PreRunnerFailed, message.into());
    }
    if late {
        return match record.state {
            State::Created => Standing::Failed(
                FailureReason::ValidationTimeout,
                format!("it did not come up and register within {limit}"),
            ),
            State::Claimed | State::Running | State::Idle | State::Terminated => {
                Standing::Failed(FailureReason::RegistrationTimeout, format!("it did not register within {limit}"))
            }
        };
    }
    let has_key = tracked.vitals.heartbeat.as_ref().is_some_and(|beat| beat.public_key.is_some());
    if record.sealed.is_empty() && has_key { Standing::NeedsToken } else { Standing::Waiting }
}

/// What the pool does with an instance that no claim moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upkeep {
    /// Nothing to do.
    Leave,
    /// A machine kept warm has come up: into the pool with it.
    Warm,
    /// It has deregistered from its last run: offer it again.
    Offer,
    /// It is to be kept warm, and half of its idle time is over: begin that anew.
    Renew,
    /// Give it up.
    End(FailureReason, String),
}

/// What is to be done with an instance; `keep` says that it is one of those that `minIdle` keeps warm.
pub fn upkeep(tracked: &Tracked, pool: &Ec2Pool, keep: bool, now: Timestamp) -> Upkeep {
    let record = &tracked.record;
    if record.state != State::Terminated && tracked.expired(now) {
        let message = format!("its time in state {} was up", record.state);
        return Upkeep::End(FailureReason::ThresholdPassed, message);
    }
    match record.state {
        State::Created if record.run_id.is_empty() => {
            let limit = SignedDuration::from(pool.timeouts.validation);
            match tracked.vitals.signal.as_ref().map(|said| said.signal) {
                Some(Signal::ScriptOk) => Upkeep::Warm,
                Some(Signal::ScriptFailed) => {
                    Upkeep::End(FailureReason::PreRunnerFailed, "its pre-runner script failed".into())
                }
                _ if now.duration_since(record.updated_at) > limit => Upkeep::End(
                    FailureReason::ValidationTimeout,
                    format!("it did not come up within {}", pool.timeouts.validation),
                ),
                _ => Upkeep::Leave,
            }
        }
        // A warm machine on its way, caught between its two moves.
        State::Running if record.run_id.is_empty() => Upkeep::Warm,
        State::Idle if !record.leaving.is_empty() => {
            let limit = SignedDuration::from(pool.timeouts.deregistration);
            if tracked.said(Signal::Deregistered, &record.leaving) && tracked.said_since_moved() {
                Upkeep::Offer
            } else if tracked.said(Signal::DeregistrationFailed, &record.leaving) && tracked.said_since_moved() {
                let message = "its agent could not deregister it from GitHub";
                Upkeep::End(FailureReason::DeregistrationTimeout, message.into())
            } else if now.duration_since(record.updated_at) > limit {
                let message = format!("it did not deregister from GitHub within {}", pool.timeouts.deregistration);
                Upkeep::End(FailureReason::DeregistrationTimeout, message)
            } else {
                Upkeep::Leave
            }
        }
        State::Idle if keep && tracked.half_idle(pool, now) => Upkeep::Renew,
        State::Created | State::Running | State::Idle | State::Claimed | State::Terminated => Upkeep::Leave,
    }
}

#[cfg(test)]
#[path = "instance_tests.rs"]
mod tests;
