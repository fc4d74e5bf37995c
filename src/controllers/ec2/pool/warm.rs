//! Creates the warm machines of `minIdle`.

use std::{borrow::Cow, sync::Arc, time::Duration};

use kube::ResourceExt;
use paddock_core::{
    api::{Ec2Pool, LaunchOrder, PoolReason, RunnerPool, RunnerPoolStatus},
    ec2::{
        capacity_memory::{LaunchChoice, with_retry},
        launch::{Wanted, client_token, tags},
        launch_error::{Kind, in_words, launch_problem, passing_problem},
        pool_status::PoolProblem,
        requirements::Requirements,
        warm,
    },
    names::PoolKey,
};
use paddock_effects::{aws::AwsError, clock, kube::objects};
use tokio_util::sync::CancellationToken;

use super::{aws_problem, upkeep::keep_up};
use crate::controllers::{
    Error,
    ec2::{Ec2Context, launch_room::Reservation},
};

/// How long `minIdle` waits after a failed launch, unless the pool is edited.
const RELAUNCH_DELAY: Duration = Duration::from_secs(60);

/// How often the pool is kept up while EC2 carries out an order.
const UPKEEP_PERIOD: Duration = Duration::from_secs(1);

/// Machines in one order: EC2 answers when all are launched, which must not exceed the call timeout.
const MAX_ORDER_SIZE: u32 = 100;

/// Creates machines until `minIdle` of them are idle or starting. An order is in the pool's status before it is sent
/// and until its machines have records, so that the next leader sends the same one. Returns what keeps it from doing so.
pub(super) async fn keep_warm(
    context: &Arc<Ec2Context>,
    pool: &mut Cow<'_, RunnerPool>,
    ec2: &Ec2Pool,
    key: &PoolKey,
    new: &mut RunnerPoolStatus,
) -> Result<Option<PoolProblem>, Error> {
    let missing = warm::missing(&context.ledger.of_pool(key), ec2, new.launch_template.as_ref());
    if new.fleet.as_ref().is_some_and(|order| context.launch_room.is_settled(key, &order.client_token)) {
        new.fleet = None;
        return Ok(None);
    }
    let (order, _room) = match &new.fleet {
        // It counts as long as the status has it.
        Some(order) => ((**order).clone(), None),
        None => {
            let (order, room) = match wanted(context, pool, ec2, key, new, missing) {
                Ok(Some(wanted)) => wanted,
                Ok(None) => return Ok(None),
                Err(problem) => return Ok(Some(problem)),
            };
            new.fleet = Some(order.clone().into());
            match objects::replace_status(&context.shared.client, pool.as_ref(), new).await? {
                Some(written) => *pool = Cow::Owned(written),
                None => return Ok(None),
            }
            (order, Some(room))
        }
    };
    let (pool, status, answered) = (pool.as_ref(), new.clone(), CancellationToken::new());
    let send = async {
        let outcome = send_order(context, pool, ec2, key, &order, new).await;
        answered.cancel();
        outcome
    };
    // EC2 takes a while for a large order, and machines expire and return meanwhile.
    let upkeep = async {
        while answered.run_until_cancelled(tokio::time::sleep(UPKEEP_PERIOD)).await.is_some() {
            if let Err((_, why)) = keep_up(context, pool, ec2, key, &status).await {
                tracing::warn!(pool = %key, why, "upkeep failed while machines are launched");
            }
        }
    };
    Ok(tokio::join!(send, upkeep).0.err())
}

