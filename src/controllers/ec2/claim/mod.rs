//! Claims on EC2 pools: idle machines first, new machines for the rest.

mod acquire;
mod release;
mod rerun;

use std::{collections::HashMap, ops::ControlFlow, sync::Arc};

use futures::{Stream, StreamExt, channel::mpsc::unbounded};
use kube::{
    Client, ResourceExt,
    runtime::{
        controller::{self, Controller},
        events::EventType,
        reflector::ObjectRef,
    },
};
use paddock_core::{
    api::{ClaimPhase, ClaimReason, Ec2Pool, Hardware, RerunOutcome, RunnerClaim, RunnerClaimStatus, RunnerPool},
    demand::job_facts::JobFacts,
    ec2::{
        capacity_memory::CapacityMemory,
        claim::{AGENT_CHECK_PERIOD, Applied, ClaimAction, ClaimFacts, Offer, PoolView, claim_ref, decide, next},
        claim_status,
        machine::Machine,
        waiting_line::Admission,
    },
    names::PoolKey,
};
use paddock_effects::{
    clock,
    kube::{
        lanes::{Turn, UrgentGuard},
        objects,
    },
};
use paddock_record::{ClaimRef, State};
use secrecy::SecretString;
use tokio_util::sync::CancellationToken;

use super::{Ec2Context, launch_room::Reservation, runner_tokens::Outage};
use crate::controllers::{Error, Next, drive, reference};

/// Actions in one reconciliation: a claim needs about six from Pending to Ready, and more where machines are replaced.
const MAX_ACTIONS: usize = 16;
/// Concurrent reconciliations; each may wait for a call to GitHub and several to AWS.
const CONCURRENCY: u16 = 128;

pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    let stores = &context.shared.stores;
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
    let changed = context.ledger.changed_claims().map(|(pool, claim)| reference(&pool.namespace, &claim));
    let (over, run_completed) = unbounded();
    let (admitted, admissions) = unbounded();
    let controller = Controller::for_shared_stream(stores.claims.stream(), stores.claims.store.clone())
        .watches_shared_stream(supplies(stores.pools.stream()), claims_of_pool)
        .reconcile_on(changed)
        .reconcile_on(run_completed)
        .reconcile_on(admissions)
        .with_config(controller::Config::default().concurrency(CONCURRENCY));
    tokio::join!(
        drive("claim", controller, context.clone(), context.shared.metrics.clone(), stop.clone(), reconcile),
        super::workflow_runs::poll(context.clone(), over, stop.clone()),
        super::waiting_line::watch(context.clone(), admitted, stop),
    );
}

/// Pools with a change that is relevant to their claims. Their worker counts change all the time and are not.
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

async fn reconcile(claim: Arc<RunnerClaim>, context: Arc<Ec2Context>) -> Result<Next, Error> {
    let namespace = claim.namespace().unwrap_or_default();
    // A claim without a pool's name chooses a board pool by its labels.
    let Some(name) = &claim.spec.pool else { return Ok(Next::AwaitChange) };
    let pool = context.shared.stores.pools.store.get(&reference(&namespace, name));
    if let Some(pool) = &pool {
        if !matches!(pool.spec.hardware(), Some(Hardware::Ec2(_))) {
            return Ok(Next::AwaitChange);
        }
        if !context.ledger.is_loaded() {
            return Ok(Next::After(AGENT_CHECK_PERIOD));
        }
    }
    let needs_finalizer = pool.is_some() && claim.metadata.deletion_timestamp.is_none();
    let claim = match needs_finalizer && !objects::has_finalizer(&*claim) {
        false => claim,
        true => match objects::add_finalizer(&context.shared.client, &*claim).await? {
            Some(claim) => Arc::new(claim),
            None => return Err(Error::Conflict),
        },
    };
    Box::pin(Work::new(context, claim, pool).run()).await
}

/// One reconciliation of one claim.
struct Work {
    context: Arc<Ec2Context>,
    /// As read or last written.
    claim: Arc<RunnerClaim>,
    pool: Option<Arc<RunnerPool>>,
    name: String,
    namespace: String,
    /// The status to write next.
    status: RunnerClaimStatus,
    last: Applied,
    pool_exhausted: bool,
    /// What EC2 offers; asked only before something is ordered.
    offer: Option<Offer>,
    /// Held from the order until the records of its machines count instead.
    room: Option<Reservation>,
    /// Held while the claim acquires machines.
    urgent: Option<UrgentGuard>,
    /// Of the next progress status.
    turn: Option<Turn>,
}

/// The facts that an action is decided from, besides the claim itself.
struct Observed {
    machines: Vec<Machine>,
    pool: Option<Arc<RunnerPool>>,
    admission: Admission,
    capacity: CapacityMemory,
    run_completed: bool,
}

