//! Compares the records of all pools with EC2 and the idle queues: machines without a record are terminated, records
//! without a machine end, and missing messages are sent again.
//!
//! EC2 shows a new instance late, and its record is written after its launch. So a mismatch counts only after it was
//! seen for [`MISMATCH_AGE`], by the operator's own clock.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures::future::join_all;
use paddock_core::{
    api::{FailureReason, Hardware, RunnerPool},
    ec2::upkeep::{Ec2State, lost},
    names::PoolKey,
};
use paddock_effects::{
    aws::{AwsError, ec2::Described},
    lock,
};
use paddock_record::State;
use tokio_util::sync::CancellationToken;

use super::{
    Ec2Context,
    pool::{
        FirstError, aws_problem,
        upkeep::{MAX_ENDS, restore_messages},
    },
};
use crate::controllers::{Error, every};

const SWEEP_PERIOD: Duration = Duration::from_secs(30);
/// How long a mismatch between records and EC2 is tolerated.
const MISMATCH_AGE: Duration = Duration::from_secs(60);

/// Mismatches, by instance, and when each was first seen.
type Mismatches = HashMap<String, Instant>;

/// What this leader remembers between two sweeps.
#[derive(Default)]
struct Memory {
    mismatches: Mutex<Mismatches>,
    /// Ended instances without a record whose agents' items are deleted.
    forgotten: Mutex<HashSet<String>>,
}

pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    let memory = Memory::default();
    let metrics = context.shared.metrics.clone();
    every("sweep", SWEEP_PERIOD, metrics, stop, || sweep(&context, &memory)).await;
}

async fn sweep(context: &Ec2Context, memory: &Memory) -> Result<(), Error> {
    let is_ec2 = |pool: &RunnerPool| matches!(pool.spec.hardware(), Some(Hardware::Ec2(_)));
    let pools = context.shared.stores.pools.store.state_filter(is_ec2);
    // Without a pool there may still be machines, but none that this leader could know of before it has loaded records.
    if !context.ledger.is_loaded() {
        return Ok(());
    }
    let cluster = &context.shared.settings.cluster_name;
    let described = match context.machines.of_cluster(cluster).await {
        Ok(described) => described,
        Err(error) => {
            for pool in &pools {
                context.pools.note_sweep(&PoolKey::of(pool), Some(aws_problem(error.clone())));
            }
            return Err(error.into());
        }
    };
    let ended: Vec<_> = described.iter().filter(|instance| instance.gone).map(|it| it.id.clone()).collect();
    let mut by_pool: HashMap<String, Vec<Described>> = HashMap::new();
    described.into_iter().for_each(|instance| by_pool.entry(instance.pool.clone()).or_default().push(instance));
    let old = age(context, &by_pool, &memory.mismatches);
    let swept = pools.iter().map(|pool| {
        let key = PoolKey::of(pool);
        let described = by_pool.remove(&key.to_string()).unwrap_or_default();
        let queues = pool.status.as_ref().map(|status| status.queues.clone()).unwrap_or_default();
        let old = &old;
        async move {
            let compared = compare(context, pool, &key, &described, old).await;
            let restored = restore_messages(context, &key, &queues).await;
            context.pools.note_sweep(&key, compared.and(restored).map_err(aws_problem).err());
        }
    });
    let swept: Vec<_> = swept.collect();
    join_all(swept).await;
    let forgotten = forget_reports(context, ended, &old, &memory.forgotten).await;
    terminate_strays(context, by_pool, &old).await.and(forgotten).map_err(Error::from)
}

/// Deletes what agents have written whose instances ended without a record, or wrote after their record was deleted.
async fn forget_reports(
    context: &Ec2Context,
    ended: Vec<String>,
    old: &HashSet<String>,
    forgotten: &Mutex<HashSet<String>>,
) -> Result<(), AwsError> {
    lock(forgotten).retain(|id| ended.contains(id));
    let is_left = |id: &String| old.contains(id) && context.ledger.get(id).is_none() && !lock(forgotten).contains(id);
    for id in ended.iter().filter(|id| is_left(id)).take(MAX_ENDS) {
        context.ledger.records.forget_report(id).await?;
        lock(forgotten).insert(id.clone());
    }
    Ok(())
}

