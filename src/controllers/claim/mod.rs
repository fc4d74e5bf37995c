//! Claims on EC2 pools: from the idle pool where it can, from new machines where it must.

mod create;
mod provision;
mod release;
pub mod runs;
pub mod tokens;
mod watch;

use std::{collections::HashMap, sync::Arc, time::Duration};

use anyhow::Result;
use futures::{Stream, StreamExt, channel::mpsc::unbounded};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    ResourceExt,
    runtime::{
        controller::{self, Action, Controller},
        events::EventType,
        reflector::ObjectRef,
    },
};
use paddock_record::State;
use secrecy::SecretString;
use tokio_util::sync::CancellationToken;

use self::tokens::TokenKind;
use super::{Context, drive, mirror::worker_state, objects, reference, registrations};
use crate::{
    api::{
        ClaimPhase, ClaimReason, ClaimWorker, Ec2Pool, Hardware, PhaseTimes, READY, RunnerClaim, RunnerClaimStatus,
        RunnerPool, WorkerSource, ready_condition, set_condition,
    },
    effects::{aws::AwsError, credentials::CredentialsError},
    plan::{fleet::pool_key, instance::Tracked},
};

/// How long a claim that waits for agents goes without a look: their words come as events, their silence does not.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long a claim waits for something outside to change: a full pool, an outage.
const WAIT: Duration = Duration::from_secs(5);
/// How long a claim waits at most for a time that it knows; machines that come free are told by their pool.
const LONG_WAIT: Duration = Duration::from_secs(30);
/// How long a claim whose view was stale goes without a look; mostly the news comes first.
const STALE: Duration = Duration::from_millis(200);
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
    let changed = context.ledger.changed_claims().filter_map(|(pool, claim)| {
        std::future::ready(pool.split_once('/').map(|(namespace, _)| reference(namespace, &claim)))
    });
    let (over, run_over) = unbounded();
    let controller = Controller::for_shared_stream(stores.claims.stream(), stores.claims.store.clone())
        .watches_shared_stream(supplies(stores.pools.stream()), claims_of_pool)
        .reconcile_on(changed)
        .reconcile_on(run_over)
        .with_config(controller::Config::default().concurrency(CONCURRENCY));
    tokio::join!(
        drive("claim", controller, context.clone(), stop.clone(), reconcile),
        runs::ask(context.clone(), over, stop),
    );
}

/// Pools whose claims have something new to go by. A pool counts its workers all the time, and no claim goes by that.
fn supplies(pools: impl Stream<Item = Arc<RunnerPool>>) -> impl Stream<Item = Arc<RunnerPool>> {
    let mut seen = HashMap::new();
    pools.filter(move |pool| {
        let status = pool.status.clone().unwrap_or_default();
        let supply = (pool.metadata.generation, pool.metadata.deletion_timestamp.is_some(), status.queues);
        let new = (supply, status.launch_template, status.conditions);
        let old = seen.insert(pool.uid(), new.clone());
        std::future::ready(old.is_none_or(|old| old != new))
    })
}

