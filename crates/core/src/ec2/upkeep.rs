//! Upkeep of machines outside of claims: pool, renew and terminate them, and find those that are lost.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_record::{Instance, SCRUB, Signal, State};

use super::machine::{Machine, RECLAIMED};
use crate::api::{Ec2Pool, FailureReason};

/// How much longer a record is kept while its runner may still be registered with GitHub.
const RUNNER_LEFT_GRACE: Duration = Duration::from_hours(1);

/// What the pool does with a machine outside of claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upkeep {
    /// Nothing to do.
    Leave,
    /// A warm machine has booted: add it to the pool.
    Warm,
    /// It has deregistered from its last run: send its message to the idle queue.
    Pool,
    /// It is kept warm, and half of its idle time has passed: restart that time.
    Renew,
    /// Terminate it.
    End(FailureReason, String),
}

/// The upkeep of a machine; `keep` is set if it is one of those that `minIdle` keeps warm.
pub fn upkeep(tracked: &Machine, pool: &Ec2Pool, keep: bool, now: Timestamp) -> Upkeep {
    let record = &tracked.record;
    if record.state == State::Unknown || (record.state != State::Terminated && record.threshold.is_none()) {
        let message = "its record was written by another version of Paddock: its state or its threshold is unknown";
        return Upkeep::End(FailureReason::RecordUnreadable, message.into());
    }
    if record.state != State::Terminated && tracked.expired(now) {
        let message = format!("its time in state {} has expired", record.state);
        return Upkeep::End(FailureReason::ThresholdPassed, message);
    }
    match record.state {
        // One that serves a claim may finish its job, and one that leaves GitHub may finish that.
        State::Created | State::Running | State::Idle
            if tracked.is_reclaimed() && record.run_id.is_empty() && record.leaving.is_empty() =>
        {
            Upkeep::End(FailureReason::SpotReclaimed, RECLAIMED.into())
        }
        State::Created if record.run_id.is_empty() => {
            let limit = SignedDuration::from(pool.timeouts.validation);
            match tracked.report.signal.as_ref().map(|last| last.signal) {
                // Without its key no token can be sealed to it, so no claim could take it.
                Some(Signal::ScriptOk) if tracked.has_key() => Upkeep::Warm,
                Some(Signal::ScriptFailed) => {
                    Upkeep::End(FailureReason::PreRunnerFailed, tracked.with_detail("its pre-runner script failed"))
                }
                _ if now.duration_since(record.updated_at) > limit => Upkeep::End(
                    FailureReason::ValidationTimeout,
                    format!("it did not boot within {}", pool.timeouts.validation),
                ),
                _ => Upkeep::Leave,
            }
        }
        // A warm machine between its two transitions.
        State::Running if record.run_id.is_empty() => Upkeep::Warm,
        // Nothing runs on it, and nothing will.
        State::Running if tracked.runner_is_over(&record.run_id) => {
            Upkeep::End(FailureReason::RunnerEnded, tracked.with_detail("its runner has ended for good"))
        }
        State::Idle if !record.leaving.is_empty() => {
            let limit = SignedDuration::from(pool.timeouts.deregistration);
            if tracked.signalled(Signal::Deregistered, &record.leaving) && tracked.is_reclaimed() {
                Upkeep::End(FailureReason::SpotReclaimed, RECLAIMED.into())
            } else if tracked.signalled(Signal::Deregistered, &record.leaving) {
                retirement(record, pool).unwrap_or(Upkeep::Pool)
            } else if tracked.signalled(Signal::DeregistrationFailed, &record.leaving) {
                // Either way it is not reused: what its last run left behind is unknown.
                match tracked.report.signal.as_ref().is_some_and(|signal| signal.reason == SCRUB) {
                    true => Upkeep::End(
                        FailureReason::ScrubFailed,
                        tracked.with_detail("it is not clean for another claim"),
                    ),
                    false => Upkeep::End(
                        FailureReason::DeregistrationFailed,
                        tracked.with_detail("its agent could not deregister it from GitHub"),
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
            None if tracked.has_spoken() && !tracked.heartbeat_is_fresh(&pool.timeouts) => {
                let message = format!("it has sent no heartbeat for {}", pool.timeouts.heartbeat);
                Upkeep::End(FailureReason::HeartbeatStale, message)
            }
            None if keep && tracked.half_idle(pool, now) => Upkeep::Renew,
            None => Upkeep::Leave,
        },
        State::Created | State::Running | State::Claimed | State::Terminated | State::Unknown => Upkeep::Leave,
    }
}

/// Whether a machine is held for a claim that does not exist (any more), so that no release will come: the claim's
/// finalizer was removed by force, or a late write of a former leader gave it a machine.
pub fn is_abandoned(record: &Instance, claim_exists: impl Fn(&Instance) -> bool) -> bool {
    let held = matches!(record.state, State::Created | State::Claimed | State::Running) && !record.claim.is_empty();
    held && !claim_exists(record)
}

/// An instance as EC2 describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ec2State<'a> {
    /// It is terminated, or about to be.
    pub gone: bool,
    /// EC2 reclaimed the spot instance.
    pub reclaimed: bool,
    /// EC2's reason for its state, as code and message; empty if it gives none.
    pub reason: &'a str,
}

/// EC2's code for a machine that has shut itself down.
const SHUT_ITSELF_DOWN: &str = "Client.InstanceInitiatedShutdown";

/// Why the machine of a record is gone, if it is. `missing_for_long`: EC2 has not listed it for a while; it shows a new
/// instance late. One that EC2 announced to take back was taken back, whatever EC2 says of it later.
pub fn lost(tracked: &Machine, seen: Option<Ec2State>, missing_for_long: bool) -> Option<(FailureReason, String)> {
    let reclaimed = tracked.is_reclaimed();
    let (reason, what, why) = match (tracked.record.state, seen) {
        (State::Terminated, _) => return None,
        (_, Some(Ec2State { gone: false, .. })) => return None,
        (_, None) if !missing_for_long => return None,
        (_, Some(Ec2State { reclaimed: listed, reason, .. })) if listed || reclaimed => {
            (FailureReason::SpotReclaimed, "EC2 took the spot machine back", reason)
        }
        (_, None) if reclaimed => (FailureReason::SpotReclaimed, "EC2 took the spot machine back", ""),
        (_, Some(Ec2State { reason, .. })) if reason.starts_with(SHUT_ITSELF_DOWN) => {
            let what = match tracked.has_spoken() {
                true => "the machine has shut itself down",
                false => "the machine has shut itself down before its agent had started: the end of its log says why",
            };
            (FailureReason::InstanceGone, what, reason)
        }
        (_, Some(Ec2State { reason, .. })) => {
            (FailureReason::InstanceGone, "the machine was terminated, and not by Paddock", reason)
        }
        (_, None) => (FailureReason::InstanceGone, "EC2 does not have the machine any more", ""),
    };
    Some((reason, if why.is_empty() { what.to_owned() } else { format!("{what} ({why})") }))
}

/// Whether the record of a terminated machine is deleted. It is kept longer while its runner may still be registered,
/// but not for ever: the App may have lost its permissions.
pub fn is_forgotten(record: &Instance, retention: Duration, now: Timestamp) -> bool {
    let retention = if record.failure_reason == FailureReason::Dumped.as_str() { Duration::ZERO } else { retention };
    let grace = if record.leaving.is_empty() { Duration::ZERO } else { RUNNER_LEFT_GRACE };
    let age = Duration::try_from(now.duration_since(record.updated_at)).unwrap_or_default();
    record.state == State::Terminated && age > retention.saturating_add(grace)
}

/// Terminates a machine that has served `reuse.maxClaims` claims.
fn retirement(record: &Instance, pool: &Ec2Pool) -> Option<Upkeep> {
    let max = pool.reuse.max_claims.filter(|max| record.claims >= *max)?;
    let message = format!("it has served {} of at most {max} claims (reuse.maxClaims)", record.claims);
    Some(Upkeep::End(FailureReason::MaxClaimsServed, message))
}

#[cfg(test)]
#[path = "upkeep_tests.rs"]
mod tests;
