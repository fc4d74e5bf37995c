//! The upkeep of a pool's machines: what no claim does with them.

use std::{collections::HashSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::runtime::events::EventType;
use paddock_core::{
    api::{Ec2Pool, Queue, RunnerPool},
    ec2::{
        machine::Machine,
        pool_status::PoolProblem,
        upkeep::{Ec2State, ORPHAN_AGE, Upkeep, is_forgotten, lost, upkeep},
        warm,
    },
    names::PoolKey,
};
use paddock_effects::aws::{
    AwsError,
    dynamodb::{MOVES_PER_WRITE, WriteOutcome},
};
use paddock_record::{Instance, State, Transition, transition};

use super::at_aws;
use crate::controllers::ec2::Ec2Context;

/// How often EC2 and the queues are compared with the records; half as often while claims wait for machines.
const SWEEP: Duration = Duration::from_secs(30);
/// Machines ended in one sweep, so that a wrong clock cannot empty the fleet.
const MAX_ENDS: usize = 20;

/// Moves machines that no claim moves, ends those whose time is up, and compares records with EC2 from time to time.
pub(super) async fn keep_up(
    context: &Arc<Ec2Context>,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &PoolKey,
    queues: &[Queue],
) -> Result<(), PoolProblem> {
    let now = Timestamp::now();
    let mut ends = 0;
    let instances = context.ledger.of_pool(key);
    let warm = warm::kept(&instances, ec2);
    let (mut warming, mut leaving, mut renewed) = (Vec::new(), Vec::new(), Vec::new());
    for tracked in &instances {
        match upkeep(tracked, ec2, warm.contains(tracked.record.instance_id.as_str()), now) {
            Upkeep::Leave => {}
            Upkeep::Warm => warming.push(tracked.clone()),
            Upkeep::Offer => leaving.push(tracked.clone()),
            Upkeep::Renew => renewed.push(tracked.clone()),
            Upkeep::End(..) if ends >= MAX_ENDS => {}
            Upkeep::End(reason, why) => {
                ends += 1;
                let id = &tracked.record.instance_id;
                context.shared.events.tell(pool, EventType::Warning, "Refresh", "WorkerEnded", format!("{id}: {why}"));
                context.end_instance(id, reason, &why).await.map_err(at_aws)?;
            }
        }
        if is_forgotten(&tracked.record, context.shared.settings.retention, now) {
            let record = &tracked.record;
            context.ledger.forget(&record.instance_id).await.map_err(at_aws)?;
        }
    }
    offer(context, key, leaving, queues).await.map_err(at_aws)?;
    pool_warm(context, key, warming, ec2, queues).await.map_err(at_aws)?;
    renew(context, key, renewed, ec2, queues).await.map_err(at_aws)?;
    offer_missing(context, key, &context.ledger.of_pool(key), queues).await.map_err(at_aws)?;
    sweep_if_due(context, key, queues);
    context.pools.upkeep_problem(key).map_or(Ok(()), Err)
}

/// Starts a sweep, one at a time. EC2 may be slow to list; machines are looked after meanwhile.
fn sweep_if_due(context: &Arc<Ec2Context>, key: &PoolKey, queues: &[Queue]) {
    let period = if context.ledger.is_claiming() { 2 * SWEEP } else { SWEEP };
    context.pools.sweep_if_due(key, period, || {
        let (context, pool, queues) = (context.clone(), key.clone(), queues.to_vec());
        tokio::spawn(async move {
            let swept = async {
                sweep(&context, &pool).await?;
                restore_offers(&context, &pool, &queues).await
            };
            context.pools.note_sweep(&pool, swept.await.map_err(at_aws).err());
        })
    });
}

/// Changes machines together, and gives those that were as they had been seen.
async fn apply(
    context: &Ec2Context,
    machines: Vec<Machine>,
    change: impl Fn(&Instance) -> Option<Transition>,
) -> Result<Vec<Machine>, AwsError> {
    let changed = machines.into_iter().filter_map(|tracked| Some((change(&tracked.record)?, tracked)));
    let (transitions, machines): (Vec<_>, Vec<_>) = changed.unzip();
    let outcomes = context.ledger.apply(transitions).await?;
    let won = machines.into_iter().zip(outcomes).filter_map(|(tracked, outcome)| match outcome {
        WriteOutcome::Won(record) => Some(Machine { record, ..tracked }),
        WriteOutcome::Lost(_) => None,
    });
    Ok(won.collect())
}

/// Their offers carry the old threshold, so new ones go out; whichever is found first is as good.
async fn renew(
    context: &Ec2Context,
    key: &PoolKey,
    machines: Vec<Machine>,
    ec2: &Ec2Pool,
    queues: &[Queue],
) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let threshold = ec2.lifetimes.idle.after(now);
    let renewed = apply(context, machines, |record| transition::renew(record, threshold, now)).await?;
    send_offers(context, key, &renewed, queues).await
}

