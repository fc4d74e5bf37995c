//! Jobs of claims: their progress, their runner, and when to ask GitHub about them.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::job_facts::{JobFacts, JobStage};
use crate::api::{Duration, Runner, RunnerClaim};

/// How long a webhook may take to report the end of a job whose runner ended.
const WEBHOOK_GRACE: SignedDuration = SignedDuration::from_secs(5);
/// The shortest interval between two regular questions about a job, to save GitHub requests.
const JOB_POLL_MIN: SignedDuration = SignedDuration::from_mins(1);

/// Progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// No runner has taken it.
    Queued,
    Running,
    Completed,
    /// GitHub does not know it.
    Gone,
    /// It is queued although its workflow run is completed.
    Stuck,
}

impl JobState {
    /// Whether no runner will run it any more.
    pub const fn is_over(self) -> bool {
        match self {
            Self::Queued | Self::Running => false,
            Self::Completed | Self::Gone | Self::Stuck => true,
        }
    }
}

/// GitHub's answer about a job, and when it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSeen {
    pub state: JobState,
    pub runner: Option<Runner>,
    pub at: Timestamp,
}

/// The runner that took the claim's job, as a webhook or GitHub's answer named it.
pub fn runner(claim: &RunnerClaim, seen: Option<&JobSeen>) -> Option<Runner> {
    let reported = JobFacts::of(claim).runner;
    reported.or_else(|| seen?.runner.clone()).or_else(|| claim.status.as_ref()?.runner.clone())
}

/// Progress of the claim's job; none for a claim without one. `ended` is when the worker that had it ended: only an
/// answer after that can mean that GitHub requeued the job.
pub fn state(claim: &RunnerClaim, seen: Option<&JobSeen>, ended: Option<Timestamp>) -> Option<JobState> {
    claim.spec.job.as_ref()?;
    let reported = JobFacts::of(claim).job;
    let is_after_end = seen.zip(ended).is_some_and(|(seen, end)| seen.at >= end);
    Some(match (reported, seen.map(|seen| seen.state)) {
        (Some(JobStage::Completed), _) => JobState::Completed,
        (_, Some(state)) if state.is_over() => state,
        (_, Some(JobState::Queued)) if is_after_end => JobState::Queued,
        (Some(JobStage::InProgress), _) | (_, Some(JobState::Running)) => JobState::Running,
        _ if claim.status.as_ref().is_some_and(|status| status.runner.is_some()) => JobState::Running,
        _ => JobState::Queued,
    })
}

/// When to ask GitHub about a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    pub at: Timestamp,
    /// A worker that may have run it ended, and no answer is newer.
    pub urgent: bool,
}

/// When to ask GitHub about a job of an open claim, in case a webhook was lost. `ended` is when a worker that may have
/// run it ended.
pub fn ask(
    claim: &RunnerClaim,
    seen: Option<&JobSeen>,
    ended: Option<Timestamp>,
    stuck_queued: Duration,
) -> Option<Ask> {
    claim.spec.job.as_ref()?;
    let created = claim.metadata.creation_timestamp.as_ref()?.0;
    let regular = match seen {
        None => stuck_queued.after(created),
        Some(seen) => stuck_queued.after(seen.at).max(seen.at.saturating_add(JOB_POLL_MIN).ok()?),
    };
    let prompt = ended.and_then(|end| end.saturating_add(WEBHOOK_GRACE).ok());
    let prompt = prompt.filter(|at| seen.is_none_or(|seen| seen.at < *at));
    Some(match prompt {
        Some(at) if at <= regular => Ask { at, urgent: true },
        _ => Ask { at: regular, urgent: false },
    })
}

