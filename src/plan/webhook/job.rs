//! A job becomes a claim, and what is heard of it later becomes part of that claim.

use std::sync::Arc;

use super::{Ignored, JobEvent, Outcome};
use crate::{
    api::{FINALIZER, LABEL_ENTITY, RunnerClaim, RunnerClaimSpec, RunnerPool},
    plan::{heard::Heard, labels},
};

/// What to do about a job's event.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make this claim. Its name follows from the job: whoever else makes it makes the same one, and the API server
    /// lets only one through.
    Make(Box<RunnerClaim>),
    /// Let the claim say all this, unless it has changed meanwhile.
    Note(Heard),
    /// Nothing.
    Leave(Outcome),
}

/// The name of a job's claim.
pub fn claim_name(job: i64) -> String {
    format!("job-{job}")
}

/// What to do about the event, with the job's claim if there is one. A claim is made whatever the event is: one that
/// tells that the job is over keeps an event that comes late from asking for a runner.
pub fn decide(event: &JobEvent, known: Option<&RunnerClaim>, pools: &[Arc<RunnerPool>]) -> Step {
    match known {
        Some(claim) if claim.spec.job.as_ref().map(|job| job.id) != Some(event.job.id) => {
            Step::Leave(Outcome::Ignored(Ignored::NameTaken))
        }
        Some(claim) => {
            let said = Heard::of(claim);
            let all = said.clone().and(event.heard.clone());
            if all == said { Step::Leave(Outcome::Known) } else { Step::Note(all) }
        }
        None => {
            let (owner, repository) = (&event.repository.owner.login, &event.repository.name);
            match labels::home(&event.labels, owner, repository, pools.iter().map(Arc::as_ref)) {
                Some(pool) => Step::Make(Box::new(claim(event, pool))),
                None => Step::Leave(Outcome::Ignored(Ignored::NoPool)),
            }
        }
    }
}

/// The claim names no pool: as long as it waits, it may be served by another pool of the namespace that comes to serve
/// its labels. It has its finalizer from the start, which is one write less on the way to a pod.
fn claim(event: &JobEvent, pool: &RunnerPool) -> RunnerClaim {
    let spec = RunnerClaimSpec {
        pool: None,
        run_id: event.run_id.to_string(),
        count: 1,
        usage_class: None,
        resource_class: None,
        allowed_instance_types: None,
        cpu: None,
        memory_mib: None,
        max_runtime: None,
        labels: Some(event.labels.clone()),
        repository: Some(event.repository.full_name()),
        repository_id: Some(event.repository.id),
        owner: Some(event.repository.owner.clone()),
        installation_id: event.installation_id,
        job: Some(event.job.clone()),
    };
    let entity = spec.entity();
    let mut claim = RunnerClaim::new(&claim_name(event.job.id), spec);
    claim.metadata.namespace = pool.metadata.namespace.clone();
    claim.metadata.labels = entity.map(|entity| [(LABEL_ENTITY.to_owned(), entity)].into());
    claim.metadata.annotations = Some(event.heard.annotations());
    claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    claim
}
