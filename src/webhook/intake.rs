//! Webhooks are taken in, whoever brings them: GitHub itself, or the log of what it could not deliver.
//!
//! Any replica does it, so nothing here is fenced. Two replicas that hear of the same job make the same claim, and the
//! API server lets one through; what is written to a claim names the version it was decided on, and is decided anew
//! when that has changed.

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

use crate::controllers::{reference, rush::Rush};

/// How often a claim may change under one's hands. Each time somebody else got further.
const RACES: usize = 8;
/// How long to wait before each further try when the API server is away: a restart of it need not be seen at GitHub, which
/// waits for 10 s.
const PAUSES_MS: [u64; 5] = [100, 200, 400, 800, 1600];

#[derive(Clone)]
pub struct Intake {
    client: Client,
    stores: Stores,
    /// Where claims of jobs have been seen: a pool may be gone before its last job has ended.
    places: Arc<RwLock<BTreeSet<String>>>,
    pub rush: Arc<Rush>,
}

impl Intake {
    pub fn start(client: Client, stores: Stores) -> Self {
        let places: Arc<RwLock<BTreeSet<String>>> = Arc::default();
        let (known, claims) = (places.clone(), stores.claims.stream());
        tokio::spawn(claims.for_each(move |claim| {
            if let (Some(_), Some(namespace)) = (&claim.spec.job, &claim.metadata.namespace)
                && !known.read().unwrap_or_else(PoisonError::into_inner).contains(namespace)
            {
                known.write().unwrap_or_else(PoisonError::into_inner).insert(namespace.clone());
            }
            std::future::ready(())
        }));
        Self { client, stores, places, rush: Arc::default() }
    }

    /// Whether it is known what there is; before that, nothing can be said of any event.
    pub fn is_ready(&self) -> bool {
        self.stores.is_ready()
    }

    /// Takes an event in. What is not [`WebhookOutcome::Unavailable`] is safe in the API server when this returns.
    pub async fn take(&self, event: &str, body: &[u8]) -> WebhookOutcome {
        match event::read(event, body) {
            Ok(Event::Job(event)) => self.job(&event).await,
            Ok(Event::Run(event)) => self.run(&event).await,
            Err(outcome) => outcome,
        }
    }

    async fn job(&self, event: &JobEvent) -> WebhookOutcome {
        let pools = self.stores.pools.store.state();
        let known = self.known(event.job.id, &pools);
        self.settle(known, |claim| claim_change::decide(event, claim, &pools)).await
    }

    /// Marks the claims of a run that is over, one by one: what fails is tried again with the whole event.
    async fn run(&self, event: &RunEvent) -> WebhookOutcome {
        let (pools, claims) = (self.stores.pools.store.state(), self.stores.claims.store.state());
        let concerned = claim_change::ended_by(event, &claims, &pools);
        if concerned.is_empty() {
            return WebhookOutcome::Ignored(Ignored::NoClaim);
        }
        let mut noted = 0;
        for claim in concerned {
            match self.settle(Some(claim.clone()), claim_change::mark_over).await {
                WebhookOutcome::Noted(count) => noted += count,
                WebhookOutcome::Known => {}
                failed => return failed,
            }
        }
        if noted == 0 { WebhookOutcome::Known } else { WebhookOutcome::Noted(noted) }
    }

