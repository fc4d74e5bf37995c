//! From the first look at a claim to Ready.

use std::time::Duration;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    ResourceExt,
    runtime::{controller::Action, events::EventType},
};
use paddock_record::{Instance, State};
use secrecy::{ExposeSecret, SecretString};

use super::{LOOK_AGAIN, TokenKind, Work};
use crate::{
    api::{
        ClaimPhase, ClaimReason, Ec2Pool, FailureReason, FleetOrder, LaunchTemplate, READY, TAG_CLAIM, TAG_CLUSTER,
        TAG_INITIAL_RUN_ID, TAG_POOL,
    },
    controllers::pickup::{Candidate, Picked},
    effects::{aws::AwsError, queues::PUT_BACK_DELAY, records::Outcome},
    plan::{
        claim::{Step, View, step, surplus},
        fleet::{FleetRequest, client_token},
        instance::Tracked,
        pickup::Needs,
    },
};

/// Steps in one reconciliation: select, create, validate and start, with room for machines that had to be replaced.
const MAX_STEPS: usize = 16;

/// What a claim is served from.
struct Supply {
    pool: Ec2Pool,
    needs: Needs,
    /// The queue of idle machines of the wanted class.
    queue: String,
    template: LaunchTemplate,
}

/// What ended a reconciliation early; `None`: go on with the next step.
type Over = Option<Action>;

impl Work {
    pub(super) async fn provision(&mut self) -> Result<Action> {
        match self.status.phase.unwrap_or_default() {
            ClaimPhase::Completed | ClaimPhase::Failed => return self.settle_over().await,
            ClaimPhase::Ready => return self.watch_over().await,
            ClaimPhase::Pending
            | ClaimPhase::Claiming
            | ClaimPhase::Creating
            | ClaimPhase::Validating
            | ClaimPhase::Releasing => {}
        }
        if self.claim.status.is_none() {
            self.say(ClaimReason::WaitingInLine, "the claim was seen".into()).await?;
        }
        let supply = match self.supply().await? {
            Ok(supply) => supply,
            Err(over) => return Ok(over),
        };
        // An order that was on its way when the operator stopped is finished first: its machines may exist.
        if self.status.fleet.as_ref().is_some_and(|order| order.instance_ids.is_empty())
            && let Some(over) = self.order(&supply).await?
        {
            return Ok(over);
        }
        let mut pool_exhausted = false;
        for _ in 0..MAX_STEPS {
            let held = self.held();
            let fleet_settled = self.status.fleet.as_ref().is_some_and(|order| !order.instance_ids.is_empty());
            let spare = surplus(&held, self.claim.spec.count, false);
            if !spare.is_empty() {
                match self.let_go(&held, &spare).await? {
                    Some(over) => return Ok(over),
                    None => continue,
                }
            }
            let view = View { count: self.claim.spec.count, held: &held, pool_exhausted, fleet_settled };
            let next = step(&view, &supply.pool, Timestamp::now());
            tracing::debug!(claim = %self.name, ?next, "next step");
            let over = match next {
                Step::Select(count) => self.select(&supply, count, &mut pool_exhausted).await?,
                Step::Create(count) => self.create(&supply, count).await?,
                Step::Validate { tokens, failed } => self.validate(&supply, &held, &tokens, &failed).await?,
                Step::Start(ids) => self.start(&supply, &held, &ids).await?,
                Step::Serve => Some(self.serve(&held).await?),
                Step::Fail(reason, message) => Some(self.fail(reason, message).await?),
            };
            if let Some(over) = over {
                return Ok(over);
            }
        }
        self.write().await?;
        Ok(Action::requeue(LOOK_AGAIN))
    }

    /// What the claim can be served from, if its pool is ready.
    async fn supply(&mut self) -> Result<Result<Supply, Action>> {
        let Some(pool) = self.pool.clone() else { return Ok(Err(Action::await_change())) };
        if pool.metadata.deletion_timestamp.is_some() && self.held().is_empty() {
            let message = "the pool is being deleted: delete the claim and choose another pool";
            return self.wait(ClaimReason::PoolNotReady, message.into()).await.map(Err);
        }
        let Some(ec2) = pool.spec.ec2.clone() else { return Ok(Err(Action::await_change())) };
        let Some(needs) = Needs::of(&self.claim.spec, &ec2) else {
            let class = self.claim.spec.resource_class.clone().unwrap_or_default();
            let message = format!("the pool has no resource class {class:?}: delete the claim and choose one it has");
            return self.fail(ClaimReason::InvalidSpec, message).await.map(Err);
        };
        let status = pool.status.clone().unwrap_or_default();
        let queue = status.queues.iter().find(|queue| queue.resource_class == needs.resource_class);
        let (Some(queue), Some(template)) = (queue.map(|queue| queue.url.clone()), status.launch_template) else {
            let why = status.conditions.iter().find(|condition| condition.type_ == READY);
            let why = why.map_or("it is being prepared".to_owned(), |condition| condition.message.clone());
            let message = format!("the pool is not ready: {why}");
            return self.wait(ClaimReason::PoolNotReady, message).await.map(Err);
        };
        Ok(Ok(Supply { pool: ec2, needs, queue, template }))
    }

