//! Processes webhook events, whether GitHub delivered them or `redelivery` read them from its log.
//!
//! Every replica does this, so writes are not fenced. Two replicas that receive the same job create the same claim, and
//! the API server accepts one. Updates carry the resource version they were decided on; a conflict is decided again.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use paddock_core::{
    api::{FIELD_MANAGER, RunnerClaim, RunnerPool},
    demand::job_facts::JobFacts,
    webhook::{
        claim_change::{self, ClaimChange},
        event::{self, Event, JobEvent, RunEvent},
        outcome::{Ignored, WebhookOutcome},
    },
};
use paddock_effects::kube::stores::Stores;
use serde_json::json;

use crate::controllers::reference;

/// Conflicts before a write is given up. Each conflict means that another writer made progress.
const MAX_CONFLICTS: usize = 8;
/// Delays between attempts while the API server is unavailable. They bridge a restart of it within the 10 s that GitHub
/// waits.
const RETRY_DELAYS_MS: [u64; 5] = [100, 200, 400, 800, 1600];

#[derive(Clone)]
pub struct Intake {
    client: Client,
    stores: Stores,
    /// Namespaces where claims of jobs were observed: a pool may be deleted before its last job has ended.
    claim_namespaces: Arc<RwLock<BTreeSet<String>>>,
}

impl Intake {
    pub fn start(client: Client, stores: Stores) -> Self {
        let claim_namespaces: Arc<RwLock<BTreeSet<String>>> = Arc::default();
        let (observed, claims) = (claim_namespaces.clone(), stores.claims.stream());
        tokio::spawn(claims.for_each(move |claim| {
            if let (Some(_), Some(namespace)) = (&claim.spec.job, &claim.metadata.namespace)
                && !observed.read().unwrap_or_else(PoisonError::into_inner).contains(namespace)
            {
                observed.write().unwrap_or_else(PoisonError::into_inner).insert(namespace.clone());
            }
            std::future::ready(())
        }));
        Self { client, stores, claim_namespaces }
    }

    /// Whether the caches are filled. No event can be decided before that.
    pub fn is_ready(&self) -> bool {
        self.stores.is_ready()
    }

    /// Processes an event. It is stored in the API server on return, unless [`WebhookOutcome::Unavailable`].
    pub async fn process(&self, event: &str, body: &[u8]) -> WebhookOutcome {
        match event::read(event, body) {
            Ok(Event::Job(event)) => self.job(&event).await,
            Ok(Event::Run(event)) => self.run(&event).await,
            Err(outcome) => outcome,
        }
    }

    async fn job(&self, event: &JobEvent) -> WebhookOutcome {
        let pools = self.stores.pools.store.state();
        let claim = self.cached_claim(event.job.id, &pools);
        self.write_claim(claim, |claim| claim_change::decide(event, claim, &pools)).await
    }

    /// Marks the claims of a completed run, one by one. After a failure the whole event is retried.
    async fn run(&self, event: &RunEvent) -> WebhookOutcome {
        let (pools, claims) = (self.stores.pools.store.state(), self.stores.claims.store.state());
        let claims_of_run = claim_change::ended_by(event, &claims, &pools);
        if claims_of_run.is_empty() {
            return WebhookOutcome::Ignored(Ignored::NoClaim);
        }
        let mut noted = 0;
        for claim in claims_of_run {
            match self.write_claim(Some(claim.clone()), claim_change::mark_over).await {
                WebhookOutcome::Noted(count) => noted += count,
                WebhookOutcome::Known => {}
                failed => return failed,
            }
        }
        if noted == 0 { WebhookOutcome::Known } else { WebhookOutcome::Noted(noted) }
    }