    /// Decides and writes, anew when somebody else was faster, and for a while also when the API server is away.
    async fn settle(
        &self,
        mut known: Option<Arc<RunnerClaim>>,
        decide: impl Fn(Option<&RunnerClaim>) -> ClaimChange,
    ) -> WebhookOutcome {
        let (mut races, mut pauses) = (0, PAUSES_MS.into_iter());
        while races < RACES {
            let written = match (decide(known.as_deref()), &known) {
                (ClaimChange::Leave(outcome), _) => return outcome,
                (ClaimChange::Make(claim), _) => self.make(&claim).await,
                (ClaimChange::Note(heard), Some(claim)) => self.note(claim, &heard).await,
                (ClaimChange::Note(_), None) => return WebhookOutcome::Known,
            };
            match written {
                Ok(outcome) => return outcome,
                Err(Failed::Raced(claim)) => (known, races) = (claim, races + 1),
                Err(Failed::Refused(outcome)) => return outcome,
                Err(Failed::Away(why)) => match pauses.next() {
                    Some(pause) => tokio::time::sleep(Duration::from_millis(pause)).await,
                    None => return WebhookOutcome::Unavailable(why),
                },
            }
        }
        WebhookOutcome::Unavailable("the claim changes all the time".into())
    }

    /// The job's claim, if a cache has it.
    fn known(&self, job: i64, pools: &[Arc<RunnerPool>]) -> Option<Arc<RunnerClaim>> {
        let name = claim_change::claim_name(job);
        let get = |namespace: &str| self.stores.claims.store.get(&reference(namespace, &name));
        let mut homes: Vec<&str> = pools.iter().filter_map(|pool| pool.metadata.namespace.as_deref()).collect();
        homes.sort_unstable();
        homes.dedup();
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        let elsewhere = places.iter().map(String::as_str).filter(|place| homes.binary_search(place).is_err());
        homes.iter().copied().chain(elsewhere).find_map(get)
    }

    async fn make(&self, claim: &RunnerClaim) -> Result<WebhookOutcome, Failed> {
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        let _rush = self.rush.enter();
        match self.api(claim).create(&parameters, claim).await {
            Ok(_) => {
                let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
                tracing::info!(namespace, claim = name, "a job became a claim");
                Ok(WebhookOutcome::Made(name))
            }
            Err(error) => Err(self.failed(claim, error).await),
        }
    }

    async fn note(&self, claim: &RunnerClaim, heard: &JobFacts) -> Result<WebhookOutcome, Failed> {
        let patch = json!({ "metadata": {
            "resourceVersion": claim.metadata.resource_version,
            "annotations": heard.annotations(),
        } });
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.api(claim).patch(&claim.name_any(), &parameters, &Patch::Merge(patch)).await {
            Ok(_) => Ok(WebhookOutcome::Noted(1)),
            // Changed, or deleted, since it was looked at.
            Err(kube::Error::Api(status)) if status.code == 404 => Err(Failed::Raced(None)),
            Err(error) => Err(self.failed(claim, error).await),
        }
    }

    /// Why a write did not happen: a fresh look at the claim settles a race.
    async fn failed(&self, claim: &RunnerClaim, error: kube::Error) -> Failed {
        let error = match error {
            kube::Error::Api(status) if status.code == 409 => match self.api(claim).get_opt(&claim.name_any()).await {
                Ok(fresh) => return Failed::Raced(fresh.map(Arc::new)),
                Err(error) => error,
            },
            error => error,
        };
        match &error {
            kube::Error::Api(status) => {
                let why = format!("the API server answers {}: {}", status.code, status.message);
                match status.code {
                    400 | 422 => Failed::Refused(WebhookOutcome::Malformed(why)),
                    429 | 500.. => Failed::Away(why),
                    // A right that is missing, a namespace that goes: not for this moment alone.
                    _ => Failed::Refused(WebhookOutcome::Unavailable(why)),
                }
            }
            error => Failed::Away(format!("the API server cannot be reached: {error}")),
        }
    }

    fn api(&self, claim: &RunnerClaim) -> Api<RunnerClaim> {
        Api::namespaced(self.client.clone(), claim.metadata.namespace.as_deref().unwrap_or_default())
    }
}

/// Why a write did not happen.
enum Failed {
    /// Somebody else was faster: the claim as it is now.
    Raced(Option<Arc<RunnerClaim>>),
    /// It will not happen now.
    Refused(WebhookOutcome),
    /// The API server is away, or has too much to do.
    Away(String),
}
