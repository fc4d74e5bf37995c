//! Where runners are registered, and in whose name.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use paddock_core::{
    api::{BoardPool, BoardWorker, Owner},
    demand::quota::{self, NoRepository, Scope},
};
use paddock_effects::github::{
    GitHubError,
    credentials::{Credentials, CredentialsError},
};

use super::{BoardContext, LOOK_AGAIN};

/// How soon a call that went wrong by chance is tried again.
const SOON: Duration = Duration::from_secs(2);

/// A place that GitHub lists runners of, and the Secret to ask with.
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

/// Why a runner cannot be spoken of with GitHub.
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
    /// When it makes sense to try again.
    pub fn retry(&self) -> Duration {
        match self {
            Self::GitHub(GitHubError::RateLimited { until }) => {
                let wait = until.duration_since(Timestamp::now()).max(SignedDuration::from_secs(1));
                wait.unsigned_abs().min(Duration::from_secs(600))
            }
            Self::GitHub(GitHubError::NoAnswer(pause)) => *pause + Duration::from_secs(1),
            Self::GitHub(GitHubError::Unavailable(_) | GitHubError::NameTaken) => SOON,
            Self::GitHub(GitHubError::Busy) => Duration::from_secs(60),
            Self::NoRepository(_) | Self::Credentials(_) | Self::GitHub(_) => LOOK_AGAIN,
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
    /// In whose name, and where, a worker's runner is registered.
    pub async fn account(
        &self,
        namespace: &str,
        pool: &BoardPool,
        worker: &BoardWorker,
    ) -> Result<Account, AccountError> {
        let place = RunnerScope::of(namespace, pool, &worker.owner, worker.repository.as_deref())?;
        self.account_at(&place, worker.installation_id).await
    }

    pub async fn account_at(&self, place: &RunnerScope, installation: Option<i64>) -> Result<Account, AccountError> {
        let credentials = self.shared.credentials.get_or_last(&place.namespace, &place.secret).await?;
        Ok(Account { credentials: credentials.for_installation(installation), scope: place.scope.clone() })
    }
}
