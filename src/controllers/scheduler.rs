//! Demand: one decision for all board pools, whenever something changed that it rests on.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use kube::{ResourceExt, api::PostParams, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{ClaimReason, RunnerClaim, RunnerPool, Worker},
    boards::slots::Capacity,
    demand::{
        schedule::{Decision, DemandFacts, Plan, Wait, decide},
        supply::drop_records,
    },
    names::PoolKey,
};
use paddock_effects::{
    kube::objects::{self, KubeError},
    lock,
    metrics::ControllerLabel,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Error,
    boards::{BoardContext, LOOK_AGAIN},
    reference, time_until,
};

/// Workers that are made at a time.
const AT_ONCE: usize = 32;
/// How long a decision that could not be carried out waits.
const RETRY: Duration = Duration::from_secs(1);

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let stores = &board.shared.stores;
    let changes = stream::select_all([
        stores.pools.stream().map(drop).boxed(),
        stores.claims.stream().map(drop).boxed(),
        stores.workers.stream().map(drop).boxed(),
        stores.pods.stream().map(drop).boxed(),
        stores.nodes.stream().map(drop).boxed(),
    ]);
    let listen = changes.for_each(async |()| board.changed.notify_one());
    let label = ControllerLabel { controller: "demand" };
    let work = async {
        let mut wait = Duration::ZERO;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = board.changed.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
            let start = Instant::now();
            board.shared.metrics.reconciles.get_or_create(&label).inc();
            wait = match board.decide().await {
                Ok(retry_at) => retry_at.map_or(LOOK_AGAIN, time_until).min(LOOK_AGAIN),
                Err(error) => {
                    board.shared.metrics.reconcile_errors.get_or_create(&label).inc();
                    tracing::warn!(%error, "the decision could not be carried out");
                    RETRY
                }
            };
            board.curious.notify_one();
            // What comes in meanwhile is one more decision, not many.
            tokio::time::sleep(start.elapsed().min(RETRY)).await;
        }
    };
    tokio::select! {
        () = listen => {}
        () = work => {}
    }
}

impl BoardContext {
    /// Decides for every pool, and makes the workers. Says when a decision may change by itself.
    async fn decide(&self) -> Result<Option<Timestamp>, Error> {
        let (client, stores) = (&self.shared.client, &self.shared.stores);
        let making = self.making.lock().await;
        self.reservations.settle(client, &stores.workers).await?;

        let mut workers = self.all_workers();
        let (pools, mut claims) = (stores.pools.store.state(), stores.claims.store.state());
        if self.timers.due("board memory", LOOK_AGAIN) {
            self.memory.tidy(&claims, &workers);
        }
        let jobs = lock(&self.memory.jobs).clone();
        drop_records(&mut claims, &mut workers, &jobs);
        let limits = self.limits.read();
        let not_ready = self.not_ready(&pools, limits.as_ref().err());
        let plan = decide(DemandFacts {
            capacity: self.capacity(&pools, &workers),
            pools: &pools,
            claims: &claims,
            workers: &workers,
            limits: &limits.unwrap_or_default(),
            not_ready: &not_ready,
            jobs: &jobs,
            troubles: &self.memory.troubles(),
            prefix: &self.prefix,
            now: Timestamp::now(),
        });
        self.tell_workers(&plan, &workers);

        let mut waits = BTreeMap::new();
        let mut made = Vec::new();
        for decision in plan.decisions {
            match decision {
                Decision::Wait { claim, wait } => drop(claim.uid().map(|uid| waits.insert(uid, wait))),
                Decision::Provision { claim, worker } => made.push((claim, *worker)),
            }
        }
        let mut outcome = Ok(());
        let rush = (!made.is_empty()).then(|| self.rush.enter());
        let mut made = stream::iter(made)
            .map(|(claim, worker)| async move { (claim.uid(), self.make(&claim, worker).await) })
            .buffer_unordered(AT_ONCE);
        while let Some((uid, made)) = made.next().await {
            match made {
                Ok(wait) => drop(uid.zip(wait).map(|(uid, wait)| waits.insert(uid, wait))),
                Err(error) => {
                    outcome = Err(error);
                    // What the API server does not answer now it would not answer for the next one either.
                    break;
                }
            }
        }
        drop((made, making, rush));
        let retry_at = waits.values().filter_map(|wait: &Wait| wait.retry_at).min();
        self.tell_claims(waits, &claims);
        outcome.map(|()| retry_at)
    }

