//! From the first look at a claim to Ready.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use jiff::Timestamp;
use kube::runtime::{controller::Action, events::EventType};
use paddock_record::{Instance, State};
use secrecy::{ExposeSecret, SecretString};

use super::{LOOK_AGAIN, TokenKind, Work};
use crate::{
    api::{ClaimPhase, ClaimReason, Ec2Pool, FailureReason, LaunchTemplate, READY},
    controllers::pickup::{Candidate, Fate},
    effects::records::Outcome,
    plan::{
        claim::{Step, View, step, surplus},
        heard::Heard,
        instance::{Standing, Tracked, standing},
        pickup::Needs,
    },
};

/// A claim that has its machines, or their agents' answers, by then is not worth a write that says it waits for them. With
/// many claims under way it is longer: a word for each of them makes all of them wait.
const SOON: Duration = Duration::from_millis(250);
const SOON_PER_CLAIM: Duration = Duration::from_millis(20);
const SOON_AT_MOST: Duration = Duration::from_secs(2);
/// Steps in one reconciliation: select, create, validate and start, with room for machines that had to be replaced.
const MAX_STEPS: usize = 16;

/// What a claim is served from.
pub(super) struct Supply {
    pub pool: Ec2Pool,
    pub needs: Needs,
    /// The queue of idle machines of the wanted class.
    pub queue: String,
    pub template: LaunchTemplate,
}

/// What ended a reconciliation early; `None`: go on with the next step.
pub(super) type Over = Option<Action>;

