//! The status of a claim on an EC2 pool.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use paddock_record::{Instance, Signal, State};

use super::{
    capacity_memory::with_retry,
    claim::{Applied, ClaimAction, ClaimFacts, PROVISIONING_BACKOFF, PROVISIONING_TRIES},
    machine::Machine,
    rerun::note_interruptions,
    worker_status::worker_state,
};
use crate::api::{
    CapacityShortage, ClaimPhase, ClaimReason, ClaimWorker, FailureReason, PhaseTimes, READY, Rerun, RerunOutcome,
    RunnerClaim, RunnerClaimStatus, WorkerSource, head, ready_condition, set_condition,
};

/// As in the schema of [`CapacityShortage`].
const SHORTAGE_MESSAGE_MAX: usize = 1024;

/// The status that a reconciliation starts from.
pub fn initial(claim: &RunnerClaim, now: Timestamp) -> RunnerClaimStatus {
    let mut status = claim.status.clone().unwrap_or_default();
    status.observed_generation = claim.metadata.generation;
    if status.phase.is_none() {
        status.enter(ClaimPhase::Pending, now);
        status.set_progress(0, claim.spec.count);
    }
    status.pool = claim.spec.pool.clone();
    status
}

/// The status while an action is carried out ([`Applied::UnderWay`]), and after it.
pub fn status(facts: &ClaimFacts, action: &ClaimAction, applied: &Applied, now: Timestamp) -> RunnerClaimStatus {
    let mut status = facts.status.clone();
    let count = facts.claim.spec.count;
    let enter = |status: &mut RunnerClaimStatus, phase: ClaimPhase, reason: ClaimReason, message: &str| {
        status.enter(phase, now);
        status.retry_at = None;
        let ready = phase == ClaimPhase::Ready;
        let condition = ready_condition(ready, reason, message, facts.claim.metadata.generation, now);
        set_condition(&mut status.conditions, condition);
    };
    match action {
        ClaimAction::Select(missing) => {
            let message = format!("looking for {missing} idle machines");
            enter(&mut status, ClaimPhase::Claiming, ClaimReason::Claiming, &message);
        }
        ClaimAction::Seal(_) | ClaimAction::Replace(_) | ClaimAction::AwaitAgents => {
            let message = format!("waiting for {} machines to register with GitHub", facts.held().count());
            enter(&mut status, ClaimPhase::Validating, ClaimReason::Validating, &message);
        }
        ClaimAction::Nothing
        | ClaimAction::Wait(_)
        | ClaimAction::LookUpOffer
        | ClaimAction::PlaceOrder(_)
        | ClaimAction::MakeRoom { .. }
        | ClaimAction::SendOrder(_)
        | ClaimAction::FallBack { .. }
        | ClaimAction::Abandon(_)
        | ClaimAction::Start(_)
        | ClaimAction::Serve
        | ClaimAction::Watch
        | ClaimAction::Return(_)
        | ClaimAction::Release(_)
        | ClaimAction::Finish(..)
        | ClaimAction::Dump(_)
        | ClaimAction::Settle
        | ClaimAction::Rerun(_)
        | ClaimAction::Finalize => {}
    }
    let phase = status.phase.unwrap_or_default();
    match (action, applied) {
        (_, Applied::UnderWay | Applied::Incomplete | Applied::NoRoom) => {}
        (_, Applied::Unavailable(reason, message)) => enter(&mut status, phase, *reason, message),
        (_, Applied::Failed { tries, message }) => {
            let message = format!("{message} (try {tries} of {PROVISIONING_TRIES})");
            enter(&mut status, phase, ClaimReason::AwsUnavailable, &message);
            status.failed_tries = Some(*tries);
            status.retry_at = now.checked_add(PROVISIONING_BACKOFF.delay(*tries)).ok().map(whole_second).map(Time);
        }
        (ClaimAction::Wait(wait), _) => {
            if let Some(shortage) = &mut status.shortage {
                shortage.since = None;
            }
            enter(&mut status, phase, wait.reason, &wait.message);
            status.retry_at = wait.retry_at.map(whole_second).map(Time);
        }
        (ClaimAction::Abandon(wait), _) => {
            let attempt = status.fleet.take().map_or(0, |order| order.attempt);
            let last = status.shortage.take().unwrap_or_default();
            // The memory of an earlier order says less than EC2's own answer.
            let message = if attempt == 0 && last.since.is_some() {
                last.message
            } else {
                head(&wait.message, SHORTAGE_MESSAGE_MAX)
            };
            let retry_at = wait.retry_at.map(whole_second);
            let shown = retry_at.map_or_else(|| message.clone(), |at| with_retry(&message, at));
            // What passes by itself is no shortage.
            let is_shortage = wait.reason == ClaimReason::InsufficientCapacity;
            let since = last.since.or(Some(Time(whole_second(now)))).filter(|_| is_shortage);
            status.shortage = Some(CapacityShortage { since, attempt: attempt.max(last.attempt), message });
            enter(&mut status, ClaimPhase::Claiming, wait.reason, &shown);
            status.retry_at = retry_at.map(Time);
        }
        (
            ClaimAction::PlaceOrder(order) | ClaimAction::MakeRoom { order, .. } | ClaimAction::FallBack { order, .. },
            _,
        ) => {
            let message = format!("creating {} {} machines", order.requested, order.usage_class.as_str());
            enter(&mut status, ClaimPhase::Creating, ClaimReason::Creating, &message);
            status.fleet = Some(order.clone());
        }
        (ClaimAction::SendOrder(_), Applied::Launched { fleet_id, instance_ids }) => {
            if let Some(fleet) = &mut status.fleet {
                fleet.fleet_id = Some(fleet_id.clone());
                fleet.instance_ids = instance_ids.clone();
            }
            status.shortage = None;
        }
        (ClaimAction::Serve, _) => {
            list_workers(&mut status, facts);
            enter(&mut status, ClaimPhase::Ready, ClaimReason::Ready, &all_registered(facts));
            status.failed_tries = None;
        }
        (ClaimAction::Watch, _) => {
            list_workers(&mut status, facts);
            note_interruptions(&mut status, facts.held(), &lost(facts), now);
            if let Some((phase, reason, message)) = losses(facts).or_else(|| ended_runners(facts)) {
                enter(&mut status, phase, reason, &message);
            }
        }
        (ClaimAction::Release(message), _) => {
            if phase == ClaimPhase::Ready {
                note_interruptions(&mut status, facts.held(), &lost(facts), now);
            }
            enter(&mut status, ClaimPhase::Releasing, ClaimReason::Releasing, message);
        }
        (ClaimAction::Finish(phase, reason, message), _) => {
            list_none(&mut status, count);
            enter(&mut status, *phase, *reason, message);
        }
        (ClaimAction::Dump(message), _) => {
            list_none(&mut status, count);
            enter(&mut status, ClaimPhase::Failed, ClaimReason::InternalError, message);
        }
        (ClaimAction::Settle, _) => list_none(&mut status, count),
        (ClaimAction::Rerun(_), Applied::Rerun(rerun)) => status.rerun = Some(rerun.clone()),
        (
            ClaimAction::Nothing
            | ClaimAction::Select(_)
            | ClaimAction::LookUpOffer
            | ClaimAction::SendOrder(_)
            | ClaimAction::Seal(_)
            | ClaimAction::Replace(_)
            | ClaimAction::AwaitAgents
            | ClaimAction::Start(_)
            | ClaimAction::Return(_)
            | ClaimAction::Rerun(_)
            | ClaimAction::Finalize,
            _,
        ) => {}
    }
    status
}

