//! Claims on EC2 pools: from the idle pool where it can, from new machines where it must.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::StreamExt;
use jiff::Timestamp;
use kube::{
    Api, ResourceExt,
    runtime::{
        controller::{Action, Controller},
        events::EventType,
        finalizer::{Event as Finalize, finalizer},
        reflector::ObjectRef,
    },
};
use paddock_record::{Instance, State};
use secrecy::{ExposeSecret, SecretString};
use tokio_util::sync::CancellationToken;

use super::{
    Context, drive,
    pickup::{Candidate, Picked},
    reference, status,
};
use crate::{
    api::{
        ClaimPhase, ClaimReason, ClaimWorker, Ec2Pool, FINALIZER, FailureReason, FleetOrder, Hardware, READY,
        RunnerClaim, RunnerClaimStatus, RunnerPool, TAG_CLAIM, TAG_CLUSTER, TAG_INITIAL_RUN_ID, TAG_POOL, WorkerSource,
        ready_condition, set_condition,
    },
    effects::{aws::AwsError, github::Scope, queues::PUT_BACK_DELAY, records::Outcome},
    plan::{
        claim::{Step, View, step},
        fleet::{FleetRequest, client_token, pool_key},
        instance::Tracked,
        pickup::Needs,
    },
};

/// How long a claim that waits for agents goes without a look: their words come as events, their silence does not.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long a claim waits for something outside to change: a full pool, an outage.
const WAIT: Duration = Duration::from_secs(5);
/// Steps in one reconciliation: select, create, validate and start, with room for machines that had to be replaced.
const MAX_STEPS: usize = 16;

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
        .reconcile_on(changed);
    drive("claim", controller, context.clone(), stop, reconcile).await;
}