/// Warm machines go created → running → idle, without a run, and are offered.
async fn pool_warm(
    context: &Ec2Context,
    key: &PoolKey,
    machines: Vec<Machine>,
    ec2: &Ec2Pool,
    queues: &[Queue],
) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let threshold = ec2.lifetimes.idle.after(now);
    let (created, mut running): (Vec<_>, _) =
        machines.into_iter().partition(|tracked| tracked.record.state == State::Created);
    running.extend(apply(context, created, |record| transition::warm_up(record, threshold, now)).await?);
    let idle = apply(context, running, |record| transition::make_idle(record, threshold, now)).await?;
    send_offers(context, key, &idle, queues).await
}

/// The messages first, then the records: a crash in between sends them again, and a second message does no harm.
async fn offer(context: &Ec2Context, key: &PoolKey, machines: Vec<Machine>, queues: &[Queue]) -> Result<(), AwsError> {
    let batches = machines.chunks(MOVES_PER_WRITE).map(async |machines| {
        send_offers(context, key, machines, queues).await?;
        apply(context, machines.to_vec(), transition::pool).await
    });
    futures::future::try_join_all(batches).await.map(drop)
}

/// Offers the idle machines that this leader has not offered yet.
async fn offer_missing(
    context: &Ec2Context,
    key: &PoolKey,
    instances: &[Machine],
    queues: &[Queue],
) -> Result<(), AwsError> {
    let free: HashSet<_> = instances.iter().filter(|t| t.is_free()).map(|t| t.record.instance_id.as_str()).collect();
    let missing = context.pools.unsent(key, &free);
    let missing: Vec<_> = instances.iter().filter(|t| missing.contains(&t.record.instance_id)).cloned().collect();
    send_offers(context, key, &missing, queues).await
}

/// One whose class was taken out of the pool is not offered: nobody can claim it, and its time runs out.
async fn send_offers(
    context: &Ec2Context,
    key: &PoolKey,
    machines: &[Machine],
    queues: &[Queue],
) -> Result<(), AwsError> {
    for queue in queues {
        let of_class = |tracked: &&Machine| tracked.record.resource_class == queue.resource_class;
        let machines: Vec<_> = machines.iter().filter(of_class).collect();
        // Whatever was offered before may carry a threshold that is about to pass.
        machines.iter().for_each(|tracked| context.pools.forget_sent(key, &tracked.record.instance_id));
        let messages: Vec<_> = machines.iter().map(|tracked| tracked.idle_message().write()).collect();
        context.queues.send(&queue.url, &messages).await?;
        machines.iter().for_each(|tracked| context.pools.note_sent(key, &tracked.record.instance_id));
    }
    Ok(())
}

/// Offers every idle machine again where a queue has fewer messages than there are machines.
async fn restore_offers(context: &Ec2Context, key: &PoolKey, queues: &[Queue]) -> Result<(), AwsError> {
    for queue in queues {
        let mut idle = context.ledger.of_pool(key);
        idle.retain(|tracked| tracked.is_free() && tracked.record.resource_class == queue.resource_class);
        if !idle.is_empty() && (context.queues.size(&queue.url).await? as usize) < idle.len() {
            send_offers(context, key, &idle, queues).await?;
        }
    }
    Ok(())
}

/// Instances that carry our tag and have no live record are nobody's: they end. Records whose instance is gone end too.
async fn sweep(context: &Ec2Context, key: &PoolKey) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let described = context.machines.of_pool(&context.shared.settings.cluster_name, key).await?;
    let orphans: Vec<_> = described
        .iter()
        .filter(|d| !d.gone)
        .filter(|d| match context.ledger.get(&d.id) {
            Some(tracked) => tracked.record.state == State::Terminated,
            None => d.launched_at.is_none_or(|launched| now.duration_since(launched) > ORPHAN_AGE),
        })
        .map(|d| d.id.clone())
        .take(MAX_ENDS)
        .collect();
    if !orphans.is_empty() {
        tracing::warn!(?orphans, "ending instances that have no live record");
        context.machines.terminate(&orphans).await?;
    }
    let mut ends = 0;
    for tracked in context.ledger.of_pool(key) {
        let there = described.iter().find(|described| described.id == tracked.record.instance_id);
        let seen = there.map(|there| Ec2State { gone: there.gone, reclaimed: there.reclaimed });
        if let Some((reason, why)) = lost(&tracked, seen, now)
            && ends < MAX_ENDS
        {
            ends += 1;
            context.end_instance(&tracked.record.instance_id, reason, why).await?;
        }
    }
    Ok(())
}
