//! Creates a worker's JIT config, Secret and pod.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::{DeleteParams, PostParams};
use paddock_core::{
    api::{BoardPool, ClaimReason, FailureReason},
    boards::{
        pod::{adopted_by, is_pod_of, is_secret_of, pod, runner_id, secret},
        worker::failure,
        worker_status,
    },
    demand::{
        quota::{NoRepository, Registration},
        refusals::Subject,
    },
};
use paddock_effects::{
    clock,
    github::{GitHubError, JitConfig, Removal},
    kube::objects::{self, KubeError},
};
use secrecy::ExposeSecret;

use super::Work;
use crate::controllers::{
    Error, Next,
    boards::{
        RESYNC_PERIOD,
        accounts::{AccountError, RunnerScope},
        lock,
    },
};

/// How long a new pod usually takes to appear in the cache.
const POD_CACHE_DELAY: Duration = Duration::from_secs(1);
/// How long a worker may hold a slot while GitHub creates no runner or the service account is missing: other claims
/// wait for the slot.
const SLOT_HOLD_MAX: jiff::SignedDuration = jiff::SignedDuration::from_secs(30);

impl Work<'_> {
    pub async fn create(&self) -> Result<Next, Error> {
        let Some(pool) = self.pool else {
            return self.fail(failure(FailureReason::PodRefused, "its pool is gone")).await;
        };
        if self.board.pod_named_as(self.worker).is_some_and(|pod| !is_pod_of(&pod, self.worker)) {
            return self.await_predecessor().await;
        }
        // A worker that this process just created has no Secret yet.
        let fresh = lock(&self.board.memory.fresh).remove(&self.name);
        let found = if fresh {
            None
        } else {
            self.secrets().get_opt(&self.name).await.map_err(KubeError::new("cannot read the Secret"))?
        };
        // From the runner to its pod: nothing else may delay it.
        let mut urgent = None;
        let runner = match found {
            Some(secret) if !is_secret_of(&secret, self.worker) => {
                tracing::warn!(worker = self.name, "deleting the Secret of an earlier worker of this name");
                objects::delete_exactly(&self.secrets(), &secret, DeleteParams::default()).await?;
                return Ok(Next::After(POD_CACHE_DELAY));
            }
            Some(secret) if adopted_by(&secret).is_some() => {
                return match self.pods().get_opt(&self.name).await.map_err(KubeError::new("cannot read the pod"))? {
                    Some(_) => Ok(Next::After(POD_CACHE_DELAY)),
                    None => self.fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else")).await,
                };
            }
            Some(secret) => runner_id(&secret),
            None => {
                let jit = match self.jit_config(pool).await {
                    Ok(jit) => jit,
                    Err(error) => return self.no_runner(pool, error).await,
                };
                urgent = Some(self.board.shared.lanes.urgent());
                let secret = secret(self.worker, jit.encoded.expose_secret(), jit.runner_id);
                match self.secrets().create(&PostParams::default(), &secret).await {
                    Ok(_) => Some(jit.runner_id),
                    // The previous leader created it, and its runner was just replaced by ours: start over.
                    Err(kube::Error::Api(status)) if status.is_already_exists() => {
                        tracing::warn!(worker = self.name, "Secret already exists; recreating Secret and runner");
                        objects::delete(&self.secrets(), &self.name).await?;
                        return Ok(Next::After(POD_CACHE_DELAY));
                    }
                    Err(error) => return self.not_created("the Secret", error).await,
                }
            }
        };
        let created = self.pods().create(&PostParams::default(), &pod(self.worker, pool, runner)).await;
        drop(urgent);
        match created {
            // Once the cache shows it, it becomes the owner of its Secret.
            Ok(_) => Ok(Next::After(POD_CACHE_DELAY)),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(Next::After(POD_CACHE_DELAY)),
            Err(error) if objects::lacks_service_account(&error) && self.may_hold_slot(clock::now()) => {
                Ok(Next::After(POD_CACHE_DELAY))
            }
            Err(error) => self.not_created("the pod", error).await,
        }
    }

    /// What the API server refuses fails the worker, which removes its runner and backs off. Anything else is retried, for
    /// as long as the worker may hold its slot.
    async fn not_created(&self, what: &str, error: kube::Error) -> Result<Next, Error> {
        let answered = matches!(error, kube::Error::Api(_));
        if objects::is_refusal(&error) || (answered && !self.may_hold_slot(clock::now())) {
            let message = format!("{what} is refused: {error}");
            return self.fail(failure(FailureReason::PodRefused, &message)).await;
        }
        Err(KubeError::new(format!("cannot create {what}"))(error).into())
    }

    /// The pod of a deleted worker of the same name still ends.
    async fn await_predecessor(&self) -> Result<Next, Error> {
        let message = format!("waiting for the end of pod {}, which an earlier worker of this name left", self.name);
        let status = worker_status::waiting(self.worker, self.status(), ClaimReason::Creating, &message, clock::now());
        self.write(&status).await?;
        Ok(Next::After(RESYNC_PERIOD))
    }

    /// Registers a runner. One of the same name belongs to this worker, and its config is lost: it is replaced.
    async fn jit_config(&self, pool: &BoardPool) -> Result<JitConfig, AccountError> {
        let account = self.board.account(&self.namespace, pool, self.spec).await?;
        let github = &self.board.shared.github;
        let register = || {
            let group = Some(pool.github.runner_group.as_str());
            github.create_jit_config(&account.credentials, &account.scope, &self.name, &self.spec.labels, group)
        };
        let jit = match register().await {
            Err(GitHubError::NameTaken) => {
                match github.remove_runner(&account.credentials, &account.scope, &self.name).await? {
                    Removal::Busy => return Err(GitHubError::Busy.into()),
                    Removal::Deleted | Removal::Gone => register().await?,
                }
            }
            outcome => outcome?,
        };
        let registration = self.registration(pool)?;
        if self.board.memory.accept(&[Subject::credentials(&registration), Subject::Owner(registration)]) {
            self.board.changed.notify_one();
        }
        Ok(jit)
    }

    fn registration(&self, pool: &BoardPool) -> Result<Registration, NoRepository> {
        let scope = RunnerScope::of(&self.namespace, pool, &self.spec.owner, self.spec.repository.as_deref())?;
        Ok(scope.registration())
    }

    /// GitHub created no runner. Transient failures are retried for a while; then the worker fails, which frees its
    /// slot, and the claims that share the cause back off.
    async fn no_runner(&self, pool: &BoardPool, error: AccountError) -> Result<Next, Error> {
        let now = clock::now();
        let created_at = self.created_at(now);
        if self.may_hold_slot(now) && !error.is_final() && error.retry() <= RESYNC_PERIOD {
            return self.wait(ClaimReason::GitHubUnavailable, &error, error.retry()).await;
        }
        let registration = self.registration(pool).ok();
        if let Some(subject) = registration.and_then(|registration| error.subject(registration)) {
            self.board.memory.refuse(subject, error.to_string(), created_at, error.retry(), now);
            self.board.changed.notify_one();
        }
        self.fail(failure(FailureReason::PodRefused, &error.to_string())).await
    }

    fn created_at(&self, now: Timestamp) -> Timestamp {
        self.worker.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0)
    }

    /// Whether the worker may still hold its slot while it waits.
    fn may_hold_slot(&self, now: Timestamp) -> bool {
        now.duration_since(self.created_at(now)) < SLOT_HOLD_MAX
    }
}
