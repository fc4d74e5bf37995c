//! The upkeep of a pool's machines: what no claim does with them.

use std::{cmp::Reverse, collections::HashSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::runtime::events::EventType;
use paddock_record::{Instance, State};
use tokio::task::JoinHandle;

use super::{Trouble, at_aws};
use crate::{
    api::{Ec2Pool, Queue, RunnerPool},
    controllers::{Context, lock},
    effects::{
        aws::AwsError,
        records::{MOVES_PER_WRITE, Outcome},
    },
    plan::instance::{ORPHAN_AGE, Seen, Tracked, Upkeep, lost, upkeep},
};

/// How often EC2 and the queues are compared with the records; half as often while claims wait for machines.
const SWEEP: Duration = Duration::from_secs(30);
/// How much longer a record stays whose runner may still be at GitHub.
const UNSETTLED: Duration = Duration::from_secs(3600);
/// Machines ended in one sweep, so that a wrong clock cannot empty the fleet.
const MAX_ENDS: usize = 20;

/// Moves machines that no claim moves, ends those whose time is up, and compares records with EC2 from time to time.
pub(super) async fn keep_up(
    context: &Arc<Context>,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &str,
    queues: &[Queue],
) -> Result<(), Trouble> {
    let now = Timestamp::now();
    let mut ends = 0;
    let instances = context.ledger.of_pool(key);
    let warm = kept_warm(&instances, ec2);
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
                context.events.tell(pool, EventType::Warning, "Refresh", "WorkerEnded", format!("{id}: {why}"));
                context.end_instance(id, reason, &why).await.map_err(at_aws)?;
            }
        }
        if is_forgotten(&tracked.record, context.settings.retention, now) {
            let record = &tracked.record;
            context.ledger.forget(&record.instance_id).await.map_err(at_aws)?;
        }
    }
    offer(context, leaving, queues).await.map_err(at_aws)?;
    pool_warm(context, warming, ec2, queues).await.map_err(at_aws)?;
    renew(context, renewed, ec2, queues).await.map_err(at_aws)?;
    offer_missing(context, key, &context.ledger.of_pool(key), queues).await.map_err(at_aws)?;
    sweep_if_due(context, key, queues);
    context.troubles.of_upkeep(key).map_or(Ok(()), Err)
}

/// Starts a sweep, one at a time. EC2 may be slow to list; machines are looked after meanwhile.
fn sweep_if_due(context: &Arc<Context>, key: &str, queues: &[Queue]) {
    let period = if context.ledger.is_claiming() { 2 * SWEEP } else { SWEEP };
    let mut sweeps = lock(&context.sweeps);
    if sweeps.get(key).is_none_or(JoinHandle::is_finished) && context.timers.due(&format!("sweep {key}"), period) {
        let (context, pool, queues) = (context.clone(), key.to_owned(), queues.to_vec());
        let sweep = tokio::spawn(async move {
            let swept = async {
                sweep(&context, &pool).await?;
                restore_offers(&context, &pool, &queues).await
            };
            context.troubles.swept(&pool, swept.await.map_err(at_aws).err());
        });
        sweeps.insert(key.to_owned(), sweep);
    }
}

/// Whether nobody asks for the record of an ended machine any more. One whose runner may still be at GitHub stays a while
/// longer, but not for ever: the App may have lost its rights.
fn is_forgotten(record: &Instance, retention: Duration, now: Timestamp) -> bool {
    let grace = if record.leaving.is_empty() { Duration::ZERO } else { UNSETTLED };
    let age = Duration::try_from(now.duration_since(record.updated_at)).unwrap_or_default();
    record.state == State::Terminated && age > retention.saturating_add(grace)
}

/// The idle machines that `minIdle` speaks of: those that have the longest to live anyway.
fn kept_warm<'a>(instances: &'a [Tracked], pool: &Ec2Pool) -> HashSet<&'a str> {
    let idle = |tracked: &&Tracked| tracked.record.state == State::Idle && is_default(tracked, pool);
    let mut idle: Vec<_> = instances.iter().filter(idle).collect();
    idle.sort_by_key(|tracked| Reverse(tracked.record.threshold));
    idle.into_iter().take(pool.min_idle as usize).map(|tracked| tracked.record.instance_id.as_str()).collect()
}

/// `minIdle` speaks of machines as the pool makes them by default.
pub(super) fn is_default(tracked: &Tracked, pool: &Ec2Pool) -> bool {
    let class = pool.default_resource_class().map(|class| class.name.as_str());
    class == Some(tracked.record.resource_class.as_str())
        && tracked.record.usage_class == pool.defaults.usage_class.as_str()
}

