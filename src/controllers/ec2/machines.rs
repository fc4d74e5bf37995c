//! Operations on instances that claims and pools share.

use jiff::Timestamp;
use paddock_core::{
    api::{ClaimPhase, Ec2Pool, FailureReason, LaunchOrder, LaunchTemplate, RunnerPool},
    ec2::{
        claim::{Offer, claim_ref},
        machine::Machine,
        requirements::Requirements,
    },
    names::PoolKey,
};
use paddock_effects::{
    aws::{AwsError, dynamodb::WriteOutcome, ec2::Launched},
    clock,
};
use paddock_record::{ClaimRef, Identity, Instance, State, Transition, log_tail, transition};

use super::{
    Ec2Context,
    launch_room::Limits,
    runner_tokens::{Outage, sealed},
    waiting_line::is_of,
};
use crate::controllers::reference;

/// What the return of machines came to.
pub enum Returned {
    Done,
    NoToken(Outage),
}

impl Ec2Context {
    /// What EC2 offers for machines of a pool. That the types cannot be counted keeps nothing from being ordered.
    pub async fn offer(
        &self,
        key: &PoolKey,
        spec: &Ec2Pool,
        template: &LaunchTemplate,
        needs: &Requirements,
    ) -> Result<Offer, AwsError> {
        let site = match self.pools.site(key, spec) {
            Some(site) => site,
            None => {
                let image = template.image.as_deref().or(spec.ami.id.as_deref()).unwrap_or_default();
                let site = self.machines.check(spec, image).await?;
                self.pools.note_site(key, site.clone());
                site
            }
        };
        let counted = self.machines.count_types(&site.architecture, needs).await;
        let instance_types = counted.inspect_err(|error| tracing::warn!(pool = %key, %error, "types not counted")).ok();
        Ok(Offer { subnets: site.subnets, instance_types })
    }

    /// The first record of a newly launched instance, for a claim and its scope or to be kept warm; `None` if it has one.
    pub fn launch(
        &self,
        launched: &Launched,
        key: &PoolKey,
        pool: &Ec2Pool,
        order: &LaunchOrder,
        claim: Option<(ClaimRef, &str)>,
        now: Timestamp,
    ) -> Option<Transition> {
        // At least what was ordered, where its size is not known.
        let (cpu, mem) = launched.size.map_or((order.cpu, order.memory_mib), |size| (size.cpu, size.memory_mib));
        let identity = Identity {
            instance_id: launched.id.clone(),
            pool: key.to_string(),
            resource_class: order.resource_class.clone(),
            instance_type: launched.instance_type.clone(),
            usage_class: launched.usage_class.as_str().to_owned(),
            zone: launched.zone.clone(),
            cpu,
            mem,
            github_url: github_url(self.shared.github.html_url(), pool),
            runner_group: pool.github.runner_group.clone().unwrap_or_default(),
            template: order.launch_template.digest.clone().unwrap_or_default(),
            image: order.launch_template.image.clone().unwrap_or_default(),
        };
        let known = self.ledger.get(&launched.id).map(|machine| machine.record);
        let (claim, scope) = claim.unzip();
        let threshold = pool.lifetimes.created.after(now);
        transition::launch(known.as_ref(), identity, claim, scope.unwrap_or_default(), threshold, now)
    }

    /// What limits new machines of a pool.
    pub fn limits(&self, key: &PoolKey, max: u32) -> Limits {
        let live = |machine: &Machine| machine.record.state != State::Terminated;
        let stores = &self.shared.stores;
        let claims = stores.claims.store.state_filter(|claim| is_of(claim, key));
        let statuses = claims.iter().filter_map(|claim| claim.status.as_ref());
        let unfinished = statuses.filter(|status| !status.phase.is_some_and(ClaimPhase::is_over));
        let orders = unfinished.filter_map(|status| status.fleet.as_deref());
        let pool = stores.pools.store.get(&reference::<RunnerPool>(&key.namespace, &key.name));
        let own = pool.as_ref().and_then(|pool| pool.status.as_ref()?.fleet.as_deref());
        let open = orders.filter(|order| order.instance_ids.is_empty()).chain(own);
        Limits {
            max,
            live: self.ledger.count(key, live),
            open: open.map(|order| (order.client_token.clone(), order.requested)).collect(),
        }
    }