    /// Takes idle machines from the pool.
    async fn select(&mut self, supply: &Supply, count: u32, pool_exhausted: &mut bool) -> Result<Over> {
        self.enter(ClaimPhase::Claiming, ClaimReason::Claiming, format!("looking for {count} idle machines"));
        let picked = self.context.pickups.take(&supply.queue, supply.needs.clone(), count).await?;
        *pool_exhausted = picked.exhausted;
        if picked.candidates.is_empty() {
            return Ok(None);
        }
        let token = match self.token(&supply.pool, TokenKind::Registration).await {
            Ok(token) => token,
            Err(outage) => {
                self.put_back(&supply.queue, &picked).await;
                return self.wait_for_github(outage).await.map(Some);
            }
        };
        let tries = picked.candidates.into_iter().map(|candidate| self.claim_one(supply, candidate, &token));
        for outcome in futures::future::join_all(tries).await {
            outcome?;
        }
        Ok(None)
    }

    /// Tries to claim a candidate; one that cannot be had is dropped, or shown to others.
    async fn claim_one(&self, supply: &Supply, candidate: Candidate, token: &SecretString) -> Result<()> {
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
                    threshold: Some(supply.pool.lifetimes.claimed.after(now)),
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
            Outcome::Won(_) => queues.delete(&supply.queue, &[candidate.message]).await?,
            // Still deregistering from its last run: somebody will want it in a moment.
            Outcome::Lost(Some(record)) if record.state == State::Idle => {
                queues.put_back(&supply.queue, &candidate.message, PUT_BACK_DELAY).await?;
            }
            Outcome::Lost(there) => {
                let state = there.map_or("unknown".to_owned(), |record| record.state.to_string());
                tracing::info!(instance = id, state, "dropped an offer of a machine that is not idle");
                queues.delete(&supply.queue, &[candidate.message]).await?;
            }
        }
        Ok(())
    }

    /// Gives back those of the held that the claim does not need.
    async fn let_go(&mut self, held: &[Tracked], spare: &[String]) -> Result<Over> {
        let spare = held.iter().filter(|tracked| spare.contains(&tracked.record.instance_id)).cloned();
        self.give_back(&spare.collect::<Vec<_>>()).await
    }

    async fn put_back(&self, queue: &str, picked: &Picked) {
        for candidate in &picked.candidates {
            // Should this fail, the message comes back by itself when its visibility runs out.
            let _ = self.context.queues.put_back(queue, &candidate.message, Duration::ZERO).await;
        }
    }

    /// Has machines created for what the pool could not give.
    async fn create(&mut self, supply: &Supply, count: u32) -> Result<Over> {
        let (key, max) = (self.pool_key(), supply.pool.max_instances);
        let there = self.context.ledger.of_pool(&key);
        let live = there.iter().filter(|tracked| tracked.record.state != State::Terminated).count() as u32;
        let Some(_room) = self.context.launches.reserve(&key, live, count, count, max) else {
            let message = format!(
                "{count} more machines are needed, but the pool has or creates {live} of at most {max} (maxInstances)"
            );
            return self.wait(ClaimReason::PoolFull, message).await.map(Some);
        };
        self.status.fleet = Some(FleetOrder {
            client_token: client_token(&self.claim.uid().unwrap_or_default(), 1),
            attempt: 1,
            requested: count,
            usage_class: supply.needs.usage_class,
            ordered_at: Time(Timestamp::now()),
            fleet_id: None,
            instance_ids: Vec::new(),
        });
        self.enter(ClaimPhase::Creating, ClaimReason::Creating, format!("creating {count} machines"));
        // The intent before the effect: a successor finds the token and asks for the same fleet.
        self.write().await?;
        self.order(supply).await
    }

    /// Has the persisted order carried out, and its instances entered.
    async fn order(&mut self, supply: &Supply) -> Result<Over> {
        let order = self.status.fleet.clone().context("there is no order")?;
        let (key, run_id) = (self.pool_key(), self.claim.spec.run_id.clone());
        let request = FleetRequest {
            client_token: order.client_token,
            template: supply.template.clone(),
            count: order.requested,
            usage_class: order.usage_class,
            cpu: supply.needs.cpu,
            memory_mib: supply.needs.memory_mib,
            allowed_instance_types: supply.needs.allowed_instance_types.clone(),
            subnet_ids: supply.pool.subnet_ids.clone(),
            tags: vec![
                (TAG_CLUSTER.into(), self.context.settings.cluster_name.clone()),
                (TAG_POOL.into(), key.clone()),
                (TAG_CLAIM.into(), self.name.clone()),
                (TAG_INITIAL_RUN_ID.into(), run_id.clone()),
            ],
        };
        let outcome = match self.context.machines.create_fleet(&request).await {
            Ok(outcome) => outcome,
            Err(error @ (AwsError::Refused { .. } | AwsError::Denied { .. })) => {
                return self.fail(ClaimReason::AwsUnavailable, error.to_string()).await.map(Some);
            }
            Err(error) => return Err(error.into()),
        };
        let now = Timestamp::now();
        let entries = outcome.launched.iter().map(async |launched| {
            let record =
                self.context.new_instance(launched, &key, &supply.pool, &supply.needs, &run_id, &self.name, now);
            self.context.ledger.create(&record).await
        });
        for entry in futures::future::join_all(entries).await {
            entry?;
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

    /// Hands tokens to those that wait for one and ends those that failed; with none of these, waits.
    async fn validate(
        &mut self,
        supply: &Supply,
        held: &[Tracked],
        tokens: &[String],
        failed: &[(String, FailureReason, String)],
    ) -> Result<Over> {
        let message = format!("waiting for {} machines to register with GitHub", held.len());
        self.enter(ClaimPhase::Validating, ClaimReason::Validating, message);
        if !tokens.is_empty() {
            match self.token(&supply.pool, TokenKind::Registration).await {
                Ok(token) => self.hand_out(held, tokens, &token).await?,
                Err(outage) => return self.wait_for_github(outage).await.map(Some),
            }
        }
        for (id, reason, why) in failed {
            self.event(EventType::Warning, "WorkerFailed", format!("{id}: {why}")).await;
            self.context.end_instance(id, *reason, why).await?;
        }
        self.write().await?;
        Ok(failed.is_empty().then(|| Action::requeue(LOOK_AGAIN)))
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

    /// Puts the confirmed machines in service.
    async fn start(&self, supply: &Supply, held: &[Tracked], ids: &[String]) -> Result<Over> {
        let now = Timestamp::now();
        let runtime = self.claim.spec.max_runtime.unwrap_or(supply.pool.lifetimes.max_runtime);
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
        Ok(None)
    }

    /// Why a claim that was Ready has no machines any more, from the records of those it had.
    fn how_it_ended(&self) -> (ClaimPhase, ClaimReason, String) {
        let began = self.claim.metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0);
        let ours = self.context.ledger.of_claim(&self.pool_key(), &self.name);
        let lost: Vec<_> = ours
            .iter()
            .map(|tracked| &tracked.record)
            .filter(|record| record.state == State::Terminated && record.updated_at >= began)
            .filter(|record| record.failure_reason != FailureReason::ThresholdPassed.as_str())
            .map(|record| format!("{}: {}", record.instance_id, record.failure_message))
            .collect();
        if lost.is_empty() {
            let message = "its machines have reached the end of their time";
            (ClaimPhase::Completed, ClaimReason::MaxRuntimeReached, message.into())
        } else {
            (ClaimPhase::Failed, ClaimReason::WorkerLost, lost.join("; "))
        }
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
    async fn watch_over(&mut self) -> Result<Action> {
        let held = self.held();
        let spare = surplus(&held, self.claim.spec.count, true);
        if let Some(over) = self.let_go(&held, &spare).await? {
            return Ok(over);
        }
        let held = self.held();
        self.list_workers(&held);
        if held.is_empty() {
            let (phase, reason, message) = self.how_it_ended();
            self.enter(phase, reason, message);
        }
        self.write().await?;
        Ok(Action::await_change())
    }
}
