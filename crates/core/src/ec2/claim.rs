//! The next action of a claim on an EC2 pool.

use std::{
    ops::ControlFlow::{self, Break, Continue},
    time::Duration,
};

use jiff::Timestamp;
use paddock_record::{ClaimRef, State};

use super::{
    capacity_memory::CapacityMemory,
    claim_order::{first_order, no_instance_type, not_admitted, ordered},
    launch_error::Cause,
    machine::{Machine, MachineCheck, check},
    requirements::Requirements,
    rerun::{self, RerunStep},
    waiting_line::Admission,
    zones::Subnet,
};
use crate::{
    api::{
        ClaimPhase, ClaimReason, Ec2Pool, FINALIZER, FailureReason, LaunchOrder, LaunchTemplate, READY, Rerun,
        RunnerClaim, RunnerClaimSpec, RunnerClaimStatus, RunnerPool,
    },
    backoff::Backoff,
    demand::schedule::Wait,
    next::Next,
};

/// Agents that answer cause an event; agents that stay silent do not, so a claim checks its timeouts this often.
pub const AGENT_CHECK_PERIOD: Duration = Duration::from_secs(1);
/// How long a claim waits for something outside to change, such as an outage.
const RETRY_PERIOD: Duration = Duration::from_secs(5);
/// The longest wait, for a known time or an event.
const RETRY_PERIOD_MAX: Duration = Duration::from_secs(30);
/// The most tries of a claim whose calls AWS refuses: the fifth ends it, after 75 s.
pub const PROVISIONING_TRIES: u32 = 5;
/// The delay after each of them.
pub const PROVISIONING_BACKOFF: Backoff = Backoff::new(RETRY_PERIOD, Duration::from_mins(1));
/// How soon a claim is reconciled again after a write conflict; its watch event mostly comes first.
pub const CONFLICT_RETRY: Duration = Duration::from_millis(200);

/// Input of [`decide`].
pub struct ClaimFacts<'a> {
    pub claim: &'a RunnerClaim,
    /// The claim's status so far, which may be ahead of the one that was written.
    pub status: &'a RunnerClaimStatus,
    pub pool: PoolView<'a>,
    /// The machines whose records name this claim, terminated ones included.
    pub machines: &'a [Machine],
    /// Whether the pool can give it the machines that it misses.
    pub admission: &'a Admission,
    pub capacity: &'a CapacityMemory,
    /// What EC2 was found to offer.
    pub offer: Option<&'a Offer>,
    /// The name of the operator's cluster.
    pub cluster: &'a str,
    /// The pool has nothing more that fits.
    pub pool_exhausted: bool,
    pub run_completed: bool,
    /// The pool has interrupted jobs run again.
    pub reruns: bool,
    /// Outcome of the previous action in the same reconciliation.
    pub last: &'a Applied,
}

/// The pool as the claim needs it.
pub enum PoolView<'a> {
    Missing,
    /// It is being deleted, and the claim holds nothing of it.
    Deleting,
    /// It does not have the claim's resource class.
    NoSuchClass,
    /// Its queue or its launch template is missing, for this reason.
    NotReady(String),
    Ready(Supply<'a>),
}

/// What a claim is served from.
pub struct Supply<'a> {
    pub spec: &'a Ec2Pool,
    pub needs: Requirements,
    /// The queue of idle machines of the wanted class.
    pub queue: &'a str,
    pub template: &'a LaunchTemplate,
}

/// What EC2 offers for a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offer {
    /// The pool's subnets.
    pub subnets: Vec<Subnet>,
    /// How many instance types meet the claim's requirements, if EC2 says so.
    pub instance_types: Option<u32>,
}

pub type Ids = Vec<String>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedMachine {
    pub id: String,
    pub reason: FailureReason,
    pub message: String,
}

