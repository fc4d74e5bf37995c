//! The GitHub client: runners, runner groups and tokens; `runs.rs` has the jobs.

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use http::Method;
use paddock_core::{demand::quota::Scope, ec2::runner_release::RunnerApplication};
use secrecy::SecretString;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::json;

use super::{credentials::Credentials, error::GitHubError, runner_list::CACHED_LISTS, session::Sessions};
use crate::{cache::ExpiringCache, fence::Fence};

/// The only runner group of a repository.
const DEFAULT_GROUP: i64 = 1;
/// The largest page that GitHub returns.
pub(super) const PER_PAGE: usize = 100;

/// A runner that is registered at GitHub.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct KnownRunner {
    pub id: i64,
    pub name: String,
    /// `online` or `offline`.
    pub status: String,
    pub busy: bool,
}

impl KnownRunner {
    pub fn is_up(&self) -> bool {
        self.busy || self.status == "online"
    }
}

/// The configuration of a new JIT runner. It is a secret: it lets its holder run as this runner.
#[derive(Clone, Debug)]
pub struct JitConfig {
    pub runner_id: i64,
    pub encoded: SecretString,
}

/// The result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    Deleted,
    Gone,
    /// It runs a job and was not removed.
    Busy,
}

/// GitHub's REST API, at the same address for every pool.
#[derive(Clone)]
pub struct GitHub {
    html_url: String,
    pub(super) sessions: Arc<Sessions>,
    groups: Arc<ExpiringCache<GroupKey, i64>>,
    /// By credential and scope.
    pub(super) runner_lists: Arc<ExpiringCache<(String, String), Arc<[RunnerApplication]>>>,
}

/// The credential, organisation and name of a runner group.
type GroupKey = (String, String, String);
/// Limit of cached runner groups; in practice there is one per organisation.
const CACHED_GROUPS: usize = 4096;

/// A page of runners.
#[derive(Deserialize)]
struct RunnerPage {
    runners: Vec<KnownRunner>,
}

impl GitHub {
    pub fn new(api_url: &str, fence: Fence) -> Self {
        let sessions = Arc::new(Sessions::new(api_url.to_owned(), fence));
        Self {
            html_url: html_url(api_url),
            sessions,
            groups: Arc::new(ExpiringCache::new(CACHED_GROUPS)),
            runner_lists: Arc::new(ExpiringCache::new(CACHED_LISTS)),
        }
    }

    /// The web address of GitHub, as in a runner's `config.sh --url`.
    pub fn html_url(&self) -> &str {
        &self.html_url
    }

    pub async fn registration_token(
        &self,
        credentials: &Credentials,
        scope: &Scope,
    ) -> Result<SecretString, GitHubError> {
        self.runner_token(credentials, scope, "registration-token").await
    }

    pub async fn remove_token(&self, credentials: &Credentials, scope: &Scope) -> Result<SecretString, GitHubError> {
        self.runner_token(credentials, scope, "remove-token").await
    }

    async fn runner_token(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        kind: &str,
    ) -> Result<SecretString, GitHubError> {
        #[derive(Deserialize)]
        struct Answer {
            token: String,
        }
        let route = format!("{}/actions/runners/{kind}", scope.route());
        let answer: Answer = self.sessions.call(credentials, scope, Method::POST, &route, None).await?;
        Ok(answer.token.into())
    }

    /// The group's id; creates the group if it does not exist. Public repositories may use it, or their jobs would stay
    /// queued. This is safe because each runner runs only one job.
    pub async fn ensure_runner_group(
        &self,
        credentials: &Credentials,
        org: &str,
        name: &str,
    ) -> Result<i64, GitHubError> {
        let scope = Scope::Organization(org.to_owned());
        let fetch = async {
            let id = match self.find_group(credentials, &scope, name).await? {
                Some(id) => id,
                None => self.create_group(credentials, &scope, name).await?,
            };
            Ok((id, Duration::MAX))
        }
        .boxed();
        self.groups.get_or_fetch(group_key(credentials, org, name), fetch).await
    }

