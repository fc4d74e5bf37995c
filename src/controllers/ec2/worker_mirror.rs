//! Workers mirror records: one `Worker` object per instance, written only when it changed.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use paddock_core::{
    api::{FIELD_MANAGER, RunnerPool, Worker},
    ec2::{machine::Machine, worker_status},
    names::PoolKey,
};
use paddock_effects::{
    kube::{
        lanes::BACKGROUND_DELAY_MAX,
        objects::{self, KubeError, Written},
    },
    ledger::WORKER_WINDOW,
};
use tokio_util::sync::CancellationToken;

use super::Ec2Context;
use crate::controllers::{ERROR_RETRY, Failures, REFUSAL_RETRY, reference};

/// Workers written at a time: enough that all those of a claim wait for their turn together.
const CONCURRENT_WRITES: usize = 128;
// Together they leave time to write the Workers of a Ready claim within a second.
const _: () = assert!(WORKER_WINDOW.as_millis() + BACKGROUND_DELAY_MAX.as_millis() < 1000);
/// The retry delay after a write conflict: the watch event is about to arrive.
const STALE_WRITE_RETRY: Duration = Duration::from_millis(200);

/// Updates Workers as their instances change, until `stop`.
pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    let failures = Failures::default();
    let mut changed = Box::pin(context.ledger.changed_instances().take_until(stop.cancelled_owned()));
    while let Some(ids) = changed.next().await {
        stream::iter(ids).for_each_concurrent(CONCURRENT_WRITES, |id| sync(&context, &failures, id)).await;
    }
}

/// Enqueues the Workers that have no instance any more.
pub fn enqueue_orphans(context: &Ec2Context) {
    let orphan = |worker: &Worker| worker.spec.ec2.is_some() && context.ledger.get(&worker.name_any()).is_none();
    for worker in context.shared.stores.workers.store.state_filter(orphan) {
        context.ledger.enqueue_worker(&worker.name_any());
    }
}

async fn sync(context: &Arc<Ec2Context>, failures: &Failures<String>, id: String) {
    // First the turn, then the facts: a machine that changes meanwhile is written once.
    let turn = context.shared.background.turn().await;
    let outcome = match context.ledger.get(&id) {
        Some(machine) => mirror(context, &turn.client, &machine).await,
        None => remove(context, &turn.client, &id).await,
    };
    drop(turn);
    let delay = match outcome {
        Ok(Written::Yes) => return failures.clear(&id),
        Ok(Written::Stale) => STALE_WRITE_RETRY,
        Err(error) => {
            let (count, new) = failures.add(id.clone(), error.to_string());
            if new {
                tracing::warn!(worker = id, %error, "Worker not written");
            }
            if error.is_refusal() { REFUSAL_RETRY.delay(count) } else { ERROR_RETRY }
        }
    };
    let context = context.clone();
    tokio::spawn(async move {
        tokio::time::sleep(delay).await;
        context.ledger.enqueue_worker(&id);
    });
}

async fn mirror(context: &Ec2Context, client: &Client, machine: &Machine) -> Result<Written, KubeError> {
    let (id, key) = (&machine.record.instance_id, &machine.record.pool);
    let pool = PoolKey::parse(key)
        .and_then(|key| context.shared.stores.pools.store.get(&reference::<RunnerPool>(&key.namespace, &key.name)));
    // Without its pool, the instance and its Worker are about to end.
    let Some(pool) = pool else { return Ok(Written::Yes) };
    let (Some(ec2), namespace) = (&pool.spec.ec2, pool.namespace().unwrap_or_default()) else {
        return Ok(Written::Yes);
    };
    let old = context.shared.stores.workers.store.get(&reference(&namespace, id));
    let new = worker_status::status(machine, ec2, old.as_ref().and_then(|worker| worker.status.as_ref()));
    let wanted = worker_status::worker(&pool, machine);
    let worker = match old {
        Some(old) if old.labels() == wanted.labels() => (*old).clone(),
        _ => {
            let api: Api<Worker> = Api::namespaced(client.clone(), &namespace);
            api.patch(id, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&wanted))
                .await
                .map_err(KubeError::new(format!("cannot write Worker {namespace}/{id}")))?
        }
    };
    objects::write_status(client, &worker, worker.status.as_ref(), &new).await
}

async fn remove(context: &Ec2Context, client: &Client, id: &str) -> Result<Written, KubeError> {
    let orphan = |worker: &Worker| worker.spec.ec2.is_some() && worker.name_any() == id;
    for worker in context.shared.stores.workers.store.state_filter(orphan) {
        objects::delete(&objects::api(client, &*worker), id).await?;
    }
    Ok(Written::Yes)
}
