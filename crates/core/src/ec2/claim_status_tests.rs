use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::{
    api::{LaunchOrder, RunnerPool},
    demand::schedule::Wait,
    ec2::{
        capacity_memory::CapacityMemory,
        claim::{FailedMachine, PoolView},
    },
    fixtures::{
        boards::with,
        ec2::{at, beat, ec2_claim, ready_pool, record, said, tracked},
    },
};

const RUN: &str = "7890";

fn machine(id: &str, state: State) -> Machine {
    tracked(record(id, state, RUN, at(10)))
}

fn terminated(id: &str, reason: FailureReason, second: i64) -> Machine {
    let mut tracked = tracked(record(id, State::Terminated, "", at(second)));
    tracked.record.failure_reason = reason.as_str().into();
    tracked.record.failure_message = "gone".into();
    tracked
}

fn after(claim: &RunnerClaim, machines: &[Machine], action: &ClaimAction, applied: &Applied) -> RunnerClaimStatus {
    let (pool, capacity): (RunnerPool, _) = (ready_pool(), CapacityMemory::new(Duration::from_mins(3)));
    let facts = ClaimFacts {
        claim,
        status: &initial(claim, at(1)),
        pool: PoolView::of(&claim.spec, Some(&pool), true),
        machines,
        admission: &Ok(Vec::new()),
        capacity: &capacity,
        offer: None,
        cluster: "prod",
        pool_exhausted: false,
        run_completed: false,
        reruns: false,
        last: &Applied::default(),
    };
    status(&facts, action, applied, at(20))
}

/// Phase, reason and message.
fn summary(status: &RunnerClaimStatus) -> (ClaimPhase, &str, &str) {
    let ready = &status.conditions[0];
    assert_eq!(ready.status == "True", status.phase == Some(ClaimPhase::Ready));
    (status.phase.unwrap(), &ready.reason, &ready.message)
}

fn claim_in(phase: ClaimPhase, change: Value) -> RunnerClaim {
    let mut claim = with(&ec2_claim(2, RUN), json!({"status": change}));
    claim.status.get_or_insert_default().enter(phase, at(5));
    claim
}

fn order() -> Box<LaunchOrder> {
    let order = json!({"clientToken": "t", "attempt": 1, "requested": 2, "usageClass": "spot", "orderedAt": at(1)});
    serde_json::from_value(order).unwrap()
}

#[test]
fn a_claim_starts_as_pending_with_nothing() {
    let status = initial(&ec2_claim(2, RUN), at(1));
    assert_eq!(
        (status.phase, status.progress.as_str(), status.pool.as_deref()),
        (Some(ClaimPhase::Pending), "0/2", Some("linux"))
    );
    let ready = claim_in(ClaimPhase::Ready, json!({"progress": "2/2"}));
    assert_eq!(initial(&ready, at(9)), RunnerClaimStatus { pool: Some("linux".into()), ..ready.status.unwrap() });
}

