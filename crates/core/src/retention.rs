//! When finished claims are deleted.

use jiff::{SignedDuration, Timestamp};

use crate::api::RunnerClaim;

/// Whether a claim, on either kind of hardware, finished longer than `retention` ago.
pub fn is_outdated(claim: &RunnerClaim, retention: SignedDuration, now: Timestamp) -> bool {
    let Some(status) = claim.status.as_ref().filter(|_| claim.metadata.deletion_timestamp.is_none()) else {
        return false;
    };
    let ended = status.phase.filter(|phase| phase.is_over()).and_then(|phase| status.phase_times.of(phase));
    ended.is_some_and(|ended| now.duration_since(ended.0) > retention)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{api::ClaimPhase, fixtures::ec2::at};

    #[test]
    fn claims_go_when_they_have_been_over_for_the_retention_time_and_never_before() {
        let day = SignedDuration::from_hours(24);
        for phase in [ClaimPhase::Pending, ClaimPhase::Ready, ClaimPhase::Releasing] {
            assert!(!is_outdated(&claim(phase), day, at(1_000_000)), "{phase:?}");
        }
        for phase in [ClaimPhase::Completed, ClaimPhase::Failed] {
            assert!(!is_outdated(&claim(phase), day, at(86_400)), "{phase:?}");
            assert!(is_outdated(&claim(phase), day, at(86_401)), "{phase:?}");
        }
    }

    fn claim(phase: ClaimPhase) -> RunnerClaim {
        let spec = serde_json::from_value(json!({"pool": "linux", "runId": "42"})).unwrap();
        let mut claim = RunnerClaim::new("build", spec);
        claim.status.get_or_insert_default().enter(phase, at(0));
        claim
    }
}
