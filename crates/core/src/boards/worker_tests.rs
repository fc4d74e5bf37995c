use serde_json::json;

use super::*;
use crate::fixtures::boards::{board_worker, claim, pod, with};

const KEEP: Keep = Keep { pod: Duration::from_secs(60), record: Duration::from_secs(3600) };

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn in_state(state: &str) -> Worker {
    with(&board_worker("w", "p", "c"), json!({"status": {"state": state, "stateSince": "1970-01-01T00:00:00Z"}}))
}

fn facts(pod: Option<&Pod>, claim: ClaimView) -> WorkerFacts<'_> {
    WorkerFacts { pod, claim, surplus: false, lost: None, unhealthy: None, outdated: false, took_job: false }
}

#[test]
fn each_state_has_its_next_step() {
    let fresh = board_worker("w", "p", "c");
    let seen = with(&fresh, json!({"status": {"pod": {"name": "w"}}}));
    let record = with(&in_state("completed"), json!({"metadata": {"finalizers": null}}));
    let deleted = json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}});
    let running = pod("w", "p", Some("n"), "Running");
    let ended = pod("w", "p", Some("n"), "Succeeded");
    let mirror = WorkerAction::Mirror(observe(WorkerState::Pending, &running));
    let missing = WorkerAction::Fail(failure(FailureReason::PodMissing, "the pod was deleted by someone else"));
    let none = None::<&Pod>;
    use ClaimView::{Gone, Open, Over};
    for (name, worker, pod, claim, now, expected) in [
        ("nothing made yet", &fresh, none, Open, 0, WorkerAction::Create),
        ("its pod is there", &fresh, Some(&running), Open, 0, mirror),
        ("its pod was there and is gone", &seen, none, Open, 0, missing),
        ("its claim is over, a spare serves others", &fresh, none, Over, 0, WorkerAction::Create),
        ("its claim is gone", &fresh, Some(&running), Gone, 0, WorkerAction::Delete),
        ("it failed", &in_state("failed"), none, Open, 0, WorkerAction::Deregister),
        ("it completed and its claim is gone", &in_state("completed"), none, Gone, 0, WorkerAction::Deregister),
        ("a record with a pod", &record, Some(&ended), Gone, 59, WorkerAction::Wait(Some(at(60)))),
        ("a record with an old pod", &record, Some(&ended), Open, 60, WorkerAction::DeletePod),
        ("a record that counts", &record, none, Open, 9999, WorkerAction::Wait(None)),
        ("a record", &record, none, Over, 3599, WorkerAction::Wait(None)),
        ("an old record", &record, none, Gone, 3600, WorkerAction::Forget),
        ("it is being deleted", &with(&fresh, deleted.clone()), Some(&running), Open, 0, WorkerAction::Remove),
        ("a record is being deleted", &with(&record, deleted), Some(&running), Open, 0, WorkerAction::Wait(None)),
    ] {
        assert_eq!(next(worker, facts(pod, claim), KEEP, at(now)), expected, "{name}");
    }
}

#[test]
fn a_surplus_worker_is_retired_and_an_unhealthy_one_is_given_up() {
    let unhealthy = failure(FailureReason::RunnerIdle, "idle");
    let running = pod("w", "p", Some("n"), "Running");
    let base = facts(Some(&running), ClaimView::Open);
    let up = in_state("running");
    assert_eq!(next(&up, WorkerFacts { surplus: true, ..base.clone() }, KEEP, at(0)), WorkerAction::Retire);
    let given_up = WorkerFacts { unhealthy: Some(unhealthy.clone()), ..base.clone() };
    assert_eq!(next(&up, given_up.clone(), KEEP, at(0)), WorkerAction::GiveUp(unhealthy));
    let moved = next(&board_worker("w", "p", "c"), given_up, KEEP, at(0));
    assert_eq!(
        moved,
        WorkerAction::Mirror(observe(WorkerState::Pending, &running)),
        "the state of the pod comes first"
    );
    for (lost, reason, message) in [
        (LostNode::Unreachable, FailureReason::NodeUnreachable, "node n does not answer"),
        (LostNode::Deleted, FailureReason::NodeDeleted, "node n was deleted"),
    ] {
        let lost = WorkerFacts { lost: Some(lost), surplus: true, ..base.clone() };
        let WorkerAction::Fail(failure) = next(&up, lost, KEEP, at(0)) else { panic!("its node is lost") };
        assert_eq!((failure.reason, failure.message.as_str()), (reason, message));
    }
}

