//! The next step of a claim on an EC2 pool.

use jiff::Timestamp;
use paddock_record::State;

use super::instance::{Standing, Tracked, standing};
use crate::api::{ClaimReason, Ec2Pool, FailureReason};

/// What a claim looks like when its next step is chosen.
pub struct View<'a> {
    pub count: u32,
    /// The instances whose records name this claim's run.
    pub held: &'a [Tracked],
    /// The pool has nothing more that fits.
    pub pool_exhausted: bool,
    /// A fleet was ordered for this claim, and its instances have their records.
    pub fleet_settled: bool,
}

/// What to do now. Everything in one step may be done at once; the next step follows from what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Take up to this many from the pool.
    Select(u32),
    /// Have this many created.
    Create(u32),
    /// Hand tokens to those that wait for one, end those that failed, and wait for the rest.
    Validate { tokens: Vec<String>, failed: Vec<(String, FailureReason, String)> },
    /// All are there: put them in service together.
    Start(Vec<String>),
    /// All are in service.
    Serve,
    /// It cannot be fulfilled: give back what it holds and say why.
    Fail(ClaimReason, String),
}

pub fn step(view: &View, pool: &Ec2Pool, now: Timestamp) -> Step {
    let standings: Vec<_> = view
        .held
        .iter()
        .filter(|tracked| tracked.record.state != State::Terminated)
        .map(|tracked| (tracked, standing(tracked, &pool.timeouts, now)))
        .collect();
    let ids = |wanted: fn(&Standing) -> bool| -> Vec<String> {
        let those = standings.iter().filter(|(_, standing)| wanted(standing));
        those.map(|(tracked, _)| tracked.record.instance_id.clone()).collect()
    };
    let failed: Vec<_> = standings
        .iter()
        .filter_map(|(tracked, standing)| match standing {
            Standing::Failed(reason, message) => Some((tracked.record.instance_id.clone(), *reason, message.clone())),
            Standing::Waiting | Standing::NeedsToken | Standing::Confirmed | Standing::Working => None,
        })
        .collect();
    let created_failed = |id: &str| {
        standings.iter().any(|(tracked, _)| tracked.record.instance_id == id && tracked.record.state == State::Created)
    };
    // A machine of the pool is replaced by another one; one that was made for this claim fails it.
    if let Some((id, _, message)) = failed.iter().find(|(id, ..)| created_failed(id)) {
        return Step::Fail(ClaimReason::ValidationFailed, format!("{id}: {message}"));
    }
    let live = (standings.len() - failed.len()) as u32;
    let missing = view.count.saturating_sub(live);
    if !failed.is_empty() {
        return Step::Validate { tokens: ids(|s| matches!(s, Standing::NeedsToken)), failed };
    }
    if missing == 0 {
        let confirmed = ids(|s| matches!(s, Standing::Confirmed));
        let working = ids(|s| matches!(s, Standing::Working)).len() as u32;
        return if working == view.count {
            Step::Serve
        } else if working + confirmed.len() as u32 == view.count {
            Step::Start(confirmed)
        } else {
            Step::Validate { tokens: ids(|s| matches!(s, Standing::NeedsToken)), failed }
        };
    }
    match (view.pool_exhausted, view.fleet_settled) {
        (_, true) => {
            let message = format!("{missing} of {} created machines were lost before they were ready", view.count);
            Step::Fail(ClaimReason::WorkerLost, message)
        }
        (false, false) => Step::Select(missing),
        (true, false) => Step::Create(missing),
    }
}

/// What a claim holds and does not need: more than its count, as after a write of a former leader came late, and once it
/// is Ready all that is not in service. Machines of the pool go first, because they can go back to it.
pub fn surplus(held: &[Tracked], count: u32, ready: bool) -> Vec<String> {
    let live = held.iter().filter(|tracked| tracked.record.state != State::Terminated);
    let (working, mut spare): (Vec<_>, Vec<_>) = live.partition(|tracked| tracked.record.state == State::Running);
    let needed = if ready { 0 } else { (count as usize).saturating_sub(working.len()) };
    spare.sort_by_key(|tracked| tracked.record.state != State::Claimed);
    let excess = spare.len().saturating_sub(needed);
    spare.into_iter().take(excess).map(|tracked| tracked.record.instance_id.clone()).collect()
}

#[cfg(test)]
#[path = "claim_tests.rs"]
mod tests;
