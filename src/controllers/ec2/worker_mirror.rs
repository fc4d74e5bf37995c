//! Workers mirror records: one `Worker` object per instance, written only when it changed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use paddock_core::{
    api::{FIELD_MANAGER, RunnerPool, Worker},
    ec2::{machine::Machine, worker_status},
    names::PoolKey,
};
use paddock_effects::{
    kube::objects::{self, KubeError, Written},
    ledger::WORKER_WINDOW,
};
use tokio_util::sync::CancellationToken;

use super::Ec2Context;
use crate::controllers::reference;

/// Workers written at a time: few, so that the API server has room for what claims wait for.
const WRITES: usize = 4;
/// How long Workers wait while claims wait for machines: a warm claim is Ready by then, and its Workers are written once and
/// after it. Together with [`WORKER_WINDOW`] it leaves time to write them within a second of Ready.
const CLAIMS_FIRST: Duration = Duration::from_millis(500);
const _: () = assert!(WORKER_WINDOW.as_millis() + CLAIMS_FIRST.as_millis() < 1000);
/// How often it is checked whether they still wait.
const CLAIMS_POLL: Duration = Duration::from_millis(20);
/// After a write over a version that is not there any more: the news are on their way.
const STALE: Duration = Duration::from_millis(200);
const RETRY: Duration = Duration::from_secs(5);

/// Makes Workers show their instances as these change, until `stop`.
pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    let mut changed = Box::pin(context.ledger.changed_instances().take_until(stop.cancelled_owned()));
    while let Some(ids) = changed.next().await {
        let since = Instant::now();
        while context.ledger.is_claiming() && since.elapsed() < CLAIMS_FIRST {
            tokio::time::sleep(CLAIMS_POLL).await;
        }
        stream::iter(ids).for_each_concurrent(WRITES, |id| show(&context, id)).await;
    }
}

/// Has those Workers looked at that stand for no instance any more.
pub fn find_strays(context: &Ec2Context) {
    let stray = |worker: &Worker| worker.spec.ec2.is_some() && context.ledger.get(&worker.name_any()).is_none();
    for worker in context.shared.stores.workers.store.state_filter(stray) {
        context.ledger.show(&worker.name_any());
    }
}

async fn show(context: &Arc<Ec2Context>, id: String) {
    let outcome = match context.ledger.get(&id) {
        Some(tracked) => mirror(context, &tracked).await,
        None => remove(context, &id).await,
    };
    let trouble = match outcome {
        Ok(Written::Yes) => return,
        Ok(Written::Stale) => None,
        Err(error) => Some(error),
    };
    let pause = if trouble.is_some() { RETRY } else { STALE };
    if let Some(error) = trouble {
        tracing::warn!(worker = id, %error, "Worker not written");
    }
    let context = context.clone();
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        context.ledger.show(&id);
    });
}

async fn mirror(context: &Ec2Context, tracked: &Machine) -> Result<Written, KubeError> {
    let (id, key) = (&tracked.record.instance_id, &tracked.record.pool);
    let pool = PoolKey::parse(key)
        .and_then(|key| context.shared.stores.pools.store.get(&reference::<RunnerPool>(&key.namespace, &key.name)));
    // Without its pool an instance is about to end, and so is its Worker.
    let Some(pool) = pool else { return Ok(Written::Yes) };
    let (Some(ec2), namespace) = (&pool.spec.ec2, pool.namespace().unwrap_or_default()) else {
        return Ok(Written::Yes);
    };
    let old = context.shared.stores.workers.store.get(&reference(&namespace, id));
    let new = worker_status::status(tracked, ec2, old.as_ref().and_then(|worker| worker.status.as_ref()));
    let wanted = worker_status::worker(&pool, tracked);
    let worker = match old {
        Some(old) if old.labels() == wanted.labels() => (*old).clone(),
        _ => {
            let api: Api<Worker> = Api::namespaced(context.shared.client.clone(), &namespace);
            api.patch(id, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&wanted))
                .await
                .map_err(KubeError::new(format!("cannot write Worker {namespace}/{id}")))?
        }
    };
    objects::write_status(&context.shared.client, &worker, worker.status.as_ref(), &new).await
}

async fn remove(context: &Ec2Context, id: &str) -> Result<Written, KubeError> {
    let stray = |worker: &Worker| worker.spec.ec2.is_some() && worker.name_any() == id;
    for worker in context.shared.stores.workers.store.state_filter(stray) {
        objects::delete(&objects::api(&context.shared.client, &*worker), id).await?;
    }
    Ok(Written::Yes)
}
