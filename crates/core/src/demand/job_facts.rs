//! Facts from webhooks about a claim, stored in its annotations.
//!
//! Facts are merged and never retracted, so the order and repetition of webhooks do not matter.

use std::collections::BTreeMap;

use crate::api::{
    ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE, ANNOTATION_RUN_STATE, RUNNER_NAME_MAX, Runner, RunnerClaim, head,
};

/// Progress of a job, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobStage {
    /// It waits for a runner.
    Queued,
    /// A runner has taken it.
    InProgress,
    /// It has ended, whether it ran or not.
    Completed,
}

impl JobStage {
    const ALL: [Self; 3] = [Self::Queued, Self::InProgress, Self::Completed];

    /// As GitHub spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.as_str() == text)
    }
}

/// All facts from webhooks about a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFacts {
    /// Progress of the claim's job; none for a claim that no webhook created.
    pub job: Option<JobStage>,
    /// The runner that took the job; it may be another than the one created for it.
    pub runner: Option<Runner>,
    /// Whether the claim's workflow run is completed.
    pub run_completed: bool,
}

/// The value of the run-state annotation of a completed run.
const RUN_COMPLETED: &str = "completed";

impl JobFacts {
    /// Reads the claim's annotations. Users can edit them, so invalid values are ignored.
    pub fn of(claim: &RunnerClaim) -> Self {
        let value = |key: &str| claim.metadata.annotations.as_ref()?.get(key).map(String::as_str);
        Self {
            job: value(ANNOTATION_JOB_STATE).and_then(JobStage::parse),
            runner: value(ANNOTATION_JOB_RUNNER).and_then(parse_runner),
            run_completed: value(ANNOTATION_RUN_STATE) == Some(RUN_COMPLETED),
        }
    }

    /// Merges both. GitHub gives a job to one runner; should it ever name two, every replica keeps the same one.
    pub fn and(self, more: Self) -> Self {
        let rank = |runner: &Runner| (runner.id, runner.name.clone());
        Self {
            job: self.job.max(more.job),
            runner: [self.runner, more.runner].into_iter().flatten().max_by_key(rank),
            run_completed: self.run_completed || more.run_completed,
        }
    }

    /// The annotations that store these facts.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let job = self.job.map(|job| (ANNOTATION_JOB_STATE, job.as_str().to_owned()));
        let runner = self.runner.as_ref().map(|runner| (ANNOTATION_JOB_RUNNER, format_runner(runner)));
        let run = self.run_completed.then(|| (ANNOTATION_RUN_STATE, RUN_COMPLETED.to_owned()));
        [job, runner, run].into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

/// The id, a slash, and the name, which may contain slashes.
fn format_runner(runner: &Runner) -> String {
    let id = runner.id.map(|id| id.to_string()).unwrap_or_default();
    format!("{id}/{}", head(&runner.name, RUNNER_NAME_MAX))
}

fn parse_runner(text: &str) -> Option<Runner> {
    let (id, name) = text.split_once('/')?;
    let id = if id.is_empty() { None } else { Some(id.parse().ok()?) };
    (!name.is_empty()).then(|| Runner { id, name: head(name, RUNNER_NAME_MAX) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::fixtures::boards::{claim, with};

    fn any_facts() -> impl Strategy<Value = JobFacts> {
        let job = prop::option::of(prop::sample::select(&JobStage::ALL[..]));
        let runner = prop::option::of((prop::option::of(1i64..4), "[a-c/ é\n]{1,4}"));
        (job, runner, any::<bool>()).prop_map(|(job, runner, run_completed)| {
            let runner = runner.map(|(id, name)| Runner { id, name });
            JobFacts { job, runner, run_completed }
        })
    }

    fn annotated(annotations: &BTreeMap<String, String>) -> RunnerClaim {
        with(&claim("c", 0), json!({"metadata": {"annotations": annotations}}))
    }

    proptest! {
        #[test]
        fn annotations_round_trip(facts in any_facts()) {
            prop_assert_eq!(JobFacts::of(&annotated(&facts.annotations())), facts);
        }

        #[test]
        fn i6_order_and_repetition_do_not_matter_and_nothing_is_taken_back(
            a in any_facts(), b in any_facts(), c in any_facts(),
        ) {
            let join = |a: &JobFacts, b: &JobFacts| a.clone().and(b.clone());
            prop_assert_eq!(join(&a, &b), join(&b, &a));
            prop_assert_eq!(join(&join(&a, &b), &c), join(&a, &join(&b, &c)));
            prop_assert_eq!(join(&a, &a), a.clone());
            prop_assert!(join(&a, &b).job >= a.job && (join(&a, &b).run_completed || !a.run_completed));
        }
    }

    #[test]
    fn invalid_annotations_are_ignored() {
        for (key, value) in [
            (ANNOTATION_JOB_STATE, "Completed"),
            (ANNOTATION_JOB_STATE, ""),
            (ANNOTATION_JOB_RUNNER, "runner"),
            (ANNOTATION_JOB_RUNNER, "7/"),
            (ANNOTATION_JOB_RUNNER, "x/runner"),
            (ANNOTATION_RUN_STATE, "running"),
        ] {
            let claim = annotated(&[(key.to_owned(), value.to_owned())].into());
            assert_eq!(JobFacts::of(&claim), JobFacts::default(), "{key}={value}");
        }
        assert_eq!(JobFacts::of(&claim("c", 0)), JobFacts::default());
    }
}
