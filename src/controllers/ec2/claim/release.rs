//! Returns the machines that a claim holds.

use paddock_core::{
    api::FailureReason,
    ec2::{claim::Applied, machine::Machine},
};
use paddock_effects::kube::objects;

use super::{Error, Outage, Work};
use crate::controllers::ec2::machines::Returned;

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

    /// Terminates all machines of the claim. One that cannot be terminated does not keep the others.
    pub(super) async fn dump(&self, why: &str) -> Result<Applied, Error> {
        let mut outcome = Ok(());
        for machine in self.held() {
            let ended = self.context.end_instance(&machine.record.instance_id, FailureReason::Dumped, why).await;
            outcome = outcome.and(ended);
        }
        outcome?;
        Ok(if self.held().is_empty() { Applied::Done } else { Applied::Incomplete })
    }

    /// Returns machines of the pool to it, and terminates those that never ran.
    pub(super) async fn give_back(&self, held: &[Machine]) -> Result<Applied, Error> {
        let Some(ec2) = self.pool.as_ref().and_then(|pool| pool.spec.ec2.as_ref()) else { return Ok(Applied::Done) };
        match self.context.give_back(&self.namespace, ec2, held).await? {
            Returned::Done => Ok(Applied::Done),
            // Deletion must not block: the machines end, and GitHub removes their runners later.
            Returned::NoToken(Outage::NoCredentials(why)) if self.claim.metadata.deletion_timestamp.is_some() => {
                let why = format!("the claim was deleted, and its runner cannot leave GitHub: {why}");
                self.context.end_unreleased(held, &why).await?;
                Ok(Applied::Done)
            }
            Returned::NoToken(outage) => Ok(outage.into()),
        }
    }
}
