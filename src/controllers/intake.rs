//! Webhooks are taken in, whoever brings them: GitHub itself, or the log of what it could not deliver.
//!
//! Any replica does it, so nothing here is fenced. Two replicas that hear of the same job make the same claim, and the
//! API server lets one through; what is written to a claim names the version it was decided on, and is decided anew
//! when that has changed.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError, RwLock},
};

use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::reference;
use crate::{
    api::{FIELD_MANAGER, RunnerClaim, RunnerPool},
    plan::{
        heard::Heard,
        webhook::{self, Event, Ignored, JobEvent, Outcome, RunEvent, Step},
    },
    stores::Stores,
};

/// How often a claim may change under one's hands. Each time somebody else got further.
const ATTEMPTS: usize = 8;

#[derive(Clone)]
pub struct Intake {
    client: Client,
    stores: Stores,
    /// Where claims of jobs have been seen: a pool may be gone before its last job has ended.
    places: Arc<RwLock<BTreeSet<String>>>,
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
        Self { client, stores, places }
    }

    /// Whether it is known what there is; before that, nothing can be said of any event.
    pub fn is_ready(&self) -> bool {
        self.stores.is_ready()
    }

    /// Takes an event in. What is not [`Outcome::Unavailable`] is safe in the API server when this returns.
    pub async fn take(&self, event: &str, body: &[u8]) -> Outcome {
        match webhook::read(event, body) {
            Ok(Event::Job(event)) => self.job(&event).await,
            Ok(Event::Run(event)) => self.run(&event).await,
            Err(outcome) => outcome,
        }
    }

    async fn job(&self, event: &JobEvent) -> Outcome {
        let pools = self.stores.pools.store.state();
        let mut known = self.known(event.job.id, &pools);
        for _ in 0..ATTEMPTS {
            let written = match webhook::decide(event, known.as_deref(), &pools) {
                Step::Leave(outcome) => return outcome,
                Step::Make(claim) => self.make(&claim).await,
                Step::Note(heard) => match &known {
                    Some(claim) => self.note(claim, &heard).await,
                    None => return Outcome::Unavailable("nothing is known to be noted to".into()),
                },
            };
            known = match written {
                Ok(outcome) => return outcome,
                Err(Raced::Changed(claim)) => claim,
                Err(Raced::Lost(outcome)) => return outcome,
            };
        }
        Outcome::Unavailable("the claim changes all the time".into())
    }

    /// The job's claim, if a cache has it.
    fn known(&self, job: i64, pools: &[Arc<RunnerPool>]) -> Option<Arc<RunnerClaim>> {
        let name = webhook::claim_name(job);
        let get = |namespace: &str| self.stores.claims.store.get(&reference(namespace, &name));
        let mut homes: Vec<&str> = pools.iter().filter_map(|pool| pool.metadata.namespace.as_deref()).collect();
        homes.sort_unstable();
        homes.dedup();
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        let elsewhere = places.iter().map(String::as_str).filter(|place| homes.binary_search(place).is_err());
        homes.iter().copied().chain(elsewhere).find_map(get)
    }

    async fn make(&self, claim: &RunnerClaim) -> Result<Outcome, Raced> {
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() };
        match self.api(claim).create(&parameters, claim).await {
            Ok(_) => {
                let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
                tracing::info!(namespace, claim = name, "a job became a claim");
                Ok(Outcome::Made(name))
            }
            Err(error) => Err(self.raced(claim, error).await),
        }
    }

    async fn note(&self, claim: &RunnerClaim, heard: &Heard) -> Result<Outcome, Raced> {
        let patch = json!({ "metadata": {
            "resourceVersion": claim.metadata.resource_version,
            "annotations": heard.annotations(),
        } });
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match self.api(claim).patch(&claim.name_any(), &parameters, &Patch::Merge(patch)).await {
            Ok(_) => Ok(Outcome::Noted(1)),
            Err(error) => Err(self.raced(claim, error).await),
        }
    }

    /// Somebody else was faster, which a fresh look at the claim settles; or the API server cannot, or will not.
    async fn raced(&self, claim: &RunnerClaim, error: kube::Error) -> Raced {
        let unavailable = |error: kube::Error| Raced::Lost(Outcome::Unavailable(told(&error)));
        match &error {
            kube::Error::Api(status) if matches!(status.code, 404 | 409) => {
                match self.api(claim).get_opt(&claim.name_any()).await {
                    // A namespace that is not there any more answers like a claim that is not.
                    Ok(None) if status.code == 404 && claim.metadata.resource_version.is_none() => unavailable(error),
                    Ok(fresh) => Raced::Changed(fresh.map(Arc::new)),
                    Err(error) => unavailable(error),
                }
            }
            kube::Error::Api(status) if matches!(status.code, 400 | 422) => {
                Raced::Lost(Outcome::Malformed(told(&error)))
            }
            _ => unavailable(error),
        }
    }

    /// Marks the claims of a run that is over. Each goes its own way: one that cannot be written is tried again with
    /// the event.
    async fn run(&self, event: &RunEvent) -> Outcome {
        let (pools, claims) = (self.stores.pools.store.state(), self.stores.claims.store.state());
        let concerned = webhook::ended_by(event, &claims, &pools);
        if concerned.is_empty() {
            return Outcome::Ignored(Ignored::NoClaim);
        }
        let over = Heard { run_over: true, ..Heard::default() };
        let mut noted = 0;
        for claim in concerned {
            let mut known = Some(claim.clone());
            for attempt in 1.. {
                let Some(claim) = known.take() else { break };
                let said = Heard::of(&claim);
                let all = said.clone().and(over.clone());
                if all == said {
                    break;
                }
                known = match self.note(&claim, &all).await {
                    Ok(_) => {
                        noted += 1;
                        None
                    }
                    Err(Raced::Changed(fresh)) if attempt < ATTEMPTS => fresh,
                    Err(Raced::Changed(_)) => return Outcome::Unavailable("a claim changes all the time".into()),
                    Err(Raced::Lost(outcome)) => return outcome,
                };
            }
        }
        if noted == 0 { Outcome::Known } else { Outcome::Noted(noted) }
    }

    fn api(&self, claim: &RunnerClaim) -> Api<RunnerClaim> {
        Api::namespaced(self.client.clone(), claim.metadata.namespace.as_deref().unwrap_or_default())
    }
}

/// Why a write did not happen.
enum Raced {
    /// Somebody else was faster: the claim as it is now.
    Changed(Option<Arc<RunnerClaim>>),
    /// It cannot be written now.
    Lost(Outcome),
}

/// The API server's own sentence.
fn told(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("the API server answers {}: {}", status.code, status.message),
        error => format!("the API server cannot be reached: {error}"),
    }
}