/// What to do now. The parts of one action may run concurrently; the next action depends on its outcome.
#[derive(Debug, Clone, PartialEq)]
pub enum ClaimAction {
    Nothing,
    /// Report what the claim waits for.
    Wait(Wait),
    /// Take up to this many from the pool.
    Select(u32),
    /// Ask what EC2 offers, before anything is ordered.
    LookUpOffer,
    /// Record the order before it is sent, so that a new leader sends the same order.
    PlaceOrder(Box<LaunchOrder>),
    /// Terminate idle machines of other scopes, then record the order that takes their room.
    MakeRoom {
        order: Box<LaunchOrder>,
        terminate: Ids,
    },
    /// Send the recorded order to EC2.
    SendOrder(Box<LaunchOrder>),
    /// Terminate the few machines that the last order got, for this reason, and place another order.
    FallBack {
        order: Box<LaunchOrder>,
        terminate: Ids,
        message: String,
    },
    /// EC2 does not have the machines: return everything, and wait.
    Abandon(Wait),
    /// Seal the token that each of these waits for.
    Seal(Ids),
    /// Terminate these, so that others replace them.
    Replace(Vec<FailedMachine>),
    /// Wait for the agents to register.
    AwaitAgents,
    /// All are registered: start them together.
    Start(Ids),
    /// All are running: the claim is Ready.
    Serve,
    /// The claim is Ready: report what is left of it.
    Watch,
    /// Return machines that the claim does not need.
    Return(Ids),
    /// Report that everything is about to be returned, so that a new leader continues.
    Release(String),
    /// Return everything, then end the claim.
    Finish(ClaimPhase, ClaimReason, String),
    /// Terminate everything, for this reason, then end the claim.
    Dump(String),
    /// Return what a finished claim still holds.
    Settle,
    /// Have the jobs run again that were interrupted while a finished claim was served.
    Rerun(RerunStep),
    /// Return everything, then remove the finalizer of the deleted claim.
    Finalize,
}

/// Outcome of an action.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Applied {
    /// Nothing yet: the action is about to be carried out.
    #[default]
    UnderWay,
    Done,
    /// The action still waits for something.
    Incomplete,
    Selected {
        exhausted: bool,
    },
    /// EC2 does not say what it offers, for this reason.
    NoOffer(String),
    /// Another claim took the room under `maxInstances`.
    NoRoom,
    /// EC2 launched all that were ordered.
    Launched {
        fleet_id: String,
        instance_ids: Ids,
    },
    /// EC2 launched less than was ordered.
    Short {
        launched: Ids,
        causes: Vec<Cause>,
    },
    /// The order's launch template does not exist, so nothing was launched.
    TemplateGone(String),
    /// EC2 does not accept the order.
    Refused(String),
    /// GitHub or AWS cannot be used now.
    Unavailable(ClaimReason, String),
    /// AWS refused a call, for the `tries`-th time.
    Failed {
        tries: u32,
        message: String,
    },
    /// What became of the interrupted jobs.
    Rerun(Box<Rerun>),
}

impl ClaimAction {
    /// Whether the action is tried [`PROVISIONING_TRIES`] times only. The return of machines never ends: they would leak.
    pub const fn provisions(&self) -> bool {
        match self {
            Self::Select(_)
            | Self::LookUpOffer
            | Self::PlaceOrder(_)
            | Self::MakeRoom { .. }
            | Self::SendOrder(_)
            | Self::FallBack { .. }
            | Self::Seal(_)
            | Self::Replace(_)
            | Self::AwaitAgents
            | Self::Start(_) => true,
            Self::Nothing
            | Self::Wait(_)
            | Self::Abandon(_)
            | Self::Serve
            | Self::Watch
            | Self::Return(_)
            | Self::Release(_)
            | Self::Finish(..)
            | Self::Dump(_)
            | Self::Settle
            | Self::Rerun(_)
            | Self::Finalize => false,
        }
    }
}

