//! A claim's orders for new machines.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    capacity_memory::LaunchChoice,
    claim::{Applied, ClaimAction, ClaimFacts, Offer, Supply, wait},
    launch::{Wanted, client_token, tags},
    launch_error::{Cause, Kind, in_words},
    waiting_line::{Obstacle, PASSED_FOR_MAX},
    zones::Subnet,
};
use crate::{
    api::{ClaimPhase, ClaimReason, LaunchOrder, OrderSubnet, UsageClass},
    backoff::Backoff,
    demand::schedule::Wait,
    names::PoolKey,
};

/// The delay after an order that fell short for a reason that passes by itself, in zones that may have capacity.
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
    offer: &Offer,
    count: u32,
    in_the_way: &[String],
    now: Timestamp,
) -> ClaimAction {
    match choose(facts, supply, offer, now) {
        LaunchChoice::Ask { usage_class, subnets } => {
            // Another one follows the first if a machine of the pool has to be replaced and the pool has no more, or
            // if EC2 had no capacity.
            let last = facts.status.fleet.as_ref().map(|order| order.attempt);
            let abandoned = facts.status.shortage.as_ref().map(|shortage| shortage.attempt);
            let attempt = last.max(abandoned).unwrap_or_default() + 1;
            let order = launch_order(facts, supply, attempt, count, usage_class, subnets, now);
            match in_the_way {
                [] => ClaimAction::PlaceOrder(order),
                _ => ClaimAction::MakeRoom { order, terminate: in_the_way.to_vec() },
            }
        }
        LaunchChoice::Wait { until, causes } => no_capacity(facts, supply, until, &in_words(&causes), now),
    }
}

fn choose(facts: &ClaimFacts, supply: &Supply, offer: &Offer, now: Timestamp) -> LaunchChoice {
    facts.capacity.order(&supply.needs, &offer.subnets, supply.spec.fallback.spot_to_on_demand, now)
}

/// EC2 has no instance type that the claim could have, so it would wait for nothing.
pub(super) fn no_instance_type(supply: &Supply) -> ClaimAction {
    let message = supply.needs.no_instance_type();
    ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::InvalidSpec, message)
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
        | Applied::NoOffer(_)
        | Applied::NoRoom
        | Applied::Launched { .. }
        | Applied::Failed { .. }
        | Applied::Rerun(_)
        | Applied::Unavailable(..) => ClaimAction::SendOrder(order.clone().into()),
        Applied::Refused(why) => ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::AwsUnavailable, why.clone()),
        Applied::TemplateGone(why) if *supply.template == order.launch_template => {
            wait(ClaimReason::PoolNotReady, why.clone())
        }
        Applied::TemplateGone(_) => {
            let (usage_class, subnets) = (order.usage_class, order.subnets.clone());
            let retry = launch_order(facts, supply, order.attempt + 1, order.requested, usage_class, subnets, now);
            ClaimAction::PlaceOrder(retry)
        }
        Applied::Short { launched, causes } => short(facts, supply, order, launched, causes, now),
    }
}

/// All machines come from one order. One that fell short for capacity is followed by another in other zones, then for
/// on-demand machines where the pool's fallback allows; otherwise the claim waits for capacity.
fn short(
    facts: &ClaimFacts,
    supply: &Supply,
    order: &LaunchOrder,
    launched: &[String],
    causes: &[Cause],
    now: Timestamp,
) -> ClaimAction {
    let (got, requested, class) = (launched.len(), order.requested, order.usage_class.as_str());
    let why = |causes: &[Cause]| format!("EC2 gave {got} of {requested} {class} machines: {}", in_words(causes));
    let has = |fits: fn(Kind) -> bool| causes.iter().any(|cause| fits(cause.kind()));
    let passes = has(Kind::passes);
    let backed_off = now.saturating_add(SHORT_ORDER_BACKOFF.delay(order.attempt)).unwrap_or(now);
    let retry = || {
        let (reason, message) = (ClaimReason::AwsUnavailable, why(causes));
        ClaimAction::Abandon(Wait { reason, message, retry_at: Some(backed_off) })
    };
    if !causes.is_empty() && !has(|kind| kind == Kind::Capacity) {
        let failed = || ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::AwsUnavailable, why(causes));
        return if passes { retry() } else { failed() };
    }
    let known = || Offer { subnets: order.subnets.iter().map(Subnet::from).collect(), instance_types: None };
    match choose(facts, supply, &facts.offer.cloned().unwrap_or_else(known), now) {
        LaunchChoice::Ask { usage_class, subnets } if is_new(order, usage_class, &subnets) => {
            let zones: Vec<_> = subnets.iter().map(|subnet| subnet.zone.as_str()).collect();
            let (instead, zones) = (usage_class.as_str(), zones.join(", "));
            ClaimAction::FallBack {
                message: format!("{}; asking for {instead} machines in zones {zones}", why(causes)),
                order: launch_order(facts, supply, order.attempt + 1, requested, usage_class, subnets, now),
                terminate: launched.to_vec(),
            }
        }
        // EC2 could not be asked in some of the zones.
        LaunchChoice::Ask { .. } if passes => retry(),
        LaunchChoice::Ask { .. } => no_capacity(facts, supply, backed_off, &why(causes), now),
        LaunchChoice::Wait { until, causes: all } => {
            let others = causes.iter().filter(|cause| cause.kind() != Kind::Capacity).cloned();
            let all: Vec<_> = all.into_iter().chain(others).collect();
            no_capacity(facts, supply, until, &why(&all), now)
        }
    }
}

/// Whether an order for these would ask EC2 for anything else than the last one.
fn is_new(last: &LaunchOrder, usage_class: UsageClass, subnets: &[OrderSubnet]) -> bool {
    usage_class != last.usage_class || subnets.iter().any(|subnet| !last.subnets.contains(subnet))
}

fn launch_order(
    facts: &ClaimFacts,
    supply: &Supply,
    attempt: u32,
    count: u32,
    usage_class: UsageClass,
    subnets: Vec<OrderSubnet>,
    now: Timestamp,
) -> Box<LaunchOrder> {
    let metadata = &facts.claim.metadata;
    let client_token = client_token(metadata.uid.as_deref().unwrap_or_default(), attempt);
    let (namespace, pool) = (metadata.namespace.as_deref(), facts.claim.spec.pool.as_deref());
    let pool = PoolKey::new(namespace.unwrap_or_default(), pool.unwrap_or_default());
    let claim = (metadata.name.as_deref().unwrap_or_default(), facts.claim.spec.run_id.as_str());
    let tags = tags(facts.cluster, &pool, Some(claim));
    let (template, needs) = (supply.template, &supply.needs);
    Wanted { client_token, attempt, template, count, usage_class, subnets, needs, tags }.order(now).into()
}

#[cfg(test)]
#[path = "claim_order_tests.rs"]
mod tests;