#[test]
fn the_phase_follows_the_action() {
    use ClaimPhase::{Claiming, Creating, Pending, Ready, Releasing, Validating};
    let claim = ec2_claim(2, RUN);
    let machines = [machine("i-1", State::Running), machine("i-2", State::Running)];
    let failed = FailedMachine { id: "i-1".into(), reason: FailureReason::RegistrationFailed, message: "no".into() };
    let wait = Wait { reason: ClaimReason::PoolFull, message: "full".into(), retry_at: None };
    let fall_back = ClaimAction::FallBack { order: order(), terminate: Vec::new(), message: "short".into() };
    let registering = (Validating, "Validating", "waiting for 2 machines to register with GitHub");
    for (action, expected) in [
        (ClaimAction::Wait(wait), (Pending, "PoolFull", "full")),
        (ClaimAction::Select(2), (Claiming, "Claiming", "looking for 2 idle machines")),
        (ClaimAction::PlaceOrder(order()), (Creating, "Creating", "creating 2 spot machines")),
        (
            ClaimAction::MakeRoom { order: order(), terminate: vec!["i-9".into()] },
            (Creating, "Creating", "creating 2 spot machines"),
        ),
        (fall_back, (Creating, "Creating", "creating 2 spot machines")),
        (ClaimAction::Seal(vec!["i-1".into()]), registering),
        (ClaimAction::Replace(vec![failed]), registering),
        (ClaimAction::AwaitAgents, registering),
        (ClaimAction::Serve, (Ready, "Ready", "2 of 2 runners are registered for run 7890")),
        (ClaimAction::Release("returning".into()), (Releasing, "Releasing", "returning")),
        (
            ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::WorkerLost, "lost".into()),
            (ClaimPhase::Failed, "WorkerLost", "lost"),
        ),
    ] {
        let status = after(&claim, &machines, &action, &Applied::Done);
        assert_eq!(summary(&status), expected, "{action:?}");
        assert_eq!(
            status.phase_times.of(expected.0).map(|time| time.0),
            Some(if expected.0 == Pending { at(1) } else { at(20) })
        );
    }
    let unchanged = initial(&claim, at(1));
    for action in [
        ClaimAction::Nothing,
        ClaimAction::SendOrder(order()),
        ClaimAction::Start(vec!["i-1".into()]),
        ClaimAction::Return(vec!["i-1".into()]),
        ClaimAction::Finalize,
    ] {
        assert_eq!(after(&claim, &machines, &action, &Applied::Done), unchanged, "{action:?}");
    }
}

#[test]
fn what_is_not_done_is_not_reported() {
    let claim = claim_in(ClaimPhase::Creating, json!({}));
    let finish = ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::WorkerLost, "lost".into());
    for (action, applied) in [
        (ClaimAction::Serve, Applied::UnderWay),
        (ClaimAction::PlaceOrder(order()), Applied::NoRoom),
        (finish.clone(), Applied::Incomplete),
        (ClaimAction::Settle, Applied::Incomplete),
    ] {
        assert_eq!(after(&claim, &[], &action, &applied), initial(&claim, at(1)), "{action:?} {applied:?}");
    }
    let outage = Applied::Unavailable(ClaimReason::GitHubUnavailable, "down".into());
    for (action, phase) in [
        (finish, ClaimPhase::Creating),
        (ClaimAction::Select(1), ClaimPhase::Claiming),
        (ClaimAction::Seal(Vec::new()), ClaimPhase::Validating),
    ] {
        assert_eq!(summary(&after(&claim, &[], &action, &outage)), (phase, "GitHubUnavailable", "down"));
    }
}

#[test]
fn a_wait_for_a_known_time_says_when_to_the_second() {
    let until = at(60) + Duration::from_millis(700);
    let wait = Wait { reason: ClaimReason::InsufficientCapacity, message: "none".into(), retry_at: Some(until) };
    let mut claim = ec2_claim(2, RUN);
    let waiting = after(&claim, &[], &ClaimAction::Wait(wait), &Applied::Done);
    assert_eq!(waiting.retry_at.as_ref().map(|time| time.0), Some(at(60)));
    claim.status = Some(waiting);
    assert_eq!(after(&claim, &[], &ClaimAction::Select(1), &Applied::UnderWay).retry_at, None);
}

#[test]
fn the_order_is_in_the_status_before_and_after_it_is_sent() {
    let mut claim = ec2_claim(2, RUN);
    let placed = after(&claim, &[], &ClaimAction::PlaceOrder(order()), &Applied::Done);
    assert_eq!(placed.fleet, Some(order()));
    claim.status = Some(placed);
    let launched = Applied::Launched { fleet_id: "fleet-1".into(), instance_ids: vec!["i-1".into(), "i-2".into()] };
    let fleet = after(&claim, &[], &ClaimAction::SendOrder(order()), &launched).fleet.unwrap();
    assert_eq!((fleet.fleet_id.as_deref(), fleet.instance_ids.len()), (Some("fleet-1"), 2));
}