impl<'a> PoolView<'a> {
    pub fn of(claim: &RunnerClaimSpec, pool: Option<&'a RunnerPool>, holds_machines: bool) -> Self {
        let Some((pool, spec)) = pool.and_then(|pool| Some((pool, pool.spec.ec2.as_ref()?))) else {
            return Self::Missing;
        };
        if pool.metadata.deletion_timestamp.is_some() && !holds_machines {
            return Self::Deleting;
        }
        let Some(needs) = Requirements::of(claim, pool.metadata.namespace.as_deref().unwrap_or_default(), spec) else {
            return Self::NoSuchClass;
        };
        let status = pool.status.as_ref();
        let queue = status.and_then(|status| status.queues.iter().find(|q| q.resource_class == needs.resource_class));
        match (queue, status.and_then(|status| status.launch_template.as_ref())) {
            (Some(queue), Some(template)) => Self::Ready(Supply { spec, needs, queue: &queue.url, template }),
            (None, _) | (_, None) => {
                let ready =
                    status.and_then(|status| status.conditions.iter().find(|condition| condition.type_ == READY));
                Self::NotReady(ready.map_or("it is being prepared".into(), |condition| condition.message.clone()))
            }
        }
    }

    pub const fn supply(&self) -> Option<&Supply<'a>> {
        match self {
            Self::Ready(supply) => Some(supply),
            Self::Missing | Self::Deleting | Self::NoSuchClass | Self::NotReady(_) => None,
        }
    }
}

impl ClaimFacts<'_> {
    /// The machines that the claim holds.
    pub fn held(&self) -> impl Iterator<Item = &Machine> {
        self.machines.iter().filter(|tracked| tracked.record.state != State::Terminated)
    }
}

/// The reference to a claim in its machines' records.
pub fn claim_ref(claim: &RunnerClaim) -> ClaimRef<'_> {
    let (name, uid) = (claim.metadata.name.as_deref(), claim.metadata.uid.as_deref());
    ClaimRef { name: name.unwrap_or_default(), uid: uid.unwrap_or_default(), run: &claim.spec.run_id }
}

