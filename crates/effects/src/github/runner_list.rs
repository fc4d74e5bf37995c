//! The runners that GitHub lists for download.

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use paddock_core::{demand::quota::Scope, ec2::runner_release::RunnerApplication};

use super::{client::GitHub, credentials::Credentials, error::GitHubError};

/// How long a list is used before GitHub is asked whether it has changed. A new runner comes about once a month, and the old one is
/// taken for another one.
const LIST_LIFETIME: Duration = Duration::from_hours(3);

/// Limit of cached lists; in practice there is one per organisation.
pub(super) const CACHED_LISTS: usize = 4096;

impl GitHub {
    /// The runners that GitHub lists now; its last list while it does not answer.
    pub async fn runner_list(
        &self,
        credentials: &Credentials,
        scope: &Scope,
    ) -> Result<Arc<[RunnerApplication]>, GitHubError> {
        let key = (credentials.fingerprint.clone(), scope.to_string());
        let last = self.runner_lists.last(&key).await;
        let route = format!("{}/actions/runners/downloads", scope.route());
        let fetch = async {
            let runners = self.sessions.get_in_background::<Vec<RunnerApplication>>(credentials, scope, &route).await?;
            Ok((Arc::from(runners), LIST_LIFETIME))
        }
        .boxed();
        let list = self.runner_lists.get_or_fetch(key, fetch).await;
        list.or_else(|error| last.ok_or(error))
    }
}