#[test]
fn workers_are_listed_once_the_claim_is_ready_and_no_more_when_it_is_over() {
    let mut machines = [machine("i-1", State::Running), machine("i-2", State::Running)];
    machines[0].record.initial_run_id = RUN.into();
    machines[1].record.initial_run_id = "another".into();
    let ready = after(&ec2_claim(2, RUN), &machines, &ClaimAction::Serve, &Applied::Done);
    let sources: Vec<_> = ready.workers.iter().map(|worker| (worker.name.as_str(), worker.source)).collect();
    assert_eq!(sources, [("i-1", WorkerSource::Created), ("i-2", WorkerSource::Pool)]);
    assert_eq!(ready.progress, "2/2");
    let mut claim = ec2_claim(2, RUN);
    claim.status = Some(ready);
    let finish = ClaimAction::Finish(ClaimPhase::Completed, ClaimReason::Completed, "done".into());
    for action in [ClaimAction::Settle, finish] {
        let over = after(&claim, &[], &action, &Applied::Done);
        assert_eq!((over.workers.len(), over.progress.as_str()), (0, "0/2"));
    }
}

#[test]
fn a_ready_claim_follows_its_machines() {
    use FailureReason::{SpotReclaimed, ThresholdPassed};
    let running = |id| machine(id, State::Running);
    let claim = claim_in(ClaimPhase::Ready, json!({}));
    let watch = |machines: &[Machine]| after(&claim, machines, &ClaimAction::Watch, &Applied::Done);
    for (name, machines, expected) in [
        (
            "one is lost",
            vec![running("i-1"), terminated("i-2", SpotReclaimed, 9)],
            (ClaimPhase::Ready, "WorkerLost", "1 of 2 runners are left; lost: i-2 (spot_reclaimed: gone)"),
        ),
        ("no record is left", vec![], (ClaimPhase::Failed, "WorkerLost", "its machines and their records are gone")),
        (
            "an earlier claim of this name lost one",
            vec![terminated("i-1", SpotReclaimed, 4)],
            (ClaimPhase::Failed, "WorkerLost", "its machines and their records are gone"),
        ),
        (
            "both have run long enough",
            vec![terminated("i-1", ThresholdPassed, 9), terminated("i-2", ThresholdPassed, 9)],
            (
                ClaimPhase::Completed,
                "MaxRuntimeReached",
                "its machines have run for as long as they may (maxRuntime), and were terminated",
            ),
        ),
        (
            "one has, the other was lost",
            vec![terminated("i-1", ThresholdPassed, 9), terminated("i-2", SpotReclaimed, 9)],
            (ClaimPhase::Failed, "WorkerLost", "i-2 (spot_reclaimed: gone)"),
        ),
    ] {
        assert_eq!(summary(&watch(&machines)), expected, "{name}");
    }
    for machines in [vec![running("i-1"), running("i-2")], vec![running("i-1")]] {
        assert!(watch(&machines).conditions.is_empty(), "nothing is known to be lost");
    }
}

#[test]
fn a_loss_is_reported_once() {
    let mut claim = claim_in(ClaimPhase::Ready, json!({}));
    let machines = [machine("i-1", State::Running), terminated("i-2", FailureReason::SpotReclaimed, 9)];
    let before = initial(&claim, at(1));
    let status = after(&claim, &machines, &ClaimAction::Watch, &Applied::Done);
    let message = "1 of 2 runners are left; lost: i-2 (spot_reclaimed: gone)";
    assert_eq!(newly_lost(&before, &status), Some(("WorkerLost", message)));
    claim.status = Some(status.clone());
    assert_eq!(newly_lost(&status, &after(&claim, &machines, &ClaimAction::Watch, &Applied::Done)), None);
    let over = after(&claim, &[], &ClaimAction::Watch, &Applied::Done);
    assert_eq!(newly_lost(&status, &over), None, "the event of its phase reports that");
}

