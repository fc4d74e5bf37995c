//! The life of a worker: a JIT config, a Secret, a pod, and nothing left behind.
//!
//! Every step can be the last before a crash. What there is decides what comes next: no Secret, then there is no config
//! that anybody could use, and a runner of the worker's name at GitHub is a leftover; a Secret of the worker's, then the
//! pod is missing; a Secret of the pod's, then the pod was made.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Pod, Secret},
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::{
    Api, ResourceExt,
    api::{LogParams, Patch, PatchParams, PostParams},
    runtime::{
        controller::{Action, Config, Controller},
        events::EventType,
    },
};
use secrecy::{ExposeSecret, SecretString};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        drive,
        objects::{self, Written},
        reference,
    },
    AccountError, Board, LOOK_AGAIN, look_again,
};
use crate::{
    api::{
        BoardPool, BoardTimeouts, BoardWorker, ClaimReason, FIELD_MANAGER, Failure, FailureReason, LOG_TAIL_MAX,
        PodPlace, READY, Runner, Worker, WorkerState, WorkerStatus, clip, ready_condition, set_condition,
    },
    effects::{
        credentials::CredentialsError,
        github::{GitHubError, JitConfig, Removal},
    },
    plan::{
        board_worker::{self, ClaimView, Keep, Observed, Step, failure},
        pod::{JIT_CONFIG, adopted_by, adoption, pod, secret},
    },
};

/// How often GitHub is asked whether a runner whose pod runs has come online.
const REGISTERING: std::time::Duration = std::time::Duration::from_secs(3);
/// How long a pod that was just made may take to show in the cache.
const SHOWING: std::time::Duration = std::time::Duration::from_secs(1);
/// How long refused credentials may keep a worker that is over.
const FORSAKEN: jiff::SignedDuration = jiff::SignedDuration::from_mins(10);

pub async fn run(board: Arc<Board>, stop: CancellationToken) {
    let stores = &board.context.stores;
    let worker_of_pod = |pod: Arc<Pod>| Some(reference(&pod.namespace().unwrap_or_default(), &pod.name_any()));
    let controller = Controller::for_shared_stream(stores.workers.stream(), stores.workers.store.clone())
        .with_config(Config::default().concurrency(16))
        .watches_shared_stream(stores.pods.stream(), worker_of_pod);
    let context = board.context.clone();
    drive("board-worker", controller, context, stop, move |worker, _| reconcile(worker, board.clone())).await;
}

async fn reconcile(worker: Arc<Worker>, board: Arc<Board>) -> Result<Action> {
    let Some(spec) = worker.spec.board.clone() else { return Ok(Action::await_change()) };
    let namespace = worker.namespace().unwrap_or_default();
    let pool = board.pool(&namespace, &worker.spec.pool);
    let pool = pool.as_ref().and_then(|pool| pool.spec.board.as_ref());
    let pod = board.context.stores.pods.store.get(&reference(&namespace, &worker.name_any()));
    let keep = Keep {
        pod: pool.map_or_else(|| BoardTimeouts::default().pod_grace, |pool| pool.timeouts.pod_grace),
        record: crate::api::Duration::from_secs(board.context.settings.retention.as_secs()),
    };
    let step = board_worker::next(&worker, pod.as_deref(), board.claim_view(&worker, &spec), keep, Timestamp::now());
    tracing::debug!(worker = worker.name_any(), ?step, "next step");
    let life = Life { board: &board, worker: &worker, spec: &spec, pool, name: worker.name_any(), namespace };
    match step {
        Step::Create => life.create().await,
        Step::Mirror(observed) => life.mirror(observed, pod.as_deref()).await,
        Step::Fail(failure) => life.fail(failure).await,
        Step::Deregister => life.deregister().await,
        Step::Remove => life.remove().await,
        Step::Delete | Step::Forget => {
            objects::delete(&objects::api(&board.context.client, &*worker), &life.name).await?;
            Ok(Action::await_change())
        }
        Step::DeletePod => {
            objects::delete(&life.pods(), &life.name).await?;
            Ok(Action::await_change())
        }
        Step::Rest(None) => Ok(Action::await_change()),
        Step::Rest(until) => Ok(look_again(until)),
    }
}

