//! Claims that boards serve: how they stand, and how they are let go.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use jiff::{SignedDuration, Timestamp};
use kube::{
    ResourceExt,
    runtime::{
        controller::{Action, Config, Controller},
        events::EventType,
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
};
use crate::{
    api::{ClaimPhase, Hardware, READY, Runner, RunnerClaim, RunnerClaimStatus, RunnerPool, Worker},
    effects::github::{GitHubError, WorkflowJob},
    plan::{
        board_claim::{Standing, holding, status},
        board_worker::{since, state},
        capacity::is_active,
        demand::{JobSeen, JobState, Wait, is_open},
        entity, labels,
    },
};

/// How often GitHub is asked about a job that nothing was heard of, in case a webhook was lost.
const ASK_AGAIN: SignedDuration = SignedDuration::from_mins(1);
/// How long a claim may be without a decision before it says that it has none.
const YOUNG: Duration = Duration::from_secs(3);

pub async fn run(board: Arc<Board>, stop: CancellationToken) {
    let stores = &board.context.stores;
    let claim_of_worker = |worker: Arc<Worker>| {
        let claim = &worker.spec.board.as_ref()?.claim;
        Some(reference(&worker.namespace().unwrap_or_default(), claim))
    };
    let claims = stores.claims.store.clone();
    let open_claims = move |pool: Arc<RunnerPool>| -> Vec<_> {
        let open = claims.state_filter(|claim| claim.namespace() == pool.namespace() && is_open(claim));
        open.iter().map(|claim| ObjectRef::from_obj(&**claim)).collect()
    };
    let controller = Controller::for_shared_stream(stores.claims.stream(), stores.claims.store.clone())
        .with_config(Config::default().concurrency(16))
        .watches_shared_stream(stores.workers.stream(), claim_of_worker)
        .watches_shared_stream(stores.pools.stream(), open_claims)
        .reconcile_on(nudges(&board.claims));
    let context = board.context.clone();
    drive("board-claim", controller, context, stop, move |claim, _| reconcile(claim, board.clone())).await;
}

async fn reconcile(claim: Arc<RunnerClaim>, board: Arc<Board>) -> Result<Action> {
    let pools = board.context.stores.pools.store.state();
    let here = pools.iter().filter(|pool| pool.namespace() == claim.namespace()).map(Arc::as_ref);
    let pool = match labels::select(&claim, here) {
        Ok(pool) => match pool.spec.hardware() {
            Some(Hardware::Board(_)) => Ok(pool),
            Some(Hardware::Ec2(_)) | None => return Ok(Action::await_change()),
        },
        // A named pool that does not exist may as well be meant for machines.
        Err(_) if claim.spec.pool.is_some() => return Ok(Action::await_change()),
        Err((reason, message)) => Err(Wait { reason, message, retry_at: None }),
    };
    if claim.metadata.deletion_timestamp.is_some() {
        board.release(&claim, pool).await
    } else {
        board.show(&claim, pool).await
    }
}

impl Board {
    async fn show(&self, claim: &RunnerClaim, pool: Result<&RunnerPool, Wait>) -> Result<Action> {
        let workers = self.workers_of(claim, &*self.reservations.lock().await);
        let own: Vec<&Worker> = workers.iter().map(Arc::as_ref).collect();
        let waits = claim.uid().is_some_and(|uid| lock(&self.waits).contains_key(&uid));
        if claim.status.is_none() && own.is_empty() && !waits && pool.is_ok() && is_young(claim) {
            // The decision is being made, and is shown as soon as it is.
            return Ok(Action::requeue(YOUNG));
        }
        let runner = self.ask_for_job(claim, pool.as_ref().ok().copied(), &own).await;
        let new = self.write(claim, pool, &own, runner).await?;
        match new.phase {
            Some(ClaimPhase::Failed) => {
                // A failed claim holds nothing. Those that are busy stay until they are done.
                for worker in
                    own.iter().filter(|worker| is_active(worker) && worker.metadata.deletion_timestamp.is_none())
                {
                    objects::delete(&objects::api(&self.context.client, *worker), &worker.name_any()).await?;
                }
                Ok(Action::await_change())
            }
            Some(phase) if phase.is_over() => Ok(Action::await_change()),
            _ => Ok(look_again(None)),
        }
    }

    /// Deletes the claim's workers, each of which stays until its runner is free, and then lets the claim go.
    async fn release(&self, claim: &RunnerClaim, pool: Result<&RunnerPool, Wait>) -> Result<Action> {
        if !objects::has_finalizer(claim) {
            return Ok(Action::await_change());
        }
        let client = &self.context.client;
        let reservations = self.reservations.lock().await;
        let workers = self.workers_of(claim, &reservations);
        let own: Vec<&Worker> = workers.iter().map(Arc::as_ref).collect();
        let held = holding(&own);
        for worker in held.iter().filter(|worker| worker.metadata.deletion_timestamp.is_none()) {
            objects::delete(&objects::api(client, *worker), &worker.name_any()).await?;
        }
        if held.is_empty() {
            objects::remove_finalizer(client, claim).await?;
            return Ok(Action::await_change());
        }
        drop(reservations);
        self.write(claim, pool, &own, None).await?;
        Ok(Action::requeue(LOOK_AGAIN))
    }

    async fn write(
        &self,
        claim: &RunnerClaim,
        pool: Result<&RunnerPool, Wait>,
        own: &[&Worker],
        runner: Option<Runner>,
    ) -> Result<RunnerClaimStatus> {
        let uid = claim.uid().unwrap_or_default();
        let job = lock(&self.jobs).get(&uid).copied();
        let (name, wait) = match pool {
            Ok(pool) => (pool.metadata.name.clone(), lock(&self.waits).get(&uid).cloned()),
            Err(wait) => (None, Some(wait)),
        };
        let standing = Standing { pool: name.as_deref(), workers: own, wait: wait.as_ref(), job };
        let now = Timestamp::now();
        let mut new = status(claim, standing, now);
        new.runner = runner.or(new.runner);
        let written = objects::write_status(&self.context.client, claim, claim.status.as_ref(), &new).await?;
        let before = claim.status.as_ref().and_then(|status| status.phase);
        if written == Written::Yes && before != new.phase {
            self.tell(claim, &new, now).await;
        }
        Ok(new)
    }

    async fn tell(&self, claim: &RunnerClaim, status: &RunnerClaimStatus, now: Timestamp) {
        let Some(condition) = status.conditions.iter().find(|condition| condition.type_ == READY) else { return };
        let phase = status.phase.unwrap_or_default();
        let created = claim.metadata.creation_timestamp.as_ref();
        if let (ClaimPhase::Ready, Some(created)) = (phase, created) {
            self.context.metrics.claim_seconds.observe(now.duration_since(created.0).as_secs_f64());
        }
        let type_ = if phase == ClaimPhase::Failed { EventType::Warning } else { EventType::Normal };
        self.context.event(claim, type_, phase.as_str(), &condition.reason, condition.message.clone()).await;
    }

    /// Asks GitHub about the claim's job when one of its workers has ended since, or nothing was heard for long; says
    /// which runner has it.
    async fn ask_for_job(&self, claim: &RunnerClaim, pool: Option<&RunnerPool>, own: &[&Worker]) -> Option<Runner> {
        let board = pool?.spec.board.as_ref()?;
        let (job, repository) = (claim.spec.job.as_ref()?, claim.spec.repository.as_ref()?);
        let (owner, uid) = (claim.spec.owner.as_ref()?, claim.uid()?);
        let now = Timestamp::now();
        let created = claim.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
        let last = lock(&self.jobs).get(&uid).map_or(created, |seen| seen.at);
        let ended = own.iter().filter(|worker| state(worker).is_over()).filter_map(|worker| since(worker)).max();
        if !is_open(claim) || !(ended.is_some_and(|end| end >= last) || now.duration_since(last) >= ASK_AGAIN) {
            return None;
        }
        let secret = entity::credentials_ref(board, owner);
        let credentials = self.context.credentials.get(&claim.namespace()?, &secret.name).await.ok()?;
        let credentials = credentials.for_installation(claim.spec.installation_id);
        let (state, runner) = match self.context.github.job(&credentials, repository, job.id).await {
            Ok(job) => (job_state(&job), job.runner_name.map(|name| Runner { id: job.runner_id, name })),
            Err(GitHubError::NotFound(_)) => (JobState::Gone, None),
            Err(error) => {
                tracing::warn!(claim = claim.name_any(), job = job.id, %error, "the job cannot be asked for");
                return None;
            }
        };
        lock(&self.jobs).insert(uid, JobSeen { state, at: now });
        let _ = self.pools.send(ObjectRef::from_obj(pool?));
        runner.filter(|runner| !runner.name.is_empty())
    }
}

fn is_young(claim: &RunnerClaim) -> bool {
    let created = claim.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| Timestamp::now().duration_since(created.0).unsigned_abs() < YOUNG)
}

fn job_state(job: &WorkflowJob) -> JobState {
    match job.status.as_str() {
        "completed" => JobState::Completed,
        "in_progress" => JobState::Running,
        // `queued`, and the states before it: `waiting`, `pending`, `requested`.
        _ => JobState::Queued,
    }
}
