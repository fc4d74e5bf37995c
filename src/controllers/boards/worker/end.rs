//! Ends a worker: removes its runner first, unless it is busy, then its Secret and pod.

use jiff::SignedDuration;
use kube::{
    ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    runtime::events::EventType,
};
use paddock_core::{
    api::{ClaimReason, FIELD_MANAGER, Failure, WorkerState},
    boards::{pod::runner_id, slots::has_ended, worker},
};
use paddock_effects::{
    clock,
    github::{GitHubError, Removal, credentials::CredentialsError},
    kube::objects::{self, KubeError},
};
use serde_json::json;

use super::Work;
use crate::controllers::{
    Error, Next,
    boards::{RESYNC_PERIOD, accounts::AccountError, lock},
};

/// How long refused credentials may block the deletion of an ended worker.
const REFUSED_CREDENTIALS_TIMEOUT: SignedDuration = SignedDuration::from_mins(10);

impl Work<'_> {
    /// A health check failed. GitHub decides: a runner that it reports busy is not removed.
    pub async fn give_up(&self, failure: Failure) -> Result<Next, Error> {
        match self.remove_runner().await {
            Ok(Removal::Deleted | Removal::Gone) => self.fail(failure).await,
            Ok(Removal::Busy) => Ok(self.postpone_removal(failure.reason.as_str())),
            Err(error) => Ok(self.retry_removal(&error)),
        }
    }

    /// No open claim needs the worker.
    pub async fn retire(&self) -> Result<Next, Error> {
        match self.remove_runner().await {
            Ok(Removal::Deleted | Removal::Gone) => {
                tracing::info!(worker = self.name, "deleting surplus worker");
                objects::delete(&objects::api(&self.board.shared.client, self.worker), &self.name).await?;
                Ok(Next::AwaitChange)
            }
            Ok(Removal::Busy) => Ok(self.postpone_removal("surplus")),
            Err(error) => Ok(self.retry_removal(&error)),
        }
    }

    fn postpone_removal(&self, why: &str) -> Next {
        tracing::info!(worker = self.name, why, "runner is busy; removal postponed");
        self.board.memory.note_busy(&self.name, clock::now());
        Next::After(RESYNC_PERIOD)
    }

    fn retry_removal(&self, error: &AccountError) -> Next {
        tracing::warn!(worker = self.name, %error, "runner not removed; retrying");
        Next::After(error.retry().max(RESYNC_PERIOD))
    }

    /// Makes the kubelet end the pod through its deadline, which keeps its log and events.
    pub async fn end_pod(&self) -> Result<Next, Error> {
        let patch = json!({"spec": {"activeDeadlineSeconds": 1}});
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.pods().patch(&self.name, &parameters, &Patch::Merge(patch)).await {
            Ok(_) => Ok(Next::After(RESYNC_PERIOD)),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Next::After(RESYNC_PERIOD)),
            Err(error) => Err(KubeError::new("cannot end the pod")(error).into()),
        }
    }

    /// Deletes the pod without the kubelet's confirmation: its node is unreachable.
    pub async fn force_pod(&self) -> Result<Next, Error> {
        match self.pods().delete(&self.name, &DeleteParams::default().grace_period(0)).await {
            Ok(_) => Ok(Next::After(RESYNC_PERIOD)),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Next::After(RESYNC_PERIOD)),
            Err(error) => Err(KubeError::new("cannot delete the pod")(error).into()),
        }
    }

    /// The worker has ended: removes its runner and its config. A runner that completed its one job deregisters itself;
    /// if it did not, the sweep finds it.
    pub async fn deregister(&self) -> Result<Next, Error> {
        let removed = match worker::state(self.worker) {
            WorkerState::Completed => Ok(Removal::Gone),
            _ => self.remove_runner().await,
        };
        match removed {
            Ok(Removal::Busy) => self.wait(ClaimReason::Releasing, &GitHubError::Busy.into()).await,
            Ok(Removal::Deleted | Removal::Gone) => {
                objects::delete(&self.secrets(), &self.name).await?;
                objects::remove_finalizer(&self.board.shared.client, self.worker).await?;
                Ok(Next::AwaitChange)
            }
            Err(error) => self.wait(ClaimReason::GitHubUnavailable, &error).await,
        }
    }

    /// The worker is being deleted. A busy runner is not interrupted: GitHub refuses to remove it, and deletion waits.
    pub async fn remove(&self, unreachable: bool) -> Result<Next, Error> {
        match self.remove_runner().await {
            Ok(Removal::Busy) => self.wait(ClaimReason::Releasing, &GitHubError::Busy.into()).await,
            Ok(Removal::Deleted | Removal::Gone) => {
                objects::delete(&self.secrets(), &self.name).await?;
                if unreachable {
                    self.force_pod().await?;
                } else {
                    objects::delete(&self.pods(), &self.name).await?;
                }
                objects::remove_finalizer(&self.board.shared.client, self.worker).await?;
                Ok(Next::AwaitChange)
            }
            Err(error) => self.wait(ClaimReason::GitHubUnavailable, &error).await,
        }
    }

    /// Removes the runner at GitHub, which also proves that it is not busy.
    async fn remove_runner(&self) -> Result<Removal, AccountError> {
        let uid = self.worker.uid().unwrap_or_default();
        let Some(pool) = self.pool.filter(|_| !lock(&self.board.memory.unregistered).contains(&uid)) else {
            return Ok(Removal::Gone);
        };
        let outcome = match self.board.account(&self.namespace, pool, self.spec).await {
            Err(error) => Err(error),
            Ok(account) => {
                let github = &self.board.shared.github;
                let (credentials, scope) = (&account.credentials, &account.scope);
                let known = self.worker.status.as_ref().and_then(|status| status.runner.as_ref()?.id);
                let removed = match known.or_else(|| self.pod.and_then(runner_id)) {
                    Some(id) => github.delete_runner(credentials, scope, id).await,
                    None => github.remove_runner(credentials, scope, &self.name).await,
                };
                removed.map_err(Into::into)
            }
        };
        match outcome {
            Ok(removal @ (Removal::Deleted | Removal::Gone)) => {
                lock(&self.board.memory.unregistered).insert(uid);
                Ok(removal)
            }
            Err(error) if self.may_abandon_runner(&error) => {
                tracing::warn!(worker = self.name, %error, "runner abandoned at GitHub");
                let message = format!("its runner is left to GitHub, which forgets it within a day: {error}");
                self.board.shared.events.record(self.worker, EventType::Warning, "Remove", "RunnerLeft", message);
                Ok(Removal::Gone)
            }
            outcome => outcome,
        }
    }

    /// Whether to give up on removing the runner: its pod has ended, and the credentials were deleted with the pool or
    /// refused for too long. GitHub removes offline JIT runners; a worker that can never be deleted would be worse.
    fn may_abandon_runner(&self, error: &AccountError) -> bool {
        if self.pod.is_some_and(|pod| !has_ended(pod)) {
            return false;
        }
        let deleted = self.worker.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let ended = worker::since(self.worker).filter(|_| worker::state(self.worker).is_over());
        let timed_out =
            deleted.or(ended).is_some_and(|time| clock::now().duration_since(time) > REFUSED_CREDENTIALS_TIMEOUT);
        match error {
            AccountError::Credentials(CredentialsError::Missing(_)) => self.pool_is_deleting(),
            AccountError::GitHub(error) => error.is_final() && timed_out,
            AccountError::NoRepository(_) => true,
            AccountError::Credentials(_) => false,
        }
    }

    fn pool_is_deleting(&self) -> bool {
        let pool = self.board.pool(&self.namespace, &self.worker.spec.pool);
        pool.is_none_or(|pool| pool.metadata.deletion_timestamp.is_some())
    }
}
