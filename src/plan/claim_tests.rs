use paddock_record::Signal;

use super::*;
use crate::plan::{
    instance::Vitals,
    sample_ec2::{at, beat, pool, record, said, tracked},
};

const RUN: &str = "7890";

fn held(id: &str, state: State, signal: Option<Signal>) -> Tracked {
    let mut tracked = tracked(record(id, state, RUN, at(0)));
    tracked.vitals = Vitals { heartbeat: Some(beat(at(1))), signal: signal.map(|signal| said(signal, RUN)) };
    tracked.record.sealed = "sealed".into();
    tracked
}

fn next(count: u32, held: &[Tracked], pool_exhausted: bool, fleet_settled: bool) -> Step {
    step(&View { count, held, pool_exhausted, fleet_settled }, &pool(), at(2))
}

#[test]
fn the_pool_is_asked_first_and_machines_are_created_only_when_it_has_none() {
    assert_eq!(next(3, &[], false, false), Step::Select(3));
    assert_eq!(next(3, &[held("i-1", State::Claimed, None)], false, false), Step::Select(2));
    assert_eq!(next(3, &[held("i-1", State::Claimed, None)], true, false), Step::Create(2));
}

#[test]
fn i4_nobody_starts_before_all_are_confirmed() {
    let waiting = held("i-2", State::Claimed, None);
    let confirmed = held("i-1", State::Claimed, Some(Signal::Registered));
    assert!(matches!(next(2, &[confirmed.clone(), waiting], true, false), Step::Validate { .. }));
    let created = held("i-2", State::Created, Some(Signal::Registered));
    assert_eq!(next(2, &[confirmed, created], true, true), Step::Start(vec!["i-1".into(), "i-2".into()]));
}

#[test]
fn i5_a_start_that_was_cut_short_is_finished() {
    let running = held("i-1", State::Running, Some(Signal::Registered));
    let confirmed = held("i-2", State::Claimed, Some(Signal::Registered));
    assert_eq!(next(2, &[running.clone(), confirmed], false, false), Step::Start(vec!["i-2".into()]));
    let other = held("i-2", State::Running, Some(Signal::Registered));
    assert_eq!(next(2, &[running, other], false, false), Step::Serve);
}

#[test]
fn a_machine_of_the_pool_that_fails_its_checks_is_replaced() {
    let failed = held("i-1", State::Claimed, Some(Signal::RegistrationFailed));
    match next(1, &[failed], false, false) {
        Step::Validate { failed, .. } => assert_eq!(failed[0].0, "i-1"),
        other => panic!("{other:?}"),
    }
    let ended = held("i-1", State::Terminated, None);
    assert_eq!(next(1, &[ended], false, false), Step::Select(1), "and another one is looked for");
}

#[test]
fn i4_a_created_machine_that_fails_its_checks_fails_the_claim() {
    let fine = held("i-1", State::Claimed, Some(Signal::Registered));
    let failed = held("i-2", State::Created, Some(Signal::ScriptFailed));
    match next(2, &[fine, failed], true, true) {
        Step::Fail(ClaimReason::ValidationFailed, message) => assert!(message.starts_with("i-2: "), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_fleet_is_ordered_once() {
    assert!(matches!(next(1, &[], true, true), Step::Fail(ClaimReason::WorkerLost, _)));
}

#[test]
fn i4_a_claim_lets_go_of_what_it_does_not_need_machines_of_the_pool_first() {
    let [claimed, created, running] =
        [("i-1", State::Claimed), ("i-2", State::Created), ("i-3", State::Running)].map(|(id, s)| held(id, s, None));
    let all = [created.clone(), claimed.clone(), running.clone()];
    for (count, ready, spare) in
        [(3, false, &[][..]), (2, false, &["i-1"][..]), (1, false, &["i-1", "i-2"][..]), (3, true, &["i-1", "i-2"][..])]
    {
        assert_eq!(surplus(&all, count, ready), spare, "{count} {ready}");
    }
    assert!(surplus(std::slice::from_ref(&running), 1, true).is_empty());
    assert!(surplus(&[running, held("i-4", State::Terminated, None)], 1, true).is_empty());
}
