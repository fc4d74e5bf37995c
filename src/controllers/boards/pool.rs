//! Board pools: their status, their readiness and their deletion.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    ResourceExt,
    runtime::{controller::Controller, reflector::ObjectRef},
};
use paddock_core::{
    api::{Hardware, LABEL_POOL, RunnerPool, RunnerPoolStatus, Worker},
    boards::{pool_status, slots::is_active, worker::holds_runner},
    names::PoolKey,
};
use paddock_effects::{clock, kube::objects};
use tokio_util::sync::CancellationToken;

use super::{BoardContext, RESYNC_PERIOD, lock};
use crate::controllers::{Error, Next, drive, reference};

/// The minimum time between status writes of a pool, whose counts change with every pod.
const STATUS_WRITE_PERIOD: Duration = Duration::from_secs(1);

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let stores = &board.shared.stores;
    let pools = stores.pools.store.clone();
    let all_pools = move |_: Arc<Node>| -> Vec<_> {
        pools.state().iter().filter(|pool| pool.spec.board.is_some()).map(|pool| ObjectRef::from_obj(&**pool)).collect()
    };
    let pool_of_worker = |worker: Arc<Worker>| {
        let board = worker.spec.board.is_some();
        board.then(|| reference(&worker.namespace().unwrap_or_default(), &worker.spec.pool))
    };
    let pool_of_pod = |pod: Arc<Pod>| {
        let pool = pod.labels().get(LABEL_POOL)?;
        Some(reference(&pod.namespace().unwrap_or_default(), pool))
    };
    let controller = Controller::for_shared_stream(stores.pools.stream(), stores.pools.store.clone())
        .watches_shared_stream(stores.workers.stream(), pool_of_worker)
        .watches_shared_stream(stores.pods.stream(), pool_of_pod)
        .watches_shared_stream(stores.nodes.stream(), all_pools);
    let metrics = board.shared.metrics.clone();
    drive("board-pool", controller, board, metrics, stop, reconcile).await;
}

async fn reconcile(pool: Arc<RunnerPool>, board: Arc<BoardContext>) -> Result<Next, Error> {
    let Some(Hardware::Board(_)) = pool.spec.hardware() else { return Ok(Next::AwaitChange) };
    let client = &board.shared.client;
    if pool.metadata.deletion_timestamp.is_some() {
        return board.remove_pool(&pool).await;
    }
    if !objects::has_finalizer(&*pool) {
        objects::add_finalizer(client, &*pool).await?;
        return Ok(Next::After(RESYNC_PERIOD));
    }
    let obstacle = board.obstacle(&pool).await;
    let timer = format!("pool {}", PoolKey::of(&pool));
    if !board.timers.due(&timer, STATUS_WRITE_PERIOD) {
        return Ok(Next::After(STATUS_WRITE_PERIOD));
    }
    let status = board.pool_status(&pool, obstacle);
    objects::write_status(&board.shared.background.client, &*pool, pool.status.as_ref(), &status).await?;
    Ok(Next::After(RESYNC_PERIOD))
}

impl BoardContext {
    /// What keeps the pool from creating workers; also stored for the scheduler.
    async fn obstacle(&self, pool: &RunnerPool) -> Option<String> {
        let github = &pool.spec.board.as_ref()?.github;
        let namespace = pool.namespace().unwrap_or_default();
        let mut obstacle = None;
        for secret in [Some(&github.credentials_ref), github.personal_credentials_ref.as_ref()].into_iter().flatten() {
            if let Err(error) = self.shared.credentials.get(&namespace, &secret.name).await {
                obstacle = Some(error.to_string());
                break;
            }
        }
        let before = lock(&self.memory.obstacles).insert(PoolKey::of(pool), obstacle.clone());
        if before != Some(obstacle.clone()) {
            self.changed.notify_one();
        }
        obstacle
    }

    fn pool_status(&self, pool: &RunnerPool, obstacle: Option<String>) -> RunnerPoolStatus {
        let key = PoolKey::of(pool);
        let capacity = self.capacity(&self.shared.stores.pools.store.state(), &self.all_workers());
        let slots = (capacity.total(&key), capacity.free(&key));
        pool_status::status(pool, &self.workers_of_pool(&key), slots, obstacle, clock::now())
    }

    fn workers_of_pool(&self, pool: &PoolKey) -> Vec<Arc<Worker>> {
        let mut workers = self.all_workers();
        workers.retain(|worker| {
            worker.spec.board.is_some()
                && worker.spec.pool == pool.name
                && worker.namespace().as_deref() == Some(pool.namespace.as_str())
        });
        workers
    }

    /// Removes the finalizer when no runner is registered through the pool any more; busy ones finish first.
    async fn remove_pool(&self, pool: &RunnerPool) -> Result<Next, Error> {
        let client = &self.shared.client;
        if !objects::has_finalizer(pool) {
            return Ok(Next::AwaitChange);
        }
        let _creation = self.creation_lock.lock().await;
        let mut held = self.workers_of_pool(&PoolKey::of(pool));
        held.retain(|worker| holds_runner(worker));
        for worker in held.iter().filter(|worker| is_active(worker) && worker.metadata.deletion_timestamp.is_none()) {
            objects::delete(&objects::api(client, &**worker), &worker.name_any()).await?;
        }
        if held.is_empty() {
            objects::remove_finalizer(client, pool).await?;
            return Ok(Next::AwaitChange);
        }
        let status = pool_status::deleting(pool, &held, clock::now());
        objects::write_status(client, pool, pool.status.as_ref(), &status).await?;
        Ok(Next::After(RESYNC_PERIOD))
    }
}
