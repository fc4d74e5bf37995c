//! Deletes finished claims, on EC2 and on boards, after their retention time.

use std::{sync::Arc, time::Duration};

use jiff::SignedDuration;
use kube::{
    ResourceExt,
    api::{DeleteParams, Preconditions},
};
use paddock_core::{api::RunnerClaim, retention::is_outdated};
use paddock_effects::{clock, kube::objects};
use tokio_util::sync::CancellationToken;

use super::{Shared, every};

/// How often claims are checked, unless their retention time is less than ten times this.
const MAX_CHECK_PERIOD: Duration = Duration::from_secs(60);

/// How often to check for expired objects.
pub fn period(retention: Duration) -> Duration {
    MAX_CHECK_PERIOD.min(retention / 10).max(Duration::from_secs(1))
}

pub async fn run(shared: Arc<Shared>, stop: CancellationToken) {
    let retention = shared.settings.retention;
    let period = period(retention);
    let retention = SignedDuration::try_from(retention).unwrap_or(SignedDuration::MAX);
    every("retention", period, shared.metrics.clone(), stop, || async {
        let now = clock::now();
        for claim in shared.stores.claims.store.state_filter(|claim| is_outdated(claim, retention, now)) {
            if let Err(error) = delete(&shared, &claim).await {
                tracing::warn!(claim = claim.name_any(), %error, "finished claim not deleted");
            }
        }
        Ok(())
    })
    .await;
}

/// Deletes only the observed version of the claim: one of the same name may have been created since.
async fn delete(shared: &Shared, claim: &RunnerClaim) -> kube::Result<()> {
    let preconditions = Preconditions { uid: claim.uid(), resource_version: claim.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match objects::api(&shared.client, claim).delete(&claim.name_any(), &parameters).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
        Err(error) => Err(error),
    }
}