async fn reconcile(claim: Arc<RunnerClaim>, context: Arc<Context>) -> Result<Action> {
    let namespace = claim.namespace().unwrap_or_default();
    let pool = claim.spec.pool.as_ref().and_then(|name| context.stores.pools.store.get(&reference(&namespace, name)));
    let held = !claim.finalizers().is_empty();
    let Some(pool) = pool else {
        return match (&claim.spec.pool, held) {
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
            Finalize::Apply(claim) => Work::new(context, claim, Some(pool)).provision().await,
            Finalize::Cleanup(claim) => Work::new(context, claim, Some(pool)).release().await,
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

    fn ec2(&self) -> Option<(&RunnerPool, &Ec2Pool)> {
        let pool = self.pool.as_deref()?;
        Some((pool, pool.spec.ec2.as_ref()?))
    }

    fn pool_key(&self) -> String {
        pool_key(&self.namespace, self.claim.spec.pool.as_deref().unwrap_or_default())
    }

    fn held(&self) -> Vec<Tracked> {
        let live = |tracked: &Tracked| tracked.record.state != State::Terminated;
        self.context.ledger.of_claim(&self.pool_key(), &self.name).into_iter().filter(live).collect()
    }

    async fn provision(mut self) -> Result<Action> {
        let phase = self.status.phase.unwrap_or_default();
        if phase.is_over() {
            return self.settle_over().await;
        }
        if phase == ClaimPhase::Ready {
            return self.watch_over().await;
        }
        let Some((pool, ec2)) = self.ec2().map(|(pool, ec2)| (pool.clone(), ec2.clone())) else {
            return Ok(Action::await_change());
        };
        let Some(needs) = Needs::of(&self.claim.spec, &ec2) else {
            let class = self.claim.spec.resource_class.clone().unwrap_or_default();
            let message =
                format!("the pool has no resource class {class:?}: delete the claim and choose one that it has");
            return self.fail(ClaimReason::InvalidSpec, message).await;
        };
        let pool_status = pool.status.clone().unwrap_or_default();
        let queue = pool_status.queues.iter().find(|queue| queue.resource_class == needs.resource_class);
        let (Some(queue), Some(template)) = (queue.map(|queue| queue.url.clone()), pool_status.launch_template) else {
            let why = pool_status.conditions.iter().find(|condition| condition.type_ == READY);
            let why = why.map_or("it is being prepared".to_owned(), |condition| condition.message.clone());
            return self.wait(ClaimReason::PoolNotReady, format!("the pool is not ready: {why}")).await;
        };

        let mut pool_exhausted = false;
        // An order that was on its way when the operator stopped is finished first: its machines may exist.
        if self.status.fleet.as_ref().is_some_and(|order| order.instance_ids.is_empty())
            && let Some(over) = self.order(&ec2, &needs, &template).await?
        {
            return Ok(over);
        }
        for _ in 0..MAX_STEPS {
            let held = self.held();
            let fleet_settled = self.status.fleet.as_ref().is_some_and(|order| !order.instance_ids.is_empty());
            let view = View { count: self.claim.spec.count, held: &held, pool_exhausted, fleet_settled };
            let next = step(&view, &ec2, Timestamp::now());
            tracing::debug!(claim = %self.name, ?next, "next step");
            match next {
                Step::Select(count) => {
                    self.enter(
                        ClaimPhase::Claiming,
                        ClaimReason::Claiming,
                        format!("looking for {count} idle machines"),
                    );
                    let (picked, token) = tokio::join!(
                        self.context.pickups.take(&queue, needs.clone(), count),
                        self.token(&ec2, TokenKind::Registration)
                    );
                    let (picked, token) = match (picked, token) {
                        (Ok(picked), Ok(token)) => (picked, token),
                        (Err(error), _) => return self.wait_for_aws(error).await,
                        (Ok(picked), Err(error)) => {
                            self.put_back(&queue, &picked).await;
                            return self.wait_for_github(error).await;
                        }
                    };
                    pool_exhausted = picked.exhausted;
                    self.claim_all(&queue, picked, &token, &ec2).await?;
                    self.write().await?;
                }
                Step::Create(count) => {
                    let there = self.context.ledger.of_pool(&self.pool_key());
                    let live = there.iter().filter(|tracked| tracked.record.state != State::Terminated).count() as u32;
                    let max = ec2.max_instances;
                    let Some(_room) = self.context.launches.reserve(&self.pool_key(), live, count, count, max) else {
                        let message = format!(
                            "{count} more machines are needed, but the pool has or creates {live} of at most {max} (maxInstances)"
                        );
                        return self.wait(ClaimReason::PoolFull, message).await;
                    };
                    self.status.fleet = Some(FleetOrder {
                        client_token: client_token(&self.claim.uid().unwrap_or_default(), 1),
                        attempt: 1,
                        requested: count,
                        usage_class: needs.usage_class,
                        ordered_at: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now()),
                        fleet_id: None,
                        instance_ids: Vec::new(),
                    });
                    self.enter(ClaimPhase::Creating, ClaimReason::Creating, format!("creating {count} machines"));
                    // The intent before the effect: a successor finds the token and asks for the same fleet.
                    self.write().await?;
                    if let Some(over) = self.order(&ec2, &needs, &template).await? {
                        return Ok(over);
                    }
                }
                Step::Validate { tokens, failed } => {
                    let message = format!("waiting for {} machines to register with GitHub", held.len());
                    self.enter(ClaimPhase::Validating, ClaimReason::Validating, message);
                    if !tokens.is_empty() {
                        match self.token(&ec2, TokenKind::Registration).await {
                            Ok(token) => self.hand_out(&held, &tokens, &token).await?,
                            Err(error) => return self.wait_for_github(error).await,
                        }
                    }
                    for (id, reason, why) in &failed {
                        self.event(EventType::Warning, "WorkerFailed", format!("{id}: {why}")).await;
                        self.context.end_instance(id, *reason, why).await?;
                    }
                    if failed.is_empty() {
                        self.write().await?;
                        return Ok(Action::requeue(LOOK_AGAIN));
                    }
                }
                Step::Start(ids) => self.start(&held, &ids, &ec2).await?,
                Step::Serve => return self.serve(&held).await,
                Step::Fail(reason, message) => return self.fail(reason, message).await,
            }
        }
        self.write().await?;
        Ok(Action::requeue(LOOK_AGAIN))
    }

    /// Tries to claim every candidate at once; those that cannot be had are dropped, or shown to others.
    async fn claim_all(&self, queue: &str, picked: Picked, token: &SecretString, pool: &Ec2Pool) -> Result<()> {
        let tries = picked.candidates.into_iter().map(|candidate| self.claim_one(queue, candidate, token, pool));
        for outcome in futures::future::join_all(tries).await {
            outcome?;
        }
        Ok(())
    }

    async fn claim_one(&self, queue: &str, candidate: Candidate, token: &SecretString, pool: &Ec2Pool) -> Result<()> {
        let (ledger, queues, now) = (&self.context.ledger, &self.context.queues, Timestamp::now());
        let id = &candidate.offer.instance_id;
        let tracked = ledger.get(id).filter(|tracked| tracked.record.pool == self.pool_key());
        let key = tracked.as_ref().and_then(|t| t.vitals.heartbeat.as_ref()).and_then(|beat| beat.public_key.clone());
        let outcome = match (tracked, key) {
            (Some(Tracked { record, .. }), Some(key)) if record.state == State::Idle => {
                let next = Instance {
                    state: State::Claimed,
                    run_id: self.claim.spec.run_id.clone(),
                    claim: self.name.clone(),
                    threshold: Some(pool.lifetimes.claimed.after(now)),
                    updated_at: now,
                    sealed: key.seal(token.expose_secret()),
                    claims: record.claims + 1,
                    ..record.clone()
                };
                ledger.advance(&record, &next, now).await?
            }
            (tracked, _) => Outcome::Lost(tracked.map(|tracked| tracked.record)),
        };
        match outcome {
            Outcome::Won(_) => queues.delete(queue, &[candidate.message]).await?,
            // Still deregistering from its last run: somebody will want it in a moment.
            Outcome::Lost(Some(record)) if record.state == State::Idle => {
                queues.put_back(queue, &candidate.message, PUT_BACK_DELAY).await?;
            }
            Outcome::Lost(there) => {
                let state = there.map_or("unknown".to_owned(), |record| record.state.to_string());
                tracing::info!(instance = id, state, "dropped an offer of a machine that is not idle");
                queues.delete(queue, &[candidate.message]).await?;
            }
        }
        Ok(())
    }

    async fn put_back(&self, queue: &str, picked: &Picked) {
        for candidate in &picked.candidates {
            let _ = self.context.queues.put_back(queue, &candidate.message, Duration::ZERO).await;
        }
    }

    /// Has the persisted order carried out and its instances entered; an answer ends the reconciliation.
    async fn order(
        &mut self,
        pool: &Ec2Pool,
        needs: &Needs,
        template: &crate::api::LaunchTemplate,
    ) -> Result<Option<Action>> {
        let order = self.status.fleet.clone().context("there is no order")?;
        let key = self.pool_key();
        let request = FleetRequest {
            client_token: order.client_token.clone(),
            template: template.clone(),
            count: order.requested,
            usage_class: order.usage_class,
            cpu: needs.cpu,
            memory_mib: needs.memory_mib,
            allowed_instance_types: needs.allowed_instance_types.clone(),
            subnet_ids: pool.subnet_ids.clone(),
            tags: vec![
                (TAG_CLUSTER.into(), self.context.settings.cluster_name.clone()),
                (TAG_POOL.into(), key.clone()),
                (TAG_CLAIM.into(), self.name.clone()),
                (TAG_INITIAL_RUN_ID.into(), self.claim.spec.run_id.clone()),
            ],
        };
        let outcome = match self.context.machines.create_fleet(&request).await {
            Ok(outcome) => outcome,
            Err(error @ (AwsError::Refused { .. } | AwsError::Denied { .. })) => {
                return self.fail(ClaimReason::AwsUnavailable, error.to_string()).await.map(Some);
            }
            Err(error) => return self.wait_for_aws(error).await.map(Some),
        };
        let now = Timestamp::now();
        let records = outcome.launched.iter().map(|launched| {
            self.context.new_instance(launched, &key, pool, needs, &self.claim.spec.run_id, &self.name, now)
        });
        for outcome in
            futures::future::join_all(records.map(async |record| self.context.ledger.create(&record).await)).await
        {
            outcome?;
        }
        if (outcome.launched.len() as u32) < order.requested {
            let got = outcome.launched.len();
            let message = format!("EC2 gave {got} of {} machines: {}", order.requested, outcome.causes.join("; "));
            return self.fail(ClaimReason::InsufficientCapacity, message).await.map(Some);
        }
        if let Some(fleet) = &mut self.status.fleet {
            fleet.fleet_id = Some(outcome.fleet_id);
            fleet.instance_ids = outcome.launched.into_iter().map(|launched| launched.id).collect();
        }
        self.write().await?;
        Ok(None)
    }

    /// Gives created machines, whose keys are known by now, the token to register with.
    async fn hand_out(&self, held: &[Tracked], ids: &[String], token: &SecretString) -> Result<()> {
        let now = Timestamp::now();
        for tracked in held.iter().filter(|tracked| ids.contains(&tracked.record.instance_id)) {
            let key = tracked.vitals.heartbeat.as_ref().and_then(|beat| beat.public_key.as_ref());
            if let Some(key) = key {
                let next = Instance { sealed: key.seal(token.expose_secret()), ..tracked.record.clone() };
                self.context.ledger.advance(&tracked.record, &next, now).await?;
            }
        }
        Ok(())
    }

    async fn start(&self, held: &[Tracked], ids: &[String], pool: &Ec2Pool) -> Result<()> {
        let now = Timestamp::now();
        let runtime = self.claim.spec.max_runtime.unwrap_or(pool.lifetimes.max_runtime);
        let starts = held.iter().filter(|tracked| ids.contains(&tracked.record.instance_id)).map(async |tracked| {
            let next = Instance {
                state: State::Running,
                threshold: Some(runtime.after(now)),
                updated_at: now,
                sealed: String::new(),
                ..tracked.record.clone()
            };
            self.context.ledger.advance(&tracked.record, &next, now).await
        });
        for outcome in futures::future::join_all(starts).await {
            outcome?;
        }
        Ok(())
    }

    async fn serve(&mut self, held: &[Tracked]) -> Result<Action> {
        let count = self.claim.spec.count;
        self.list_workers(held);
        self.enter(ClaimPhase::Ready, ClaimReason::Ready, format!("{count} of {count} runners are registered"));
        self.write().await?;
        if let Some(created) = &self.claim.metadata.creation_timestamp {
            let seconds = Timestamp::now().duration_since(created.0).as_secs_f64();
            self.context.metrics.claim_seconds.observe(seconds);
        }
        self.event(EventType::Normal, "Ready", format!("{count} runners serve run {}", self.claim.spec.run_id)).await;
        Ok(Action::await_change())
    }

    /// A claim that is Ready stays so until its machines are gone: their time was up, or they were lost.
    async fn watch_over(mut self) -> Result<Action> {
        let held = self.held();
        self.list_workers(&held);
        if held.is_empty() {
            let message = "its machines have reached the end of their time";
            self.enter(ClaimPhase::Completed, ClaimReason::MaxRuntimeReached, message.into());
        }
        self.write().await?;
        Ok(Action::await_change())
    }

    /// A claim that is over holds nothing.
    async fn settle_over(mut self) -> Result<Action> {
        if let Some(waiting) = self.give_all_back().await? {
            return Ok(waiting);
        }
        self.list_workers(&[]);
        self.write().await?;
        Ok(Action::await_change())
    }

    async fn release(mut self) -> Result<Action> {
        self.enter(ClaimPhase::Releasing, ClaimReason::Releasing, "giving the machines back to the pool".into());
        if let Some(waiting) = self.give_all_back().await? {
            return Err(anyhow::anyhow!("the claim still holds machines; looking again in {waiting:?}"));
        }
        Ok(Action::await_change())
    }

    async fn fail(&mut self, reason: ClaimReason, message: String) -> Result<Action> {
        self.event(EventType::Warning, "Failed", message.clone()).await;
        if let Some(waiting) = self.give_all_back().await? {
            return Ok(waiting);
        }
        self.list_workers(&[]);
        self.status.set_progress(0, self.claim.spec.count);
        self.enter(ClaimPhase::Failed, reason, message);
        self.write().await?;
        Ok(Action::await_change())
    }

    /// Returns machines of the pool to it, and ends those that never served; an answer means that it has to wait.
    async fn give_all_back(&mut self) -> Result<Option<Action>> {
        let held = self.held();
        if held.is_empty() {
            return Ok(None);
        }
        let Some((_, ec2)) = self.ec2() else { return Ok(None) };
        let ec2 = ec2.clone();
        let token = match self.token(&ec2, TokenKind::Removal).await {
            Ok(token) => token,
            Err(error) => return self.wait_for_github(error).await.map(Some),
        };
        let now = Timestamp::now();
        for tracked in &held {
            let record = &tracked.record;
            let key = tracked.vitals.heartbeat.as_ref().and_then(|beat| beat.public_key.as_ref());
            match (record.state, key) {
                (State::Running | State::Claimed, Some(key)) => {
                    let next = Instance {
                        state: State::Idle,
                        run_id: String::new(),
                        claim: String::new(),
                        leaving: record.run_id.clone(),
                        threshold: Some(ec2.lifetimes.idle.after(now)),
                        updated_at: now,
                        sealed: key.seal(token.expose_secret()),
                        ..record.clone()
                    };
                    self.context.ledger.advance(record, &next, now).await?;
                }
                (State::Idle | State::Terminated, _) => {}
                (State::Created | State::Running | State::Claimed, _) => {
                    let why = "the claim ended before the machine served";
                    self.context.end_instance(&record.instance_id, FailureReason::CreationAborted, why).await?;
                }
            }
        }
        match self.held().is_empty() {
            true => Ok(None),
            false => Ok(Some(Action::requeue(LOOK_AGAIN))),
        }
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
            state: super::mirror::worker_state(tracked.record.state),
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

    async fn wait_for_aws(&mut self, error: AwsError) -> Result<Action> {
        self.say(ClaimReason::AwsUnavailable, error.to_string()).await?;
        Ok(Action::requeue(WAIT))
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