impl Work {
    fn new(context: Arc<Ec2Context>, claim: Arc<RunnerClaim>, pool: Option<Arc<RunnerPool>>) -> Self {
        Self {
            context,
            name: claim.name_any(),
            namespace: claim.namespace().unwrap_or_default(),
            status: claim_status::initial(&claim, clock::now()),
            claim,
            pool,
            last: Applied::default(),
            pool_exhausted: false,
            offer: None,
            room: None,
            urgent: None,
            turn: None,
        }
    }

    /// Takes several actions, so that a claim on a warm pool is Ready in one reconciliation.
    async fn run(&mut self) -> Result<Next, Error> {
        for _ in 0..MAX_ACTIONS {
            let observed = self.observe();
            let action = decide(&self.facts(&observed), clock::now());
            tracing::debug!(claim = %self.name, ?action, "next action");
            self.status = self.status_after(&observed, &action, &Applied::UnderWay);
            let applied = self.apply(&observed, &action).await;
            match self.report(&observed, &action, applied).await? {
                ControlFlow::Continue(()) => {}
                ControlFlow::Break(next) => return Ok(next),
            }
        }
        self.write().await?;
        Ok(Next::After(AGENT_CHECK_PERIOD))
    }

    fn observe(&self) -> Observed {
        Observed {
            machines: self.context.ledger.of_claim(&self.pool_key(), self.reference()),
            pool: self.pool.clone(),
            admission: self.context.admission(&self.claim, &self.status, self.pool.as_deref(), self.pool_exhausted),
            capacity: self.context.capacity_memory().clone(),
            run_completed: JobFacts::of(&self.claim).run_completed || self.context.runs.is_over(&self.claim),
        }
    }

    fn facts<'a>(&'a self, observed: &'a Observed) -> ClaimFacts<'a> {
        ClaimFacts {
            claim: &self.claim,
            status: &self.status,
            pool: self.pool_view(observed),
            machines: &observed.machines,
            admission: &observed.admission,
            capacity: &observed.capacity,
            offer: self.offer.as_ref(),
            cluster: &self.context.shared.settings.cluster_name,
            pool_exhausted: self.pool_exhausted,
            run_completed: observed.run_completed,
            reruns: observed.ec2().is_some_and(|pool| pool.rerun_interrupted),
            last: &self.last,
        }
    }

