//! Whether the workflow run of a claim is completed, according to a webhook or to GitHub's answer.

use jiff::{SignedDuration, Timestamp};

use super::rerun;
use crate::{
    api::{ClaimPhase, Ec2Pool, RunnerClaim},
    demand::job_facts::JobFacts,
};

/// How many 404s in a row mean that a run which GitHub once showed was deleted, and so counts as completed.
const MISSING_ANSWERS_MIN: u32 = 3;

/// GitHub's answer about a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Active,
    Completed,
    /// 404: deleted, or hidden from these credentials.
    Missing,
}

/// The answers about a run so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    pub at: Option<Timestamp>,
    seen: bool,
    missing: u32,
    completed: bool,
}

impl Asked {
    /// Records an answer; `None` is an inconclusive one, such as an outage.
    pub fn note(&mut self, answer: Option<Answer>, now: Timestamp) {
        self.at = Some(now);
        match answer {
            None => {}
            Some(Answer::Active) => (self.seen, self.missing) = (true, 0),
            Some(Answer::Completed) => self.completed = true,
            Some(Answer::Missing) => self.missing += 1,
        }
    }

    /// A run that was never seen may be hidden by a missing permission, which ends no claim.
    pub const fn is_over(&self) -> bool {
        self.completed || self.seen && self.missing >= MISSING_ANSWERS_MIN
    }

    /// Whether to ask again; a claim that became Ready just now has jobs to run.
    pub fn is_due(&self, ready_since: Timestamp, period: SignedDuration, now: Timestamp) -> bool {
        !self.is_over() && now.duration_since(self.at.unwrap_or(ready_since)) >= period
    }
}

/// The repository and id of the run to ask about, and since when the claim is Ready, or over with interrupted jobs that
/// may be run again; none if there is nothing to ask, or no way to.
pub fn to_ask(claim: &RunnerClaim, pool: &Ec2Pool) -> Option<(String, i64, Timestamp)> {
    let status = claim.status.as_ref()?;
    let phase = status.phase?;
    if !(phase == ClaimPhase::Ready || pool.rerun_interrupted && rerun::is_open(status))
        || claim.metadata.deletion_timestamp.is_some()
        || JobFacts::of(claim).run_completed
    {
        return None;
    }
    let (repository, run) = rerun::run_of(claim, pool)?;
    Some((repository, run, status.phase_times.of(phase)?.0))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    use super::*;
    use crate::{
        api::{ANNOTATION_RUN_STATE, Interruption},
        fixtures::ec2::{at, pool},
    };

    fn asked(answers: &[Option<Answer>]) -> Asked {
        let mut asked = Asked::default();
        answers.iter().for_each(|answer| asked.note(*answer, at(0)));
        asked
    }

    #[test]
    fn only_what_github_says_ends_a_run_and_404_only_if_it_lasts_after_the_run_was_seen() {
        use Answer::*;
        for (answers, over) in [
            (&[][..], false),
            (&[Some(Active)], false),
            (&[Some(Completed)], true),
            (&[None, None, None, None], false),
            (&[Some(Missing), Some(Missing), Some(Missing), Some(Missing)], false),
            (&[Some(Active), Some(Missing), Some(Missing)], false),
            (&[Some(Active), Some(Missing), Some(Missing), None, Some(Missing)], true),
            (&[Some(Active), Some(Missing), Some(Missing), Some(Active), Some(Missing)], false),
        ] {
            assert_eq!(asked(answers).is_over(), over, "{answers:?}");
        }
    }

    #[test]
    fn a_run_is_asked_about_once_a_period_from_when_its_claim_was_ready() {
        let period = SignedDuration::from_mins(5);
        assert!(!Asked::default().is_due(at(0), period, at(299)));
        assert!(Asked::default().is_due(at(0), period, at(300)));
        let mut asked = Asked::default();
        asked.note(None, at(400));
        assert!(!asked.is_due(at(0), period, at(699)) && asked.is_due(at(0), period, at(700)));
        asked.note(Some(Answer::Completed), at(700));
        assert!(!asked.is_due(at(0), period, at(9000)), "there is nothing more to learn");
    }

    #[test]
    fn the_repository_is_the_claims_or_the_pools_and_without_one_github_is_not_asked() {
        let claim = |run: &str, repository: Option<&str>| -> RunnerClaim {
            let mut claim = RunnerClaim::new(
                "build",
                serde_json::from_value(json!({"pool": "linux", "runId": run, "repository": repository})).unwrap(),
            );
            let status = claim.status.get_or_insert_default();
            status.enter(ClaimPhase::Ready, at(7));
            status.phase_times.ready = Some(Time(at(7)));
            claim
        };
        let (mut org, mut repo) = (pool(), pool());
        repo.github.repository = Some("rocket".into());
        let ask = |repository: &str| Some((repository.to_owned(), 42, at(7)));
        assert_eq!(to_ask(&claim("42", Some("acme/site")), &repo), ask("acme/site"));
        assert_eq!(to_ask(&claim("42", None), &repo), ask("acme/rocket"));
        assert_eq!(to_ask(&claim("42", None), &org), None);
        assert_eq!(to_ask(&claim("nightly", Some("acme/site")), &org), None, "that is no run of GitHub's");
        let mut marked = claim("42", Some("acme/site"));
        marked.metadata.annotations = Some([(ANNOTATION_RUN_STATE.to_owned(), "completed".to_owned())].into());
        assert_eq!(to_ask(&marked, &org), None);
        let mut waiting = claim("42", Some("acme/site"));
        waiting.status.as_mut().unwrap().phase = Some(ClaimPhase::Validating);
        assert_eq!(to_ask(&waiting, &org), None);
        let mut lost = claim("42", Some("acme/site"));
        let status = lost.status.as_mut().unwrap();
        status.enter(ClaimPhase::Failed, at(9));
        status.interruptions = vec![Interruption { worker: "i-1".into(), since: Time(at(8)) }];
        assert_eq!(to_ask(&lost, &org), None);
        org.rerun_interrupted = true;
        assert_eq!(to_ask(&lost, &org), Some(("acme/site".into(), 42, at(9))), "its jobs may be run again");
    }
}
