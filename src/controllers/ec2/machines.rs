//! What claims and pools both do with an instance.

use jiff::Timestamp;
use paddock_core::{
    api::{Ec2Pool, FailureReason},
    ec2::requirements::Requirements,
    names::PoolKey,
};
use paddock_effects::aws::{AwsError, dynamodb::WriteOutcome, ec2::Launched};
use paddock_record::{ClaimRef, Identity, Transition, transition};

use super::Ec2Context;
use crate::controllers::reference;

impl Ec2Context {
    /// The first record of an instance that EC2 just launched, unless it has one: for a claim, or to be kept warm.
    pub fn launch(
        &self,
        launched: &Launched,
        key: &PoolKey,
        pool: &Ec2Pool,
        needs: &Requirements,
        claim: Option<ClaimRef>,
        now: Timestamp,
    ) -> Option<Transition> {
        let identity = Identity {
            instance_id: launched.id.clone(),
            pool: key.to_string(),
            resource_class: needs.resource_class.clone(),
            instance_type: launched.instance_type.clone(),
            usage_class: launched.usage_class.as_str().to_owned(),
            zone: launched.zone.clone(),
            cpu: needs.cpu,
            mem: needs.memory_mib,
            github_url: github_url(self.shared.github.html_url(), pool),
        };
        let known = self.ledger.get(&launched.id).map(|tracked| tracked.record);
        transition::launch(known.as_ref(), identity, claim, pool.lifetimes.created.after(now), now)
    }

    /// Ends instances whose pool is gone for good, as after somebody removed its finalizer by hand, and forgets them.
    pub async fn end_strays(&self) -> Result<(), AwsError> {
        let watched = |namespace: &str| self.shared.settings.namespace.as_deref().is_none_or(|only| only == namespace);
        for tracked in self.ledger.all() {
            let (id, pool) = (&tracked.record.instance_id, &tracked.record.pool);
            let Some(key) = PoolKey::parse(pool).filter(|key| watched(&key.namespace)) else { continue };
            if self.shared.stores.pools.store.get(&reference(&key.namespace, &key.name)).is_none() {
                self.end_instance(id, FailureReason::InstanceGone, &format!("there is no pool {pool}")).await?;
                self.ledger.forget(id).await?;
            }
        }
        Ok(())
    }

    /// Ends an instance in two phases: the record first, so that nobody claims it any more, then the machine, then
    /// what its agent wrote. A crash in between is finished by the sweep, which ends machines of ended records.
    pub async fn end_instance(&self, id: &str, reason: FailureReason, why: &str) -> Result<(), AwsError> {
        let Some(tracked) = self.ledger.get(id) else { return Ok(()) };
        if let Some(ended) = transition::terminate(&tracked.record, reason.as_str(), why, Timestamp::now())
            && let [WriteOutcome::Lost(_)] = self.ledger.apply(vec![ended]).await?[..]
        {
            // It moved on meanwhile: what was decided is not about what it is now.
            return Ok(());
        }
        tracing::info!(instance = id, reason = reason.as_str(), why, "ended an instance");
        self.machines.terminate(&[id.to_owned()]).await?;
        self.ledger.records.forget_report(id).await
    }
}

/// Where the pool's runners register.
fn github_url(base: &str, pool: &Ec2Pool) -> String {
    let place = [Some(base), Some(&pool.github.owner), pool.github.repository.as_deref()];
    place.into_iter().flatten().collect::<Vec<_>>().join("/")
}
