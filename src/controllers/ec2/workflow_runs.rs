//! Polls GitHub for the workflow runs of Ready claims, in case a webhook was lost.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::channel::mpsc::UnboundedSender;
use jiff::SignedDuration;
use kube::{ResourceExt, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{Ec2Pool, RunnerClaim},
    ec2::workflow_run::{Answer, Asked, to_ask},
};
use paddock_effects::{clock, github::GitHubError};
use tokio_util::sync::CancellationToken;

use super::Ec2Context;
use crate::controllers::{every, reference};

/// How often to check which runs are due.
const ROUND_PERIOD: Duration = Duration::from_secs(15);
/// Runs polled in one round: at most 1,200 an hour, of the 5,000 requests that GitHub allows an installation.
const MAX_RUNS_PER_ROUND: usize = 5;

/// The polled runs of Ready claims, by the claim's uid. Not persisted.
#[derive(Default)]
pub struct Runs(Mutex<HashMap<String, Asked>>);

/// A run to poll.
struct DueRun {
    claim: Arc<RunnerClaim>,
    credentials: String,
    repository: String,
    run: i64,
}

impl Runs {
    fn polled(&self) -> MutexGuard<'_, HashMap<String, Asked>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether GitHub reported the claim's run as completed.
    pub fn is_over(&self, claim: &RunnerClaim) -> bool {
        claim.uid().is_some_and(|uid| self.polled().get(&uid).is_some_and(Asked::is_over))
    }
}

/// Polls in rounds until `stop`, and enqueues the claims whose run is over.
pub async fn poll(context: Arc<Ec2Context>, over: UnboundedSender<ObjectRef<RunnerClaim>>, stop: CancellationToken) {
    let period = context.shared.settings.run_poll;
    every("workflow-runs", ROUND_PERIOD.min(period), context.shared.metrics.clone(), stop, || async {
        for due in due_runs(&context, SignedDuration::try_from(period).unwrap_or(SignedDuration::MAX)) {
            let answer = poll_run(&context, &due).await;
            let uid = due.claim.uid().unwrap_or_default();
            let mut polled = context.runs.polled();
            let asked = polled.entry(uid).or_default();
            asked.note(answer, clock::now());
            if asked.is_over() {
                let _ = over.unbounded_send(ObjectRef::from_obj(&*due.claim));
            }
        }
        Ok(())
    })
    .await;
}

/// The runs to poll now, the least recently polled first.
fn due_runs(context: &Ec2Context, period: SignedDuration) -> Vec<DueRun> {
    let now = clock::now();
    let mut polled = context.runs.polled();
    let (mut due, mut ready) = (Vec::new(), HashMap::new());
    for claim in context.shared.stores.claims.store.state() {
        let Some((pool, uid)) = pool_of(context, &claim).zip(claim.uid()) else { continue };
        let Some((repository, run, since)) = to_ask(&claim, &pool) else { continue };
        let asked = polled.remove(&uid).unwrap_or_default();
        if asked.is_due(since, period, now) {
            let credentials = pool.github.credentials_ref.name.clone();
            due.push((asked.at.unwrap_or(since), DueRun { claim, credentials, repository, run }));
        }
        ready.insert(uid, asked);
    }
    *polled = ready;
    due.sort_by_key(|(since, _)| *since);
    due.into_iter().take(MAX_RUNS_PER_ROUND).map(|(_, run)| run).collect()
}

fn pool_of(context: &Ec2Context, claim: &RunnerClaim) -> Option<Ec2Pool> {
    let pool = reference(&claim.namespace()?, claim.spec.pool.as_ref()?);
    context.shared.stores.pools.store.get(&pool)?.spec.ec2.clone()
}

async fn poll_run(context: &Ec2Context, due: &DueRun) -> Option<Answer> {
    let DueRun { claim, credentials, repository, run } = due;
    let namespace = claim.namespace().unwrap_or_default();
    let credentials = context.shared.credentials.get_or_last(&namespace, credentials).await;
    let credentials = credentials.inspect_err(|error| tracing::warn!(%error, "workflow run not polled")).ok()?;
    match context.shared.github.run_is_over(&credentials, repository, *run).await {
        Ok(true) => Some(Answer::Completed),
        Ok(false) => Some(Answer::Active),
        Err(GitHubError::NotFound(_)) => Some(Answer::Missing),
        Err(error) => {
            tracing::warn!(claim = claim.name_any(), repository, run, %error, "workflow run not polled");
            None
        }
    }
}