#[test]
fn a_runner_that_ended_is_shown_until_it_is_back() {
    let mut claim = claim_in(ClaimPhase::Ready, json!({}));
    let before = initial(&claim, at(1));
    let mut failing = machine("i-1", State::Running);
    let mut signal = said(Signal::RegistrationFailed, &failing.record.run_id);
    (signal.claims, signal.detail) = (Some(failing.record.claims), "the runner has ended (no route)".into());
    failing.report.signal = Some(signal);
    let machines = [failing, machine("i-2", State::Running)];
    let watch = |claim: &RunnerClaim, machines: &[Machine]| after(claim, machines, &ClaimAction::Watch, &Applied::Done);
    let status = watch(&claim, &machines);
    let message = "runners have ended and are started again: i-1: the runner has ended (no route)";
    assert_eq!(summary(&status), (ClaimPhase::Ready, "RunnerEnded", message));
    assert_eq!(newly_lost(&before, &status), Some(("RunnerEnded", message)));
    claim.status = Some(status);
    let back = watch(&claim, &[machine("i-1", State::Running), machine("i-2", State::Running)]);
    assert_eq!(summary(&back).1, "Ready");
}

#[test]
fn each_phase_has_one_event() {
    let mut claim = ec2_claim(2, RUN);
    claim.status = Some(after(&claim, &[], &ClaimAction::Select(2), &Applied::UnderWay));
    let ready = after(&claim, &[], &ClaimAction::Serve, &Applied::Done);
    let phases = |before: &PhaseTimes| -> Vec<_> {
        entered(before, &ready).into_iter().map(|entered| (entered.phase, entered.reason)).collect()
    };
    use ClaimPhase::{Claiming, Pending, Ready};
    let [pending, claiming, serving] =
        [(Pending, "Pending".into()), (Claiming, "Claiming".into()), (Ready, "Ready".into())];
    assert_eq!(phases(&PhaseTimes::default()), [pending, claiming, serving.clone()]);
    assert_eq!(phases(&claim.status.as_ref().unwrap().phase_times), [serving]);
    assert_eq!(phases(&ready.phase_times), []);
    let notes: Vec<_> = entered(&PhaseTimes::default(), &ready).into_iter().map(|entered| entered.note).collect();
    assert_eq!(notes[1], Claiming.doing(), "a phase that is over");
    assert!(notes[2].starts_with("2 of 2 runners"), "the current phase has the message of its condition");
}

#[test]
fn a_claim_that_gave_up_its_order_remembers_its_number_and_ec2s_reasons() {
    let order = json!({"clientToken": "t", "attempt": 3, "requested": 2, "usageClass": "spot", "orderedAt": at(6)});
    let ordered = claim_in(ClaimPhase::Creating, json!({"fleet": order}));
    let wait = |message: &str| Wait {
        reason: ClaimReason::InsufficientCapacity,
        message: message.into(),
        retry_at: Some(at(80)),
    };
    let status = after(&ordered, &[], &ClaimAction::Abandon(wait("none in zone-a")), &Applied::Done);
    let shown = (ClaimPhase::Claiming, "InsufficientCapacity", "none in zone-a, retry at 2025-06-15T15:08:00Z");
    assert_eq!(summary(&status), shown);
    assert_eq!((status.fleet.as_ref(), status.retry_at.as_ref()), (None, Some(&Time(at(80)))));
    let shortage = CapacityShortage { since: Some(Time(at(20))), attempt: 3, message: "none in zone-a".into() };
    assert_eq!(status.shortage, Some(shortage.clone()));

    let waiting = RunnerClaim { status: Some(status), ..ordered };
    let known = ClaimAction::Abandon(wait("insufficient capacity in zones zone-a"));
    let status = after(&waiting, &[], &known, &Applied::Done);
    assert_eq!(summary(&status), shown, "what is remembered says less than EC2 did");
    assert_eq!(status.shortage, Some(shortage));
    let room = ClaimAction::Wait(Wait { reason: ClaimReason::PoolFull, ..wait("full") });
    let status = after(&waiting, &[], &room, &Applied::Done);
    assert_eq!(status.shortage.map(|shortage| (shortage.since, shortage.attempt)), Some((None, 3)));
    let passing = ClaimAction::Abandon(Wait { reason: ClaimReason::AwsUnavailable, ..wait("throttled") });
    let status = after(&waiting, &[], &passing, &Applied::Done).shortage.unwrap();
    assert_eq!((status.since, status.attempt), (None, 3), "what passes by itself is no shortage");
    let incomplete = after(&waiting, &[], &known, &Applied::Incomplete);
    assert_eq!(incomplete.shortage, waiting.status.unwrap().shortage);
}

