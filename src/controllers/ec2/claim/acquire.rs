//! Acquiring machines: select idle ones, launch new ones, give them tokens, start them.

use jiff::Timestamp;
use kube::runtime::events::EventType;
use paddock_core::{
    api::{Ec2Pool, FailureReason, LaunchOrder},
    ec2::{
        claim::{Applied, ClaimAction, FailedMachine, Supply},
        launch_error::{Kind, launch_problem},
        machine::{Machine, MachineCheck, check},
    },
};
use paddock_effects::{
    aws::{AwsError, dynamodb::WriteOutcome, ec2::FleetOutcome},
    clock,
    kube::lanes::BACKGROUND_DELAY_MAX,
};
use paddock_record::{State, transition};
use secrecy::SecretString;

use super::{Error, Observed, Work};
use crate::controllers::ec2::{
    idle_queue::{Candidate, Disposition},
    pool::aws_problem,
    runner_tokens::sealed,
};

impl Work {
    pub(super) async fn acquire(&mut self, observed: &Observed, action: &ClaimAction) -> Result<Applied, Error> {
        self.urgent.get_or_insert_with(|| self.context.shared.lanes.urgent());
        let view = self.pool_view(observed);
        let Some(supply) = view.supply() else { return Ok(Applied::Incomplete) };
        match action {
            ClaimAction::Select(count) => self.select(supply, *count).await,
            ClaimAction::LookUpOffer => Ok(self.look_up_offer(supply).await),
            ClaimAction::PlaceOrder(order) => Ok(self.reserve_room(supply, order, 0)),
            ClaimAction::MakeRoom { order, terminate } => self.make_room(supply, order, terminate).await,
            ClaimAction::SendOrder(order) => self.send_order(supply, order).await,
            ClaimAction::FallBack { order, terminate, message } => self.fall_back(order, terminate, message).await,
            ClaimAction::Seal(ids) => self.seal(supply, &observed.chosen(ids)).await,
            ClaimAction::Replace(failed) => self.replace(failed).await,
            ClaimAction::AwaitAgents => Ok(self.await_agents(supply.spec).await),
            ClaimAction::Start(ids) => self.start(supply, &observed.chosen(ids)).await,
            ClaimAction::Nothing
            | ClaimAction::Wait(_)
            | ClaimAction::Serve
            | ClaimAction::Watch
            | ClaimAction::Return(_)
            | ClaimAction::Abandon(_)
            | ClaimAction::Release(_)
            | ClaimAction::Finish(..)
            | ClaimAction::Dump(_)
            | ClaimAction::Settle
            | ClaimAction::Rerun(_)
            | ClaimAction::Finalize => Ok(Applied::Done),
        }
    }

    /// Takes idle machines from the pool. The status is written only if that takes longer than [`BACKGROUND_DELAY_MAX`]
    /// and than other urgent work.
    async fn select(&mut self, supply: &Supply<'_>, count: u32) -> Result<Applied, Error> {
        let idle_queues = self.context.idle_queues.clone();
        let mut take = Box::pin(idle_queues.take(supply.queue, self.pool_key(), supply.needs.clone(), count));
        let (at_once, token) =
            tokio::join!(tokio::time::timeout(BACKGROUND_DELAY_MAX, &mut take), self.token(supply.spec));
        let picked = match at_once {
            Ok(picked) => picked?,
            Err(_) => {
                self.urgent = None;
                let shared = self.context.shared.clone();
                tokio::select! {
                    biased;
                    picked = &mut take => picked?,
                    turn = shared.background.turn() => {
                        self.turn = Some(turn);
                        self.write_progress().await?;
                        take.await?
                    }
                }
            }
        };
        match token {
            _ if picked.candidates.is_empty() => {}
            Ok(token) => self.claim_all(supply, picked.candidates, &token).await?,
            Err(outage) => return Ok(outage.into()),
        }
        Ok(Applied::Selected { exhausted: picked.exhausted })
    }