/// An order for the missing machines, if there is capacity and a launch template.
fn wanted(
    context: &Ec2Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &PoolKey,
    new: &RunnerPoolStatus,
    missing: u32,
) -> Result<Option<(LaunchOrder, Reservation)>, PoolProblem> {
    let (Some(needs), Some(template)) = (warm::requirements(ec2), &new.launch_template) else { return Ok(None) };
    if let Some((problem, age)) = context.pools.launch_problem(key, pool.metadata.generation)
        && age < RELAUNCH_DELAY
    {
        return Err(problem);
    }
    let now = clock::now();
    let is_booting = !context.ledger.find(key, warm::is_booting).is_empty();
    let failed = context.pools.failed_boots(key, pool.metadata.generation);
    if failed.as_ref().is_some_and(|failed| !failed.may_launch(is_booting, now)) {
        return Ok(None);
    }
    let most = if failed.is_some() { 1 } else { MAX_ORDER_SIZE };
    let (token, limits) =
        (client_token(&format!("{}{now}", pool.uid().unwrap_or_default()), 0), context.limits(key, ec2.max_instances));
    let Some(room) = context.launch_room.reserve(key, &token, &limits, 1, missing.min(most)) else { return Ok(None) };
    if new.classes.iter().any(|class| class.name == needs.resource_class && class.instance_types == 0) {
        return Err((PoolReason::InvalidSpec, needs.no_instance_type()));
    }
    let subnets = context.pools.subnets(key, ec2);
    if subnets.is_empty() {
        context.pools.prepare_again(key);
        return Ok(None);
    }
    let subnets = match context.capacity_memory().order(&needs, &subnets, false, now) {
        LaunchChoice::Ask { subnets, .. } => subnets,
        LaunchChoice::Wait { until, causes } => {
            return Err((PoolReason::InsufficientCapacity, with_retry(&in_words(&causes), until)));
        }
    };
    let wanted = Wanted {
        client_token: token,
        attempt: 1,
        template,
        count: room.count(),
        usage_class: needs.usage_class,
        subnets,
        needs: &needs,
        tags: tags(&context.shared.settings.cluster_name, key, None),
    };
    Ok(Some((wanted.order(now), room)))
}

/// Sends a persisted order, and removes it from the status when its outcome is known.
async fn send_order(
    context: &Ec2Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &PoolKey,
    order: &LaunchOrder,
    new: &mut RunnerPoolStatus,
) -> Result<(), PoolProblem> {
    let outcome = match context.machines.create_fleet(order).await {
        Ok(outcome) => outcome,
        Err(error) if error.is_template_gone() => {
            context.pools.prepare_again(key);
            // An order with the pool's template is repeated until EC2 shows it.
            new.fleet = new.fleet.take().filter(|_| new.launch_template.as_ref() == Some(&order.launch_template));
            return Err(aws_problem(error));
        }
        Err(error @ (AwsError::Refused { .. } | AwsError::Denied { .. })) => {
            new.fleet = None;
            let problem = aws_problem(error);
            context.note_launch_outcome(Some(pool), Some(problem.clone()));
            return Err(problem);
        }
        Err(error) => return Err(aws_problem(error)),
    };
    let now = clock::now();
    let launch = |launched| context.launch(launched, key, ec2, order, None, now);
    context.ledger.apply(outcome.launched.iter().filter_map(launch).collect()).await.map_err(aws_problem)?;
    context.launch_room.settle(key, &order.client_token);
    context.pools.note_warm_launch(key);
    new.fleet = None;
    context.capacity_memory().note(order, outcome.launched.len(), &outcome.causes, now);
    if outcome.causes.iter().any(|cause| cause.kind() == Kind::NotYet) {
        context.pools.prepare_again(key);
    }
    let problem = launch_problem(&outcome.causes).or_else(|| passing_problem(&outcome.causes));
    let problem = problem.filter(|_| outcome.launched.is_empty());
    context.note_launch_outcome(Some(pool), problem.clone());
    match problem {
        Some(problem) => Err(problem),
        None if outcome.launched.is_empty() => {
            let (needs, subnets) = (Requirements::of_order(order), context.pools.subnets(key, ec2));
            match context.capacity_memory().order(&needs, &subnets, false, now) {
                // Other zones are asked next.
                LaunchChoice::Ask { .. } => Ok(()),
                LaunchChoice::Wait { causes, .. } => {
                    let (count, causes) = (order.requested, in_words(&causes));
                    Err((PoolReason::InsufficientCapacity, format!("EC2 gave none of {count} warm machines: {causes}")))
                }
            }
        }
        None => Ok(()),
    }
}