#[test]
fn the_pod_of_a_worker_that_is_over_is_ended_so_that_its_log_stays() {
    let failed = in_state("failed");
    let running = pod("w", "p", Some("n"), "Running");
    let ending = with(&running, json!({"spec": {"activeDeadlineSeconds": 1}}));
    let step = |pod: &Pod, now| next(&failed, facts(Some(pod), ClaimView::Open), KEEP, at(now));
    assert_eq!(step(&running, 0), WorkerAction::EndPod);
    assert_eq!(step(&ending, 0), WorkerAction::Wait(Some(at(60))));
    assert_eq!(step(&ending, 60), WorkerAction::DeletePod, "the kubelet does not act");
    assert_eq!(step(&pod("w", "p", None, "Pending"), 0), WorkerAction::DeletePod, "no kubelet has it");
    assert_eq!(step(&pod("w", "p", Some("n"), "Failed"), 0), WorkerAction::Deregister);
    let lost = WorkerFacts { lost: Some(LostNode::Deleted), ..facts(Some(&ending), ClaimView::Open) };
    assert_eq!(next(&failed, lost, KEEP, at(0)), WorkerAction::ForcePod);
}

#[test]
fn a_pod_that_ends_well_has_served_only_if_its_runner_took_a_job() {
    let (up, ended) = (in_state("running"), pod("w", "p", Some("n"), "Succeeded"));
    let observed = observe(WorkerState::Running, &ended);
    let unknown = facts(Some(&ended), ClaimView::Open);
    assert_eq!(next(&up, unknown.clone(), KEEP, at(0)), WorkerAction::Settle(observed.clone()));
    let took_job = WorkerFacts { took_job: true, ..unknown.clone() };
    assert_eq!(next(&up, took_job, KEEP, at(0)), WorkerAction::Mirror(observed));
    let failure = json!({"reason": "runner_without_job", "message": ""});
    let empty = with(&in_state("failed"), json!({"metadata": {"finalizers": null}, "status": {"failure": failure}}));
    assert_eq!(next(&empty, unknown, KEEP, at(0)), WorkerAction::DeletePod, "it leaves no pod");
}

#[test]
fn failures_that_need_not_be_remembered_are_forgotten() {
    let record = with(&in_state("failed"), json!({"metadata": {"finalizers": null}}));
    let ended = pod("w", "p", Some("n"), "Failed");
    let old = WorkerFacts { outdated: true, ..facts(Some(&ended), ClaimView::Open) };
    assert_eq!(next(&record, old, KEEP, at(0)), WorkerAction::Forget);
}

#[test]
fn a_pod_that_cannot_start_says_why() {
    let unscheduled =
        json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]);
    let pending = with(&pod("w", "p", None, "Pending"), json!({"status": {"conditions": unscheduled}}));
    assert_eq!(observe(WorkerState::Pending, &pending).waiting.as_deref(), Some("Unschedulable: 0/1 nodes"));
    let pulling = json!([{
        "name": "runner", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "no image"}},
    }]);
    let pulling = with(&pending, json!({"status": {"containerStatuses": pulling}}));
    assert_eq!(observe(WorkerState::Pending, &pulling).waiting.as_deref(), Some("ErrImageNeverPull: no image"));
    assert_eq!(observe(WorkerState::Pending, &pod("w", "p", None, "Running")).waiting, None);
}

#[test]
fn states_move_only_along_their_arrows() {
    use WorkerState::{Completed, Failed, Pending, Running};
    for (before, phase, after) in [
        (Pending, "Pending", Pending),
        (Pending, "Running", Running),
        (Pending, "Succeeded", Running),
        (Pending, "Failed", Failed),
        (Running, "Pending", Running),
        (Running, "Running", Running),
        (Running, "Succeeded", Completed),
        (Running, "Failed", Failed),
        (Running, "Unknown", Running),
    ] {
        assert_eq!(observe(before, &pod("w", "p", None, phase)).state, after, "{before:?} and {phase}");
    }
}

#[test]
fn a_failure_says_how_the_pod_ended() {
    let terminated = json!({"exitCode": 137, "reason": "OOMKilled"});
    let status = json!({"containerStatuses": [
        {"name": "runner", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": terminated}},
    ]});
    let failed = with(&pod("w", "p", None, "Failed"), json!({"status": status}));
    let failure = observe(WorkerState::Running, &failed).failure.unwrap();
    assert_eq!(failure.message, "container runner ended with exit code 137 (OOMKilled)");
    assert_eq!(failure.containers[0].exit_code, Some(137));
    let late = with(&failed, json!({"status": {"reason": "DeadlineExceeded", "message": "too long"}}));
    assert_eq!(observe(WorkerState::Running, &late).failure.unwrap().message, "DeadlineExceeded: too long");
}

#[test]
fn a_new_claim_of_an_old_name_does_not_inherit_its_workers() {
    let old = claim("c", 0);
    let board = board_worker("w", "p", "c").spec.board.unwrap();
    let worker = worker("w".into(), &old, "p", board);
    assert!(serves(&worker, &old) && holds_runner(&worker));
    assert!(!serves(&worker, &with(&old, json!({"metadata": {"uid": "another"}}))));
    assert!(!serves(&worker, &claim("d", 0)));
}