    pub fn capacity(&self, pools: &[Arc<RunnerPool>], workers: &[Arc<Worker>]) -> Capacity {
        let stores = &self.shared.stores;
        let boards = pools.iter().filter_map(|pool| Some((PoolKey::of(pool), pool.spec.board.as_ref()?)));
        Capacity::count(boards, &stores.nodes.store.state(), &stores.pods.store.state(), workers)
    }

    /// Pools that cannot make workers, and why.
    fn not_ready(&self, pools: &[Arc<RunnerPool>], no_limits: Option<&anyhow::Error>) -> BTreeMap<PoolKey, String> {
        let obstacles = lock(&self.memory.obstacles);
        let boards = pools.iter().filter(|pool| pool.spec.board.is_some());
        let why = boards.filter_map(|pool| {
            let why = match obstacles.get(&PoolKey::of(pool)) {
                Some(Some(why)) => why.clone(),
                // Only a pool that cannot vanish may have workers: they need its credentials to the end.
                Some(None) if objects::has_finalizer(&**pool) => format!("{:#}", no_limits?),
                Some(None) | None => "it is being prepared".into(),
            };
            Some((PoolKey::of(pool), why))
        });
        why.collect()
    }

    /// Makes a worker, or says why it never will.
    async fn make(&self, claim: &RunnerClaim, worker: Worker) -> Result<Option<Wait>, Error> {
        let name = worker.name_any();
        // Both are said before: its first look may come before the answer, and the answer may be lost.
        lock(&self.memory.fresh).insert(name.clone());
        self.reservations.insert(worker.clone());
        match objects::api(&self.shared.client, &worker).create(&PostParams::default(), &worker).await {
            Ok(made) => {
                tracing::info!(worker = name, claim = claim.name_any(), "a worker was made");
                self.reservations.insert(made);
                Ok(None)
            }
            // Made before, by us with the answer lost or by the leader before us; the cache will show it.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                lock(&self.memory.fresh).remove(&name);
                Ok(None)
            }
            Err(error) if objects::is_refusal(&error) => {
                self.reservations.remove(&worker);
                let message = format!("the worker is refused: {error}");
                Ok(Some(Wait { reason: ClaimReason::InternalError, message, retry_at: None }))
            }
            Err(error) => Err(KubeError::new(format!("cannot create Worker {name}"))(error).into()),
        }
    }

    /// Tells the workers for which something changed, a job that their runner has or that nobody needs them, and with
    /// them their claims.
    fn tell_workers(&self, plan: &Plan, workers: &[Arc<Worker>]) {
        let bindings = std::mem::replace(&mut *lock(&self.memory.bindings), plan.bindings.clone());
        let surplus = std::mem::replace(&mut *lock(&self.memory.surplus), plan.surplus.clone());
        if bindings == plan.bindings && surplus == plan.surplus {
            return;
        }
        for worker in workers {
            let name = worker.name_any();
            let same = bindings.get(&name) == plan.bindings.get(&name)
                && surplus.contains(&name) == plan.surplus.contains(&name);
            if !same {
                let namespace = worker.namespace().unwrap_or_default();
                // Nobody listens while the controllers stop.
                let _ = self.workers.send(reference(&namespace, &name));
                if let Some(board) = &worker.spec.board {
                    let _ = self.claims.send(reference(&namespace, &board.claim));
                }
            }
        }
    }

    /// Tells the claims whose wait has changed.
    fn tell_claims(&self, waits: BTreeMap<String, Wait>, claims: &[Arc<RunnerClaim>]) {
        let before = std::mem::replace(&mut *lock(&self.memory.waits), waits.clone());
        for claim in claims {
            let uid = claim.metadata.uid.as_deref().unwrap_or_default();
            if before.get(uid) != waits.get(uid) {
                let _ = self.claims.send(ObjectRef::from_obj(&**claim));
            }
        }
    }
}
