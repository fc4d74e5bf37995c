//! Ends a worker: removes its runner first, unless it is busy, then its Secret and pod.

use std::time::Duration;

use jiff::Timestamp;
use kube::{
    ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    runtime::events::EventType,
};
use paddock_core::{
    api::{BoardPool, ClaimReason, FIELD_MANAGER, Failure, WorkerState},
    boards::{
        pod::{is_pod_of, runner_id},
        removal::is_abandoned,
        slots::{has_ended, is_pending},
        worker,
    },
};
use paddock_effects::{
    clock,
    github::{GitHubError, Removal},
    kube::objects::{self, KubeError},
};
use serde_json::json;

use super::Work;
use crate::controllers::{
    Error, Next,
    boards::{RESYNC_PERIOD, accounts::AccountError, lock},
};

/// The outcome of an attempt to remove the runner.
enum Attempt {
    Gone,
    Busy,
    /// It is tried again after this pause.
    Failed(AccountError, Duration),
    /// It failed before, and the pause is not over.
    Paused(Timestamp),
}

impl Work<'_> {
    /// A health check failed. GitHub decides: a runner that it reports busy is not removed.
    pub async fn give_up(&self, failure: Failure) -> Result<Next, Error> {
        match self.remove_runner().await {
            Attempt::Gone => self.fail(failure).await,
            Attempt::Busy => Ok(self.postpone_removal(failure.reason.as_str())),
            Attempt::Failed(error, pause) => Ok(self.retry_removal(&error, pause)),
            Attempt::Paused(until) => Ok(Next::At(until)),
        }
    }

    /// No open claim needs the worker.
    pub async fn retire(&self) -> Result<Next, Error> {
        match self.remove_runner().await {
            Attempt::Gone => {
                tracing::info!(worker = self.name, "deleting surplus worker");
                objects::delete(&objects::api(&self.board.shared.client, self.worker), &self.name).await?;
                Ok(Next::AwaitChange)
            }
            Attempt::Busy => Ok(self.postpone_removal("surplus")),
            Attempt::Failed(error, pause) => Ok(self.retry_removal(&error, pause)),
            Attempt::Paused(until) => Ok(Next::At(until)),
        }
    }

    fn postpone_removal(&self, why: &str) -> Next {
        tracing::info!(worker = self.name, why, "runner is busy; removal postponed");
        self.board.memory.note_busy(&self.name, clock::now());
        Next::After(RESYNC_PERIOD)
    }

    /// Its condition says how it runs, so an event tells this.
    fn retry_removal(&self, error: &AccountError, pause: Duration) -> Next {
        tracing::warn!(worker = self.name, %error, "runner not removed; retrying");
        let message = format!("its runner is not removed: {error}");
        self.board.shared.events.record(self.worker, EventType::Warning, "Remove", "RunnerNotRemoved", message);
        Next::After(pause.max(RESYNC_PERIOD))
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

    /// Deletes the pod without the kubelet's confirmation: its node is unreachable or gone.
    pub async fn force_pod(&self) -> Result<Next, Error> {
        self.delete_pod(DeleteParams::default().grace_period(0)).await?;
        Ok(Next::After(RESYNC_PERIOD))
    }

    /// Deletes the worker's pod, and none that another worker of this name left.
    pub async fn delete_pod(&self, parameters: DeleteParams) -> Result<(), Error> {
        let uncached = match self.pod {
            Some(_) => None,
            None => self.pods().get_opt(&self.name).await.map_err(KubeError::new("cannot read the pod"))?,
        };
        if let Some(pod) = self.pod.or(uncached.as_ref()).filter(|pod| is_pod_of(pod, self.worker)) {
            objects::delete_exactly(&self.pods(), pod, parameters).await?;
        }
        Ok(())
    }

    /// The worker has ended: removes its runner and its config. A runner that completed its one job deregisters itself;
    /// if it did not, the sweep finds it.
    pub async fn deregister(&self) -> Result<Next, Error> {
        let attempt = match worker::state(self.worker) {
            WorkerState::Completed => Attempt::Gone,
            _ => self.remove_runner().await,
        };
        if let Some(wait) = self.await_removal(attempt).await? {
            return Ok(wait);
        }
        objects::delete(&self.secrets(), &self.name).await?;
        objects::remove_finalizer(&self.board.shared.client, self.worker).await?;
        Ok(Next::AwaitChange)
    }

    /// The worker is being deleted. A busy runner is not interrupted: GitHub refuses to remove it, and deletion waits.
    pub async fn remove(&self, lost: bool) -> Result<Next, Error> {
        let attempt = self.remove_runner().await;
        if let Some(wait) = self.await_removal(attempt).await? {
            return Ok(wait);
        }
        objects::delete(&self.secrets(), &self.name).await?;
        let parameters = DeleteParams::default();
        self.delete_pod(if lost { parameters.grace_period(0) } else { parameters }).await?;
        objects::remove_finalizer(&self.board.shared.client, self.worker).await?;
        Ok(Next::AwaitChange)
    }

    /// What the worker's end waits for, as its condition says; `None` once the runner is gone.
    async fn await_removal(&self, attempt: Attempt) -> Result<Option<Next>, Error> {
        let next = match attempt {
            Attempt::Gone => return Ok(None),
            Attempt::Busy => {
                let busy = GitHubError::Busy.into();
                self.wait(ClaimReason::Releasing, &busy, busy.retry()).await?
            }
            Attempt::Failed(error, pause) => self.wait(ClaimReason::GitHubUnavailable, &error, pause).await?,
            Attempt::Paused(until) => Next::At(until),
        };
        Ok(Some(next))
    }

    /// Removes the runner at GitHub, which also proves that it is not busy.
    async fn remove_runner(&self) -> Attempt {
        let (memory, uid, now) = (&self.board.memory, self.worker.uid().unwrap_or_default(), clock::now());
        let Some(pool) = self.pool.filter(|_| !lock(&memory.unregistered).contains(&uid)) else {
            return Attempt::Gone;
        };
        if let Some(until) = memory.removal_paused(&uid, now) {
            return Attempt::Paused(until);
        }
        match self.try_removal(pool).await {
            Ok(Removal::Deleted | Removal::Gone) => {
                memory.note_removed(uid);
                Attempt::Gone
            }
            Ok(Removal::Busy) => Attempt::Busy,
            Err(error) if self.may_abandon_runner(&error, now).await => {
                tracing::warn!(worker = self.name, %error, "runner abandoned at GitHub");
                let message = format!("its runner is left to GitHub, which forgets it within a day: {error}");
                self.board.shared.events.record(self.worker, EventType::Warning, "Remove", "RunnerLeft", message);
                Attempt::Gone
            }
            Err(error) => {
                let pause = memory.pause_removal(&uid, error.retry(), now);
                Attempt::Failed(error, pause)
            }
        }
    }

    async fn try_removal(&self, pool: &BoardPool) -> Result<Removal, AccountError> {
        let account = self.board.account(&self.namespace, pool, self.spec).await?;
        let github = &self.board.shared.github;
        let (credentials, scope) = (&account.credentials, &account.scope);
        let known = self.worker.status.as_ref().and_then(|status| status.runner.as_ref()?.id);
        let removal = match known.or_else(|| self.pod.and_then(runner_id)) {
            Some(id) => github.delete_runner(credentials, scope, id).await?,
            None => github.remove_runner(credentials, scope, &self.name).await?,
        };
        Ok(removal)
    }

    /// Whether to give up on removing the runner of a worker that ended or is being deleted. While its pod runs, GitHub
    /// must say that it has no job.
    async fn may_abandon_runner(&self, error: &AccountError, now: Timestamp) -> bool {
        let deleted = self.worker.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let ended = worker::since(self.worker).filter(|_| worker::state(self.worker).is_over());
        let runs = self.pod.is_some_and(|pod| !has_ended(pod) && !is_pending(pod));
        is_abandoned(error.obstacle(self.pool_is_deleting()), deleted.or(ended), now) && (!runs || self.is_free().await)
    }

    pub fn pool_is_deleting(&self) -> bool {
        let pool = self.board.pool(&self.namespace, &self.worker.spec.pool);
        pool.is_none_or(|pool| pool.metadata.deletion_timestamp.is_some())
    }
}
