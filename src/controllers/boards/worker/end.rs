//! The end of a worker: its runner first, unless that is busy, then what it had here.

use jiff::{SignedDuration, Timestamp};
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
    github::{GitHubError, Removal, credentials::CredentialsError},
    kube::objects::{self, KubeError},
};
use serde_json::json;

use super::Life;
use crate::controllers::{
    Error, Next,
    boards::{LOOK_AGAIN, accounts::AccountError, lock},
};

/// How long refused credentials may keep a worker that is over.
const FORSAKEN: SignedDuration = SignedDuration::from_mins(10);

impl Life<'_> {
    /// A health rule was broken. GitHub has the last word: a runner that it calls busy is left alone.
    pub async fn give_up(&self, failure: Failure) -> Result<Next, Error> {
        match self.take_runner_away().await {
            Ok(Removal::Deleted | Removal::Gone) => self.fail(failure).await,
            Ok(Removal::Busy) => Ok(self.leave_alone(failure.reason.as_str())),
            Err(error) => Ok(self.try_later(&error)),
        }
    }

    /// No open claim needs it.
    pub async fn retire(&self) -> Result<Next, Error> {
        match self.take_runner_away().await {
            Ok(Removal::Deleted | Removal::Gone) => {
                tracing::info!(worker = self.name, "no claim needs it: it goes");
                objects::delete(&objects::api(&self.board.shared.client, self.worker), &self.name).await?;
                Ok(Next::AwaitChange)
            }
            Ok(Removal::Busy) => Ok(self.leave_alone("surplus")),
            Err(error) => Ok(self.try_later(&error)),
        }
    }

    fn leave_alone(&self, why: &str) -> Next {
        tracing::info!(worker = self.name, why, "its runner is busy: it is left alone");
        self.board.memory.refused(&self.name, Timestamp::now());
        Next::After(LOOK_AGAIN)
    }

    fn try_later(&self, error: &AccountError) -> Next {
        tracing::warn!(worker = self.name, %error, "its runner cannot be removed yet");
        Next::After(error.retry().max(LOOK_AGAIN))
    }

    /// The kubelet ends the pod as at its deadline, so that its log and events stay.
    pub async fn end_pod(&self) -> Result<Next, Error> {
        let patch = json!({"spec": {"activeDeadlineSeconds": 1}});
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.pods().patch(&self.name, &parameters, &Patch::Merge(patch)).await {
            Ok(_) => Ok(Next::After(LOOK_AGAIN)),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Next::After(LOOK_AGAIN)),
            Err(error) => Err(KubeError::new("cannot end the pod")(error).into()),
        }
    }

    /// No kubelet will confirm it.
    pub async fn force_pod(&self) -> Result<Next, Error> {
        match self.pods().delete(&self.name, &DeleteParams::default().grace_period(0)).await {
            Ok(_) => Ok(Next::After(LOOK_AGAIN)),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Next::After(LOOK_AGAIN)),
            Err(error) => Err(KubeError::new("cannot delete the pod")(error).into()),
        }
    }

    /// The worker is over: its runner must not outlive it, and its config has no use. A runner that ran its one job to
    /// the end is gone by itself; should it not be, the sweep finds it.
    pub async fn deregister(&self) -> Result<Next, Error> {
        let removed = match worker::state(self.worker) {
            WorkerState::Completed => Ok(Removal::Gone),
            _ => self.take_runner_away().await,
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

    /// The worker is to go. A busy runner is left alone: GitHub refuses to remove it, and so do we.
    pub async fn remove(&self, unreachable: bool) -> Result<Next, Error> {
        match self.take_runner_away().await {
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
    async fn take_runner_away(&self) -> Result<Removal, AccountError> {
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
            Err(error) if self.is_forsaken(&error) => {
                tracing::warn!(worker = self.name, %error, "its runner is left to GitHub");
                let message = format!("its runner is left to GitHub, which forgets it within a day: {error}");
                self.board.shared.events.tell(self.worker, EventType::Warning, "Remove", "RunnerLeft", message);
                Ok(Removal::Gone)
            }
            outcome => outcome,
        }
    }

    /// Whether nobody can do anything about the runner: it runs nowhere, and the credentials are gone with their pool, as
    /// in a namespace that goes, or were refused for long. GitHub removes JIT runners that stay away by itself; an object
    /// that could never be deleted would be worse.
    fn is_forsaken(&self, error: &AccountError) -> bool {
        if self.pod.is_some_and(|pod| !has_ended(pod)) {
            return false;
        }
        let deleted = self.worker.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let ended = worker::since(self.worker).filter(|_| worker::state(self.worker).is_over());
        let long = deleted.or(ended).is_some_and(|time| Timestamp::now().duration_since(time) > FORSAKEN);
        match error {
            AccountError::Credentials(CredentialsError::Missing(_)) => self.pool_is_going(),
            AccountError::GitHub(error) => error.is_final() && long,
            AccountError::NoRepository(_) => true,
            AccountError::Credentials(_) => false,
        }
    }

    fn pool_is_going(&self) -> bool {
        let pool = self.board.pool(&self.namespace, &self.worker.spec.pool);
        pool.is_none_or(|pool| pool.metadata.deletion_timestamp.is_some())
    }
}
