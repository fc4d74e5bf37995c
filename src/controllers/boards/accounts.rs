//! Where runners are registered, and with which credentials.

use std::time::Duration;

use jiff::SignedDuration;
use paddock_core::{
    api::{BoardPool, BoardWorker, Owner},
    boards::removal::Obstacle,
    demand::{
        quota::{self, NoRepository, Registration, Scope},
        refusals::Subject,
    },
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

    pub fn registration(&self) -> Registration {
        let Self { namespace, secret, scope, .. } = self.clone();
        Registration { namespace, secret, scope }
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

    /// What the failure to register a runner belongs to, besides its claim: others that share it wait.
    pub fn subject(&self, registration: Registration) -> Option<Subject> {
        match self {
            Self::Credentials(_) | Self::GitHub(GitHubError::Unauthorized(_)) => {
                Some(Subject::credentials(&registration))
            }
            Self::GitHub(
                GitHubError::NotFound(_)
                | GitHubError::NoInstallation(_)
                | GitHubError::Forbidden(_)
                | GitHubError::RateLimited { .. }
                | GitHubError::Unavailable(_)
                | GitHubError::NoAnswer(_)
                | GitHubError::Unexpected(_),
            ) => Some(Subject::Owner(registration)),
            // The claim's own labels, and its runner's name.
            Self::GitHub(
                GitHubError::Refused(_) | GitHubError::NameTaken | GitHubError::Busy | GitHubError::Fenced(_),
            )
            | Self::NoRepository(_) => None,
        }
    }

    /// Whether the same happens to every question about the owner's jobs, whatever their repository.
    pub fn is_of_owner(&self) -> bool {
        match self {
            Self::Credentials(_) => true,
            Self::GitHub(error) => match error {
                GitHubError::NoInstallation(_)
                | GitHubError::Unauthorized(_)
                | GitHubError::RateLimited { .. }
                | GitHubError::NoAnswer(_)
                | GitHubError::Fenced(_) => true,
                GitHubError::NotFound(_)
                | GitHubError::Forbidden(_)
                | GitHubError::NameTaken
                | GitHubError::Busy
                | GitHubError::Unavailable(_)
                | GitHubError::Refused(_)
                | GitHubError::Unexpected(_) => false,
            },
            Self::NoRepository(_) => false,
        }
    }

    /// Why a runner was not removed. `deleting`: its pool is being deleted, and the credentials may go first.
    pub fn obstacle(&self, deleting: bool) -> Obstacle {
        match self {
            Self::NoRepository(_) => Obstacle::Final,
            Self::Credentials(CredentialsError::Missing(_)) if deleting => Obstacle::Final,
            Self::Credentials(_) | Self::GitHub(GitHubError::Unexpected(_)) => Obstacle::Refused,
            Self::GitHub(error) if error.is_final() => Obstacle::Refused,
            Self::GitHub(_) => Obstacle::Outage,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_belongs_to_the_claim_the_credentials_or_the_owner() {
        let place =
            Registration { namespace: "ci".into(), secret: "app".into(), scope: Scope::Organization("acme".into()) };
        let (owner, credentials) = (Some(Subject::Owner(place.clone())), Some(Subject::credentials(&place)));
        let text = String::new;
        for (error, subject, of_owner, obstacle) in [
            (GitHubError::Refused(text()), None, false, Obstacle::Refused),
            (GitHubError::NameTaken, None, false, Obstacle::Outage),
            (GitHubError::Unauthorized(text()), credentials.clone(), true, Obstacle::Refused),
            (GitHubError::NoInstallation(text()), owner.clone(), true, Obstacle::Refused),
            (GitHubError::Forbidden(text()), owner.clone(), false, Obstacle::Refused),
            (GitHubError::Unexpected(text()), owner.clone(), false, Obstacle::Refused),
            (GitHubError::RateLimited { until: clock::now() }, owner.clone(), true, Obstacle::Outage),
            (GitHubError::NoAnswer(Duration::ZERO), owner, true, Obstacle::Outage),
        ] {
            let error = AccountError::from(error);
            let found = (error.subject(place.clone()), error.is_of_owner(), error.obstacle(false));
            assert_eq!(found, (subject, of_owner, obstacle), "{error:?}");
        }
        let missing = AccountError::from(CredentialsError::Missing("app".into()));
        assert_eq!(missing.subject(place), credentials);
        assert_eq!([false, true].map(|deleting| missing.obstacle(deleting)), [Obstacle::Refused, Obstacle::Final]);
    }
}