    /// Decides and writes. Retries after a conflict, and for a while when the API server is unavailable.
    async fn write_claim(
        &self,
        mut current: Option<Arc<RunnerClaim>>,
        decide: impl Fn(Option<&RunnerClaim>) -> ClaimChange,
    ) -> WebhookOutcome {
        let (mut conflicts, mut delays) = (0, RETRY_DELAYS_MS.into_iter());
        while conflicts < MAX_CONFLICTS {
            let written = match (decide(current.as_deref()), &current) {
                (ClaimChange::Leave(outcome), _) => return outcome,
                (ClaimChange::Create(claim), _) => self.create(&claim).await,
                (ClaimChange::Annotate(facts), Some(claim)) => self.annotate(claim, &facts).await,
                (ClaimChange::Annotate(_), None) => return WebhookOutcome::Known,
            };
            match written {
                Ok(outcome) => return outcome,
                Err(WriteError::Conflict(claim)) => (current, conflicts) = (claim, conflicts + 1),
                Err(WriteError::Refused(outcome)) => return outcome,
                Err(WriteError::Unavailable(why)) => match delays.next() {
                    Some(delay) => tokio::time::sleep(Duration::from_millis(delay)).await,
                    None => return WebhookOutcome::Unavailable(why),
                },
            }
        }
        WebhookOutcome::Unavailable("too many conflicts while writing the claim".into())
    }

    /// The job's claim, if it is cached.
    fn cached_claim(&self, job: i64, pools: &[Arc<RunnerPool>]) -> Option<Arc<RunnerClaim>> {
        let name = claim_change::claim_name(job);
        let get = |namespace: &str| self.stores.claims.store.get(&reference(namespace, &name));
        let mut pool_namespaces: Vec<&str> =
            pools.iter().filter_map(|pool| pool.metadata.namespace.as_deref()).collect();
        pool_namespaces.sort_unstable();
        pool_namespaces.dedup();
        let claim_namespaces = self.claim_namespaces.read().unwrap_or_else(PoisonError::into_inner);
        let others = claim_namespaces
            .iter()
            .map(String::as_str)
            .filter(|namespace| pool_namespaces.binary_search(namespace).is_err());
        pool_namespaces.iter().copied().chain(others).find_map(get)
    }

    async fn create(&self, claim: &RunnerClaim) -> Result<WebhookOutcome, WriteError> {
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        match self.api(claim).create(&parameters, claim).await {
            Ok(_) => {
                let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
                tracing::info!(namespace, claim = name, "claim created");
                Ok(WebhookOutcome::Made(name))
            }
            Err(error) => Err(self.write_error(claim, error).await),
        }
    }

    async fn annotate(&self, claim: &RunnerClaim, facts: &JobFacts) -> Result<WebhookOutcome, WriteError> {
        let patch = json!({ "metadata": {
            "resourceVersion": claim.metadata.resource_version,
            "annotations": facts.annotations(),
        } });
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.api(claim).patch(&claim.name_any(), &parameters, &Patch::Merge(patch)).await {
            Ok(_) => Ok(WebhookOutcome::Noted(1)),
            // Deleted since it was read.
            Err(kube::Error::Api(status)) if status.code == 404 => Err(WriteError::Conflict(None)),
            Err(error) => Err(self.write_error(claim, error).await),
        }
    }

    /// Classifies a failed write. After a conflict the claim is read again.
    async fn write_error(&self, claim: &RunnerClaim, error: kube::Error) -> WriteError {
        let error = match error {
            kube::Error::Api(status) if status.code == 409 => match self.api(claim).get_opt(&claim.name_any()).await {
                Ok(fresh) => return WriteError::Conflict(fresh.map(Arc::new)),
                Err(error) => error,
            },
            error => error,
        };
        match &error {
            kube::Error::Api(status) => {
                let why = format!("the API server answers {}: {}", status.code, status.message);
                match status.code {
                    400 | 422 => WriteError::Refused(WebhookOutcome::Malformed(why)),
                    429 | 500.. => WriteError::Unavailable(why),
                    // A missing permission or a terminating namespace does not go away with a retry.
                    _ => WriteError::Refused(WebhookOutcome::Unavailable(why)),
                }
            }
            error => WriteError::Unavailable(format!("the API server cannot be reached: {error}")),
        }
    }

    fn api(&self, claim: &RunnerClaim) -> Api<RunnerClaim> {
        Api::namespaced(self.client.clone(), claim.metadata.namespace.as_deref().unwrap_or_default())
    }
}

/// Why a write failed.
enum WriteError {
    /// Another writer was first: the claim as it is now.
    Conflict(Option<Arc<RunnerClaim>>),
    /// A retry would not help.
    Refused(WebhookOutcome),
    /// The API server is unavailable or overloaded.
    Unavailable(String),
}
