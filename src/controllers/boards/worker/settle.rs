//! A pod that ended well: whether its runner took a job.

use jiff::SignedDuration;
use kube::ResourceExt;
use paddock_core::{
    api::{ClaimReason, FailureReason},
    boards::{
        health::RunnerFacts,
        removal,
        worker::{Observed, failure},
    },
};
use paddock_effects::{clock, github::KnownRunner};

use super::Work;
use crate::controllers::{Error, Next, boards::accounts::AccountError};

/// How long a webhook may take to name the runner; it saves the question.
const WEBHOOK_GRACE: SignedDuration = SignedDuration::from_secs(2);
/// How long GitHub may take to remove a runner that has run its job.
const REMOVAL_GRACE: SignedDuration = SignedDuration::from_secs(15);
const RECHECK_PERIOD: std::time::Duration = std::time::Duration::from_secs(5);

impl Work<'_> {
    /// No webhook named its runner. GitHub removes a JIT runner with its one job, so one that is still listed took none:
    /// the runner's scripts exit with 0 on some errors too. Nothing is removed here, so that the next leader finds the same.
    pub async fn settle(&self, observed: Observed, runner_facts: RunnerFacts) -> Result<Next, Error> {
        let (uid, now) = (self.worker.uid().unwrap_or_default(), clock::now());
        let end = self.board.memory.pod_end(&uid, now);
        let ended_for = now.duration_since(end);
        if runner_facts.has_job && ended_for < WEBHOOK_GRACE {
            return Ok(Next::After(WEBHOOK_GRACE.unsigned_abs()));
        }
        let none = || failure(FailureReason::RunnerWithoutJob, "the pod ended, and its runner had taken no job");
        match self.listed_runner().await {
            Ok(None) => self.mirror(observed, runner_facts, None).await,
            Ok(Some(runner)) if runner.busy || ended_for < REMOVAL_GRACE => Ok(Next::After(RECHECK_PERIOD)),
            Ok(Some(_)) => self.fail(none()).await,
            Err(error) if removal::is_abandoned(error.obstacle(self.pool_is_deleting()), Some(end), now) => {
                let message = format!("the pod ended, and GitHub does not tell whether its runner took a job: {error}");
                self.fail(failure(FailureReason::RunnerWithoutJob, &message)).await
            }
            Err(error) => self.wait(ClaimReason::GitHubUnavailable, &error, error.retry()).await,
        }
    }

    async fn listed_runner(&self) -> Result<Option<KnownRunner>, AccountError> {
        // Without its pool no runner can be asked for, and none is waited for.
        let Some(pool) = self.pool else { return Ok(None) };
        let account = self.board.account(&self.namespace, pool, self.spec).await?;
        let github = &self.board.shared.github;
        Ok(github.runner_by_name(&account.credentials, &account.scope, &self.name).await?)
    }

    /// Whether GitHub lists the runner as free, or not at all.
    pub async fn is_free(&self) -> bool {
        self.listed_runner().await.is_ok_and(|runner| runner.is_none_or(|runner| !runner.busy))
    }
}
