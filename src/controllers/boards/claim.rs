//! Claims on board pools: their status and their release.

use std::{future::ready, sync::Arc, time::Duration};

use futures::StreamExt;
use kube::{
    ResourceExt,
    runtime::{
        controller::{Config, Controller},
        events::EventType,
        reflector::ObjectRef,
    },
};
use paddock_core::{
    api::{ClaimPhase, Hardware, READY, RunnerClaim, RunnerClaimStatus, RunnerPool, Worker},
    boards::claim_status::{BoardClaimFacts, holding, status},
    demand::{
        job, pool_selection,
        schedule::{Wait, is_open},
    },
};
use paddock_effects::{
    clock,
    kube::objects::{self, Written},
};
use tokio_util::sync::CancellationToken;

use super::{BoardContext, RESYNC_PERIOD, enqueued, lock, requeue_by};
use crate::controllers::{Error, Next, drive, reference};

/// How long a new claim in progress goes without a status: most have a pod by then, which saves a write.
const FIRST_STATUS_DELAY: Duration = Duration::from_secs(3);

pub async fn run(board: Arc<BoardContext>, stop: CancellationToken) {
    let stores = &board.shared.stores;
    let claims = stores.claims.store.clone();
    let claim_of_worker = move |worker: Arc<Worker>| {
        let claim = reference(&worker.namespace().unwrap_or_default(), &worker.spec.board.as_ref()?.claim);
        Some(claim).filter(|claim| claims.get(claim).is_some_and(|claim| is_unfinished(&claim)))
    };
    let claims = stores.claims.store.clone();
    let open_claims = move |pool: Arc<RunnerPool>| -> Vec<_> {
        let open = claims.state_filter(|claim| claim.namespace() == pool.namespace() && is_open(claim));
        open.iter().map(|claim| ObjectRef::from_obj(&**claim)).collect()
    };
    // There may be thousands of finished claims, for which nothing is left to do.
    let unfinished = stores.claims.stream().filter(|claim| ready(is_unfinished(claim)));
    let controller = Controller::for_shared_stream(unfinished, stores.claims.store.clone())
        // No limit: progress waits for its lane and must not block other claims.
        .with_config(Config::default().concurrency(0))
        .watches_shared_stream(stores.workers.stream(), claim_of_worker)
        .watches_shared_stream(stores.pools.stream(), open_claims)
        .reconcile_on(enqueued(&board.claims));
    let metrics = board.shared.metrics.clone();
    drive("board-claim", controller, board, metrics, stop, reconcile).await;
}

fn is_unfinished(claim: &RunnerClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some() || is_open(claim)
}

async fn reconcile(claim: Arc<RunnerClaim>, board: Arc<BoardContext>) -> Result<Next, Error> {
    if !is_unfinished(&claim) {
        return Ok(Next::AwaitChange);
    }
    let deleted = claim.metadata.deletion_timestamp.is_some();
    let pools = board.shared.stores.pools.store.state();
    let in_namespace = pools.iter().filter(|pool| pool.namespace() == claim.namespace()).map(Arc::as_ref);
    let pool = match pool_selection::select(&claim, in_namespace) {
        Ok(pool) => match pool.spec.hardware() {
            Some(Hardware::Board(_)) => Ok(pool),
            Some(Hardware::Ec2(_)) | None => return Ok(Next::AwaitChange),
        },
        // A named pool that does not exist may be meant to be an EC2 pool.
        Err(_) if claim.spec.pool.is_some() => return Ok(Next::AwaitChange),
        Err((reason, message)) => Err(Wait { reason, message, retry_at: None }),
    };
    if deleted { board.release(&claim, pool).await } else { board.refresh(&claim, pool).await }
}

impl BoardContext {
    async fn refresh(&self, claim: &RunnerClaim, pool: Result<&RunnerPool, Wait>) -> Result<Next, Error> {
        let workers = self.workers_of(claim);
        let own: Vec<&Worker> = workers.iter().map(Arc::as_ref).collect();
        // A claim with workers must not disappear before they are released. If it is deleted right now, its workers
        // observe that and end.
        if !objects::has_finalizer(claim) && (pool.is_ok() || !own.is_empty()) {
            objects::add_finalizer(&self.shared.client, claim).await?;
            return Ok(Next::After(RESYNC_PERIOD));
        }
        let waits = claim.uid().is_some_and(|uid| lock(&self.memory.waits).contains_key(&uid));
        let served = pool.is_ok();
        let new = self.status(claim, pool, &own);
        let in_progress = match new.phase {
            Some(ClaimPhase::Pending) => served && !waits,
            Some(ClaimPhase::Creating) => !waits,
            _ => false,
        };
        if claim.status.is_none() && in_progress && is_new(claim) {
            return Ok(Next::After(FIRST_STATUS_DELAY));
        }
        let over = new.phase.is_some_and(ClaimPhase::is_over);
        self.write(claim, &new).await?;
        Ok(if over { Next::AwaitChange } else { requeue_by(None) })
    }

