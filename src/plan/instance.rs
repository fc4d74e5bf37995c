//! How an instance stands: what its record and its agent's words together mean.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{Heartbeat, IdleMessage, Instance, SCRUB, Signal, State, WorkerSignal};

use crate::api::{Ec2Pool, Ec2Timeouts, FailureReason};

/// How far the clocks of operator and instance may differ.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(5);

/// What the agent of an instance has written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Vitals {
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

    /// Whether a claim can have it now: free, in its time, and with a key to seal a token to.
    pub fn is_claimable(&self, now: Timestamp) -> bool {
        self.is_free() && !self.expired(now) && self.has_key()
    }

    /// Whether its agent has published a key to seal tokens to, with its first heartbeat.
    fn has_key(&self) -> bool {
        self.vitals.heartbeat.as_ref().is_some_and(|beat| beat.public_key.is_some())
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

    /// What failed, and why as far as its agent says: the machine's own log goes with it.
    fn told(&self, what: &str) -> String {
        match self.vitals.signal.as_ref().map(|said| said.detail.as_str()) {
            None | Some("") => what.to_owned(),
            Some(detail) => format!("{what}: {detail}"),
        }
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
        let message = tracked.told("its agent could not register with GitHub");
        return Standing::Failed(FailureReason::RegistrationFailed, message);
    }
    if record.state == State::Created
        && tracked.vitals.signal.as_ref().is_some_and(|s| s.signal == Signal::ScriptFailed)
    {
        let message = tracked.told("its pre-runner script failed");
        return Standing::Failed(FailureReason::PreRunnerFailed, message);
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
    if record.sealed.is_empty() && tracked.has_key() { Standing::NeedsToken } else { Standing::Waiting }
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
                // Without its key no token can be sealed to it, so no claim could take it.
                Some(Signal::ScriptOk) if tracked.has_key() => Upkeep::Warm,
                Some(Signal::ScriptFailed) => {
                    Upkeep::End(FailureReason::PreRunnerFailed, tracked.told("its pre-runner script failed"))
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
                retirement(record, pool).unwrap_or(Upkeep::Offer)
            } else if tracked.said(Signal::DeregistrationFailed, &record.leaving) && tracked.said_since_moved() {
                // Either way nobody else may have it: what its last run left there is not known.
                match tracked.vitals.signal.as_ref().is_some_and(|said| said.reason == SCRUB) {
                    true => Upkeep::End(FailureReason::ScrubFailed, tracked.told("it is not clean for another claim")),
                    false => Upkeep::End(
                        FailureReason::DeregistrationFailed,
                        tracked.told("its agent could not deregister it from GitHub"),
                    ),
                }
            } else if now.duration_since(record.updated_at) > limit {
                let message = format!("it did not deregister from GitHub within {}", pool.timeouts.deregistration);
                Upkeep::End(FailureReason::DeregistrationTimeout, message)
            } else {
                Upkeep::Leave
            }
        }
        State::Idle => match retirement(record, pool) {
            Some(end) => end,
            None if keep && tracked.half_idle(pool, now) => Upkeep::Renew,
            None => Upkeep::Leave,
        },
        State::Created | State::Running | State::Claimed | State::Terminated => Upkeep::Leave,
    }
}

/// An instance without a record is an orphan, and a record without an instance lost, only after this time: records are
/// written after launches, and EC2 shows a new instance late.
pub const ORPHAN_AGE: SignedDuration = SignedDuration::from_secs(60);

/// An instance as EC2 describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// It is terminated, or about to be.
    pub gone: bool,
    /// EC2 took it back.
    pub reclaimed: bool,
}

/// Why a record has no machine any more, if so.
pub fn lost(tracked: &Tracked, seen: Option<Seen>, now: Timestamp) -> Option<(FailureReason, &'static str)> {
    let young = now.duration_since(tracked.record.updated_at) < ORPHAN_AGE;
    match (tracked.record.state, seen) {
        (State::Terminated, _) => None,
        (_, Some(Seen { gone: false, .. })) => None,
        (_, Some(Seen { reclaimed: true, .. })) => {
            Some((FailureReason::SpotReclaimed, "EC2 took the spot machine back"))
        }
        (_, Some(Seen { .. })) => Some((FailureReason::InstanceGone, "the machine was terminated, and not by Paddock")),
        (_, None) if young => None,
        (_, None) => Some((FailureReason::InstanceGone, "EC2 does not have the machine any more")),
    }
}

/// The end of a machine that has served as many claims as it may.
fn retirement(record: &Instance, pool: &Ec2Pool) -> Option<Upkeep> {
    let max = pool.reuse.max_claims.filter(|max| record.claims >= *max)?;
    let message = format!("it has served {} of at most {max} claims (reuse.maxClaims)", record.claims);
    Some(Upkeep::End(FailureReason::MaxClaimsServed, message))
}

#[cfg(test)]
#[path = "instance_tests.rs"]
mod tests;