fn whole_second(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

fn list_workers(status: &mut RunnerClaimStatus, facts: &ClaimFacts) {
    let run = &facts.claim.spec.run_id;
    let worker = |tracked: &Machine| ClaimWorker {
        name: tracked.record.instance_id.clone(),
        state: worker_state(tracked.record.state),
        source: if tracked.record.initial_run_id == *run { WorkerSource::Created } else { WorkerSource::Pool },
    };
    status.workers = facts.held().map(worker).collect();
    let running = facts.held().filter(|tracked| tracked.record.state == State::Running).count();
    status.set_progress(running as u32, facts.claim.spec.count);
}

fn list_none(status: &mut RunnerClaimStatus, count: u32) {
    status.workers.clear();
    status.set_progress(0, count);
}

/// The new phase of a Ready claim that lost machines, or is about to; none if no machine is known to be lost.
fn losses(facts: &ClaimFacts) -> Option<(ClaimPhase, ClaimReason, String)> {
    let (held, count, lost) = (facts.held().count(), facts.claim.spec.count, lost(facts));
    if held == 0 {
        return Some(end_of_claim(&lost));
    }
    let reclaimed = facts.held().filter(|machine| machine.is_reclaimed());
    let reclaimed: Vec<_> = reclaimed.map(|machine| machine.record.instance_id.as_str()).collect();
    let some_lost = (held as u32) < count && !lost.is_empty();
    let reason = match (some_lost, reclaimed.is_empty()) {
        (true, _) => ClaimReason::WorkerLost,
        (false, false) => ClaimReason::SpotInterruption,
        (false, true) => return None,
    };
    let mut message = format!("{held} of {count} runners are left");
    if !reclaimed.is_empty() {
        message += &format!("; within two minutes EC2 takes back {}", reclaimed.join(", "));
    }
    if some_lost {
        message += &format!("; lost: {}", describe(&lost));
    }
    Some((ClaimPhase::Ready, reason, message))
}

/// What a Ready claim says while a runner is started again, and once all are back.
fn ended_runners(facts: &ClaimFacts) -> Option<(ClaimPhase, ClaimReason, String)> {
    let ended = facts.held().filter(|machine| {
        machine.record.state == State::Running && machine.signalled(Signal::RegistrationFailed, &machine.record.run_id)
    });
    let ended: Vec<_> = ended.map(|machine| machine.with_detail(&machine.record.instance_id)).collect();
    let ready = facts.status.conditions.iter().find(|condition| condition.type_ == READY);
    let was_said = ready.is_some_and(|ready| ready.reason == ClaimReason::RunnerEnded.as_str());
    match ended[..] {
        [] if was_said => Some((ClaimPhase::Ready, ClaimReason::Ready, all_registered(facts))),
        [] => None,
        _ => {
            let message = format!("runners have ended and are started again: {}", ended.join("; "));
            Some((ClaimPhase::Ready, ClaimReason::RunnerEnded, message))
        }
    }
}

fn all_registered(facts: &ClaimFacts) -> String {
    let count = facts.claim.spec.count;
    format!("{count} of {count} runners are registered for run {}", facts.claim.spec.run_id)
}

/// The records of machines that this claim had when it became Ready, and that were terminated since.
fn lost<'a>(facts: &ClaimFacts<'a>) -> Vec<&'a Instance> {
    let created = facts.claim.metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0);
    let ready = facts.status.phase_times.ready.as_ref().map_or(created, |time| time.0);
    let records = facts.machines.iter().map(|tracked| &tracked.record);
    records.filter(|record| record.state == State::Terminated && record.updated_at >= ready).collect()
}

