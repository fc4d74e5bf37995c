//! The change of a claim that follows from an event: a job becomes a claim, what is told of it later becomes part of that
//! claim, and the end of a workflow run releases the machines that were claimed for it.

use std::sync::Arc;

use super::{
    event::{JobEvent, RunEvent},
    outcome::{Ignored, WebhookOutcome},
};
use crate::{
    api::{ClaimPhase, FINALIZER, Hardware, LABEL_ENTITY, RunnerClaim, RunnerClaimSpec, RunnerPool},
    demand::{job_facts::JobFacts, pool_selection},
};

/// What to do about a job's event.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimChange {
    /// Make this claim. Its name follows from the job: whoever else makes it makes the same one, and the API server
    /// lets only one through.
    Make(Box<RunnerClaim>),
    /// Let the claim say all this, unless it has changed meanwhile.
    Note(JobFacts),
    /// Nothing.
    Leave(WebhookOutcome),
}

/// The name of a job's claim.
pub fn claim_name(job: i64) -> String {
    format!("job-{job}")
}

/// What to do about the event, with the job's claim if there is one. A claim is made whatever the event is: one that
/// tells that the job is over keeps an event that comes late from asking for a runner.
pub fn decide(event: &JobEvent, known: Option<&RunnerClaim>, pools: &[Arc<RunnerPool>]) -> ClaimChange {
    match known {
        Some(claim) if claim.spec.job.as_ref().map(|job| job.id) != Some(event.job.id) => {
            ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NameTaken))
        }
        Some(claim) => {
            let said = JobFacts::of(claim);
            let all = said.clone().and(event.heard.clone());
            if all == said { ClaimChange::Leave(WebhookOutcome::Known) } else { ClaimChange::Note(all) }
        }
        None => {
            let (owner, repository) = (&event.repository.owner.login, &event.repository.name);
            match pool_selection::home(&event.labels, owner, repository, pools.iter().map(Arc::as_ref)) {
                Some(pool) => ClaimChange::Make(Box::new(claim(event, pool))),
                None => ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool)),
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

/// Claims on EC2 pools that were made for the run. One that was made after the run had ended is for a later attempt of
/// it, which has the same number.
pub fn ended_by<'a>(
    event: &RunEvent,
    claims: impl IntoIterator<Item = &'a Arc<RunnerClaim>>,
    pools: &[Arc<RunnerPool>],
) -> Vec<&'a Arc<RunnerClaim>> {
    let (run_id, repository) = (event.id.to_string(), event.repository.full_name());
    let concerns = |claim: &&Arc<RunnerClaim>| {
        let spec = &claim.spec;
        spec.run_id == run_id
            && spec.repository.as_ref().is_none_or(|named| named.eq_ignore_ascii_case(&repository))
            && claim.metadata.creation_timestamp.as_ref().is_some_and(|created| created.0 <= event.ended_at)
            && claim.metadata.deletion_timestamp.is_none()
            && !claim.status.as_ref().and_then(|status| status.phase).is_some_and(ClaimPhase::is_over)
            && is_on_ec2(claim, pools)
    };
    claims.into_iter().filter(concerns).collect()
}

/// Lets a claim say that its run is over.
pub fn mark_over(claim: Option<&RunnerClaim>) -> ClaimChange {
    // One that was deleted meanwhile has been released.
    let Some(claim) = claim else { return ClaimChange::Leave(WebhookOutcome::Known) };
    let said = JobFacts::of(claim);
    match said.run_completed {
        true => ClaimChange::Leave(WebhookOutcome::Known),
        false => ClaimChange::Note(JobFacts { run_completed: true, ..said }),
    }
}

fn is_on_ec2(claim: &RunnerClaim, pools: &[Arc<RunnerPool>]) -> bool {
    let here = pools.iter().map(Arc::as_ref).filter(|pool| pool.metadata.namespace == claim.metadata.namespace);
    match pool_selection::select(claim, here).map(|pool| pool.spec.hardware()) {
        Ok(Some(Hardware::Ec2(_))) => true,
        Ok(Some(Hardware::Board(_)) | None) | Err(_) => false,
    }
}

#[cfg(test)]
#[path = "claim_change_tests.rs"]
mod tests;