    /// Tries to claim the candidates.
    async fn claim_all(
        &self,
        supply: &Supply<'_>,
        candidates: Vec<Candidate>,
        token: &SecretString,
    ) -> Result<(), Error> {
        let (ledger, now, scope) = (&self.context.ledger, clock::now(), &supply.needs.scope);
        let (claim, group) = (self.reference(), supply.spec.github.runner_group.as_deref().unwrap_or_default());
        let threshold = supply.spec.lifetimes.claimed.after(now);
        let (mut transitions, mut tried) = (Vec::new(), Vec::new());
        for candidate in candidates {
            let known = ledger.get(&candidate.machine.instance_id);
            let known = known.filter(|machine| !machine.expired(now) && !machine.is_reclaimed());
            // The message may be older than the machine's last claim.
            let fitting = known.filter(|machine| supply.needs.fits_scope(&machine.record));
            let claimed = fitting.and_then(|machine| {
                transition::claim(&machine.record, claim, scope, group, sealed(&machine, token), threshold, now)
            });
            match claimed {
                Some(claimed) => {
                    transitions.push(claimed);
                    tried.push(candidate);
                }
                None => candidate.settle(Disposition::Busy),
            }
        }
        for (candidate, outcome) in tried.into_iter().zip(ledger.apply(transitions).await?) {
            match outcome {
                WriteOutcome::Won(_) => candidate.settle(Disposition::Over),
                // Its runner is still deregistering from the last run; it is claimable soon.
                WriteOutcome::Lost(Some(record)) if record.state == State::Idle => candidate.settle(Disposition::Busy),
                WriteOutcome::Lost(current) => {
                    let state = current.map_or("unknown".to_owned(), |record| record.state.to_string());
                    tracing::info!(
                        instance = candidate.machine.instance_id,
                        state,
                        "idle message discarded: machine is not idle"
                    );
                    candidate.settle(Disposition::Over);
                }
            }
        }
        Ok(())
    }

    async fn look_up_offer(&mut self, supply: &Supply<'_>) -> Applied {
        match self.context.offer(&self.pool_key(), supply.spec, supply.template, &supply.needs).await {
            Ok(offer) => {
                self.offer = Some(offer);
                Applied::Done
            }
            Err(error) => Applied::NoOffer(error.to_string()),
        }
    }

    /// Reserves room, that of `ending` machines included; the order itself is written with the status.
    fn reserve_room(&mut self, supply: &Supply<'_>, order: &LaunchOrder, ending: usize) -> Applied {
        let (key, count) = (self.pool_key(), order.requested);
        let mut limits = self.context.limits(&key, supply.spec.max_instances);
        limits.live = limits.live.saturating_sub(ending as u32);
        // That of an order which this one replaces.
        self.room = None;
        self.room = self.context.launch_room.reserve(&key, &order.client_token, &limits, count, count);
        if self.room.is_some() { Applied::Done } else { Applied::NoRoom }
    }

    /// Terminates idle machines of other scopes. The order's room is reserved first: the pool would launch warm machines
    /// there.
    async fn make_room(
        &mut self,
        supply: &Supply<'_>,
        order: &LaunchOrder,
        terminate: &[String],
    ) -> Result<Applied, Error> {
        if self.reserve_room(supply, order, terminate.len()) == Applied::NoRoom {
            return Ok(Applied::NoRoom);
        }
        for id in terminate {
            let why = format!("terminated to make room for claim {} of another scope (reuse.scope)", self.name);
            self.context.end_instance(id, FailureReason::ScopeEvicted, &why).await?;
        }
        let is_live = |id: &String| {
            let machine = self.context.ledger.get(id);
            machine.is_some_and(|machine| machine.record.state != State::Terminated)
        };
        if terminate.iter().any(is_live) {
            self.room = None;
            return Ok(Applied::NoRoom);
        }
        let note = format!("{} of another scope made room (reuse.scope)", terminate.join(", "));
        self.event(EventType::Normal, "MadeRoom", note);
        Ok(Applied::Done)
    }