pub fn decide(facts: &ClaimFacts, now: Timestamp) -> ClaimAction {
    use ClaimPhase::{Claiming, Completed, Creating, Failed, Pending, Ready, Releasing, Validating};
    let metadata = &facts.claim.metadata;
    let finalizer = metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER);
    let deleted = metadata.deletion_timestamp.is_some();
    match (deleted, &facts.pool, facts.status.phase.unwrap_or_default()) {
        (true, _, _) if !finalizer => ClaimAction::Nothing,
        // A pool is not deleted while claims hold its machines, so nothing is left to return.
        (true, PoolView::Missing, _) | (true, _, Releasing) => ClaimAction::Finalize,
        (true, _, Pending | Claiming | Creating | Validating | Ready | Completed | Failed) => {
            ClaimAction::Release("returning the machines to the pool".into())
        }
        // It keeps its last condition, and nothing is left to return either.
        (false, PoolView::Missing, Completed | Failed) => ClaimAction::Nothing,
        (false, PoolView::Missing, Pending | Claiming | Creating | Validating | Ready | Releasing) => {
            let (namespace, name) = (metadata.namespace.as_deref(), facts.claim.spec.pool.as_deref());
            let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
            let message = format!("no RunnerPool {name} in namespace {namespace}: apply it, and the claim goes on");
            wait(ClaimReason::PoolNotFound, message)
        }
        (false, _, Completed | Failed) if facts.held().next().is_some() => ClaimAction::Settle,
        (false, _, Completed | Failed) => rerun::step(facts, now).map_or(ClaimAction::Settle, ClaimAction::Rerun),
        (false, _, Releasing) => {
            let message = "its workflow run is completed, and its machines are returned";
            ClaimAction::Finish(Completed, ClaimReason::Completed, message.into())
        }
        (false, _, Pending | Claiming | Creating | Validating | Ready) if facts.run_completed => {
            ClaimAction::Release("its workflow run is completed: returning the machines to the pool".into())
        }
        (false, _, Ready) => watch(facts),
        (false, _, Pending | Claiming | Creating | Validating)
            if facts.status.failed_tries >= Some(PROVISIONING_TRIES) =>
        {
            let why = last_message(facts.status);
            ClaimAction::Dump(format!(
                "given up after {PROVISIONING_TRIES} tries, and all machines are terminated: {why}"
            ))
        }
        (false, _, Pending | Claiming | Creating | Validating) if backs_off(facts.status, now) => {
            let (reason, message) = (ClaimReason::AwsUnavailable, last_message(facts.status).to_owned());
            ClaimAction::Wait(Wait { reason, message, retry_at: facts.status.retry_at.as_ref().map(|at| at.0) })
        }
        (false, PoolView::Deleting, Pending | Claiming | Creating | Validating) => {
            let message = "the pool is being deleted: delete the claim and choose another pool";
            wait(ClaimReason::PoolNotReady, message.into())
        }
        (false, PoolView::NoSuchClass, Pending | Claiming | Creating | Validating) => {
            let class = facts.claim.spec.resource_class.as_deref().unwrap_or_default();
            let message = format!("the pool has no resource class {class:?}: delete the claim and choose one it has");
            ClaimAction::Finish(Failed, ClaimReason::InvalidSpec, message)
        }
        (false, PoolView::NotReady(why), Pending | Claiming | Creating | Validating) => {
            wait(ClaimReason::PoolNotReady, format!("the pool is not ready: {why}"))
        }
        (false, PoolView::Ready(supply), Pending | Claiming | Creating | Validating) => match &facts.status.fleet {
            // An order on its way when the operator stopped comes first: its machines may exist.
            Some(order) if order.instance_ids.is_empty() => ordered(facts, supply, order, now),
            Some(_) | None => acquire(facts, supply, now),
        },
    }
}

pub(super) fn wait(reason: ClaimReason, message: String) -> ClaimAction {
    ClaimAction::Wait(Wait { reason, message, retry_at: None })
}

/// Whether the claim waits before its next try. Its own status is an event that would end the wait early.
fn backs_off(status: &RunnerClaimStatus, now: Timestamp) -> bool {
    let reason = status.conditions.iter().find(|condition| condition.type_ == READY).map(|it| it.reason.as_str());
    reason == Some(ClaimReason::AwsUnavailable.as_str()) && status.retry_at.as_ref().is_some_and(|at| at.0 > now)
}

fn last_message(status: &RunnerClaimStatus) -> &str {
    let ready = status.conditions.iter().find(|condition| condition.type_ == READY);
    ready.map_or("", |condition| condition.message.as_str())
}

/// A Ready claim returns its surplus once, then reports.
fn watch(facts: &ClaimFacts) -> ClaimAction {
    let spare = surplus(facts.machines, facts.claim.spec.count, true);
    let tried = *facts.last == Applied::Done;
    if spare.is_empty() || tried { ClaimAction::Watch } else { ClaimAction::Return(spare) }
}

