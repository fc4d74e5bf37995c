//! The change of a claim that follows from an event: a job creates a claim, later events of the job annotate it, and
//! the end of a workflow run releases the machines that were claimed for it.

use std::sync::Arc;

use super::{
    event::{JobEvent, RunEvent},
    outcome::{Ignored, WebhookOutcome},
};
use crate::{
    api::{ClaimPhase, FINALIZER, Hardware, LABEL_ENTITY, RunnerClaim, RunnerClaimSpec, RunnerPool},
    demand::{job_facts::JobFacts, pool_selection},
    ec2::rerun,
};

/// The change that follows from an event.
#[derive(Clone, Debug, PartialEq)]
pub enum ClaimChange {
    /// Create this claim. Its name is derived from the job, so every replica creates the same object, and the API
    /// server accepts only one.
    Create(Box<RunnerClaim>),
    /// Write these facts to the claim's annotations, unless it has changed meanwhile.
    Annotate(JobFacts),
    /// No change.
    Leave(WebhookOutcome),
}

/// The name of a job's claim.
pub fn claim_name(job: i64) -> String {
    format!("job-{job}")
}

/// `known` is the job's claim, if there is one. Any event creates a claim: that of a completed job keeps a late
/// `queued` event from requesting a runner.
pub fn decide(event: &JobEvent, known: Option<&RunnerClaim>, pools: &[Arc<RunnerPool>]) -> ClaimChange {
    match known {
        Some(claim) if claim.spec.job.as_ref().map(|job| job.id) != Some(event.job.id) => {
            ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NameTaken))
        }
        Some(claim) => {
            let current = JobFacts::of(claim);
            let merged = current.clone().and(event.facts.clone());
            if merged == current { ClaimChange::Leave(WebhookOutcome::Known) } else { ClaimChange::Annotate(merged) }
        }
        None => {
            let (owner, repository) = (&event.repository.owner.login, &event.repository.name);
            match pool_selection::home(&event.labels, owner, repository, pools.iter().map(Arc::as_ref)) {
                Some(pool) => ClaimChange::Create(Box::new(claim(event, pool))),
                None => ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool)),
            }
        }
    }
}

/// The claim names no pool: while it waits, another pool of the namespace may start to serve its labels. It is created
/// with its finalizer, which saves a write before the pod.
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
    claim.metadata.annotations = Some(event.facts.annotations());
    claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    claim
}

/// Claims on EC2 pools that were created for the run, and finished ones whose interrupted jobs may be run again. One that
/// was created after the run ended is for a re-run, which has the same id.
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
            && claim
                .status
                .as_ref()
                .is_none_or(|status| !status.phase.is_some_and(ClaimPhase::is_over) || rerun::is_open(status))
            && is_on_ec2(claim, pools)
    };
    claims.into_iter().filter(concerns).collect()
}

/// Records in the claim's annotations that its run is completed.
pub fn mark_over(claim: Option<&RunnerClaim>) -> ClaimChange {
    // A claim that was deleted meanwhile is released already.
    let Some(claim) = claim else { return ClaimChange::Leave(WebhookOutcome::Known) };
    let current = JobFacts::of(claim);
    match current.run_completed {
        true => ClaimChange::Leave(WebhookOutcome::Known),
        false => ClaimChange::Annotate(JobFacts { run_completed: true, ..current }),
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
