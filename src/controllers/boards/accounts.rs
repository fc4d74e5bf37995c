//! Where runners are registered, and with which credentials.

use std::time::Duration;

use jiff::SignedDuration;
use paddock_core::{
    api::{BoardPool, BoardWorker, Owner},
    demand::quota::{self, NoRepository, Scope},
};
use paddock_effects::{
    clock,
    github::{
        GitHubError,
        credentials::{Credentials, CredentialsError},
    },
};

use super::{BoardContext, RESYNC_PERIOD};

/// How soon a call is retried after a transient failure.
const TRANSIENT_RETRY: Duration = Duration::from_secs(2);

/// A scope and group that GitHub lists runners for, and the Secret to authenticate with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RunnerScope {
    pub namespace: String,
    pub secret: String,
    pub scope: Scope,
    /// The runner group of an organisation; a repository has none.
    pub group: String,
}

impl RunnerScope {
    pub fn of(
        namespace: &str,
        pool: &BoardPool,
        owner: &Owner,
        repository: Option<&str>,
    ) -> Result<Self, NoRepository> {
        let scope = Scope::of(owner, repository)?;
        let group = match scope {
            Scope::Organization(_) => pool.github.runner_group.clone(),
            Scope::Repository { .. } => String::new(),
        };
        let secret = quota::credentials_ref(pool, owner).name.clone();
        Ok(Self { namespace: namespace.to_owned(), secret, scope, group })
    }
}

pub struct Account {
    pub credentials: Credentials,
    pub scope: Scope,
}

/// Why GitHub cannot be called about a runner.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    #[error(transparent)]
    NoRepository(#[from] NoRepository),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error(transparent)]
    GitHub(#[from] GitHubError),
}

impl AccountError {
    /// How long to wait before a retry.
    pub fn retry(&self) -> Duration {
        match self {
            Self::GitHub(GitHubError::RateLimited { until }) => {
                let wait = until.duration_since(clock::now()).max(SignedDuration::from_secs(1));
                wait.unsigned_abs().min(Duration::from_secs(600))
            }
            Self::GitHub(GitHubError::NoAnswer(pause)) => *pause + Duration::from_secs(1),
            Self::GitHub(GitHubError::Unavailable(_) | GitHubError::NameTaken) => TRANSIENT_RETRY,
            Self::GitHub(GitHubError::Busy) => Duration::from_secs(60),
            Self::NoRepository(_) | Self::Credentials(_) | Self::GitHub(_) => RESYNC_PERIOD,
        }
    }

    pub fn is_final(&self) -> bool {
        match self {
            Self::GitHub(error) => error.is_final(),
            Self::NoRepository(_) => true,
            Self::Credentials(_) => false,
        }
    }
}

impl BoardContext {
    /// The credentials and the scope that a worker's runner is registered with.
    pub async fn account(
        &self,
        namespace: &str,
        pool: &BoardPool,
        worker: &BoardWorker,
    ) -> Result<Account, AccountError> {
        let runner_scope = RunnerScope::of(namespace, pool, &worker.owner, worker.repository.as_deref())?;
        self.account_at(&runner_scope, worker.installation_id).await
    }

    pub async fn account_at(
        &self,
        runner_scope: &RunnerScope,
        installation: Option<i64>,
    ) -> Result<Account, AccountError> {
        let credentials = self.shared.credentials.get_or_last(&runner_scope.namespace, &runner_scope.secret).await?;
        Ok(Account { credentials: credentials.for_installation(installation), scope: runner_scope.scope.clone() })
    }
}
