//! What a pool does with machines that no claim moves: pool, renew and terminate them, and find those that are lost.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{Instance, SCRUB, Signal, State};

use super::machine::Machine;
use crate::api::{Ec2Pool, FailureReason};

/// How much longer a record stays whose runner may still be at GitHub.
const RUNNER_LEFT_GRACE: Duration = Duration::from_hours(1);

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
pub fn upkeep(tracked: &Machine, pool: &Ec2Pool, keep: bool, now: Timestamp) -> Upkeep {
    let record = &tracked.record;
    if record.state != State::Terminated && tracked.expired(now) {
        let message = format!("its time in state {} was up", record.state);
        return Upkeep::End(FailureReason::ThresholdPassed, message);
    }
    match record.state {
        State::Created if record.run_id.is_empty() => {
            let limit = SignedDuration::from(pool.timeouts.validation);
            match tracked.report.signal.as_ref().map(|said| said.signal) {
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
                match tracked.report.signal.as_ref().is_some_and(|said| said.reason == SCRUB) {
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
pub struct Ec2State {
    /// It is terminated, or about to be.
    pub gone: bool,
    /// EC2 took it back.
    pub reclaimed: bool,
}

/// Why a record has no machine any more, if so.
pub fn lost(tracked: &Machine, seen: Option<Ec2State>, now: Timestamp) -> Option<(FailureReason, &'static str)> {
    let young = now.duration_since(tracked.record.updated_at) < ORPHAN_AGE;
    match (tracked.record.state, seen) {
        (State::Terminated, _) => None,
        (_, Some(Ec2State { gone: false, .. })) => None,
        (_, Some(Ec2State { reclaimed: true, .. })) => {
            Some((FailureReason::SpotReclaimed, "EC2 took the spot machine back"))
        }
        (_, Some(Ec2State { .. })) => {
            Some((FailureReason::InstanceGone, "the machine was terminated, and not by Paddock"))
        }
        (_, None) if young => None,
        (_, None) => Some((FailureReason::InstanceGone, "EC2 does not have the machine any more")),
    }
}

/// Whether the record of a machine that ended is removed. One whose runner may still be at GitHub stays longer, but not for
/// ever: the App may have lost its rights.
pub fn is_forgotten(record: &Instance, retention: Duration, now: Timestamp) -> bool {
    let grace = if record.leaving.is_empty() { Duration::ZERO } else { RUNNER_LEFT_GRACE };
    let age = Duration::try_from(now.duration_since(record.updated_at)).unwrap_or_default();
    record.state == State::Terminated && age > retention.saturating_add(grace)
}

/// The end of a machine that has served as many claims as it may.
fn retirement(record: &Instance, pool: &Ec2Pool) -> Option<Upkeep> {
    let max = pool.reuse.max_claims.filter(|max| record.claims >= *max)?;
    let message = format!("it has served {} of at most {max} claims (reuse.maxClaims)", record.claims);
    Some(Upkeep::End(FailureReason::MaxClaimsServed, message))
}

#[cfg(test)]
#[path = "upkeep_tests.rs"]
mod tests;
