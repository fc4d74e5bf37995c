//! The workflow runs of Ready claims: GitHub is asked about each from time to time, in case a webhook was lost.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::channel::mpsc::UnboundedSender;
use jiff::{SignedDuration, Timestamp};
use kube::{ResourceExt, runtime::reflector::ObjectRef};
use paddock_core::{
    api::{Ec2Pool, RunnerClaim},
    ec2::workflow_run::{Answer, Asked, to_ask},
};
use paddock_effects::github::GitHubError;
use tokio_util::sync::CancellationToken;

use super::Ec2Context;
use crate::controllers::{every, reference};

/// How often it is seen who is to be asked about.
const ROUND: Duration = Duration::from_secs(15);
/// Runs asked about in one round: at most 1,200 an hour, of the 5,000 requests that GitHub allows an installation.
const PER_ROUND: usize = 5;

/// What is known of the runs of Ready claims, by the claim's uid; nothing of it matters after a restart.
#[derive(Default)]
pub struct Runs(Mutex<HashMap<String, Asked>>);

/// A run that GitHub is to be asked about.
struct Question {
    claim: Arc<RunnerClaim>,
    credentials: String,
    repository: String,
    run: i64,
}

impl Runs {
    fn known(&self) -> MutexGuard<'_, HashMap<String, Asked>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether GitHub said that the claim's run is over.
    pub fn is_over(&self, claim: &RunnerClaim) -> bool {
        claim.uid().is_some_and(|uid| self.known().get(&uid).is_some_and(Asked::is_over))
    }
}

/// Asks in rounds until `stop`, and sends the claims whose run is over.
pub async fn ask(context: Arc<Ec2Context>, over: UnboundedSender<ObjectRef<RunnerClaim>>, stop: CancellationToken) {
    let period = context.shared.settings.run_poll;
    every("workflow-runs", ROUND.min(period), context.shared.metrics.clone(), stop, || async {
        for question in questions(&context, SignedDuration::try_from(period).unwrap_or(SignedDuration::MAX)) {
            let answer = put(&context, &question).await;
            let uid = question.claim.uid().unwrap_or_default();
            let mut known = context.runs.known();
            let asked = known.entry(uid).or_default();
            asked.note(answer, Timestamp::now());
            if asked.is_over() {
                let _ = over.unbounded_send(ObjectRef::from_obj(&*question.claim));
            }
        }
        Ok(())
    })
    .await;
}

/// Whom to ask about now: who was not asked about for longest comes first.
fn questions(context: &Ec2Context, period: SignedDuration) -> Vec<Question> {
    let now = Timestamp::now();
    let mut known = context.runs.known();
    let (mut due, mut ready) = (Vec::new(), HashMap::new());
    for claim in context.shared.stores.claims.store.state() {
        let Some((pool, uid)) = pool_of(context, &claim).zip(claim.uid()) else { continue };
        let Some((repository, run, since)) = to_ask(&claim, &pool) else { continue };
        let asked = known.remove(&uid).unwrap_or_default();
        if asked.is_due(since, period, now) {
            let credentials = pool.github.credentials_ref.name.clone();
            due.push((asked.at.unwrap_or(since), Question { claim, credentials, repository, run }));
        }
        ready.insert(uid, asked);
    }
    *known = ready;
    due.sort_by_key(|(since, _)| *since);
    due.into_iter().take(PER_ROUND).map(|(_, question)| question).collect()
}

fn pool_of(context: &Ec2Context, claim: &RunnerClaim) -> Option<Ec2Pool> {
    let pool = reference(&claim.namespace()?, claim.spec.pool.as_ref()?);
    context.shared.stores.pools.store.get(&pool)?.spec.ec2.clone()
}

async fn put(context: &Ec2Context, question: &Question) -> Option<Answer> {
    let Question { claim, credentials, repository, run } = question;
    let namespace = claim.namespace().unwrap_or_default();
    let credentials = context.shared.credentials.get_or_last(&namespace, credentials).await;
    let credentials = credentials.inspect_err(|error| tracing::warn!(%error, "a run cannot be asked about")).ok()?;
    match context.shared.github.run_is_over(&credentials, repository, *run).await {
        Ok(true) => Some(Answer::Completed),
        Ok(false) => Some(Answer::Active),
        Err(GitHubError::NotFound(_)) => Some(Answer::Missing),
        Err(error) => {
            tracing::warn!(claim = claim.name_any(), repository, run, %error, "a run cannot be asked about");
            None
        }
    }
}