impl Work {
    pub(super) async fn provision(&mut self) -> Result<Action> {
        match self.status.phase.unwrap_or_default() {
            ClaimPhase::Completed | ClaimPhase::Failed => return self.settle_over().await,
            ClaimPhase::Releasing => return self.finish().await,
            _ if Heard::of(&self.claim).run_over || self.context.runs.is_over(&self.claim) => {
                return self.finish().await;
            }
            ClaimPhase::Ready => return self.watch_over().await,
            ClaimPhase::Pending | ClaimPhase::Claiming | ClaimPhase::Creating | ClaimPhase::Validating => {}
        }
        let _under_way = self.context.claims_under_way.clone();
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

    fn soon(&self) -> Duration {
        let others = Arc::strong_count(&self.context.claims_under_way).saturating_sub(2);
        (SOON + SOON_PER_CLAIM * others as u32).min(SOON_AT_MOST)
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

    /// Takes idle machines from the pool. One that is served at once is not worth a word in between.
    async fn select(&mut self, supply: &Supply, count: u32, pool_exhausted: &mut bool) -> Result<Over> {
        self.enter(ClaimPhase::Claiming, ClaimReason::Claiming, format!("looking for {count} idle machines"));
        let pickups = self.context.pickups.clone();
        let mut take = Box::pin(pickups.take(&supply.queue, self.pool_key(), supply.needs.clone(), count));
        let (at_once, token) = tokio::join!(
            tokio::time::timeout(self.soon(), &mut take),
            self.token(&supply.pool, TokenKind::Registration)
        );
        let picked = match at_once {
            Ok(picked) => picked?,
            Err(_) => {
                self.write().await?;
                take.await?
            }
        };
        *pool_exhausted = picked.exhausted;
        match token {
            _ if picked.candidates.is_empty() => Ok(None),
            Ok(token) => self.claim_all(supply, picked.candidates, &token).await.map(|()| None),
            Err(outage) => self.wait_for_github(outage).await.map(Some),
        }
    }

    /// Tries to claim the candidates; what cannot be had is dropped, or shown to others.
    async fn claim_all(&self, supply: &Supply, candidates: Vec<Candidate>, token: &SecretString) -> Result<()> {
        let (ledger, now) = (&self.context.ledger, Timestamp::now());
        let (mut moves, mut tried) = (Vec::new(), Vec::new());
        for candidate in candidates {
            let known = ledger.get(&candidate.offer.instance_id).filter(|tracked| tracked.is_claimable(now));
            let key = known.as_ref().and_then(|t| t.vitals.heartbeat.as_ref()?.public_key.clone());
            let (Some(Tracked { record, .. }), Some(key)) = (known, key) else {
                candidate.settle(Fate::Busy);
                continue;
            };
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
            moves.push((record, next));
            tried.push(candidate);
        }
        for (candidate, outcome) in tried.into_iter().zip(ledger.advance_all(&moves, now).await?) {
            match outcome {
                Outcome::Won(_) => candidate.settle(Fate::Over),
                // Still deregistering from its last run: somebody will want it in a moment.
                Outcome::Lost(Some(record)) if record.state == State::Idle => candidate.settle(Fate::Busy),
                Outcome::Lost(there) => {
                    let state = there.map_or("unknown".to_owned(), |record| record.state.to_string());
                    tracing::info!(
                        instance = candidate.offer.instance_id,
                        state,
                        "dropped an offer of a machine that is not idle"
                    );
                    candidate.settle(Fate::Over);
                }
            }
        }
        Ok(())
    }

    /// Gives back those of the held that the claim does not need.
    pub(super) async fn let_go(&mut self, held: &[Tracked], spare: &[String]) -> Result<Over> {
        let spare = held.iter().filter(|tracked| spare.contains(&tracked.record.instance_id)).cloned();
        self.give_back(&spare.collect::<Vec<_>>()).await
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
        if failed.iter().any(|(_, reason, _)| *reason == FailureReason::RegistrationFailed) {
            self.context.tokens.forget(&self.uid());
        }
        for (id, reason, why) in failed {
            self.event(EventType::Warning, "WorkerFailed", format!("{id}: {why}"));
            self.context.end_instance(id, *reason, why).await?;
        }
        if !failed.is_empty() {
            return self.write().await.map(|()| None);
        }
        if self.answered_soon(supply, held).await {
            return Ok(None);
        }
        self.write().await?;
        Ok(Some(Action::requeue(LOOK_AGAIN)))
    }

    /// Waits a moment for all agents of machines that were just claimed.
    async fn answered_soon(&self, supply: &Supply, held: &[Tracked]) -> bool {
        let just_claimed = |tracked: &Tracked| tracked.record.state == State::Claimed;
        if !held.iter().all(just_claimed)
            || self.claim.status.as_ref().is_some_and(|old| old.phase == self.status.phase)
        {
            return false;
        }
        let mut news = self.context.ledger.news();
        let is_awaited =
            |tracked: &Tracked| matches!(standing(tracked, &supply.pool.timeouts, Timestamp::now()), Standing::Waiting);
        let all = async {
            while self.held().iter().any(is_awaited) {
                if news.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(self.soon(), all).await.is_ok()
    }

    /// Gives created machines, whose keys are known by now, the token to register with.
    async fn hand_out(&self, held: &[Tracked], ids: &[String], token: &SecretString) -> Result<()> {
        let now = Timestamp::now();
        let waiting = held.iter().filter(|tracked| ids.contains(&tracked.record.instance_id));
        let moves: Vec<_> = waiting
            .filter_map(|tracked| {
                let key = tracked.vitals.heartbeat.as_ref()?.public_key.as_ref()?;
                let next = Instance { sealed: key.seal(token.expose_secret()), ..tracked.record.clone() };
                Some((tracked.record.clone(), next))
            })
            .collect();
        self.context.ledger.advance_all(&moves, now).await?;
        Ok(())
    }

    /// Puts the confirmed machines in service.
    async fn start(&self, supply: &Supply, held: &[Tracked], ids: &[String]) -> Result<Over> {
        let now = Timestamp::now();
        let runtime = self.claim.spec.max_runtime.unwrap_or(supply.pool.lifetimes.max_runtime);
        let confirmed = held.iter().filter(|tracked| ids.contains(&tracked.record.instance_id));
        let moves: Vec<_> = confirmed
            .map(|tracked| {
                let next = Instance {
                    state: State::Running,
                    threshold: Some(runtime.after(now)),
                    updated_at: now,
                    sealed: String::new(),
                    ..tracked.record.clone()
                };
                (tracked.record.clone(), next)
            })
            .collect();
        self.context.ledger.advance_all(&moves, now).await?;
        Ok(None)
    }

    async fn serve(&mut self, held: &[Tracked]) -> Result<Action> {
        let count = self.claim.spec.count;
        self.list_workers(held);
        let message = format!("{count} of {count} runners are registered for run {}", self.claim.spec.run_id);
        self.enter(ClaimPhase::Ready, ClaimReason::Ready, message);
        self.write().await?;
        if let Some(created) = &self.claim.metadata.creation_timestamp {
            let seconds = Timestamp::now().duration_since(created.0).as_secs_f64();
            self.context.metrics.claim_seconds.observe(seconds);
        }
        self.context.tokens.forget(&self.uid());
        Ok(Action::await_change())
    }
}