    /// Deletes the claim's workers, each of which stays until its runner is free, then removes the finalizer.
    async fn release(&self, claim: &RunnerClaim, pool: Result<&RunnerPool, Wait>) -> Result<Next, Error> {
        if !objects::has_finalizer(claim) {
            return Ok(Next::AwaitChange);
        }
        let client = &self.shared.client;
        let creation = self.creation_lock.lock().await;
        let workers = self.workers_of(claim);
        let own: Vec<&Worker> = workers.iter().map(Arc::as_ref).collect();
        let held = holding(&own);
        for worker in held.iter().filter(|worker| worker.metadata.deletion_timestamp.is_none()) {
            objects::delete(&objects::api(client, *worker), &worker.name_any()).await?;
        }
        if held.is_empty() {
            objects::remove_finalizer(client, claim).await?;
            return Ok(Next::AwaitChange);
        }
        drop(creation);
        let status = self.status(claim, pool, &own);
        self.write(claim, &status).await?;
        Ok(Next::After(RESYNC_PERIOD))
    }

    fn status(&self, claim: &RunnerClaim, pool: Result<&RunnerPool, Wait>, own: &[&Worker]) -> RunnerClaimStatus {
        let uid = claim.uid().unwrap_or_default();
        let (name, wait) = match pool {
            Ok(pool) => (pool.metadata.name.clone(), lock(&self.memory.waits).get(&uid).cloned()),
            Err(wait) => (None, Some(wait)),
        };
        let runner = job::runner(claim, self.memory.job(claim).as_ref());
        let bindings = lock(&self.memory.bindings);
        let others = own.iter().filter_map(|worker| worker.metadata.name.as_deref());
        let others = others.filter(|name| runner.as_ref().is_none_or(|runner| runner.name != **name));
        let taken = others.filter(|name| claim.spec.job.is_some() && bindings.contains_key(*name)).collect();
        drop(bindings);
        let facts = BoardClaimFacts {
            pool: name.as_deref(),
            workers: own,
            taken,
            wait: wait.as_ref(),
            job: self.job_of(claim).map(|(state, _)| state),
            runner,
        };
        status(claim, facts, clock::now())
    }

    async fn write(&self, claim: &RunnerClaim, new: &RunnerClaimStatus) -> Result<(), Error> {
        let over = new.phase.is_some_and(ClaimPhase::is_over);
        let client = if over { &self.shared.client } else { &self.shared.background.client };
        let written = objects::write_status(client, claim, claim.status.as_ref(), new).await?;
        let before = claim.status.as_ref().and_then(|status| status.phase);
        if written == Written::Yes && before != new.phase {
            self.report_phase(claim, new);
        }
        Ok(())
    }

    fn report_phase(&self, claim: &RunnerClaim, status: &RunnerClaimStatus) {
        let Some(condition) = status.conditions.iter().find(|condition| condition.type_ == READY) else { return };
        let phase = status.phase.unwrap_or_default();
        let created = claim.metadata.creation_timestamp.as_ref();
        if let (ClaimPhase::Ready, Some(created)) = (phase, created) {
            let seconds = clock::now().duration_since(created.0).as_secs_f64();
            self.shared.metrics.claim_seconds.observe(seconds);
        }
        // Intermediate phases are in the status; an event for each would dominate the writes.
        if matches!(phase, ClaimPhase::Creating | ClaimPhase::Validating) {
            return;
        }
        let type_ = if phase == ClaimPhase::Failed { EventType::Warning } else { EventType::Normal };
        self.shared.events.record(claim, type_, phase.as_str(), &condition.reason, condition.message.clone());
    }
}

fn is_new(claim: &RunnerClaim) -> bool {
    let created = claim.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| clock::now().duration_since(created.0).unsigned_abs() < FIRST_STATUS_DELAY)
}
