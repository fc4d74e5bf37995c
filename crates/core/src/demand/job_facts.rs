//! What webhooks told of a claim, as its annotations carry it.
//!
//! Facts are joined and never taken back: whatever the order and repetition in which they are heard, the outcome is
//! the same.

use std::collections::BTreeMap;

use crate::api::{
    ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE, ANNOTATION_RUN_STATE, RUNNER_NAME_MAX, Runner, RunnerClaim, head,
};

/// How far a job is; the later, the further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobStage {
    /// It waits for a runner.
    Queued,
    /// A runner has taken it.
    InProgress,
    /// It is over, run or not.
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

/// Everything that was heard of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFacts {
    /// How far the claim's job is; nothing for a claim that no webhook made.
    pub job: Option<JobStage>,
    /// The runner that took the job; it may be another than the one made for it.
    pub runner: Option<Runner>,
    /// Whether the claim's workflow run is over.
    pub run_completed: bool,
}

/// What a run's annotation says once it is over.
const RUN_OVER: &str = "completed";

impl JobFacts {
    /// What the claim's annotations say. People can write annotations too: what makes no sense says nothing.
    pub fn of(claim: &RunnerClaim) -> Self {
        let said = |key: &str| claim.metadata.annotations.as_ref()?.get(key).map(String::as_str);
        Self {
            job: said(ANNOTATION_JOB_STATE).and_then(JobStage::parse),
            runner: said(ANNOTATION_JOB_RUNNER).and_then(parse_runner),
            run_completed: said(ANNOTATION_RUN_STATE) == Some(RUN_OVER),
        }
    }

    /// Both together. GitHub gives a job to one runner; should it ever name two, every replica keeps the same one.
    pub fn and(self, more: Self) -> Self {
        let rank = |runner: &Runner| (runner.id, runner.name.clone());
        Self {
            job: self.job.max(more.job),
            runner: [self.runner, more.runner].into_iter().flatten().max_by_key(rank),
            run_completed: self.run_completed || more.run_completed,
        }
    }

    /// The annotations that say it.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let job = self.job.map(|job| (ANNOTATION_JOB_STATE, job.as_str().to_owned()));
        let runner = self.runner.as_ref().map(|runner| (ANNOTATION_JOB_RUNNER, show_runner(runner)));
        let run = self.run_completed.then(|| (ANNOTATION_RUN_STATE, RUN_OVER.to_owned()));
        [job, runner, run].into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

/// The number, a slash, and the name, which may have slashes of its own.
fn show_runner(runner: &Runner) -> String {
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

    fn heard() -> impl Strategy<Value = JobFacts> {
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
        fn annotations_say_what_was_heard(heard in heard()) {
            prop_assert_eq!(JobFacts::of(&annotated(&heard.annotations())), heard);
        }

        #[test]
        fn i6_order_and_repetition_do_not_matter_and_nothing_is_taken_back(a in heard(), b in heard(), c in heard()) {
            let join = |a: &JobFacts, b: &JobFacts| a.clone().and(b.clone());
            prop_assert_eq!(join(&a, &b), join(&b, &a));
            prop_assert_eq!(join(&join(&a, &b), &c), join(&a, &join(&b, &c)));
            prop_assert_eq!(join(&a, &a), a.clone());
            prop_assert!(join(&a, &b).job >= a.job && (join(&a, &b).run_completed || !a.run_completed));
        }
    }

    #[test]
    fn what_makes_no_sense_says_nothing() {
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