impl Board {
    fn claim_view(&self, worker: &Worker, spec: &BoardWorker) -> ClaimView {
        let claim =
            self.context.stores.claims.store.get(&reference(&worker.namespace().unwrap_or_default(), &spec.claim));
        match claim.filter(|claim| board_worker::serves(worker, claim)) {
            None => ClaimView::Gone,
            Some(claim) if crate::plan::demand::is_open(&claim) => ClaimView::Open,
            Some(_) => ClaimView::Over,
        }
    }
}

/// One look at one worker.
struct Life<'a> {
    board: &'a Board,
    worker: &'a Worker,
    spec: &'a BoardWorker,
    /// Its pool; one with workers stays, so that it is missing only where somebody forced it away.
    pool: Option<&'a BoardPool>,
    name: String,
    namespace: String,
}

impl Life<'_> {
    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.board.context.client.clone(), &self.namespace)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.board.context.client.clone(), &self.namespace)
    }

    async fn create(&self) -> Result<Action> {
        if self.worker.status.is_none() {
            let mut status = self.status();
            self.say(&mut status, false, ClaimReason::Creating, "the pod is being made");
            self.write(&status).await?;
            return Ok(Action::requeue(SHOWING));
        }
        let Some(pool) = self.pool else {
            return self.fail(failure(FailureReason::PodRefused, "its pool is gone")).await;
        };
        match self.secrets().get_opt(&self.name).await? {
            Some(secret) if adopted_by(&secret).is_some() => {
                return match self.pods().get_opt(&self.name).await? {
                    Some(_) => Ok(Action::requeue(SHOWING)),
                    None => self.fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else")).await,
                };
            }
            Some(_) => {}
            None => {
                let jit = match self.jit_config(pool).await {
                    Ok(jit) => jit,
                    Err(AccountError::GitHub(error)) if error.is_final() => {
                        return self.fail(failure(FailureReason::PodRefused, &error.to_string())).await;
                    }
                    Err(error) => return self.wait(ClaimReason::GitHubUnavailable, &error).await,
                };
                let secret = secret(self.worker, jit.encoded.expose_secret());
                self.secrets().create(&PostParams::default(), &secret).await.context("cannot make the Secret")?;
            }
        }
        let pod = match self.pods().create(&PostParams::default(), &pod(self.worker, pool)).await {
            Ok(pod) => pod,
            Err(kube::Error::Api(status)) if status.is_already_exists() => self.pods().get(&self.name).await?,
            Err(error) if objects::is_refusal(&error) => {
                return self.fail(failure(FailureReason::PodRefused, &error.to_string())).await;
            }
            Err(error) => return Err(error).context("cannot make the pod"),
        };
        self.adopt(&pod).await?;
        Ok(Action::requeue(LOOK_AGAIN))
    }

    /// A new runner. One of the same name was made for this very worker, and its config is lost: it makes room.
    async fn jit_config(&self, pool: &BoardPool) -> Result<JitConfig, AccountError> {
        let account = self.board.account(&self.namespace, pool, self.spec).await?;
        let github = &self.board.context.github;
        let make = || {
            let group = Some(pool.github.runner_group.as_str());
            github.create_jit_config(&account.credentials, &account.scope, &self.name, &self.spec.labels, group)
        };
        match make().await {
            Err(GitHubError::NameTaken) => {
                match github.remove_runner(&account.credentials, &account.scope, &self.name).await? {
                    Removal::Busy => Err(GitHubError::Busy.into()),
                    Removal::Deleted | Removal::Gone => Ok(make().await?),
                }
            }
            outcome => Ok(outcome?),
        }
    }

    async fn adopt(&self, pod: &Pod) -> Result<()> {
        let patch = json!({"metadata": {"ownerReferences": [adoption(pod)]}});
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.secrets().patch(&self.name, &parameters, &Patch::Merge(patch)).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error).context("cannot give the Secret to the pod"),
        }
    }

    /// The status with what never changes filled in.
    fn status(&self) -> WorkerStatus {
        let mut status = self.worker.status.clone().unwrap_or_default();
        let claim = self.board.context.stores.claims.store.get(&reference(&self.namespace, &self.spec.claim));
        status.claim = Some(self.spec.claim.clone());
        status.run_id = status.run_id.or_else(|| claim.map(|claim| claim.spec.run_id.clone()));
        status.runner.get_or_insert_with(|| Runner { id: None, name: self.name.clone() });
        status.observed_generation = self.worker.metadata.generation;
        self.enter(&mut status, board_worker::state(self.worker));
        status
    }

    fn enter(&self, status: &mut WorkerStatus, state: WorkerState) {
        if status.state != Some(state) {
            status.state = Some(state);
            status.state_since = Some(Time(Timestamp::now()));
        }
    }

    fn say(&self, status: &mut WorkerStatus, ready: bool, reason: ClaimReason, message: &str) {
        let generation = self.worker.metadata.generation;
        set_condition(&mut status.conditions, ready_condition(ready, reason, message, generation, Timestamp::now()));
    }

    async fn write(&self, status: &WorkerStatus) -> Result<Written> {
        objects::write_status(&self.board.context.client, self.worker, self.worker.status.as_ref(), status).await
    }

    async fn wait(&self, reason: ClaimReason, error: &AccountError) -> Result<Action> {
        let mut status = self.status();
        self.say(&mut status, false, reason, &error.to_string());
        self.write(&status).await?;
        Ok(Action::requeue(error.retry()))
    }

    async fn mirror(&self, observed: Observed, pod: Option<&Pod>) -> Result<Action> {
        let Some(pod) = pod else { return Ok(Action::await_change()) };
        let mut status = self.status();
        if status.pod.is_none() && self.secrets().get_opt(&self.name).await?.is_some_and(|s| adopted_by(&s).is_none()) {
            self.adopt(pod).await?;
        }
        status.set_pod(PodPlace { name: self.name.clone(), node: observed.node });
        if let Some(mut failure) = observed.failure {
            failure.log_tail = self.log_tail().await;
            return self.fail_with(status, failure).await;
        }
        self.enter(&mut status, observed.state);
        let was_up = status.conditions.iter().any(|c| c.type_ == READY && c.status == "True");
        let mut again = LOOK_AGAIN;
        match observed.state {
            WorkerState::Running if !was_up => again = self.look_for_runner(&mut status).await,
            WorkerState::Completed => self.say(&mut status, false, ClaimReason::Completed, "its job is done"),
            WorkerState::Pending => {
                let message = observed.waiting.unwrap_or_else(|| "the pod is starting".into());
                self.say(&mut status, false, ClaimReason::Validating, &message);
            }
            _ => {}
        }
        self.write(&status).await?;
        Ok(Action::requeue(again))
    }

    /// Ready is a runner that GitHub has seen online; a pod that runs is not enough.
    async fn look_for_runner(&self, status: &mut WorkerStatus) -> std::time::Duration {
        let found = match self.pool {
            None => Ok(None),
            Some(pool) => self.runner(pool).await,
        };
        match found {
            Ok(Some(runner)) => {
                let up = runner.is_up();
                status.runner = Some(Runner { id: Some(runner.id), name: runner.name });
                if up {
                    self.say(status, true, ClaimReason::Ready, "its runner is online");
                    return LOOK_AGAIN;
                }
                self.say(status, false, ClaimReason::Validating, "the pod runs; its runner is not online yet");
                REGISTERING
            }
            Ok(None) => {
                self.say(status, false, ClaimReason::Validating, "the pod runs; GitHub does not know its runner");
                REGISTERING
            }
            Err(error) => {
                self.say(status, false, ClaimReason::GitHubUnavailable, &error.to_string());
                error.retry()
            }
        }
    }

    async fn runner(&self, pool: &BoardPool) -> Result<Option<crate::effects::github::KnownRunner>, AccountError> {
        let account = self.board.account(&self.namespace, pool, self.spec).await?;
        let github = &self.board.context.github;
        Ok(github.runner_by_name(&account.credentials, &account.scope, &self.name).await?)
    }

    async fn fail(&self, failure: Failure) -> Result<Action> {
        self.fail_with(self.status(), failure).await
    }

    async fn fail_with(&self, mut status: WorkerStatus, failure: Failure) -> Result<Action> {
        let (reason, message) = (failure.reason.as_str(), failure.message.clone());
        self.enter(&mut status, WorkerState::Failed);
        self.say(&mut status, false, ClaimReason::WorkerLost, &message);
        status.failure = Some(failure);
        if self.write(&status).await? == Written::Yes {
            tracing::warn!(worker = self.name, reason, why = message, "a worker failed");
            self.board.context.event(self.worker, EventType::Warning, "Fail", reason, message).await;
        }
        Ok(Action::requeue(LOOK_AGAIN))
    }

    /// The end of the log, without the config should it have been printed; none where there is no log.
    async fn log_tail(&self) -> Option<String> {
        let parameters = LogParams { tail_lines: Some(100), limit_bytes: Some(1 << 18), ..LogParams::default() };
        let log = self.pods().logs(&self.name, &parameters).await.ok().filter(|log| !log.is_empty())?;
        let secret = self.secrets().get_opt(&self.name).await.ok()?;
        let config = secret.and_then(|mut secret| secret.data.as_mut()?.remove(JIT_CONFIG));
        let config = config.and_then(|bytes| String::from_utf8(bytes.0).ok()).map(SecretString::from);
        let shown = match config.as_ref().map(ExposeSecret::expose_secret) {
            Some(config) if !config.is_empty() => log.replace(config, "[redacted]"),
            _ => log,
        };
        Some(clip(&shown, LOG_TAIL_MAX))
    }

    /// The worker is over: its runner must not outlive it, and its config has no use.
    async fn deregister(&self) -> Result<Action> {
        match self.take_runner_away().await {
            Ok(Removal::Busy) => self.wait(ClaimReason::Releasing, &GitHubError::Busy.into()).await,
            Ok(Removal::Deleted | Removal::Gone) => {
                objects::delete(&self.secrets(), &self.name).await?;
                objects::remove_finalizer(&self.board.context.client, self.worker).await?;
                Ok(Action::await_change())
            }
            Err(error) => self.wait(ClaimReason::GitHubUnavailable, &error).await,
        }
    }

    /// The worker is to go. A busy runner is left alone: GitHub refuses to remove it, and so do we.
    async fn remove(&self) -> Result<Action> {
        match self.take_runner_away().await {
            Ok(Removal::Busy) => self.wait(ClaimReason::Releasing, &GitHubError::Busy.into()).await,
            Ok(Removal::Deleted | Removal::Gone) => {
                objects::delete(&self.secrets(), &self.name).await?;
                objects::delete(&self.pods(), &self.name).await?;
                objects::remove_finalizer(&self.board.context.client, self.worker).await?;
                Ok(Action::await_change())
            }
            Err(error) => self.wait(ClaimReason::GitHubUnavailable, &error).await,
        }
    }

    /// Removes the runner at GitHub, which also proves that it is not busy.
    async fn take_runner_away(&self) -> Result<Removal, AccountError> {
        let Some(pool) = self.pool else { return Ok(Removal::Gone) };
        let outcome = match self.board.account(&self.namespace, pool, self.spec).await {
            Err(error) => Err(error),
            Ok(account) => {
                let github = &self.board.context.github;
                github.remove_runner(&account.credentials, &account.scope, &self.name).await.map_err(Into::into)
            }
        };
        match outcome {
            Err(error) if self.is_forsaken(&error) => {
                tracing::warn!(worker = self.name, %error, "its runner is left to GitHub");
                let message = format!("its runner is left to GitHub, which forgets it within a day: {error}");
                self.board.context.event(self.worker, EventType::Warning, "Remove", "RunnerLeft", message).await;
                Ok(Removal::Gone)
            }
            outcome => outcome,
        }
    }

    /// Whether nobody can do anything about the runner: it runs nowhere, and the credentials are gone with their pool, as
    /// in a namespace that goes, or were refused for long. GitHub removes JIT runners that stay away by itself; an object
    /// that could never be deleted would be worse.
    fn is_forsaken(&self, error: &AccountError) -> bool {
        let pod = self.board.context.stores.pods.store.get(&reference(&self.namespace, &self.name));
        let phase = pod.as_ref().map(|pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()));
        if !matches!(phase, None | Some(Some("Succeeded" | "Failed"))) {
            return false;
        }
        let deleted = self.worker.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let ended = board_worker::since(self.worker).filter(|_| board_worker::state(self.worker).is_over());
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