/// The questions to ask now, of those that can wait: one of each owner before a second one of any, oldest first.
pub fn in_turn<T>(mut questions: Vec<(Timestamp, String, T)>, room: usize) -> Vec<T> {
    questions.sort_by(|(a, x, _), (b, y, _)| (a, x).cmp(&(b, y)));
    let mut of_owner: BTreeMap<String, usize> = BTreeMap::new();
    let mut turns: Vec<_> = questions
        .into_iter()
        .map(|(_, owner, question)| {
            let turn = of_owner.entry(owner).or_default();
            *turn += 1;
            (*turn, question)
        })
        .collect();
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().take(room).map(|(_, question)| question).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        api::{ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE},
        fixtures::boards::{claim, with},
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn reported(state: Value, runner: Value) -> RunnerClaim {
        let annotations = json!({ANNOTATION_JOB_STATE: state, ANNOTATION_JOB_RUNNER: runner});
        with(&claim("c", 0), json!({"metadata": {"annotations": annotations}, "spec": {"job": {"id": 5}}}))
    }

    fn seen(state: JobState, second: i64) -> Option<JobSeen> {
        Some(JobSeen { state, runner: None, at: at(second) })
    }

    #[test]
    fn webhooks_come_first_and_answers_fill_the_gaps() {
        use JobState::{Completed, Gone, Queued, Running, Stuck};
        let (none, queued, busy, done) = (json!(null), json!("queued"), json!("in_progress"), json!("completed"));
        for (webhook, answer, ended, expected) in [
            (&none, None, None, Queued),
            (&queued, None, None, Queued),
            (&busy, None, None, Running),
            (&done, seen(Running, 9), None, Completed),
            (&queued, seen(Running, 9), None, Running),
            (&queued, seen(Completed, 9), None, Completed),
            (&queued, seen(Gone, 9), None, Gone),
            (&queued, seen(Stuck, 9), None, Stuck),
            (&busy, seen(Queued, 9), None, Running),
            (&busy, seen(Queued, 9), Some(at(10)), Running),
            (&busy, seen(Queued, 10), Some(at(10)), Queued),
        ] {
            let claim = reported(webhook.clone(), json!(null));
            assert_eq!(state(&claim, answer.as_ref(), ended), Some(expected), "{webhook} {answer:?} {ended:?}");
        }
        assert_eq!(state(&claim("c", 0), None, None), None, "a claim without a job");
        let known = with(&reported(queued, json!(null)), json!({"status": {"runner": {"name": "w"}}}));
        assert_eq!(state(&known, None, None), Some(Running), "the status keeps an earlier answer");
    }

    #[test]
    fn quiet_jobs_are_asked_about_oldest_first_and_fair_by_owner() {
        let many = (10..40).map(|second| (at(second), "many".to_owned(), second));
        let few = [(at(100), "few".to_owned(), 100), (at(90), "few".to_owned(), 90), (at(95), "one".to_owned(), 95)];
        let questions: Vec<_> = many.chain(few).collect();
        assert_eq!(in_turn(questions.clone(), 6), [10, 90, 95, 11, 100, 12]);
        assert_eq!(in_turn(questions, 2), [10, 90]);
    }

    #[test]
    fn the_runner_is_the_one_that_the_webhook_named() {
        let answer =
            JobSeen { state: JobState::Running, runner: Some(Runner { id: None, name: "b".into() }), at: at(0) };
        let named =
            |text: Value| runner(&reported(json!("in_progress"), text), Some(&answer)).map(|runner| runner.name);
        assert_eq!(named(json!("7/a")), Some("a".into()));
        assert_eq!(named(json!(null)), Some("b".into()), "unless there was none");
    }

    #[test]
    fn a_healthy_job_is_asked_for_once_a_minute_at_most_and_soon_after_its_runner_ended() {
        let claim = reported(json!("queued"), json!(null));
        let created = claim.metadata.creation_timestamp.as_ref().unwrap().0.as_second();
        let ask = |seen: Option<JobSeen>, ended: Option<i64>, stuck| {
            let ask = ask(&claim, seen.as_ref(), ended.map(at), Duration::from_secs(stuck)).unwrap();
            (ask.at.as_second() - created, ask.urgent)
        };
        let asked = |second| seen(JobState::Queued, created + second);
        assert_eq!(ask(None, None, 600), (600, false));
        assert_eq!(ask(asked(600), None, 600), (1200, false));
        assert_eq!(ask(asked(2), None, 1), (62, false));
        assert_eq!(ask(None, Some(created + 100), 600), (105, true));
        assert_eq!(ask(asked(104), Some(created + 100), 600), (105, true));
        assert_eq!(ask(asked(105), Some(created + 100), 600), (705, false));
    }
}