/// Moves machines together, and gives those that were as they had been seen.
async fn advance(
    context: &Context,
    machines: Vec<Tracked>,
    now: Timestamp,
    next: impl Fn(&Instance) -> Instance,
) -> Result<Vec<Tracked>, AwsError> {
    let moves: Vec<_> = machines.iter().map(|tracked| (tracked.record.clone(), next(&tracked.record))).collect();
    let outcomes = context.ledger.advance_all(&moves, now).await?;
    let won = machines.into_iter().zip(outcomes).filter_map(|(tracked, outcome)| match outcome {
        Outcome::Won(record) => Some(Tracked { record, ..tracked }),
        Outcome::Lost(_) => None,
    });
    Ok(won.collect())
}

/// Their offers carry the old threshold, so new ones go out; whichever is found first is as good.
async fn renew(context: &Context, machines: Vec<Tracked>, ec2: &Ec2Pool, queues: &[Queue]) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let threshold = Some(ec2.lifetimes.idle.after(now));
    let next = |record: &Instance| Instance { threshold, updated_at: now, ..record.clone() };
    let renewed = advance(context, machines, now, next).await?;
    send_offers(context, &renewed, queues).await
}

/// Warm machines go created → running → idle, for a run of nobody's, and are offered.
async fn pool_warm(context: &Context, machines: Vec<Tracked>, ec2: &Ec2Pool, queues: &[Queue]) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let threshold = Some(ec2.lifetimes.idle.after(now));
    let into = |state| move |record: &Instance| Instance { state, threshold, updated_at: now, ..record.clone() };
    let (created, mut running): (Vec<_>, _) =
        machines.into_iter().partition(|tracked| tracked.record.state == State::Created);
    running.extend(advance(context, created, now, into(State::Running)).await?);
    let idle = advance(context, running, now, into(State::Idle)).await?;
    send_offers(context, &idle, queues).await
}

/// The messages first, then the records: a crash in between sends them again, and a second message does no harm.
async fn offer(context: &Context, machines: Vec<Tracked>, queues: &[Queue]) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let next = |record: &Instance| Instance { leaving: String::new(), sealed: String::new(), ..record.clone() };
    let batches = machines.chunks(MOVES_PER_WRITE).map(async |machines| {
        send_offers(context, machines, queues).await?;
        advance(context, machines.to_vec(), now, next).await
    });
    futures::future::try_join_all(batches).await.map(drop)
}

/// Offers the idle machines that this leader has not offered yet.
async fn offer_missing(context: &Context, key: &str, instances: &[Tracked], queues: &[Queue]) -> Result<(), AwsError> {
    let free: HashSet<_> = instances.iter().filter(|t| t.is_free()).map(|t| t.record.instance_id.as_str()).collect();
    let missing = context.offers.missing(key, &free);
    let missing: Vec<_> = instances.iter().filter(|t| missing.contains(&t.record.instance_id)).cloned().collect();
    send_offers(context, &missing, queues).await
}

/// One whose class was taken out of the pool is not offered: nobody can claim it, and its time runs out.
async fn send_offers(context: &Context, machines: &[Tracked], queues: &[Queue]) -> Result<(), AwsError> {
    for queue in queues {
        let of_class = |tracked: &&Tracked| tracked.record.resource_class == queue.resource_class;
        let machines: Vec<_> = machines.iter().filter(of_class).collect();
        // Whatever was offered before may carry a threshold that is about to pass.
        machines.iter().for_each(|tracked| context.offers.forget(&tracked.record.pool, &tracked.record.instance_id));
        let messages: Vec<_> = machines.iter().map(|tracked| tracked.idle_message().write()).collect();
        context.queues.send(&queue.url, &messages).await?;
        machines.iter().for_each(|tracked| context.offers.note(&tracked.record.pool, &tracked.record.instance_id));
    }
    Ok(())
}

/// Offers every idle machine again where a queue has fewer messages than there are machines.
async fn restore_offers(context: &Context, key: &str, queues: &[Queue]) -> Result<(), AwsError> {
    for queue in queues {
        let mut idle = context.ledger.of_pool(key);
        idle.retain(|tracked| tracked.is_free() && tracked.record.resource_class == queue.resource_class);
        if !idle.is_empty() && (context.queues.size(&queue.url).await? as usize) < idle.len() {
            send_offers(context, &idle, queues).await?;
        }
    }
    Ok(())
}

/// Instances that carry our tag and have no live record are nobody's: they end. Records whose instance is gone end too.
async fn sweep(context: &Context, key: &str) -> Result<(), AwsError> {
    let now = Timestamp::now();
    let described = context.machines.of_pool(&context.settings.cluster_name, key).await?;
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
        let seen = there.map(|there| Seen { gone: there.gone, reclaimed: there.reclaimed });
        if let Some((reason, why)) = lost(&tracked, seen, now)
            && ends < MAX_ENDS
        {
            ends += 1;
            context.end_instance(&tracked.record.instance_id, reason, why).await?;
        }
    }
    Ok(())
}
