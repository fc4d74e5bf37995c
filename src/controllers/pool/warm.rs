//! Machines kept warm: what `minIdle` has created.

use std::{borrow::Cow, time::Duration};

use anyhow::Result;
use jiff::Timestamp;
use kube::ResourceExt;
use paddock_record::State;

use super::{Trouble, at_aws, upkeep::is_default};
use crate::{
    api::{Ec2Pool, FleetOrder, PoolReason, RunnerPool, RunnerPoolStatus, TAG_CLUSTER, TAG_INITIAL_RUN_ID, TAG_POOL},
    controllers::{Context, launches::Reservation, objects},
    effects::aws::AwsError,
    plan::{
        fleet::{Wanted, client_token},
        pickup::Needs,
        shortage::{Order, in_words, trouble},
    },
};

/// How long `minIdle` waits after a launch that failed, unless the pool is edited.
const RELAUNCH: Duration = Duration::from_secs(60);

/// Machines in one order: EC2 answers when all of them were launched, and that must not take longer than a call may.
const MAX_ORDER: u32 = 100;

/// Has machines created until `minIdle` of them are idle or on their way. An order is in the pool's status before EC2 has
/// it and until its machines are on record, so that a successor sends the same one.
pub(super) async fn keep_warm(
    context: &Context,
    pool: &mut Cow<'_, RunnerPool>,
    ec2: &Ec2Pool,
    key: &str,
    new: &mut RunnerPoolStatus,
) -> Result<Result<(), Trouble>> {
    let there = context.ledger.of_pool(key);
    let live = there.iter().filter(|tracked| tracked.record.state != State::Terminated).count() as u32;
    let idle = there.iter().filter(|tracked| {
        let coming = tracked.record.run_id.is_empty() && tracked.record.state == State::Created;
        is_default(tracked, ec2) && (coming || tracked.record.state == State::Idle)
    });
    let missing = ec2.min_idle.saturating_sub(idle.count() as u32);
    let reserve = |wanted| context.launches.reserve(key, live, 1, wanted, ec2.max_instances);
    if new.fleet.as_ref().is_some_and(|order| context.launches.was_carried_out(key, &order.client_token)) {
        new.fleet = None;
        return Ok(Ok(()));
    }
    let (order, _room) = match &new.fleet {
        Some(order) => ((**order).clone(), reserve(order.requested)),
        None => {
            let (order, room) = match wanted(context, pool, ec2, key, new, || reserve(missing.min(MAX_ORDER))) {
                Ok(Some(wanted)) => wanted,
                Ok(None) => return Ok(Ok(())),
                Err(trouble) => return Ok(Err(trouble)),
            };
            new.fleet = Some(order.clone().into());
            match objects::replace_status(&context.client, pool.as_ref(), new).await? {
                Some(written) => *pool = Cow::Owned(written),
                None => return Ok(Ok(())),
            }
            (order, Some(room))
        }
    };
    Ok(carry_out(context, pool, ec2, key, &order, new).await)
}

/// An order for what is missing, where there is room for it and something to order it with.
fn wanted(
    context: &Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &str,
    new: &RunnerPoolStatus,
    reserve: impl Fn() -> Option<Reservation>,
) -> Result<Option<(FleetOrder, Reservation)>, Trouble> {
    let (Some(class), Some(template)) = (ec2.default_resource_class(), &new.launch_template) else { return Ok(None) };
    if let Some((trouble, age)) = context.troubles.of_launch(key, pool.metadata.generation)
        && age < RELAUNCH
    {
        return Err(trouble);
    }
    let Some(room) = reserve() else { return Ok(None) };
    let now = Timestamp::now();
    let needs = Needs {
        usage_class: ec2.defaults.usage_class,
        resource_class: class.name.clone(),
        cpu: class.cpu,
        memory_mib: class.memory_mib,
        allowed_instance_types: ec2.defaults.allowed_instance_types.clone(),
    };
    let subnet_ids = match context.shortages().order(&needs, &ec2.subnet_ids, false, now) {
        Order::Ask { subnet_ids, .. } => subnet_ids,
        Order::Wait { message, .. } => return Err((PoolReason::InsufficientCapacity, message)),
    };
    let wanted = Wanted {
        client_token: client_token(&format!("{}{now}", pool.uid().unwrap_or_default()), 0),
        attempt: 1,
        template,
        count: room.count(),
        usage_class: needs.usage_class,
        subnet_ids,
        needs: &needs,
    };
    Ok(Some((wanted.order(now), room)))
}

/// Sends an order that is written down, and takes it out of the status when it is known what became of it.
async fn carry_out(
    context: &Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &str,
    order: &FleetOrder,
    new: &mut RunnerPoolStatus,
) -> Result<(), Trouble> {
    let tags = [
        (TAG_CLUSTER.into(), context.settings.cluster_name.clone()),
        (TAG_POOL.into(), key.to_owned()),
        (TAG_INITIAL_RUN_ID.into(), String::new()),
    ];
    let outcome = match context.machines.create_fleet(order, &tags).await {
        Ok(outcome) => outcome,
        Err(error @ (AwsError::Refused { .. } | AwsError::Denied { .. })) => {
            new.fleet = None;
            let trouble = at_aws(error);
            context.launched(Some(pool), Some(trouble.clone()));
            return Err(trouble);
        }
        Err(error) => return Err(at_aws(error)),
    };
    let now = Timestamp::now();
    let needs = Needs {
        usage_class: order.usage_class,
        resource_class: order.resource_class.clone(),
        cpu: order.cpu,
        memory_mib: order.memory_mib,
        allowed_instance_types: order.allowed_instance_types.clone(),
    };
    let record = |launched| context.new_instance(launched, key, ec2, &needs, "", "", now);
    let records: Vec<_> = outcome.launched.iter().map(record).collect();
    context.ledger.create(&records).await.map_err(at_aws)?;
    context.launches.note_carried_out(key, &order.client_token);
    new.fleet = None;
    context.shortages().note(order, outcome.launched.len(), &outcome.causes, now);
    let trouble = trouble(&outcome.causes).filter(|_| outcome.launched.is_empty());
    context.launched(Some(pool), trouble.clone());
    match trouble {
        Some(trouble) => Err(trouble),
        None if outcome.launched.is_empty() => {
            let (count, causes) = (order.requested, in_words(&outcome.causes));
            Err((PoolReason::InsufficientCapacity, format!("EC2 gave none of {count} warm machines: {causes}")))
        }
        None => Ok(()),
    }
}
