//! Claims on EC2 pools: from the idle pool where it can, from new machines where it must.

mod provision;
mod release;

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use futures::StreamExt;
use jiff::Timestamp;
use kube::{
    Api, ResourceExt,
    runtime::{
        controller::{self, Action, Controller},
        events::EventType,
        finalizer::{Event as Finalize, finalizer},
        reflector::ObjectRef,
    },
};
use paddock_record::State;
use secrecy::SecretString;
use tokio_util::sync::CancellationToken;

use super::{Context, drive, mirror::worker_state, reference, status};
use crate::{
    api::{
        ClaimPhase, ClaimReason, ClaimWorker, Ec2Pool, FINALIZER, Hardware, RunnerClaim, RunnerClaimStatus, RunnerPool,
        WorkerSource, ready_condition, set_condition,
    },
    effects::{aws::AwsError, github::Scope},
    plan::{fleet::pool_key, instance::Tracked},
};

/// How long a claim that waits for agents goes without a look: their words come as events, their silence does not.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long a claim waits for something outside to change: a full pool, an outage.
const WAIT: Duration = Duration::from_secs(5);
/// Claims looked at once; each may have a call to GitHub and several to AWS under way.
const CONCURRENCY: u16 = 128;

pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    let stores = &context.stores;
    let claims_of_pool = {
        let claims = stores.claims.store.clone();
        move |pool: Arc<RunnerPool>| {
            let claims = claims.state_filter(|claim| {
                claim.namespace() == pool.namespace()
                    && claim.spec.pool == pool.metadata.name
                    && !claim
                        .status
                        .as_ref()
                        .and_then(|status| status.phase)
                        .is_some_and(|p| p == ClaimPhase::Ready || p.is_over())
            });
            claims.into_iter().map(|claim| ObjectRef::from_obj(&*claim))
        }
    };
    let changed = context.ledger.changes().filter_map(|change| {
        let namespace = change.pool.split_once('/').map(|(namespace, _)| namespace);
        let claim = namespace.filter(|_| !change.claim.is_empty());
        std::future::ready(claim.map(|namespace| reference(namespace, &change.claim)))
    });
    let controller = Controller::for_shared_stream(stores.claims.stream(), stores.claims.store.clone())
        .watches_shared_stream(stores.pools.stream(), claims_of_pool)
        .reconcile_on(changed)
        .with_config(controller::Config::default().concurrency(CONCURRENCY));
    drive("claim", controller, context.clone(), stop, reconcile).await;
}

async fn reconcile(claim: Arc<RunnerClaim>, context: Arc<Context>) -> Result<Action> {
    let namespace = claim.namespace().unwrap_or_default();
    let pool = claim.spec.pool.as_ref().and_then(|name| context.stores.pools.store.get(&reference(&namespace, name)));
    let Some(pool) = pool else {
        return match (&claim.spec.pool, !claim.finalizers().is_empty()) {
            // Its labels choose a board pool: not ours.
            (None, _) => Ok(Action::await_change()),
            (Some(name), _) if claim.metadata.deletion_timestamp.is_none() => {
                let message = format!("no RunnerPool {name} in namespace {namespace}: apply it, and the claim goes on");
                Work::new(context, claim, None).wait(ClaimReason::PoolNotFound, message).await
            }
            // A pool cannot go while claims hold its machines, so there is nothing left to release.
            (Some(_), true) => {
                let api: Api<RunnerClaim> = Api::namespaced(context.client.clone(), &namespace);
                let done = finalizer(&api, FINALIZER, claim, async |_| Ok::<_, kube::Error>(Action::await_change()));
                Ok(done.await?)
            }
            (Some(_), false) => Ok(Action::await_change()),
        };
    };
    if !matches!(pool.spec.hardware(), Some(Hardware::Ec2(_))) {
        return Ok(Action::await_change());
    }
    if !context.ledger.is_loaded() {
        return Ok(Action::requeue(LOOK_AGAIN));
    }
    let api: Api<RunnerClaim> = Api::namespaced(context.client.clone(), &namespace);
    let work = finalizer(&api, FINALIZER, claim, |event| async {
        match event {
            Finalize::Apply(claim) => {
                let mut work = Work::new(context, claim, Some(pool));
                let outcome = work.provision().await;
                work.explain(outcome).await
            }
            Finalize::Cleanup(claim) => {
                let mut work = Work::new(context, claim, Some(pool));
                let outcome = work.release().await;
                work.explain(outcome).await
            }
        }
        .map_err(Failure)
    });
    Ok(work.await?)
}