    fn pool_view<'a>(&self, observed: &'a Observed) -> PoolView<'a> {
        let is_live = |machine: &Machine| machine.record.state != State::Terminated;
        PoolView::of(&self.claim.spec, observed.pool.as_deref(), observed.machines.iter().any(is_live))
    }

    fn status_after(&self, observed: &Observed, action: &ClaimAction, applied: &Applied) -> RunnerClaimStatus {
        claim_status::status(&self.facts(observed), action, applied, clock::now())
    }

    async fn apply(&mut self, observed: &Observed, action: &ClaimAction) -> Result<Applied, Error> {
        match action {
            // These change only the status.
            ClaimAction::Nothing
            | ClaimAction::Wait(_)
            | ClaimAction::Serve
            | ClaimAction::Watch
            | ClaimAction::Release(_) => Ok(Applied::Done),
            ClaimAction::Return(ids) => self.give_back(&observed.chosen(ids)).await,
            ClaimAction::Abandon(wait) => {
                self.room = None;
                let abandoned = self.return_all().await?;
                if abandoned == Applied::Done && self.status.fleet.is_some() {
                    self.event(EventType::Warning, wait.reason.as_str(), wait.message.clone());
                }
                Ok(abandoned)
            }
            ClaimAction::Finish(..) | ClaimAction::Settle => {
                if let ClaimAction::Finish(_, ClaimReason::ValidationFailed, why) = action {
                    let generation = self.pool.as_ref().and_then(|pool| pool.metadata.generation);
                    self.context.pools.note_failed_boot(&self.pool_key(), generation, why.clone());
                }
                self.return_all().await
            }
            ClaimAction::Dump(why) => {
                self.room = None;
                self.dump(why).await
            }
            ClaimAction::Rerun(step) => self.rerun(step).await,
            ClaimAction::Finalize => self.finalize().await,
            ClaimAction::Select(_)
            | ClaimAction::LookUpOffer
            | ClaimAction::PlaceOrder(_)
            | ClaimAction::MakeRoom { .. }
            | ClaimAction::SendOrder(_)
            | ClaimAction::FallBack { .. }
            | ClaimAction::Seal(_)
            | ClaimAction::Replace(_)
            | ClaimAction::AwaitAgents
            | ClaimAction::Start(_) => Box::pin(self.acquire(observed, action)).await,
        }
    }

    /// One status write at most. An outage of AWS is reported before its error is returned.
    async fn report(
        &mut self,
        observed: &Observed,
        action: &ClaimAction,
        applied: Result<Applied, Error>,
    ) -> Result<ControlFlow<Next>, Error> {
        let (applied, outage) = match applied {
            Ok(applied) => (applied, Ok(())),
            Err(Error::Aws(error)) if action.provisions() && !error.is_transient() => {
                tracing::warn!(claim = %self.name, namespace = self.namespace, %error, "provisioning failed");
                let (tries, message) = (self.status.failed_tries.unwrap_or_default() + 1, error.to_string());
                (Applied::Failed { tries, message }, Ok(()))
            }
            Err(Error::Aws(error)) => {
                (Applied::Unavailable(ClaimReason::AwsUnavailable, error.to_string()), Err(error))
            }
            Err(error) => return Err(error),
        };
        let status = self.status_after(observed, action, &applied);
        if let Some((reason, message)) = claim_status::newly_lost(&self.status, &status) {
            self.event(EventType::Warning, reason, message.to_owned());
        }
        if let Some((outcome, message)) = claim_status::newly_rerun(&self.status, &status) {
            let is_done = outcome == RerunOutcome::Done;
            let (type_, reason) = if is_done { (EventType::Normal, "Rerun") } else { (EventType::Warning, "NotRerun") };
            self.event(type_, reason, format!("run {}: {message}", self.claim.spec.run_id));
        }
        self.status = status;
        let (write, next) = next(action, &applied, clock::now());
        match action {
            _ if !write => {}
            ClaimAction::Wait(_) | ClaimAction::AwaitAgents => self.write_progress().await?,
            _ => self.write().await?,
        }
        outage?;
        if *action == ClaimAction::Serve {
            self.served().await;
        }
        if let Applied::Selected { exhausted } = applied {
            self.pool_exhausted = exhausted;
        }
        self.last = applied;
        Ok(next)
    }

    async fn served(&self) {
        if let Some(created) = &self.claim.metadata.creation_timestamp {
            let seconds = clock::now().duration_since(created.0).as_secs_f64();
            self.context.shared.metrics.claim_seconds.observe(seconds);
        }
        self.context.tokens.forget(&self.uid()).await;
    }

    fn uid(&self) -> String {
        self.claim.uid().unwrap_or_default()
    }

    /// The reference to the claim in its machines' records.
    fn reference(&self) -> ClaimRef<'_> {
        claim_ref(&self.claim)
    }

    fn pool_key(&self) -> PoolKey {
        PoolKey::new(&self.namespace, self.claim.spec.pool.as_deref().unwrap_or_default())
    }

    fn held(&self) -> Vec<Machine> {
        let live = |machine: &Machine| machine.record.state != State::Terminated;
        self.context.ledger.of_claim(&self.pool_key(), self.reference()).into_iter().filter(live).collect()
    }

    async fn token(&self, pool: &Ec2Pool) -> Result<SecretString, Outage> {
        self.context.registration_token(&self.namespace, pool, self.uid()).await
    }

    /// Writes a status that only reports what the claim waits for.
    async fn write_progress(&mut self) -> Result<(), Error> {
        self.urgent = None;
        let turn = self.turn.take();
        if self.is_written() {
            return Ok(());
        }
        let turn = match turn {
            Some(turn) => turn,
            None => self.context.shared.background.turn().await,
        };
        self.write_with(&turn.client).await
    }

    async fn write(&mut self) -> Result<(), Error> {
        let client = self.context.shared.client.clone();
        self.write_with(&client).await
    }

    fn is_written(&self) -> bool {
        self.claim.status.as_ref() == Some(&self.status)
    }

    async fn write_with(&mut self, client: &Client) -> Result<(), Error> {
        if self.is_written() {
            return Ok(());
        }
        let written = objects::replace_status(client, &*self.claim, &self.status).await?;
        let mut written = written.ok_or(Error::Conflict)?;
        let before = self.claim.status.as_ref().map(|status| status.phase_times.clone()).unwrap_or_default();
        // The next write is compared with this status; the API server's copy has truncated timestamps.
        written.status = Some(self.status.clone());
        self.claim = Arc::new(written);
        for entered in claim_status::entered(&before, &self.status) {
            let type_ = if entered.phase == ClaimPhase::Failed { EventType::Warning } else { EventType::Normal };
            self.context.shared.events.record(
                &*self.claim,
                type_,
                entered.phase.as_str(),
                &entered.reason,
                entered.note,
            );
        }
        Ok(())
    }

    fn event(&self, type_: EventType, reason: &str, note: String) {
        self.context.shared.events.record(&*self.claim, type_, "Claim", reason, note);
    }
}

impl Observed {
    fn ec2(&self) -> Option<&Ec2Pool> {
        self.pool.as_ref()?.spec.ec2.as_ref()
    }

    fn chosen(&self, ids: &[String]) -> Vec<Machine> {
        self.machines.iter().filter(|machine| ids.contains(&machine.record.instance_id)).cloned().collect()
    }
}

impl From<Outage> for Applied {
    fn from(outage: Outage) -> Self {
        Self::Unavailable(ClaimReason::GitHubUnavailable, outage.message().to_owned())
    }
}
