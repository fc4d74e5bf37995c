//! A claim's orders for new machines.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    capacity_memory::LaunchChoice,
    claim::{Applied, ClaimAction, ClaimFacts, Supply, wait},
    launch::{Wanted, client_token},
    launch_error::{Cause, Kind, in_words},
    waiting_line::{Obstacle, PASSED_FOR_MAX},
};
use crate::{
    api::{ClaimPhase, ClaimReason, LaunchOrder, UsageClass},
    backoff::Backoff,
    demand::schedule::Wait,
};

/// The delay after an order that fell short where other zones may still have capacity.
const SHORT_ORDER_BACKOFF: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(120));

/// What a claim does that cannot have its machines now: it returns those that it holds, then waits.
pub(super) fn not_admitted(facts: &ClaimFacts, supply: &Supply, obstacle: &Obstacle, now: Timestamp) -> ClaimAction {
    let held: Vec<_> = facts.held().map(|machine| machine.record.instance_id.clone()).collect();
    if !held.is_empty() {
        return ClaimAction::Return(held);
    }
    match obstacle {
        Obstacle::NoRoom { new, live } => {
            let max = supply.spec.max_instances;
            let message = format!(
                "{new} more machines are needed, but the pool and older claims need {live} of at most {max} (maxInstances)"
            );
            wait(ClaimReason::PoolFull, message)
        }
        Obstacle::Behind(first) => {
            let minutes = PASSED_FOR_MAX.as_mins();
            let message = format!("claim {first} is served first: it has waited for more than {minutes} minutes");
            wait(ClaimReason::PoolFull, message)
        }
        Obstacle::NoCapacity { until, message } => no_capacity(facts, supply, *until, message, now),
    }
}

/// An order for the machines that the pool did not have. It takes the room of those that are `in_the_way`.
pub(super) fn first_order(
    facts: &ClaimFacts,
    supply: &Supply,
    count: u32,
    in_the_way: &[String],
    now: Timestamp,
) -> ClaimAction {
    let fallback = supply.spec.fallback.spot_to_on_demand;
    match facts.capacity.order(&supply.needs, &supply.spec.subnet_ids, fallback, now) {
        LaunchChoice::Ask { usage_class, subnet_ids } => {
            // Another one follows the first if a machine of the pool has to be replaced and the pool has no more, or
            // if EC2 had no capacity.
            let last = facts.status.fleet.as_ref().map(|order| order.attempt);
            let abandoned = facts.status.shortage.as_ref().map(|shortage| shortage.attempt);
            let attempt = last.max(abandoned).unwrap_or_default() + 1;
            let order = launch_order(facts, supply, attempt, count, usage_class, subnet_ids, now);
            match in_the_way {
                [] => ClaimAction::PlaceOrder(order),
                _ => ClaimAction::MakeRoom { order, terminate: in_the_way.to_vec() },
            }
        }
        LaunchChoice::Wait { until, message } => no_capacity(facts, supply, until, &message, now),
    }
}

/// Waits for capacity until `timeouts.capacity` has passed.
fn no_capacity(facts: &ClaimFacts, supply: &Supply, until: Timestamp, message: &str, now: Timestamp) -> ClaimAction {
    let (reason, timeout) = (ClaimReason::InsufficientCapacity, supply.spec.timeouts.capacity);
    let known =
        facts.status.shortage.as_ref().and_then(|shortage| Some((shortage.since.as_ref()?.0, &shortage.message)));
    let deadline = timeout.after(known.map_or(now, |(since, _)| since));
    if deadline <= now {
        let why = known.map_or(message, |(_, why)| why);
        let message = format!("EC2 had no capacity within {timeout} (timeouts.capacity): {why}");
        return ClaimAction::Finish(ClaimPhase::Failed, reason, message);
    }
    ClaimAction::Abandon(Wait { reason, message: message.to_owned(), retry_at: Some(until.min(deadline)) })
}

/// The next action for an order whose machines have no records yet.
pub(super) fn ordered(facts: &ClaimFacts, supply: &Supply, order: &LaunchOrder, now: Timestamp) -> ClaimAction {
    match facts.last {
        Applied::UnderWay
        | Applied::Done
        | Applied::Incomplete
        | Applied::Selected { .. }
        | Applied::NoRoom
        | Applied::Launched { .. }
        | Applied::Failed { .. }
        | Applied::Unavailable(..) => ClaimAction::SendOrder(order.clone().into()),
        Applied::Refused(why) => ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::AwsUnavailable, why.clone()),
        Applied::TemplateGone(why) if *supply.template == order.launch_template => {
            wait(ClaimReason::PoolNotReady, format!("{why}; the pool creates its launch template again"))
        }
        Applied::TemplateGone(_) => {
            let (usage_class, subnet_ids) = (order.usage_class, order.subnet_ids.clone());
            let retry = launch_order(facts, supply, order.attempt + 1, order.requested, usage_class, subnet_ids, now);
            ClaimAction::PlaceOrder(retry)
        }
        Applied::Short { launched, causes } => short(facts, supply, order, launched, causes, now),
    }
}

/// All machines come from one order. One that fell short is followed by another where the pool's fallback allows;
/// otherwise the claim waits for capacity.
fn short(
    facts: &ClaimFacts,
    supply: &Supply,
    order: &LaunchOrder,
    launched: &[String],
    causes: &[Cause],
    now: Timestamp,
) -> ClaimAction {
    let (got, requested, class) = (launched.len(), order.requested, order.usage_class.as_str());
    let why = format!("EC2 gave {got} of {requested} {class} machines: {}", in_words(causes));
    if !causes.iter().any(|cause| cause.kind() == Kind::Capacity) {
        return ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::AwsUnavailable, why);
    }
    let fallback = supply.spec.fallback.spot_to_on_demand && order.usage_class == UsageClass::Spot;
    let until = match facts.capacity.order(&supply.needs, &supply.spec.subnet_ids, fallback, now) {
        LaunchChoice::Ask { usage_class: UsageClass::OnDemand, subnet_ids } if fallback => {
            let (attempt, instead) = (order.attempt + 1, UsageClass::OnDemand);
            return ClaimAction::FallBack {
                order: launch_order(facts, supply, attempt, requested, instead, subnet_ids, now),
                terminate: launched.to_vec(),
                message: format!("{why}; asking for on-demand machines"),
            };
        }
        // Other zones are asked next.
        LaunchChoice::Ask { .. } => now.saturating_add(SHORT_ORDER_BACKOFF.delay(order.attempt)).unwrap_or(now),
        LaunchChoice::Wait { until, .. } => until,
    };
    no_capacity(facts, supply, until, &why, now)
}

fn launch_order(
    facts: &ClaimFacts,
    supply: &Supply,
    attempt: u32,
    count: u32,
    usage_class: UsageClass,
    subnet_ids: Vec<String>,
    now: Timestamp,
) -> Box<LaunchOrder> {
    let client_token = client_token(facts.claim.metadata.uid.as_deref().unwrap_or_default(), attempt);
    let (template, needs) = (supply.template, &supply.needs);
    Wanted { client_token, attempt, template, count, usage_class, subnet_ids, needs }.order(now).into()
}

#[cfg(test)]
#[path = "claim_order_tests.rs"]
mod tests;
