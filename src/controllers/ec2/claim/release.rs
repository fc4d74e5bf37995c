//! Returns the machines that a claim holds.

use jiff::Timestamp;
use paddock_core::{
    api::FailureReason,
    ec2::{claim::Applied, machine::Machine},
};
use paddock_effects::kube::objects;
use paddock_record::{State, transition};

use super::{Error, Outage, TokenKind, Work, sealed};

impl Work {
    /// Removes the finalizer of a deleted claim once it holds no machines.
    pub(super) async fn finalize(&self) -> Result<Applied, Error> {
        let returned = if self.pool.is_some() { self.return_all().await? } else { Applied::Done };
        if returned == Applied::Done {
            objects::remove_finalizer(&self.context.shared.client, &*self.claim).await?;
        }
        Ok(returned)
    }

    pub(super) async fn return_all(&self) -> Result<Applied, Error> {
        match self.give_back(&self.held()).await? {
            Applied::Done if !self.held().is_empty() => Ok(Applied::Incomplete),
            applied => Ok(applied),
        }
    }

    /// Returns machines of the pool to it, and terminates those that never ran.
    pub(super) async fn give_back(&self, held: &[Machine]) -> Result<Applied, Error> {
        let Some(ec2) = self.pool.as_ref().and_then(|pool| pool.spec.ec2.as_ref()).filter(|_| !held.is_empty()) else {
            return Ok(Applied::Done);
        };
        let token = match self.token(ec2, TokenKind::Removal).await {
            Ok(token) => token,
            // Deletion must not block: the machines end, and GitHub removes their runners later.
            Err(Outage::NoCredentials(why)) if self.claim.metadata.deletion_timestamp.is_some() => {
                let why = format!("the claim was deleted, and its runner cannot leave GitHub: {why}");
                for machine in held {
                    let id = &machine.record.instance_id;
                    self.context.end_instance(id, FailureReason::DeregistrationFailed, &why).await?;
                }
                return Ok(Applied::Done);
            }
            Err(outage) => return Ok(outage.into()),
        };
        let now = Timestamp::now();
        let threshold = ec2.lifetimes.idle.after(now);
        let mut transitions = Vec::new();
        for machine in held {
            let record = &machine.record;
            match (record.state, transition::release(record, sealed(machine, &token), threshold, now)) {
                (_, Some(released)) => transitions.push(released),
                (State::Idle | State::Terminated, None) => {}
                (State::Created | State::Running | State::Claimed, None) => {
                    let why = "the claim ended before the machine served";
                    self.context.end_instance(&record.instance_id, FailureReason::CreationAborted, why).await?;
                }
            }
        }
        self.context.ledger.apply(transitions).await?;
        Ok(Applied::Done)
    }
}
