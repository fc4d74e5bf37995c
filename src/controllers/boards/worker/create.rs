//! A worker gets its JIT config, its Secret and its pod.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::PostParams;
use paddock_core::{
    api::{BoardPool, ClaimReason, FailureReason},
    boards::{
        pod::{adopted_by, pod, runner_id, secret},
        worker::failure,
    },
};
use paddock_effects::{
    github::{GitHubError, JitConfig, Removal},
    kube::objects::{self, KubeError},
};
use secrecy::ExposeSecret;

use super::Life;
use crate::controllers::{
    Error, Next,
    boards::{LOOK_AGAIN, accounts::AccountError, lock},
};

/// How long a pod that was just made may take to show in the cache.
const SHOWING: Duration = Duration::from_secs(1);
/// How long a worker may hold a slot for a runner that GitHub does not give, or for a service account: others wait for the
/// slot.
const PATIENCE: jiff::SignedDuration = jiff::SignedDuration::from_secs(30);

impl Life<'_> {
    pub async fn create(&self) -> Result<Next, Error> {
        let Some(pool) = self.pool else {
            return self.fail(failure(FailureReason::PodRefused, "its pool is gone")).await;
        };
        // One that this process has just made has nothing that could be found.
        let fresh = lock(&self.board.memory.fresh).remove(&self.name);
        let found = if fresh {
            None
        } else {
            self.secrets().get_opt(&self.name).await.map_err(KubeError::new("cannot read the Secret"))?
        };
        let runner = match found {
            Some(secret) if adopted_by(&secret).is_some() => {
                return match self.pods().get_opt(&self.name).await.map_err(KubeError::new("cannot read the pod"))? {
                    Some(_) => Ok(Next::After(SHOWING)),
                    None => self.fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else")).await,
                };
            }
            Some(secret) => runner_id(&secret),
            None => {
                let jit = match self.jit_config(pool).await {
                    Ok(jit) => jit,
                    Err(error) => return self.refused(error).await,
                };
                let _rush = self.board.rush.enter();
                let secret = secret(self.worker, jit.encoded.expose_secret(), jit.runner_id);
                let _turn = self.board.turn().await;
                match self.secrets().create(&PostParams::default(), &secret).await {
                    Ok(_) => Some(jit.runner_id),
                    // A leader before us made it. Its runner has made room for the one whose config is lost here: once more.
                    Err(kube::Error::Api(status)) if status.is_already_exists() => {
                        tracing::warn!(worker = self.name, "its Secret was made before; both are made anew");
                        objects::delete(&self.secrets(), &self.name).await?;
                        return Ok(Next::After(SHOWING));
                    }
                    Err(error) => return Err(KubeError::new("cannot create the Secret")(error).into()),
                }
            }
        };
        let made = {
            let _rush = self.board.rush.enter();
            let _turn = self.board.turn().await;
            self.pods().create(&PostParams::default(), &pod(self.worker, pool, runner)).await
        };
        match made {
            // It shows in the cache, and then it gets its Secret.
            Ok(_) => Ok(Next::After(SHOWING)),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(Next::After(SHOWING)),
            Err(error) if objects::lacks_service_account(&error) && self.is_young(Timestamp::now()) => {
                Ok(Next::After(SHOWING))
            }
            Err(error) if objects::is_refusal(&error) => {
                self.fail(failure(FailureReason::PodRefused, &error.to_string())).await
            }
            Err(error) => Err(KubeError::new("cannot create the pod")(error).into()),
        }
    }

    /// A new runner. One of the same name was made for this very worker, and its config is lost: it makes room.
    async fn jit_config(&self, pool: &BoardPool) -> Result<JitConfig, AccountError> {
        let account = self.board.account(&self.namespace, pool, self.spec).await?;
        let github = &self.board.shared.github;
        let make = || {
            let group = Some(pool.github.runner_group.as_str());
            github.create_jit_config(&account.credentials, &account.scope, &self.name, &self.spec.labels, group)
        };
        let made = match make().await {
            Err(GitHubError::NameTaken) => {
                match github.remove_runner(&account.credentials, &account.scope, &self.name).await? {
                    Removal::Busy => return Err(GitHubError::Busy.into()),
                    Removal::Deleted | Removal::Gone => make().await?,
                }
            }
            outcome => outcome?,
        };
        if self.board.memory.no_trouble(&self.spec.entity) {
            self.board.changed.notify_one();
        }
        Ok(made)
    }

    /// GitHub gives no runner. What may be chance is tried again for a while; then the slot is for somebody else, and the
    /// owner's other claims wait for better times.
    async fn refused(&self, error: AccountError) -> Result<Next, Error> {
        let now = Timestamp::now();
        let made = self.made(now);
        if self.is_young(now) && !error.is_final() && error.retry() <= LOOK_AGAIN {
            return self.wait(ClaimReason::GitHubUnavailable, &error).await;
        }
        self.board.memory.trouble(&self.spec.entity, error.to_string(), made, error.retry(), now);
        self.board.changed.notify_one();
        self.fail(failure(FailureReason::PodRefused, &error.to_string())).await
    }

    fn made(&self, now: Timestamp) -> Timestamp {
        self.worker.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0)
    }

    /// Whether the worker may still wait with its slot.
    fn is_young(&self, now: Timestamp) -> bool {
        now.duration_since(self.made(now)) < PATIENCE
    }
}