/// The instances that have been without a record, or records without an instance, for long enough.
fn age(
    context: &Ec2Context,
    by_pool: &HashMap<String, Vec<Described>>,
    mismatches: &Mutex<Mismatches>,
) -> HashSet<String> {
    let listed: HashSet<_> = by_pool.values().flatten().map(|instance| instance.id.as_str()).collect();
    let unknown = listed.iter().filter(|id| context.ledger.get(id).is_none()).map(|id| (*id).to_owned());
    let records = context.ledger.all().into_iter().map(|machine| machine.record.instance_id);
    let current: HashSet<_> = records.filter(|id| !listed.contains(id.as_str())).chain(unknown).collect();
    let (mut seen, now) = (lock(mismatches), Instant::now());
    seen.retain(|id, _| current.contains(id));
    current.into_iter().filter(|id| seen.entry(id.clone()).or_insert(now).elapsed() >= MISMATCH_AGE).collect()
}

/// Terminates instances of a pool without a live record, and ends records whose instance is gone.
async fn compare(
    context: &Ec2Context,
    pool: &RunnerPool,
    key: &PoolKey,
    described: &[Described],
    old: &HashSet<String>,
) -> Result<(), AwsError> {
    let mut failures = FirstError::default();
    let is_orphan = |instance: &&Described| match context.ledger.get(&instance.id) {
        Some(machine) => machine.record.state == State::Terminated,
        None => old.contains(&instance.id),
    };
    let orphans: Vec<_> = described.iter().filter(|instance| !instance.gone).filter(is_orphan).collect();
    failures.note(terminate(context, &orphans).await);
    let instances: HashMap<_, _> = described.iter().map(|instance| (instance.id.as_str(), instance)).collect();
    let ends = context.ledger.of_pool(key).into_iter().filter_map(|machine| {
        let id = machine.record.instance_id.clone();
        let instance = instances.get(id.as_str());
        let state = instance.map(|instance| Ec2State {
            gone: instance.gone,
            reclaimed: instance.reclaimed,
            reason: &instance.state_reason,
        });
        let failed_boot = machine.record.state == State::Created;
        lost(&machine, state, old.contains(&id)).map(|(reason, why)| (id, reason, why, failed_boot))
    });
    for (id, reason, why, failed_boot) in ends.take(MAX_ENDS).collect::<Vec<_>>() {
        if failed_boot && reason != FailureReason::SpotReclaimed {
            context.pools.note_failed_boot(key, pool.metadata.generation, format!("{id}: {why}"));
        }
        failures.note(context.end_instance(&id, reason, &why).await);
    }
    failures.first()
}

/// Terminates machines with this cluster's tag whose pool does not exist: it was deleted while an order was under way,
/// or its finalizer was removed by force.
async fn terminate_strays(
    context: &Ec2Context,
    by_pool: HashMap<String, Vec<Described>>,
    old: &HashSet<String>,
) -> Result<(), AwsError> {
    let watched = context.shared.settings.namespace.as_deref();
    let is_ours = |pool: &str| match (PoolKey::parse(pool), watched) {
        (Some(key), Some(namespace)) => key.namespace == namespace,
        (_, None) => true,
        (None, Some(_)) => false,
    };
    let strays = by_pool.iter().filter(|(pool, _)| is_ours(pool)).flat_map(|(_, instances)| instances);
    let strays: Vec<_> = strays.filter(|instance| !instance.gone && old.contains(&instance.id)).collect();
    terminate(context, &strays).await
}

async fn terminate(context: &Ec2Context, instances: &[&Described]) -> Result<(), AwsError> {
    let ids: Vec<_> = instances.iter().take(MAX_ENDS).map(|instance| instance.id.clone()).collect();
    if !ids.is_empty() {
        tracing::warn!(?ids, "terminating instances without a record");
    }
    context.machines.terminate(&ids).await
}