    /// The group's id, if it exists.
    async fn existing_group(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        name: &str,
    ) -> Result<Option<i64>, GitHubError> {
        let fetch = async {
            match self.find_group(credentials, scope, name).await {
                Ok(Some(id)) => Ok((id, Duration::MAX)),
                Ok(None) => Err(None),
                Err(error) => Err(Some(error)),
            }
        }
        .boxed();
        match self.groups.get_or_fetch(group_key(credentials, scope.owner(), name), fetch).await {
            Ok(id) => Ok(Some(id)),
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }

    async fn find_group(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        name: &str,
    ) -> Result<Option<i64>, GitHubError> {
        #[derive(Deserialize)]
        struct Page {
            runner_groups: Vec<Group>,
        }
        for page in 1.. {
            let route = format!("{}/actions/runner-groups?per_page={PER_PAGE}&page={page}", scope.route());
            let found: Page = self.sessions.call(credentials, scope, Method::GET, &route, None).await?;
            if let Some(group) = found.runner_groups.iter().find(|group| group.name.eq_ignore_ascii_case(name)) {
                return Ok(Some(group.id));
            }
            if found.runner_groups.len() < PER_PAGE {
                break;
            }
        }
        Ok(None)
    }

    async fn create_group(&self, credentials: &Credentials, scope: &Scope, name: &str) -> Result<i64, GitHubError> {
        let route = format!("{}/actions/runner-groups", scope.route());
        let body = json!({"name": name, "visibility": "all", "allows_public_repositories": true});
        match self.sessions.call::<Group>(credentials, scope, Method::POST, &route, Some(&body)).await {
            Ok(group) => Ok(group.id),
            // Just created, possibly by an earlier call whose response was lost.
            Err(GitHubError::NameTaken) => {
                let found = self.find_group(credentials, scope, name).await?;
                found.ok_or_else(|| GitHubError::Unavailable(format!("runner group {name} exists and is not listed")))
            }
            Err(error) => Err(error),
        }
    }

    /// Creates a runner for one job. A repository has only the default group.
    pub async fn create_jit_config(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        name: &str,
        labels: &[String],
        group: Option<&str>,
    ) -> Result<JitConfig, GitHubError> {
        #[derive(Deserialize)]
        struct Answer {
            runner: KnownRunner,
            encoded_jit_config: String,
        }
        let group_id = match (scope, group) {
            (Scope::Organization(org), Some(group)) => self.ensure_runner_group(credentials, org, group).await?,
            (Scope::Organization(_) | Scope::Repository { .. }, _) => DEFAULT_GROUP,
        };
        let route = format!("{}/actions/runners/generate-jitconfig", scope.route());
        let body = json!({"name": name, "runner_group_id": group_id, "labels": labels, "work_folder": "_work"});
        let answer = self.sessions.call::<Answer>(credentials, scope, Method::POST, &route, Some(&body)).await;
        if let (Err(GitHubError::NotFound(_)), Scope::Organization(org), Some(group)) = (&answer, scope, group) {
            // The group was deleted: look it up again next time.
            self.groups.invalidate(&group_key(credentials, org, group)).await;
        }
        let answer = answer?;
        Ok(JitConfig { runner_id: answer.runner.id, encoded: answer.encoded_jit_config.into() })
    }

    pub async fn runner_by_name(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        name: &str,
    ) -> Result<Option<KnownRunner>, GitHubError> {
        let route = format!("{}/actions/runners?name={name}&per_page={PER_PAGE}", scope.route());
        let page: RunnerPage = self.sessions.call(credentials, scope, Method::GET, &route, None).await?;
        Ok(page.runners.into_iter().find(|runner| runner.name.eq_ignore_ascii_case(name)))
    }

    /// Lists the runners of an organisation's group or of a repository. It is a background call, which is refused while
    /// little of the rate limit is left.
    pub async fn runners(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        group: &str,
    ) -> Result<Vec<KnownRunner>, GitHubError> {
        let list = match scope {
            Scope::Repository { .. } => format!("{}/actions/runners", scope.route()),
            Scope::Organization(_) => match self.existing_group(credentials, scope, group).await? {
                Some(id) => format!("{}/actions/runner-groups/{id}/runners", scope.route()),
                // The group is created with the first runner.
                None => return Ok(vec![]),
            },
        };
        let mut all = Vec::new();
        for page in 1.. {
            let route = format!("{list}?per_page={PER_PAGE}&page={page}");
            let found = self.sessions.get_in_background::<RunnerPage>(credentials, scope, &route).await;
            if let (Err(GitHubError::NotFound(_)), Scope::Organization(org)) = (&found, scope) {
                // The group was deleted: look it up again next time.
                self.groups.invalidate(&group_key(credentials, org, group)).await;
            }
            let found = found?.runners;
            let last = found.len() < PER_PAGE;
            all.extend(found);
            if last {
                break;
            }
        }
        Ok(all)
    }

    pub async fn delete_runner(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        id: i64,
    ) -> Result<Removal, GitHubError> {
        let route = format!("{}/actions/runners/{id}", scope.route());
        match self.sessions.call::<Option<IgnoredAny>>(credentials, scope, Method::DELETE, &route, None).await {
            Ok(_) => Ok(Removal::Deleted),
            Err(GitHubError::NotFound(_)) => self.sees_runners(credentials, scope).await.map(|()| Removal::Gone),
            // GitHub refuses to delete a runner only while it runs a job.
            Err(GitHubError::Refused(_)) => Ok(Removal::Busy),
            Err(error) => Err(error),
        }
    }

    /// Whether a 404 is about a runner itself: a renamed organisation's old name, for example, is answered 404 too.
    async fn sees_runners(&self, credentials: &Credentials, scope: &Scope) -> Result<(), GitHubError> {
        let route = format!("{}/actions/runners?per_page=1", scope.route());
        let _: RunnerPage = self.sessions.call(credentials, scope, Method::GET, &route, None).await?;
        Ok(())
    }

    /// Removes the runner with this name. It lists runners first: an empty list proves that there is none, while a 404
    /// may also mean that the App has lost its permissions.
    pub async fn remove_runner(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        name: &str,
    ) -> Result<Removal, GitHubError> {
        match self.runner_by_name(credentials, scope, name).await? {
            None => Ok(Removal::Gone),
            Some(runner) if runner.busy => Ok(Removal::Busy),
            Some(runner) => self.delete_runner(credentials, scope, runner.id).await,
        }
    }
}

fn group_key(credentials: &Credentials, org: &str, group: &str) -> GroupKey {
    (credentials.fingerprint.clone(), org.to_lowercase(), group.to_lowercase())
}

#[derive(Deserialize)]
struct Group {
    id: i64,
    name: String,
}

/// The API of github.com and of GitHub Enterprise Cloud with data residency is at `api.HOST`, that of GitHub Enterprise
/// Server at `HOST/api/v3`.
fn html_url(api_url: &str) -> String {
    let url = api_url.trim_end_matches('/');
    match url.strip_suffix("/api/v3") {
        Some(host) => host.to_owned(),
        None => url.replacen("://api.", "://", 1),
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
