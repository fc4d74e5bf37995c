//! What claims and pools both do with an instance.

use jiff::Timestamp;
use paddock_record::{Instance, State};

use super::{Context, reference};
use crate::{
    api::{Ec2Pool, FailureReason},
    effects::{aws::AwsError, machines::Launched, records::Outcome},
    plan::pickup::Needs,
};

impl Context {
    /// The first record of an instance that EC2 just launched: for a run, or for nobody when it is kept warm.
    #[allow(clippy::too_many_arguments)]
    pub fn new_instance(
        &self,
        launched: &Launched,
        pool_key: &str,
        pool: &Ec2Pool,
        needs: &Needs,
        run_id: &str,
        claim: &str,
        now: Timestamp,
    ) -> Instance {
        Instance {
            instance_id: launched.id.clone(),
            state: State::Created,
            run_id: run_id.to_owned(),
            threshold: Some(pool.lifetimes.created.after(now)),
            updated_at: now,
            pool: pool_key.to_owned(),
            claim: claim.to_owned(),
            resource_class: needs.resource_class.clone(),
            instance_type: launched.instance_type.clone(),
            usage_class: launched.usage_class.as_str().to_owned(),
            zone: launched.zone.clone(),
            cpu: needs.cpu,
            mem: needs.memory_mib,
            github_url: github_url(self.github.html_url(), pool),
            sealed: String::new(),
            leaving: String::new(),
            initial_run_id: run_id.to_owned(),
            claims: u32::from(!claim.is_empty()),
            failure_reason: String::new(),
            failure_message: String::new(),
        }
    }

    /// Ends instances whose pool is gone for good, as after somebody removed its finalizer by hand, and forgets them.
    pub async fn end_strays(&self) -> Result<(), AwsError> {
        let watched = |namespace: &str| self.settings.namespace.as_deref().is_none_or(|only| only == namespace);
        for tracked in self.ledger.all() {
            let (id, pool) = (&tracked.record.instance_id, &tracked.record.pool);
            let Some((namespace, name)) = pool.split_once('/').filter(|(namespace, _)| watched(namespace)) else {
                continue;
            };
            if self.stores.pools.store.get(&reference(namespace, name)).is_none() {
                self.end_instance(id, FailureReason::InstanceGone, &format!("there is no pool {pool}")).await?;
                self.ledger.forget(id).await?;
            }
        }
        Ok(())
    }

    /// Ends an instance in two phases: the record first, so that nobody claims it any more, then the machine, then
    /// what its agent wrote. A crash in between is finished by the sweep, which ends machines of ended records.
    pub async fn end_instance(&self, id: &str, reason: FailureReason, why: &str) -> Result<(), AwsError> {
        let now = Timestamp::now();
        let Some(tracked) = self.ledger.get(id) else { return Ok(()) };
        let mut seen = tracked.record;
        while seen.state != State::Terminated {
            let next = Instance {
                state: State::Terminated,
                run_id: String::new(),
                threshold: None,
                updated_at: now,
                sealed: String::new(),
                // What it was registered for, until GitHub is known to have no runner of its name.
                leaving: if seen.run_id.is_empty() { seen.leaving.clone() } else { seen.run_id.clone() },
                failure_reason: reason.as_str().to_owned(),
                failure_message: why.to_owned(),
                ..seen.clone()
            };
            match self.ledger.advance(&seen, &next, now).await? {
                Outcome::Won(ended) => seen = ended,
                // It moved on meanwhile: what we judged is not what it is any more.
                Outcome::Lost(_) => return Ok(()),
            }
        }
        tracing::info!(instance = id, reason = reason.as_str(), why, "ended an instance");
        self.machines.terminate(&[id.to_owned()]).await?;
        self.ledger.records.forget_vitals(id).await
    }
}

/// Where the pool's runners register.
fn github_url(base: &str, pool: &Ec2Pool) -> String {
    let place = [Some(base), Some(&pool.github.owner), pool.github.repository.as_deref()];
    place.into_iter().flatten().collect::<Vec<_>>().join("/")
}