async fn reconcile(claim: Arc<RunnerClaim>, context: Arc<Context>) -> Result<Action> {
    let namespace = claim.namespace().unwrap_or_default();
    let pool = claim.spec.pool.as_ref().and_then(|name| context.stores.pools.store.get(&reference(&namespace, name)));
    let Some(pool) = pool else {
        return match (&claim.spec.pool, claim.metadata.deletion_timestamp.is_some()) {
            // Its labels choose a board pool: not ours.
            (None, _) => Ok(Action::await_change()),
            (Some(name), false) => {
                let message = format!("no RunnerPool {name} in namespace {namespace}: apply it, and the claim goes on");
                let mut work = Work::new(context, claim, None);
                let outcome = work.wait(ClaimReason::PoolNotFound, message).await;
                work.explain(outcome).await
            }
            // A pool cannot go while claims hold its machines, so there is nothing left to release.
            (Some(_), true) if objects::has_finalizer(&*claim) => {
                objects::remove_finalizer(&context.client, &*claim).await?;
                Ok(Action::await_change())
            }
            (Some(_), true) => Ok(Action::await_change()),
        };
    };
    if !matches!(pool.spec.hardware(), Some(Hardware::Ec2(_))) {
        return Ok(Action::await_change());
    }
    if !context.ledger.is_loaded() {
        return Ok(Action::requeue(LOOK_AGAIN));
    }
    let deleted = claim.metadata.deletion_timestamp.is_some();
    let claim = match objects::has_finalizer(&*claim) {
        true => claim,
        false if deleted => return Ok(Action::await_change()),
        false => match objects::hold(&context.client, &*claim).await? {
            Some(claim) => Arc::new(claim),
            None => return Ok(Action::requeue(STALE)),
        },
    };
    let mut work = Work::new(context, claim, Some(pool));
    let outcome = if deleted { work.release().await } else { work.provision().await };
    work.explain(outcome).await
}

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

    fn uid(&self) -> String {
        self.claim.uid().unwrap_or_default()
    }

    fn pool_key(&self) -> String {
        pool_key(&self.namespace, self.claim.spec.pool.as_deref().unwrap_or_default())
    }

    fn held(&self) -> Vec<Tracked> {
        let live = |tracked: &Tracked| tracked.record.state != State::Terminated;
        self.context.ledger.of_claim(&self.pool_key(), &self.name).into_iter().filter(live).collect()
    }

    async fn token(&self, pool: &Ec2Pool, kind: TokenKind) -> Result<SecretString, Outage> {
        let uid = self.uid();
        if let (TokenKind::Registration, Some(token)) = (&kind, self.context.tokens.get(&uid)) {
            return Ok(token);
        }
        let (secret, scope) = (&pool.github.credentials_ref.name, registrations::scope(pool));
        let place = (self.namespace.clone(), secret.clone(), scope.to_string(), kind);
        let new = async || {
            let credentials = self.context.credentials.get_or_last(&self.namespace, secret).await;
            let credentials = credentials.map_err(|error| match error {
                CredentialsError::Unreadable { .. } => Outage::GitHub(error.to_string()),
                error => Outage::NoCredentials(error.to_string()),
            })?;
            let token = match kind {
                TokenKind::Registration => self.context.github.registration_token(&credentials, &scope).await,
                TokenKind::Removal => self.context.github.remove_token(&credentials, &scope).await,
            };
            token.map_err(|error| Outage::GitHub(error.to_string()))
        };
        let token = self.context.tokens.share(place, new).await?;
        if kind == TokenKind::Registration {
            self.context.tokens.keep(&uid, &token);
        }
        Ok(token)
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
        self.status.retry_at = None;
        let ready = phase == ClaimPhase::Ready;
        let condition = ready_condition(ready, reason, message, self.claim.metadata.generation, now);
        set_condition(&mut self.status.conditions, condition);
    }

    async fn wait(&mut self, reason: ClaimReason, message: String) -> Result<Action> {
        self.say(reason, message).await?;
        Ok(Action::requeue(WAIT))
    }

    /// Waits for a time that is known, and for a machine that comes free before.
    async fn wait_until(&mut self, until: Timestamp, reason: ClaimReason, message: String) -> Result<Action> {
        let phase = self.status.phase.unwrap_or_default();
        self.enter(phase, reason, message);
        self.status.retry_at = Some(Time(Timestamp::from_second(until.as_second()).unwrap_or(until)));
        self.write().await?;
        let left = Duration::try_from(until.duration_since(Timestamp::now())).unwrap_or_default();
        Ok(Action::requeue(left.clamp(LOOK_AGAIN, LONG_WAIT)))
    }

    async fn say(&mut self, reason: ClaimReason, message: String) -> Result<()> {
        let phase = self.status.phase.unwrap_or_default();
        self.enter(phase, reason, message);
        self.write().await
    }

    /// Trouble at AWS, wherever it came up, is told in the condition before it is tried again. A stale view is no
    /// trouble: nothing was done with it that the next look does not find.
    async fn explain(&mut self, outcome: Result<Action>) -> Result<Action> {
        match outcome {
            Err(error) if error.is::<Stale>() => Ok(Action::requeue(STALE)),
            Err(error) => match error.downcast_ref::<AwsError>().map(ToString::to_string) {
                Some(trouble) => match self.say(ClaimReason::AwsUnavailable, trouble).await {
                    Err(stale) if stale.is::<Stale>() => Ok(Action::requeue(STALE)),
                    said => said.and(Err(error)),
                },
                None => Err(error),
            },
            outcome => outcome,
        }
    }

    async fn wait_for_github(&mut self, outage: Outage) -> Result<Action> {
        let (Outage::NoCredentials(why) | Outage::GitHub(why)) = outage;
        self.say(ClaimReason::GitHubUnavailable, why).await?;
        Ok(Action::requeue(WAIT))
    }

    async fn write(&mut self) -> Result<()> {
        if self.claim.status.as_ref() == Some(&self.status) {
            return Ok(());
        }
        let written = objects::replace_status(&self.context.client, &*self.claim, &self.status).await?;
        let mut written = written.ok_or(Stale)?;
        let before = self.claim.status.as_ref().map(|status| status.phase_times.clone()).unwrap_or_default();
        // What is there now is what the next write is compared with, to the fraction of a second.
        written.status = Some(self.status.clone());
        self.claim = Arc::new(written);
        self.tell(&before);
        Ok(())
    }

    /// An event for each phase that was entered for the first time.
    fn tell(&self, before: &PhaseTimes) {
        let now = self.status.phase.unwrap_or_default();
        let entered =
            |phase: &&ClaimPhase| before.of(**phase).is_none() && self.status.phase_times.of(**phase).is_some();
        let condition = self.status.conditions.iter().find(|known| known.type_ == READY);
        for phase in ClaimPhase::ALL.iter().filter(entered) {
            let (reason, note) = match condition.filter(|_| *phase == now) {
                Some(condition) => (condition.reason.as_str(), condition.message.clone()),
                None => (phase.as_str(), phase.doing().to_owned()),
            };
            let type_ = if *phase == ClaimPhase::Failed { EventType::Warning } else { EventType::Normal };
            self.context.events.tell(&*self.claim, type_, phase.as_str(), reason, note);
        }
    }

    fn event(&self, type_: EventType, reason: &str, note: String) {
        self.context.events.tell(&*self.claim, type_, "Claim", reason, note);
    }
}

/// The claim has changed since it was seen.
#[derive(Debug, thiserror::Error)]
#[error("the claim has changed since it was seen")]
struct Stale;

/// Why there is no token to be had, for a person.
enum Outage {
    /// The Secret is not there or not good, and nobody knows when it will be.
    NoCredentials(String),
    GitHub(String),
}
