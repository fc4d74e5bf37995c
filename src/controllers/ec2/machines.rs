//! Operations on instances that claims and pools share.

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
    /// The first record of a newly launched instance, for a claim or to be kept warm; `None` if it has one.
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
        let known = self.ledger.get(&launched.id).map(|machine| machine.record);
        transition::launch(known.as_ref(), identity, claim, pool.lifetimes.created.after(now), now)
    }

    /// Ends instances whose pool no longer exists, for example after its finalizer was removed by hand.
    pub async fn end_orphans(&self) -> Result<(), AwsError> {
        let watched = |namespace: &str| self.shared.settings.namespace.as_deref().is_none_or(|only| only == namespace);
        for machine in self.ledger.all() {
            let (id, pool) = (&machine.record.instance_id, &machine.record.pool);
            let Some(key) = PoolKey::parse(pool).filter(|key| watched(&key.namespace)) else { continue };
            if self.shared.stores.pools.store.get(&reference(&key.namespace, &key.name)).is_none() {
                self.end_instance(id, FailureReason::InstanceGone, &format!("there is no pool {pool}")).await?;
                self.ledger.forget(id).await?;
            }
        }
        Ok(())
    }

    /// Ends an instance: the record first, so that it cannot be claimed, then the machine, then its agent's report.
    /// After a crash in between, the sweep terminates machines whose record has ended.
    pub async fn end_instance(&self, id: &str, reason: FailureReason, why: &str) -> Result<(), AwsError> {
        let Some(machine) = self.ledger.get(id) else { return Ok(()) };
        if let Some(ended) = transition::terminate(&machine.record, reason.as_str(), why, Timestamp::now())
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

/// The URL that the pool's runners register with.
fn github_url(base: &str, pool: &Ec2Pool) -> String {
    let parts = [Some(base), Some(&pool.github.owner), pool.github.repository.as_deref()];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}
