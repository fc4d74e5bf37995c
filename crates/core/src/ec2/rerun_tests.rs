use serde_json::{Value, json};

use super::*;
use crate::{
    api::{READY, set_condition},
    ec2::claim_scenario::{check, scenario},
    fixtures::{
        boards::with,
        ec2::{at, beat, ec2_claim, record, tracked},
    },
};
use paddock_record::State;

fn job(id: i64, conclusion: &str, runner: &str, ended: i64) -> RunJob {
    RunJob {
        id,
        name: format!("job-{id}"),
        conclusion: Some(conclusion.into()),
        completed_at: Some(at(ended)),
        runner_name: Some(runner.into()),
    }
}

fn run(attempt: u32, jobs: &[RunJob]) -> Run {
    Run { completed: true, attempt, jobs: jobs.to_vec() }
}

/// EC2 took i-1 back at 100, and i-2 at 200.
fn interruptions() -> [Interruption; 2] {
    [("i-1", 100), ("i-2", 200)].map(|(worker, since)| Interruption { worker: worker.into(), since: Time(at(since)) })
}

fn asked_at(second: i64) -> Rerun {
    Rerun { attempt: Some(1), requested_at: Some(Time(at(second))), ..Rerun::default() }
}

/// What is called, or what came of it.
fn summary(run: &Run, rerun: &Rerun, now: i64) -> String {
    match plan(run, &interruptions(), rerun, at(now)) {
        Plan::Later(_) => "later".into(),
        Plan::Call(RerunCall { attempt: 1, job: None, .. }) => "all that failed".into(),
        Plan::Call(RerunCall { attempt: 1, job: Some(id), .. }) => format!("job {id}"),
        Plan::Done => "done".into(),
        Plan::End(outcome, _) => format!("{outcome:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn interrupted_jobs_are_run_again_with_one_call_that_runs_no_other() {
    for (name, jobs, expected) in [
        ("the only failure", vec![job(1, "success", "i-9", 50), job(2, "failure", "i-1", 150)], "all that failed"),
        ("as the runner reports it", vec![job(1, "cancelled", "I-1", 150)], "all that failed"),
        ("two of two", vec![job(1, "failure", "i-1", 150), job(2, "cancelled", "i-2", 250)], "all that failed"),
        ("one of two", vec![job(1, "failure", "i-1", 150), job(2, "failure", "i-9", 150)], "job 1"),
        (
            "two of three",
            vec![job(1, "failure", "i-1", 150), job(2, "failure", "i-2", 250), job(3, "timed_out", "i-9", 1)],
            "Skipped",
        ),
        ("another machine failed", vec![job(1, "failure", "i-9", 150)], "Unneeded"),
        ("it failed before, by itself", vec![job(1, "failure", "i-1", 99)], "Unneeded"),
        ("it ended in time", vec![job(1, "success", "i-1", 150), job(2, "skipped", "i-2", 250)], "Unneeded"),
        ("a run that was cancelled", vec![job(1, "cancelled", "i-1", 150), job(2, "cancelled", "i-9", 150)], "Skipped"),
        ("a matrix that failed fast", vec![job(1, "failure", "i-1", 150), job(2, "cancelled", "i-9", 150)], "job 1"),
        ("no jobs", vec![], "Unneeded"),
    ] {
        assert_eq!(summary(&run(1, &jobs), &Rerun::default(), 300), expected, "{name}");
    }
    let waiting = RunJob { conclusion: None, runner_name: None, ..job(2, "", "", 0) };
    assert_eq!(summary(&run(1, &[job(1, "failure", "i-1", 150), waiting]), &Rerun::default(), 300), "job 1");
}

#[test]
fn a_run_is_run_again_once_whatever_happens() {
    let jobs = [job(1, "failure", "i-1", 150)];
    let (first, second) = (run(1, &jobs), run(2, &jobs));
    let running = Run { completed: false, ..first.clone() };
    for (name, run, rerun, now, expected) in [
        ("it has not completed", &running, Rerun::default(), 300, "later"),
        ("somebody was faster", &second, Rerun::default(), 300, "Skipped"),
        ("the operator died after the call", &second, asked_at(290), 300, "done"),
        ("GitHub does not show it yet", &first, asked_at(290), 300, "later"),
        ("the operator died before the call", &first, asked_at(260), 300, "all that failed"),
        ("its second attempt failed too", &second, asked_at(100), 9000, "done"),
    ] {
        assert_eq!(summary(run, &rerun, now), expected, "{name}");
    }
}

#[test]
fn what_is_asked_for_is_recorded_before_and_its_answer_after() {
    let call = RerunCall { attempt: 1, job: None, jobs: 3, names: "build".into() };
    let tried = Rerun { tries: 2, retry_at: Some(Time(at(9))), ..Rerun::default() };
    let recorded = requested(tried, &call, at(300));
    let message = "EC2 took back the machines of jobs, which are run again: build".to_owned();
    assert_eq!(recorded, Rerun { tries: 2, jobs: 3, message: message.clone(), ..asked_at(300) });
    let claim = next_claim(&ec2_claim(2, "7890"), &recorded);
    assert_eq!((claim.metadata.name.as_deref(), claim.spec.count), (Some("c-rerun"), 2));
    let finished = done(recorded.clone(), &claim);
    assert_eq!((finished.outcome, finished.claim.as_deref()), (Some(RerunOutcome::Done), Some("c-rerun")));
    assert_eq!(finished.message, message);

    let answer = |trouble| {
        let rerun = failed(recorded.clone(), trouble, at(300));
        (rerun.outcome, rerun.retry_at.map(|at| at.0), rerun.message)
    };
    let skipped = Some(RerunOutcome::Skipped);
    let (outcome, _, message) = answer(Trouble::Forbidden("Resource not accessible by integration".into()));
    assert!(outcome == skipped && message.contains("Actions: read and write"), "{message}");
    let (outcome, _, message) = answer(Trouble::Forbidden("This workflow run cannot be retried".into()));
    assert!(outcome == skipped && message.ends_with("This workflow run cannot be retried"), "{message}");
    assert_eq!(answer(Trouble::Refused("422".into())).0, skipped);
    for (trouble, retry_at) in [
        (Trouble::Forbidden("This workflow is already running".into()), 361),
        (Trouble::Unavailable("502".into(), None), 361),
        (Trouble::Unavailable("limited".into(), Some(at(4000))), 4001),
    ] {
        let (outcome, retry, _) = answer(trouble);
        assert_eq!((outcome, retry), (None, Some(at(retry_at))));
    }
    let last = Rerun { tries: TRIES - 1, ..Rerun::default() };
    let given_up = later(last, "down", None, at(300));
    assert_eq!((given_up.outcome, given_up.retry_at), (skipped, None));
    assert!(given_up.message.contains("down"), "{}", given_up.message);
}

fn over(reason: ClaimReason, status: Value) -> RunnerClaim {
    let mut claim = with(&ec2_claim(2, "7890"), json!({"status": status}));
    let status = claim.status.get_or_insert_default();
    let phase = if reason == ClaimReason::WorkerLost { ClaimPhase::Failed } else { ClaimPhase::Completed };
    status.enter(phase, at(5));
    set_condition(&mut status.conditions, crate::api::ready_condition(false, reason, "over", None, at(5)));
    assert_eq!(status.conditions[0].type_, READY);
    claim
}

#[test]
fn a_finished_claim_sees_to_its_interrupted_jobs_when_its_run_has_completed() {
    use ClaimReason::{Completed, WorkerLost};
    let interrupted = |more: Value| {
        let mut status = json!({"interruptions": interruptions()});
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        status
    };
    let with_claim = |claim: RunnerClaim| {
        let mut it = scenario(2, &[]).pool(json!({"spec": {"ec2": {"rerunInterrupted": true}}}));
        it.claim = claim;
        it
    };
    let lost = || with_claim(over(WorkerLost, interrupted(json!({}))));
    let retry = |second| with_claim(over(Completed, interrupted(json!({"rerun": {"retryAt": at(second)}}))));
    check([
        ("no interruption", with_claim(over(WorkerLost, json!({}))).run_completed(), "settle"),
        ("its run goes on", lost(), "rerun Wait(None)"),
        ("its run has completed", lost().run_completed(), "rerun Ask"),
        ("it ended with its run", with_claim(over(Completed, interrupted(json!({})))), "rerun Ask"),
        ("not yet", retry(3), "rerun Wait(Some(2025-06-15T15:06:43Z))"),
        ("again", retry(2), "rerun Ask"),
        ("seen to", with_claim(over(Completed, interrupted(json!({"rerun": {"outcome": "Done"}})))), "settle"),
        (
            "its pool is being deleted",
            lost().run_completed().pool(json!({"metadata": {"deletionTimestamp": at(1)}})),
            "settle",
        ),
        ("deleted", lost().run_completed().deleted(), "release"),
    ]);
    let mut forbidden = lost();
    forbidden.pool = Some(crate::fixtures::ec2::ready_pool());
    let expected = "rerun Skip(\"EC2 took i-1, i-2 back; jobs that failed by that are not run again: the pool's \
                    rerunInterrupted is not set\")";
    check([("the pool does not want it", forbidden, expected)]);
}

#[test]
fn of_several_claims_of_a_run_the_oldest_sees_to_the_jobs_of_all() {
    let claim = |name: &str, created: i64, more: Value| {
        let metadata = json!({"metadata": {"name": name, "creationTimestamp": at(created)}});
        Arc::new(with(&with(&over(ClaimReason::Completed, json!({})), metadata), more))
    };
    let hit = |worker: &str| json!({"status": {"interruptions": [{"worker": worker, "since": at(0)}]}});
    let mut done = hit("i-0");
    done["status"]["rerun"] = json!({"outcome": "Skipped"});
    let mut foreign = hit("i-9");
    foreign["spec"] = json!({"runId": "7891"});
    let (old, young) = (claim("old", 10, hit("i-1")), claim("young", 20, hit("i-2")));
    let all = [young.clone(), claim("first", 0, done), old.clone(), claim("other", 1, foreign)];
    let workers = of_run(&old, &all).unwrap().into_iter().map(|it| it.worker).collect::<Vec<_>>();
    assert_eq!(workers, ["i-2", "i-0", "i-1"]);
    assert_eq!(of_run(&young, &all), Err("old".into()));
    assert_eq!(of_run(&young, &all[..2]).map(|all| all.len()), Ok(2));
}

#[test]
fn an_interruption_is_noted_once_from_its_notice_or_from_the_machines_end() {
    let announced = |id: &str| {
        let mut machine = tracked(record(id, State::Running, "7890", at(0)));
        machine.record.usage_class = "spot".into();
        machine.report.heartbeat = Some(paddock_record::Heartbeat { reclaimed: true, ..beat(at(1)) });
        machine
    };
    let ended = |id: &str, reason: FailureReason| {
        let mut record = record(id, State::Terminated, "", at(500));
        record.failure_reason = reason.as_str().into();
        record
    };
    let mut status = RunnerClaimStatus::default();
    let (noticed, quiet) = (announced("i-1"), tracked(record("i-5", State::Running, "7890", at(0))));
    note_interruptions(&mut status, [&noticed, &quiet].into_iter(), &[], at(400));
    let lost = [ended("i-1", FailureReason::SpotReclaimed), ended("i-2", FailureReason::SpotReclaimed)];
    let gone = ended("i-3", FailureReason::InstanceGone);
    note_interruptions(&mut status, [].into_iter(), &[&lost[0], &lost[1], &gone], at(510));
    let noted: Vec<_> = status.interruptions.iter().map(|it| (it.worker.as_str(), it.since.0)).collect();
    assert_eq!(noted, [("i-1", at(380)), ("i-2", at(350))]);
    let mut on_demand = announced("i-4");
    on_demand.record.usage_class = "on-demand".into();
    note_interruptions(&mut status, [&on_demand].into_iter(), &[], at(600));
    assert_eq!(status.interruptions.len(), 2, "EC2 takes back spot machines alone");
}
