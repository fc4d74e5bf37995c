//! The end of a workflow run releases the machines that were claimed for it.

use std::sync::Arc;

use super::{Outcome, RunEvent, Step};
use crate::{
    api::{ClaimPhase, Hardware, RunnerClaim, RunnerPool},
    plan::{heard::Heard, labels},
};

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
pub fn mark_over(claim: Option<&RunnerClaim>) -> Step {
    // One that was deleted meanwhile has been released.
    let Some(claim) = claim else { return Step::Leave(Outcome::Known) };
    let said = Heard::of(claim);
    match said.run_over {
        true => Step::Leave(Outcome::Known),
        false => Step::Note(Heard { run_over: true, ..said }),
    }
}

fn is_on_ec2(claim: &RunnerClaim, pools: &[Arc<RunnerPool>]) -> bool {
    let here = pools.iter().map(Arc::as_ref).filter(|pool| pool.metadata.namespace == claim.metadata.namespace);
    match labels::select(claim, here).map(|pool| pool.spec.hardware()) {
        Ok(Some(Hardware::Ec2(_))) => true,
        Ok(Some(Hardware::Board(_)) | None) | Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        api::{Owner, OwnerType},
        plan::{
            samples::{board_pool, claim, with},
            webhook::Repository,
        },
    };

    #[test]
    fn a_claim_is_marked_once_and_what_it_said_stays() {
        let told = with(&claim("c", 0), json!({"metadata": {"annotations": {"paddock.dev/job-state": "queued"}}}));
        let Step::Note(heard) = mark_over(Some(&told)) else { panic!("the claim does not say it yet") };
        let marked = with(&told, json!({"metadata": {"annotations": heard.annotations()}}));
        assert_eq!(Heard::of(&marked), Heard { run_over: true, ..Heard::of(&told) });
        assert_eq!(mark_over(Some(&marked)), Step::Leave(Outcome::Known));
        assert_eq!(mark_over(None), Step::Leave(Outcome::Known));
    }

    #[test]
    fn only_open_ec2_claims_of_that_run_and_attempt_are_concerned() {
        let ec2 = serde_json::to_value(crate::plan::sample_ec2::pool()).unwrap();
        let ec2: RunnerPool =
            serde_json::from_value(json!({"metadata": {"name": "ec2", "namespace": "default"}, "spec": {"ec2": ec2}}))
                .unwrap();
        let pools = [Arc::new(board_pool("board")), Arc::new(ec2)];
        let owner = Owner { id: 1, login: "Acme".into(), type_: OwnerType::Organization };
        let created = claim("c", 0).metadata.creation_timestamp.unwrap().0;
        let event = RunEvent {
            id: 1,
            repository: Repository { id: 5, name: "rocket".into(), owner },
            ended_at: created + jiff::SignedDuration::from_secs(60),
        };
        let on = |second: i64, change: Value| {
            let claim = with(&claim("c", second), json!({"spec": {"pool": "ec2", "labels": null}}));
            Arc::new(with(&claim, change))
        };
        for (claim, concerned, why) in [
            (on(0, json!({})), true, "no repository is named"),
            (on(60, json!({"spec": {"repository": "acme/Rocket"}})), true, "names have no case"),
            (on(0, json!({"spec": {"repository": "acme/other"}})), false, "another repository"),
            (on(0, json!({"spec": {"runId": "2"}})), false, "another run"),
            (on(61, json!({})), false, "a later attempt"),
            (on(0, json!({"spec": {"pool": "board"}})), false, "its job's own webhooks end it"),
            (on(0, json!({"spec": {"pool": "gone"}})), false, "nobody knows what it is"),
            (on(0, json!({"status": {"phase": "Failed"}})), false, "over"),
            (on(0, json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}})), false, "going"),
        ] {
            assert_eq!(ended_by(&event, [&claim], &pools).len() == 1, concerned, "{why}");
        }
    }
}