/// From no machines to all of them running.
fn acquire(facts: &ClaimFacts, supply: &Supply, now: Timestamp) -> ClaimAction {
    let count = facts.claim.spec.count;
    let spare = surplus(facts.machines, count, false);
    if !spare.is_empty() {
        return ClaimAction::Return(spare);
    }
    let checks: Vec<_> =
        facts.held().map(|tracked| (&tracked.record, check(tracked, &supply.spec.timeouts, now))).collect();
    let ids = |wanted: fn(&MachineCheck) -> bool| -> Ids {
        let those = checks.iter().filter(|(_, check)| wanted(check));
        those.map(|(record, _)| record.instance_id.clone()).collect()
    };
    let mut failed = Vec::new();
    for (record, check) in &checks {
        match (check, record.state) {
            // A machine of the pool is replaced by another one; one that was launched for this claim fails it.
            (MachineCheck::Failed(reason, message), State::Created) => {
                let message = format!("{}: {message}", record.instance_id);
                let reclaimed = *reason == FailureReason::SpotReclaimed;
                let reason = if reclaimed { ClaimReason::WorkerLost } else { ClaimReason::ValidationFailed };
                return ClaimAction::Finish(ClaimPhase::Failed, reason, message);
            }
            (MachineCheck::Failed(reason, message), _) => {
                let (id, reason, message) = (record.instance_id.clone(), *reason, message.clone());
                failed.push(FailedMachine { id, reason, message });
            }
            (MachineCheck::Waiting | MachineCheck::NeedsToken | MachineCheck::Confirmed | MachineCheck::Working, _) => {
            }
        }
    }
    let missing = count.saturating_sub((checks.len() - failed.len()) as u32);
    let unsealed = ids(|check| matches!(check, MachineCheck::NeedsToken));
    let confirmed = ids(|check| matches!(check, MachineCheck::Confirmed));
    let working = ids(|check| matches!(check, MachineCheck::Working)).len() as u32;
    if !failed.is_empty() {
        if unsealed.is_empty() { ClaimAction::Replace(failed) } else { ClaimAction::Seal(unsealed) }
    } else if missing == 0 && working == count {
        ClaimAction::Serve
    } else if missing == 0 && working + confirmed.len() as u32 == count {
        ClaimAction::Start(confirmed)
    } else if missing == 0 {
        if unsealed.is_empty() { ClaimAction::AwaitAgents } else { ClaimAction::Seal(unsealed) }
    } else if lost_created(facts) {
        let message =
            format!("{missing} of {count} created machines were lost before they were ready{}", losses(facts));
        ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::WorkerLost, message)
    } else if count > supply.spec.max_instances {
        let max = supply.spec.max_instances;
        let message = format!("{count} machines are more than the pool may have, which is {max} (maxInstances)");
        ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::InvalidSpec, message)
    } else {
        match (facts.admission, facts.offer) {
            (Ok(_), _) if !facts.pool_exhausted => ClaimAction::Select(missing),
            (_, Some(Offer { instance_types: Some(0), .. })) => no_instance_type(supply),
            (Ok(in_the_way), Some(offer)) => first_order(facts, supply, offer, missing, in_the_way, now),
            (Err(obstacle), Some(_)) => not_admitted(facts, supply, obstacle, now),
            (admission, None) => match (facts.last, admission) {
                (Applied::NoOffer(_), Err(obstacle)) => not_admitted(facts, supply, obstacle, now),
                (Applied::NoOffer(why), Ok(_)) => wait(ClaimReason::AwsUnavailable, why.clone()),
                _ => ClaimAction::LookUpOffer,
            },
        }
    }
}

/// Whether a machine that was launched for the claim is gone. One of the pool is replaced instead.
fn lost_created(facts: &ClaimFacts) -> bool {
    let is_held = |id: &String| facts.held().any(|machine| machine.record.instance_id == *id);
    facts.status.fleet.as_ref().is_some_and(|order| !order.instance_ids.iter().all(is_held))
}

/// Why machines that were launched for the claim are gone, as far as their records say.
fn losses(facts: &ClaimFacts) -> String {
    let ours = |id: &String| facts.status.fleet.as_ref().is_some_and(|order| order.instance_ids.contains(id));
    let ended = facts.machines.iter().map(|machine| &machine.record).filter(|record| record.state == State::Terminated);
    let ended = ended.filter(|record| ours(&record.instance_id) && !record.failure_message.is_empty());
    ended.map(|record| format!("; {}: {}", record.instance_id, record.failure_message)).collect()
}