/// Why a Ready claim has no machines any more.
fn end_of_claim(lost: &[&Instance]) -> (ClaimPhase, ClaimReason, String) {
    let premature: Vec<_> = lost
        .iter()
        .filter(|record| record.failure_reason != FailureReason::ThresholdPassed.as_str())
        .copied()
        .collect();
    if lost.is_empty() {
        let message = "its machines and their records are gone";
        (ClaimPhase::Failed, ClaimReason::WorkerLost, message.into())
    } else if premature.is_empty() {
        let message = "its machines have run for as long as they may (maxRuntime), and were terminated";
        (ClaimPhase::Completed, ClaimReason::MaxRuntimeReached, message.into())
    } else {
        (ClaimPhase::Failed, ClaimReason::WorkerLost, describe(&premature))
    }
}

fn describe(lost: &[&Instance]) -> String {
    let each = lost
        .iter()
        .map(|record| format!("{} ({}: {})", record.instance_id, record.failure_reason, record.failure_message));
    each.collect::<Vec<_>>().join("; ")
}

/// The reason and message about lost machines or runners of a claim that stays Ready, unless it was reported before.
pub fn newly_lost<'a>(before: &RunnerClaimStatus, after: &'a RunnerClaimStatus) -> Option<(&'a str, &'a str)> {
    const LOSSES: [&str; 3] =
        [ClaimReason::WorkerLost.as_str(), ClaimReason::SpotInterruption.as_str(), ClaimReason::RunnerEnded.as_str()];
    let ready = |status: &'a RunnerClaimStatus| status.conditions.iter().find(|condition| condition.type_ == READY);
    let lost = ready(after).filter(|condition| LOSSES.contains(&condition.reason.as_str()))?;
    let is_reported =
        before.conditions.iter().any(|condition| condition.type_ == READY && condition.message == lost.message);
    (after.phase == Some(ClaimPhase::Ready) && !is_reported).then_some((lost.reason.as_str(), lost.message.as_str()))
}

/// What became of interrupted jobs, once that is known and unless no job was interrupted: it is to be told.
pub fn newly_rerun<'a>(before: &RunnerClaimStatus, after: &'a RunnerClaimStatus) -> Option<(RerunOutcome, &'a str)> {
    let outcome = |status: &RunnerClaimStatus| status.rerun.as_ref()?.outcome;
    let rerun: &Rerun = after.rerun.as_deref().filter(|_| outcome(before).is_none())?;
    let outcome = rerun.outcome.filter(|outcome| *outcome != RerunOutcome::Unneeded)?;
    Some((outcome, rerun.message.as_str()))
}

/// A phase that a claim entered for the first time, for an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entered {
    pub phase: ClaimPhase,
    pub reason: String,
    pub note: String,
}

/// The phases that were entered for the first time since `before`.
pub fn entered(before: &PhaseTimes, status: &RunnerClaimStatus) -> Vec<Entered> {
    let current = status.phase.unwrap_or_default();
    let condition = status.conditions.iter().find(|condition| condition.type_ == READY);
    let is_new = |phase: &ClaimPhase| before.of(*phase).is_none() && status.phase_times.of(*phase).is_some();
    let event = |phase: ClaimPhase| match condition.filter(|_| phase == current) {
        Some(condition) => Entered { phase, reason: condition.reason.clone(), note: condition.message.clone() },
        None => Entered { phase, reason: phase.as_str().into(), note: phase.doing().into() },
    };
    ClaimPhase::ALL.into_iter().filter(is_new).map(event).collect()
}

#[cfg(test)]
#[path = "claim_status_tests.rs"]
mod tests;