    /// Sends the persisted order to EC2 and creates the records of its instances.
    async fn send_order(&mut self, supply: &Supply<'_>, order: &LaunchOrder) -> Result<Applied, Error> {
        if self.offer.is_none() {
            // Of an order that this leader has found.
            self.look_up_offer(supply).await;
        }
        let outcome = match self.context.machines.create_fleet(order).await {
            Ok(outcome) => outcome,
            Err(error) if error.is_template_gone() => {
                self.context.pools.prepare_again(&self.pool_key());
                return Ok(Applied::TemplateGone(error.to_string()));
            }
            Err(error @ (AwsError::Refused { .. } | AwsError::Denied { .. })) => {
                self.context.note_launch_outcome(self.pool.as_deref(), Some(aws_problem(error.clone())));
                return Ok(Applied::Refused(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let now = clock::now();
        self.create_records(supply, order, &outcome, now).await?;
        self.context.launch_room.settle(&self.pool_key(), &order.client_token);
        self.context.capacity_memory().note(order, outcome.launched.len(), &outcome.causes, now);
        let instance_ids: Vec<_> = outcome.launched.into_iter().map(|launched| launched.id).collect();
        if instance_ids.len() as u32 >= order.requested {
            self.context.note_launch_outcome(self.pool.as_deref(), None);
            self.room = None;
            return Ok(Applied::Launched { fleet_id: outcome.fleet_id, instance_ids });
        }
        if outcome.causes.iter().any(|cause| cause.kind() == Kind::NotYet) {
            self.context.pools.prepare_again(&self.pool_key());
        }
        if let Some(problem) = launch_problem(&outcome.causes) {
            self.context.note_launch_outcome(self.pool.as_deref(), Some(problem));
        }
        Ok(Applied::Short { launched: instance_ids, causes: outcome.causes })
    }

    async fn fall_back(&mut self, order: &LaunchOrder, terminate: &[String], message: &str) -> Result<Applied, Error> {
        if let Some(room) = &mut self.room {
            room.pass_to(&order.client_token);
        }
        let paid_otherwise = self.status.fleet.as_ref().is_some_and(|last| last.usage_class != order.usage_class);
        for id in terminate {
            let why = "EC2 did not have the rest of its fleet";
            self.context.end_instance(id, FailureReason::CreationAborted, why).await?;
        }
        let reason = if paid_otherwise { "FellBack" } else { "AsksOtherZones" };
        self.event(EventType::Warning, reason, message.to_owned());
        Ok(Applied::Done)
    }

    async fn create_records(
        &self,
        supply: &Supply<'_>,
        order: &LaunchOrder,
        outcome: &FleetOutcome,
        now: Timestamp,
    ) -> Result<(), AwsError> {
        let (key, claim) = (self.pool_key(), Some((self.reference(), supply.needs.scope.as_str())));
        let launch = |launched| self.context.launch(launched, &key, supply.spec, order, claim, now);
        self.context.ledger.apply(outcome.launched.iter().filter_map(launch).collect()).await.map(drop)
    }

    /// Seals the registration token for launched machines, whose keys are known now.
    async fn seal(&self, supply: &Supply<'_>, waiting: &[Machine]) -> Result<Applied, Error> {
        let token = match self.token(supply.spec).await {
            Ok(token) => token,
            Err(outage) => return Ok(outage.into()),
        };
        let seal = |machine: &Machine| transition::seal(&machine.record, machine.public_key(), sealed(machine, &token));
        self.context.ledger.apply(waiting.iter().filter_map(seal).collect()).await?;
        Ok(Applied::Done)
    }

    async fn replace(&self, failed: &[FailedMachine]) -> Result<Applied, Error> {
        if failed.iter().any(|machine| machine.reason == FailureReason::RegistrationFailed) {
            self.context.tokens.forget(&self.uid()).await;
        }
        for FailedMachine { id, reason, message } in failed {
            self.event(EventType::Warning, "WorkerFailed", format!("{id}: {message}"));
            self.context.end_instance(id, *reason, message).await?;
        }
        Ok(Applied::Done)
    }

    /// Waits briefly for the agents of newly claimed machines: most report at once.
    async fn await_agents(&mut self, pool: &Ec2Pool) -> Applied {
        let just_claimed = |machine: &Machine| machine.record.state == State::Claimed;
        let reported = self.claim.status.as_ref().is_some_and(|old| old.phase == self.status.phase);
        if reported || !self.held().iter().all(just_claimed) {
            return Applied::Incomplete;
        }
        let mut changes = self.context.ledger.changes();
        let is_awaited =
            |machine: &Machine| matches!(check(machine, &pool.timeouts, clock::now()), MachineCheck::Waiting);
        let all = async {
            while self.held().iter().any(is_awaited) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // The claim itself is urgent, so this takes at least [`BACKGROUND_DELAY_MAX`].
        let turn = tokio::select! {
            biased;
            () = all => return Applied::Done,
            turn = self.context.shared.background.turn() => turn,
        };
        self.turn = Some(turn);
        Applied::Incomplete
    }

    async fn start(&self, supply: &Supply<'_>, registered: &[Machine]) -> Result<Applied, Error> {
        let now = clock::now();
        let runtime = self.claim.spec.max_runtime.unwrap_or(supply.spec.lifetimes.max_runtime);
        if registered.iter().any(|machine| machine.record.state == State::Created) {
            self.context.pools.note_boot(&self.pool_key());
        }
        let start = |machine: &Machine| transition::start(&machine.record, runtime.after(now), now);
        self.context.ledger.apply(registered.iter().filter_map(start).collect()).await?;
        Ok(Applied::Done)
    }
}
