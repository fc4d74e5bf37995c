//! Demand: one decision for all board pools, whenever one of its inputs changes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use kube::{ResourceExt, api::PostParams, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{ClaimReason, RunnerClaim, RunnerPool, Worker},
    boards::slots::Capacity,
    demand::{
        refusals::Subject,
        schedule::{Decision, DemandFacts, Plan, Wait, decide},
        supply::drop_records,
    },
    names::PoolKey,
};
use paddock_effects::{
    clock,
    kube::objects::{self, KubeError},
    lock,
    metrics::ControllerLabel,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Error,
    boards::{BoardContext, RESYNC_PERIOD},
    reference, time_until,
};

/// Workers created concurrently.
const CONCURRENT_CREATES: usize = 32;
/// The pause after a decision, as a multiple of the time that it took: so decisions take at most a fifth of a core, also
/// while thousands of claims wait.
const DECISION_PAUSE: u32 = 4;
/// How soon a decision that could not be applied is made again.
const DECISION_RETRY: Duration = Duration::from_secs(1);

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
            board.shared.metrics.reconciles.get_or_create(&label).inc();
            let mut took = Duration::ZERO;
            wait = match board.decide(&mut took).await {
                Ok(retry_at) => retry_at.map_or(RESYNC_PERIOD, time_until).min(RESYNC_PERIOD),
                Err(error) => {
                    board.shared.metrics.reconcile_errors.get_or_create(&label).inc();
                    tracing::warn!(%error, "demand decision not applied");
                    DECISION_RETRY
                }
            };
            board.poll_requested.notify_one();
            // Coalesce the changes that arrive meanwhile into one decision.
            tokio::time::sleep((took * DECISION_PAUSE).min(DECISION_RETRY)).await;
        }
    };
    tokio::select! {
        () = listen => {}
        () = work => {}
    }
}

impl BoardContext {
    /// Decides for every pool and creates the workers. Returns when the decision may change without an event; `took` is
    /// the time of the decision itself.
    async fn decide(&self, took: &mut Duration) -> Result<Option<Timestamp>, Error> {
        let (client, stores) = (&self.shared.client, &self.shared.stores);
        let creation = self.creation_lock.lock().await;
        self.reservations.settle(client, &stores.workers).await?;
        let start = Instant::now();

        let mut workers = self.all_workers();
        let (pools, mut claims) = (stores.pools.store.state(), stores.claims.store.state());
        if self.timers.due("board memory", RESYNC_PERIOD) {
            self.memory.tidy(&claims, &workers, clock::now());
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
            refusals: &self.memory.refusals(),
            prefix: &self.prefix,
            now: clock::now(),
        });
        self.enqueue_workers(&plan, &workers);

        let mut waits = BTreeMap::new();
        let mut to_create = Vec::new();
        for decision in plan.decisions {
            match decision {
                Decision::Wait { claim, wait } => drop(claim.uid().map(|uid| waits.insert(uid, wait))),
                Decision::Provision { claim, worker } => to_create.push((claim, *worker)),
            }
        }
        *took = start.elapsed();
        let mut outcome = Ok(());
        let urgent = (!to_create.is_empty()).then(|| self.shared.lanes.urgent());
        let mut created = stream::iter(to_create)
            .map(|(claim, worker)| async move { (claim.uid(), self.create_worker(&claim, worker).await) })
            .buffer_unordered(CONCURRENT_CREATES);
        while let Some((uid, result)) = created.next().await {
            match result {
                Ok(wait) => drop(uid.zip(wait).map(|(uid, wait)| waits.insert(uid, wait))),
                Err(error) => {
                    outcome = Err(error);
                    // The API server does not answer: the next worker would fail too.
                    break;
                }
            }
        }
        drop((created, creation, urgent));
        let retry_at = waits.values().filter_map(|wait: &Wait| wait.retry_at).min();
        self.enqueue_claims(waits, &claims);
        outcome.map(|()| retry_at)
    }

    pub fn capacity(&self, pools: &[Arc<RunnerPool>], workers: &[Arc<Worker>]) -> Capacity {
        let stores = &self.shared.stores;
        let boards = pools.iter().filter_map(|pool| Some((PoolKey::of(pool), pool.spec.board.as_ref()?)));
        Capacity::count(boards, &stores.nodes.store.state(), &stores.pods.store.state(), workers)
    }

    /// Pools that cannot create workers, and why.
    fn not_ready(&self, pools: &[Arc<RunnerPool>], no_limits: Option<&anyhow::Error>) -> BTreeMap<PoolKey, String> {
        let obstacles = lock(&self.memory.obstacles);
        let boards = pools.iter().filter(|pool| pool.spec.board.is_some());
        let why = boards.filter_map(|pool| {
            let why = match obstacles.get(&PoolKey::of(pool)) {
                Some(Some(why)) => why.clone(),
                // Only a pool with a finalizer may have workers: they need its credentials until they end.
                Some(None) if objects::has_finalizer(&**pool) => format!("{:#}", no_limits?),
                Some(None) | None => "it is being prepared".into(),
            };
            Some((PoolKey::of(pool), why))
        });
        why.collect()
    }

    /// Creates a worker, or returns why the API server refuses it.
    async fn create_worker(&self, claim: &RunnerClaim, worker: Worker) -> Result<Option<Wait>, Error> {
        let name = worker.name_any();
        let subject = Subject::Claim(claim.uid().unwrap_or_default());
        // Both before the call: the worker may be reconciled before the response, and the response may be lost.
        lock(&self.memory.fresh).insert(name.clone());
        self.reservations.insert(worker.clone());
        match objects::api(&self.shared.client, &worker).create(&PostParams::default(), &worker).await {
            Ok(created) => {
                tracing::info!(worker = name, claim = claim.name_any(), "worker created");
                self.reservations.insert(created);
                self.memory.accept(&[subject]);
                Ok(None)
            }
            // Created earlier, by us with a lost response or by the previous leader; the cache will show it.
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                lock(&self.memory.fresh).remove(&name);
                Ok(None)
            }
            Err(error) if objects::is_refusal(&error) => {
                self.reservations.remove(&worker);
                lock(&self.memory.fresh).remove(&name);
                let (message, now) = (format!("the worker is refused: {error}"), clock::now());
                let retry_at = Some(self.memory.refuse(subject, message.clone(), now, Duration::ZERO, now));
                Ok(Some(Wait { reason: ClaimReason::InternalError, message, retry_at }))
            }
            Err(error) => Err(KubeError::new(format!("cannot create Worker {name}"))(error).into()),
        }
    }

    /// Enqueues the workers whose job binding or surplus flag changed, and their claims.
    fn enqueue_workers(&self, plan: &Plan, workers: &[Arc<Worker>]) {
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
                // There is no receiver while the controllers stop.
                let _ = self.workers.send(reference(&namespace, &name));
                if let Some(board) = &worker.spec.board {
                    let _ = self.claims.send(reference(&namespace, &board.claim));
                }
            }
        }
    }

    /// Enqueues the claims whose wait has changed.
    fn enqueue_claims(&self, waits: BTreeMap<String, Wait>, claims: &[Arc<RunnerClaim>]) {
        let before = std::mem::replace(&mut *lock(&self.memory.waits), waits.clone());
        for claim in claims {
            let uid = claim.metadata.uid.as_deref().unwrap_or_default();
            if before.get(uid) != waits.get(uid) {
                let _ = self.claims.send(ObjectRef::from_obj(&**claim));
            }
        }
    }
}
