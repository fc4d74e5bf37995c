//! Demand: one decision for all board pools, then what each pool shows.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    ResourceExt,
    api::PostParams,
    runtime::{
        controller::{Action, Controller},
        reflector::ObjectRef,
    },
};
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        drive,
        objects::{self, Written},
        reference,
    },
    Board, LOOK_AGAIN, lock, look_again, nudges,
    reservations::Reservations,
};
use crate::{
    api::{
        ClaimReason, Hardware, LABEL_POOL, PoolKind, PoolReason, RunnerClaim, RunnerPool, RunnerPoolStatus, Slots,
        Worker, WorkerCounts, WorkerState, ready_condition, set_condition,
    },
    plan::{
        board_worker::{holds_runner, state},
        capacity::{Capacity, PoolKey, is_active},
        demand::{Decision, Scene, Wait, decide, pool_key},
        labels,
    },
};

pub async fn run(board: Arc<Board>, stop: CancellationToken) {
    let stores = &board.context.stores;
    let (pools, of_claim) = (stores.pools.store.clone(), stores.pools.store.clone());
    let all_pools = move |_: Arc<Node>| -> Vec<_> {
        pools.state().iter().filter(|pool| pool.spec.board.is_some()).map(|pool| ObjectRef::from_obj(&**pool)).collect()
    };
    // A decision is for all pools, so that it is enough to wake one; what comes in while one is made is one more.
    let pool_of_claim = move |claim: Arc<RunnerClaim>| {
        let pools = of_claim.state();
        let here = pools.iter().filter(|pool| pool.namespace() == claim.namespace()).map(Arc::as_ref);
        labels::select(&claim, here).ok().map(ObjectRef::from_obj)
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
        .watches_shared_stream(stores.claims.stream(), pool_of_claim)
        .watches_shared_stream(stores.workers.stream(), pool_of_worker)
        .watches_shared_stream(stores.pods.stream(), pool_of_pod)
        .watches_shared_stream(stores.nodes.stream(), all_pools)
        .reconcile_on(nudges(&board.pools));
    let context = board.context.clone();
    drive("demand", controller, context, stop, move |pool, _| reconcile(pool, board.clone())).await;
}

async fn reconcile(pool: Arc<RunnerPool>, board: Arc<Board>) -> Result<Action> {
    let Some(Hardware::Board(_)) = pool.spec.hardware() else { return Ok(Action::await_change()) };
    let client = &board.context.client;
    if pool.metadata.deletion_timestamp.is_some() {
        return board.remove_pool(&pool).await;
    }
    if !objects::has_finalizer(&*pool) {
        objects::add_finalizer(client, &*pool).await?;
        return Ok(Action::requeue(LOOK_AGAIN));
    }
    let obstacle = board.obstacle(&pool).await;
    let retry_at = board.decide().await?;
    let status = board.pool_status(&pool, obstacle);
    objects::write_status(client, &*pool, pool.status.as_ref(), &status).await?;
    let soon = Timestamp::now().saturating_add(jiff::SignedDuration::try_from(LOOK_AGAIN)?)?;
    Ok(look_again(Some(retry_at.map_or(soon, |at| at.min(soon)))))
}

impl Board {
    /// Decides for every pool, and makes the workers. Says when a decision may change by itself.
    async fn decide(&self) -> Result<Option<Timestamp>> {
        let (client, stores) = (&self.context.client, &self.context.stores);
        let mut reservations = self.reservations.lock().await;
        reservations.settle(client, &stores.workers).await?;

        let mut workers = stores.workers.store.state();
        workers.extend(reservations.beyond(&workers));
        let (pools, claims) = (stores.pools.store.state(), stores.claims.store.state());
        let mut not_ready = lock(&self.not_ready).clone();
        let limits = self.limits.read();
        for pool in pools.iter().filter(|pool| pool.spec.board.is_some()) {
            // Only a pool that cannot vanish may have workers: they need its credentials to the end.
            if !objects::has_finalizer(&**pool) {
                not_ready.insert(pool_key(pool), "it is being prepared".into());
            } else if let Err(error) = &limits {
                not_ready.insert(pool_key(pool), format!("{error:#}"));
            }
        }
        let jobs = lock(&self.jobs).clone();
        let decisions = decide(Scene {
            capacity: self.capacity(&pools, &workers),
            pools: &pools,
            claims: &claims,
            workers: &workers,
            limits: &limits.unwrap_or_default(),
            not_ready: &not_ready,
            jobs: &jobs,
            now: Timestamp::now(),
        });

        let mut waits = BTreeMap::new();
        let mut outcome = Ok(());
        for decision in decisions {
            let (claim, wait) = match decision {
                Decision::Wait { claim, wait } => (claim, Some(wait)),
                // What the API server does not answer now it would not answer for the next one either.
                Decision::Provision { .. } if outcome.is_err() => continue,
                Decision::Provision { claim, worker } => match self.provision(&mut reservations, &claim, *worker).await
                {
                    Ok(wait) => (claim, wait),
                    Err(error) => {
                        outcome = Err(error);
                        continue;
                    }
                },
            };
            if let (Some(uid), Some(wait)) = (claim.uid(), wait) {
                waits.insert(uid, wait);
            }
        }
        let retry_at = waits.values().filter_map(|wait: &Wait| wait.retry_at).min();
        self.publish(waits, &claims);
        outcome.map(|()| retry_at)
    }

    fn capacity(&self, pools: &[Arc<RunnerPool>], workers: &[Arc<Worker>]) -> Capacity {
        let stores = &self.context.stores;
        let boards = pools.iter().filter_map(|pool| Some((pool_key(pool), pool.spec.board.as_ref()?)));
        Capacity::count(boards, &stores.nodes.store.state(), &stores.pods.store.state(), workers)
    }

    /// Makes a worker: first the claim's finalizer, so that the claim cannot vanish behind it.
    async fn provision(
        &self,
        reservations: &mut Reservations,
        claim: &Arc<RunnerClaim>,
        worker: Worker,
    ) -> Result<Option<Wait>> {
        let client = &self.context.client;
        if !objects::has_finalizer(&**claim) && objects::add_finalizer(client, &**claim).await? == Written::Stale {
            return Ok(None);
        }
        let name = worker.name_any();
        match objects::api(client, &worker).create(&PostParams::default(), &worker).await {
            Ok(made) => {
                tracing::info!(worker = name, claim = claim.name_any(), "a worker was made");
                reservations.insert(made);
                Ok(None)
            }
            // Made before, by us with the answer lost or by the leader before us; the cache will show it.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                reservations.insert(worker);
                Ok(None)
            }
            Err(error) if objects::is_refusal(&error) => {
                let message = format!("the worker is refused: {error}");
                Ok(Some(Wait { reason: ClaimReason::InternalError, message, retry_at: None }))
            }
            Err(error) => {
                reservations.insert(worker);
                Err(error).with_context(|| format!("cannot make worker {name}"))
            }
        }
    }

    /// Tells the claims whose wait has changed.
    fn publish(&self, waits: BTreeMap<String, Wait>, claims: &[Arc<RunnerClaim>]) {
        let before = std::mem::replace(&mut *lock(&self.waits), waits.clone());
        for claim in claims {
            let uid = claim.uid().unwrap_or_default();
            if before.get(&uid) != waits.get(&uid) {
                // Nobody listens while the controllers stop.
                let _ = self.claims.send(ObjectRef::from_obj(&**claim));
            }
        }
        let known: std::collections::BTreeSet<_> = claims.iter().filter_map(|claim| claim.uid()).collect();
        lock(&self.jobs).retain(|uid, _| known.contains(uid));
    }

    /// What keeps the pool from making workers, remembered for the decisions.
    async fn obstacle(&self, pool: &RunnerPool) -> Option<String> {
        let github = &pool.spec.board.as_ref()?.github;
        let namespace = pool.namespace().unwrap_or_default();
        let mut obstacle = None;
        for secret in [Some(&github.credentials_ref), github.personal_credentials_ref.as_ref()].into_iter().flatten() {
            if let Err(error) = self.context.credentials.get(&namespace, &secret.name).await {
                obstacle = Some(error.to_string());
                break;
            }
        }
        let mut not_ready = lock(&self.not_ready);
        match &obstacle {
            Some(why) => drop(not_ready.insert(pool_key(pool), why.clone())),
            None => drop(not_ready.remove(&pool_key(pool))),
        }
        obstacle
    }

    fn pool_status(&self, pool: &RunnerPool, obstacle: Option<String>) -> RunnerPoolStatus {
        let key = pool_key(pool);
        let workers = self.context.stores.workers.store.state();
        let capacity = self.capacity(&self.context.stores.pools.store.state(), &workers);
        let (total, free) = (capacity.total(&key), capacity.free(&key));
        let mut status = pool.status.clone().unwrap_or_default();
        status.kind = Some(PoolKind::Board);
        status.workers = counts(&self.workers_of_pool(&key));
        status.slots = Some(Slots::new(total, free));
        status.observed_generation = pool.metadata.generation;
        let board = pool.spec.board.as_ref().map(|board| board.board.as_str()).unwrap_or_default();
        let (ready, reason, message) = match obstacle {
            Some(why) => (false, PoolReason::CredentialsMissing, why),
            None if total == 0 => {
                (false, PoolReason::NoBoards, format!("no ready node with slots carries board {board}"))
            }
            None => (true, PoolReason::Ready, "jobs are served".into()),
        };
        let condition = ready_condition(ready, reason, message, pool.metadata.generation, Timestamp::now());
        set_condition(&mut status.conditions, condition);
        status
    }

    fn workers_of_pool(&self, (namespace, name): &PoolKey) -> Vec<Arc<Worker>> {
        self.context.stores.workers.store.state_filter(|worker| {
            worker.spec.board.is_some()
                && worker.spec.pool == *name
                && worker.namespace().as_deref() == Some(namespace.as_str())
        })
    }

    /// A pool goes when no runner is registered through it any more; busy ones finish first.
    async fn remove_pool(&self, pool: &RunnerPool) -> Result<Action> {
        let client = &self.context.client;
        if !objects::has_finalizer(pool) {
            return Ok(Action::await_change());
        }
        let reservations = self.reservations.lock().await;
        let key = pool_key(pool);
        let mut held = self.workers_of_pool(&key);
        let hidden = reservations.beyond(&held).into_iter();
        held.extend(hidden.filter(|worker| worker.spec.pool == key.1 && worker.namespace().as_ref() == Some(&key.0)));
        held.retain(|worker| holds_runner(worker));
        for worker in held.iter().filter(|worker| is_active(worker) && worker.metadata.deletion_timestamp.is_none()) {
            objects::delete(&objects::api(client, &**worker), &worker.name_any()).await?;
        }
        if held.is_empty() {
            objects::remove_finalizer(client, pool).await?;
            return Ok(Action::await_change());
        }
        let mut status = pool.status.clone().unwrap_or_default();
        status.workers = counts(&held);
        let message = format!("waiting for {} workers to give their runners back", held.len());
        let condition =
            ready_condition(false, PoolReason::Deleting, message, pool.metadata.generation, Timestamp::now());
        set_condition(&mut status.conditions, condition);
        objects::write_status(client, pool, pool.status.as_ref(), &status).await?;
        Ok(Action::requeue(LOOK_AGAIN))
    }
}

fn counts(workers: &[Arc<Worker>]) -> WorkerCounts {
    let of =
        |wanted| u32::try_from(workers.iter().filter(|worker| state(worker) == wanted).count()).unwrap_or(u32::MAX);
    WorkerCounts {
        pending: of(WorkerState::Pending),
        running: of(WorkerState::Running),
        completed: of(WorkerState::Completed),
        failed: of(WorkerState::Failed),
        ..WorkerCounts::default()
    }
}