#[test]
fn a_refused_try_is_counted_and_a_dump_ends_the_claim() {
    let claim = ec2_claim(1, "7");
    let failed = Applied::Failed { tries: 2, message: "denied".into() };
    let status = after(&claim, &[], &ClaimAction::Select(1), &failed);
    assert_eq!(summary(&status), (ClaimPhase::Claiming, "AwsUnavailable", "denied (try 2 of 5)"));
    assert_eq!((status.failed_tries, status.retry_at.as_ref()), (Some(2), Some(&Time(at(30)))));
    let waits = RunnerClaim { status: Some(status), ..claim };
    let served = after(&waits, &[], &ClaimAction::Serve, &Applied::Done);
    assert_eq!((served.failed_tries, served.retry_at), (None, None));
    let dumped = after(&waits, &[], &ClaimAction::Dump("given up".into()), &Applied::Done);
    assert_eq!(summary(&dumped), (ClaimPhase::Failed, "InternalError", "given up"));
}

#[test]
fn a_ready_claim_names_the_machines_that_ec2_takes_back_before_they_are_lost() {
    let mut claim = claim_in(ClaimPhase::Ready, json!({}));
    let reclaimed = |id| {
        let mut it = machine(id, State::Running);
        it.record.usage_class = "spot".into();
        it.report.heartbeat = Some(paddock_record::Heartbeat { reclaimed: true, ..beat(at(11)) });
        it
    };
    let (fine, noticed) = (machine("i-1", State::Running), reclaimed("i-2"));
    let watch = |claim: &RunnerClaim, machines: &[Machine]| after(claim, machines, &ClaimAction::Watch, &Applied::Done);
    let before = initial(&claim, at(1));
    let status = watch(&claim, &[fine.clone(), noticed.clone()]);
    let message = "2 of 2 runners are left; within two minutes EC2 takes back i-2";
    assert_eq!(summary(&status), (ClaimPhase::Ready, "SpotInterruption", message));
    assert_eq!(newly_lost(&before, &status), Some(("SpotInterruption", message)));
    assert_eq!((status.interruptions.len(), status.interruptions[0].worker.as_str()), (1, "i-2"));
    claim.status = Some(status);
    let status = watch(&claim, &[reclaimed("i-1"), terminated("i-2", FailureReason::SpotReclaimed, 19)]);
    let message = "1 of 2 runners are left; within two minutes EC2 takes back i-1; lost: i-2 (spot_reclaimed: gone)";
    assert_eq!(summary(&status), (ClaimPhase::Ready, "WorkerLost", message));
    assert_eq!(status.interruptions.len(), 2);

    let claim = claim_in(ClaimPhase::Ready, json!({}));
    let released =
        after(&claim, &[fine, noticed], &ClaimAction::Release("its run is completed".into()), &Applied::Done);
    assert_eq!(released.interruptions.len(), 1, "its run was faster than the next watch");
}

#[test]
fn what_became_of_interrupted_jobs_is_told_once_unless_there_were_none() {
    use crate::api::RerunOutcome::{Done, Skipped, Unneeded};
    let told = |before: Option<RerunOutcome>, outcome: Option<RerunOutcome>| {
        let status = |outcome| RunnerClaimStatus {
            rerun: Some(Box::new(Rerun { outcome, message: "why".into(), ..Rerun::default() })),
            ..RunnerClaimStatus::default()
        };
        newly_rerun(&status(before), &status(outcome)).map(|(outcome, _)| outcome)
    };
    for (before, after, expected) in [
        (None, None, None),
        (None, Some(Done), Some(Done)),
        (None, Some(Skipped), Some(Skipped)),
        (None, Some(Unneeded), None),
        (Some(Done), Some(Done), None),
    ] {
        assert_eq!(told(before, after), expected, "{before:?} {after:?}");
    }
}