    /// Returns machines of the pool to it, and terminates those that never ran.
    pub async fn give_back(&self, namespace: &str, pool: &Ec2Pool, held: &[Machine]) -> Result<Returned, AwsError> {
        if held.is_empty() {
            return Ok(Returned::Done);
        }
        let token = match self.removal_token(namespace, pool).await {
            Ok(token) => token,
            Err(outage) => return Ok(Returned::NoToken(outage)),
        };
        let now = clock::now();
        let threshold = pool.lifetimes.idle.after(now);
        let mut transitions = Vec::new();
        for machine in held {
            let record = &machine.record;
            match (record.state, transition::release(record, sealed(machine, &token), threshold, now)) {
                (_, Some(released)) => transitions.push(released),
                (State::Idle | State::Terminated | State::Unknown, None) => {}
                (State::Created | State::Running | State::Claimed, None) => {
                    let why = "the claim ended before the machine served";
                    self.end_instance(&record.instance_id, FailureReason::CreationAborted, why).await?;
                }
            }
        }
        self.ledger.apply(transitions).await?;
        Ok(Returned::Done)
    }

    /// Terminates machines that cannot deregister from GitHub.
    pub async fn end_unreleased(&self, held: &[Machine], why: &str) -> Result<(), AwsError> {
        for machine in held {
            self.end_instance(&machine.record.instance_id, FailureReason::DeregistrationFailed, why).await?;
        }
        Ok(())
    }

    /// Whether the claim that a machine's record names exists.
    pub fn claim_exists(&self, record: &Instance) -> bool {
        let Some(pool) = PoolKey::parse(&record.pool) else { return false };
        let claim = self.shared.stores.claims.store.get(&reference(&pool.namespace, &record.claim));
        claim.is_some_and(|claim| record.serves(claim_ref(&claim)))
    }

    /// Ends instances whose pool no longer exists, for example after its finalizer was removed by hand.
    pub async fn end_orphans(&self) -> Result<(), AwsError> {
        let watched = |namespace: &str| self.shared.settings.namespace.as_deref().is_none_or(|only| only == namespace);
        let (pools, mut outcome) = (&self.shared.stores.pools.store, Ok(()));
        let exists = |key: &PoolKey| pools.get(&reference(&key.namespace, &key.name)).is_some();
        for machine in self.ledger.all() {
            let (id, pool) = (&machine.record.instance_id, &machine.record.pool);
            let gone = match PoolKey::parse(pool) {
                None => Some("its record names no pool".to_owned()),
                Some(key) if watched(&key.namespace) && !exists(&key) => Some(format!("there is no pool {pool}")),
                Some(_) => None,
            };
            if let Some(why) = gone {
                let ended = match self.end_instance(id, FailureReason::InstanceGone, &why).await {
                    Ok(()) => self.ledger.forget(id).await,
                    Err(error) => Err(error),
                };
                outcome = outcome.and(ended);
            }
        }
        outcome
    }

    /// Ends an instance: the record first, so that it cannot be claimed, then the machine, then its agent's report.
    /// After a crash in between, the sweep terminates machines whose record has ended.
    pub async fn end_instance(&self, id: &str, reason: FailureReason, why: &str) -> Result<(), AwsError> {
        let Some(machine) = self.ledger.get(id) else { return Ok(()) };
        let log = self.last_words(&machine).await;
        if let Some(ended) = transition::terminate(&machine.record, reason.as_str(), why, &log, clock::now())
            && let [WriteOutcome::Lost(_)] = self.ledger.apply(vec![ended]).await?[..]
        {
            // The record has changed, so the decision no longer applies.
            return Ok(());
        }
        tracing::info!(instance = id, reason = reason.as_str(), why, "instance ended");
        self.machines.terminate(&[id.to_owned()]).await?;
        self.ledger.records.forget_report(id).await
    }
}

impl Ec2Context {
    /// What a machine said last: its agent or, before that has started, its console.
    async fn last_words(&self, machine: &Machine) -> String {
        let silent = machine.record.state == State::Created && !machine.has_spoken();
        match machine.failure_log() {
            "" if silent => match self.machines.console(&machine.record.instance_id).await {
                Ok(output) => log_tail(&output).to_owned(),
                Err(error) => format!("the output of its console cannot be read: {error}"),
            },
            log => log.to_owned(),
        }
    }
}

/// The URL that the pool's runners register with.
fn github_url(base: &str, pool: &Ec2Pool) -> String {
    let parts = [Some(base), Some(&pool.github.owner), pool.github.repository.as_deref()];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}