/// Machines that a claim holds but does not need: those beyond its count, as after a late write of a former leader, and
/// once it is Ready all that do not run. Machines of the pool come first, because they can return to it.
pub fn surplus(held: &[Machine], count: u32, ready: bool) -> Ids {
    let live = held.iter().filter(|tracked| tracked.record.state != State::Terminated);
    let (working, mut spare): (Vec<_>, Vec<_>) = live.partition(|tracked| tracked.record.state == State::Running);
    let needed = if ready { 0 } else { (count as usize).saturating_sub(working.len()) };
    spare.sort_by_key(|tracked| tracked.record.state != State::Claimed);
    let excess = spare.len().saturating_sub(needed);
    spare.into_iter().take(excess).map(|tracked| tracked.record.instance_id.clone()).collect()
}

/// Whether the status is written after an action, and whether the next action follows in the same reconciliation. A
/// status that the next action replaces at once is not written.
pub fn next(action: &ClaimAction, applied: &Applied, now: Timestamp) -> (bool, ControlFlow<Next>) {
    use ClaimAction::{
        Abandon, AwaitAgents, Dump, FallBack, Finalize, Finish, LookUpOffer, MakeRoom, Nothing, PlaceOrder, Release,
        Replace, Rerun, Return, Seal, Select, SendOrder, Serve, Settle, Start, Wait, Watch,
    };
    match (action, applied) {
        (_, Applied::Unavailable(..)) => (true, Break(Next::After(RETRY_PERIOD))),
        (_, Applied::Failed { tries, .. }) if *tries < PROVISIONING_TRIES => {
            (true, Break(Next::After(PROVISIONING_BACKOFF.delay(*tries))))
        }
        (_, Applied::Failed { .. }) => (true, Continue(())),
        (Nothing, _) => (false, Break(Next::AwaitChange)),
        (Abandon(_), Applied::Incomplete) => (false, Break(Next::After(AGENT_CHECK_PERIOD))),
        (Wait(wait) | Abandon(wait), _) => (true, Break(Next::After(retry_delay(wait, now)))),
        (AwaitAgents, Applied::Incomplete) => (true, Break(Next::After(AGENT_CHECK_PERIOD))),
        (Finish(..) | Dump(_) | Settle | Finalize, Applied::Incomplete) => {
            (false, Break(Next::After(AGENT_CHECK_PERIOD)))
        }
        (PlaceOrder(_), Applied::NoRoom) => (false, Continue(())),
        // Another claim is making room too, or has taken a machine that was to end.
        (MakeRoom { .. }, Applied::NoRoom) => (false, Break(Next::After(CONFLICT_RETRY))),
        (SendOrder(_), applied) => (matches!(applied, Applied::Launched { .. }), Continue(())),
        (PlaceOrder(_) | MakeRoom { .. } | FallBack { .. } | Replace(_) | Release(_), _) => (true, Continue(())),
        (Select(_) | LookUpOffer | Seal(_) | AwaitAgents | Start(_) | Return(_), _) => (false, Continue(())),
        (Rerun(RerunStep::Wait(Some(at))), _) => (false, Break(Next::At(*at))),
        // The status that it writes is the change.
        (Serve | Watch | Finish(..) | Dump(_) | Settle | Rerun(_), _) => (true, Break(Next::AwaitChange)),
        // The claim may have changed since it was read, and then still has its finalizer.
        (Finalize, _) => (false, Break(Next::After(CONFLICT_RETRY))),
    }
}

fn retry_delay(wait: &Wait, now: Timestamp) -> Duration {
    match (wait.retry_at, wait.reason) {
        (Some(at), _) => {
            let left = Duration::try_from(at.duration_since(now)).unwrap_or_default();
            left.clamp(AGENT_CHECK_PERIOD, RETRY_PERIOD_MAX)
        }
        // It is reconciled when a machine becomes idle or ends.
        (None, ClaimReason::PoolFull) => RETRY_PERIOD_MAX,
        (None, _) => RETRY_PERIOD,
    }
}

#[cfg(test)]
#[path = "claim_tests.rs"]
mod tests;