/// `finalizer` wants an error type; what stopped us is told by its causes.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
struct Failure(anyhow::Error);

/// One reconciliation of one claim.
struct Work {
    context: Arc<Context>,
    claim: Arc<RunnerClaim>,
    pool: Option<Arc<RunnerPool>>,
    name: String,
    namespace: String,
    status: RunnerClaimStatus,
}

impl Work {
    fn new(context: Arc<Context>, claim: Arc<RunnerClaim>, pool: Option<Arc<RunnerPool>>) -> Self {
        let mut status = claim.status.clone().unwrap_or_default();
        status.observed_generation = claim.metadata.generation;
        if status.phase.is_none() {
            status.enter(ClaimPhase::Pending, Timestamp::now());
            status.set_progress(0, claim.spec.count);
        }
        status.pool = claim.spec.pool.clone();
        Self { context, name: claim.name_any(), namespace: claim.namespace().unwrap_or_default(), claim, pool, status }
    }

    fn pool_key(&self) -> String {
        pool_key(&self.namespace, self.claim.spec.pool.as_deref().unwrap_or_default())
    }

    fn held(&self) -> Vec<Tracked> {
        let live = |tracked: &Tracked| tracked.record.state != State::Terminated;
        self.context.ledger.of_claim(&self.pool_key(), &self.name).into_iter().filter(live).collect()
    }

    async fn token(&self, pool: &Ec2Pool, kind: TokenKind) -> Result<SecretString, Outage> {
        let credentials =
            self.context.credentials.get_or_last(&self.namespace, &pool.github.credentials_ref.name).await;
        let credentials = credentials.map_err(|error| Outage(error.to_string()))?;
        let owner = pool.github.owner.clone();
        let scope = match &pool.github.repository {
            Some(name) => Scope::Repository { owner, name: name.clone() },
            None => Scope::Organization(owner),
        };
        let token = match kind {
            TokenKind::Registration => self.context.github.registration_token(&credentials, &scope).await,
            TokenKind::Removal => self.context.github.remove_token(&credentials, &scope).await,
        };
        token.map_err(|error| Outage(error.to_string()))
    }

    fn list_workers(&mut self, held: &[Tracked]) {
        let run = &self.claim.spec.run_id;
        let workers = held.iter().map(|tracked| ClaimWorker {
            name: tracked.record.instance_id.clone(),
            state: worker_state(tracked.record.state),
            source: if &tracked.record.initial_run_id == run { WorkerSource::Created } else { WorkerSource::Pool },
        });
        self.status.workers = workers.collect();
        let ready = held.iter().filter(|tracked| tracked.record.state == State::Running).count() as u32;
        self.status.set_progress(ready, self.claim.spec.count);
    }

    fn enter(&mut self, phase: ClaimPhase, reason: ClaimReason, message: String) {
        let now = Timestamp::now();
        self.status.enter(phase, now);
        let ready = phase == ClaimPhase::Ready;
        let condition = ready_condition(ready, reason, message, self.claim.metadata.generation, now);
        set_condition(&mut self.status.conditions, condition);
    }

    async fn wait(&mut self, reason: ClaimReason, message: String) -> Result<Action> {
        self.say(reason, message).await?;
        Ok(Action::requeue(WAIT))
    }

    async fn say(&mut self, reason: ClaimReason, message: String) -> Result<()> {
        let phase = self.status.phase.unwrap_or_default();
        self.enter(phase, reason, message);
        self.write().await
    }

    /// Trouble at AWS, wherever it came up, is told in the condition before it is tried again.
    async fn explain(&mut self, outcome: Result<Action>) -> Result<Action> {
        if let Err(error) = &outcome
            && let Some(trouble) = error.downcast_ref::<AwsError>()
        {
            self.say(ClaimReason::AwsUnavailable, trouble.to_string()).await?;
        }
        outcome
    }

    async fn wait_for_github(&mut self, outage: Outage) -> Result<Action> {
        self.say(ClaimReason::GitHubUnavailable, outage.0).await?;
        Ok(Action::requeue(WAIT))
    }

    async fn write(&mut self) -> Result<()> {
        status::apply(&self.context.client, &*self.claim, self.claim.status.as_ref(), &self.status).await?;
        // What is there now is what the next write is compared with.
        Arc::make_mut(&mut self.claim).status = Some(self.status.clone());
        Ok(())
    }

    async fn event(&self, type_: EventType, reason: &str, note: String) {
        self.context.event(&*self.claim, type_, "Claim", reason, note).await;
    }
}

/// Why there is no token to be had, for a person.
struct Outage(String);

enum TokenKind {
    Registration,
    Removal,
}
