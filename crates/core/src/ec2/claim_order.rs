//! A claim's orders for new machines.

use jiff::Timestamp;

use super::{
    capacity_memory::LaunchChoice,
    claim::{Applied, ClaimAction, ClaimFacts, Supply, wait},
    launch::{Wanted, client_token},
    launch_error::{Cause, Kind, in_words},
};
use crate::{
    api::{ClaimPhase, ClaimReason, LaunchOrder, UsageClass},
    demand::schedule::Wait,
};

/// An order for the machines that the pool did not have, unless there is no room or EC2 is known to have no capacity.
pub(super) fn first_order(facts: &ClaimFacts, supply: &Supply, count: u32, now: Timestamp) -> ClaimAction {
    let (live, max) = (facts.launch.live, supply.spec.max_instances);
    if live.saturating_add(count) > max {
        let message = format!(
            "{count} more machines are needed, but the pool has or creates {live} of at most {max} (maxInstances)"
        );
        return wait(ClaimReason::PoolFull, message);
    }
    let fallback = supply.spec.fallback.spot_to_on_demand;
    match facts.launch.capacity.order(&supply.needs, &supply.spec.subnet_ids, fallback, now) {
        LaunchChoice::Ask { usage_class, subnet_ids } => {
            // Another one follows the first if a machine of the pool has to be replaced and the pool has no more.
            let attempt = facts.status.fleet.as_ref().map_or(1, |last| last.attempt + 1);
            ClaimAction::PlaceOrder(launch_order(facts, supply, attempt, count, usage_class, subnet_ids, now))
        }
        LaunchChoice::Wait { until, message } => {
            ClaimAction::Wait(Wait { reason: ClaimReason::InsufficientCapacity, message, retry_at: Some(until) })
        }
    }
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

/// All machines come from one order: one that fell short is followed by another where the pool's fallback allows.
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
    let capacity = causes.iter().any(|cause| cause.kind() == Kind::Capacity);
    let fallback = supply.spec.fallback.spot_to_on_demand && order.usage_class == UsageClass::Spot;
    match facts.launch.capacity.order(&supply.needs, &supply.spec.subnet_ids, fallback, now) {
        LaunchChoice::Ask { usage_class: UsageClass::OnDemand, subnet_ids } if fallback && capacity => {
            let (attempt, instead) = (order.attempt + 1, UsageClass::OnDemand);
            ClaimAction::FallBack {
                order: launch_order(facts, supply, attempt, requested, instead, subnet_ids, now),
                terminate: launched.to_vec(),
                message: format!("{why}; asking for on-demand machines"),
            }
        }
        LaunchChoice::Ask { .. } | LaunchChoice::Wait { .. } => {
            let reason = if capacity { ClaimReason::InsufficientCapacity } else { ClaimReason::AwsUnavailable };
            ClaimAction::Finish(ClaimPhase::Failed, reason, why)
        }
    }
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
