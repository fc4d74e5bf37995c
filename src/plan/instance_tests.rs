use paddock_record::KeyPair;

use super::*;
use crate::plan::sample_ec2::{at, beat, pool, record, said, tracked};

const RUN: &str = "7890";

#[test]
fn an_instance_that_registered_for_this_run_and_beats_is_confirmed() {
    for state in [State::Created, State::Claimed] {
        let mut it = tracked(record("i-1", state, RUN, at(0)));
        it.vitals = Vitals { heartbeat: Some(beat(at(3))), signal: Some(said(Signal::Registered, RUN)) };
        assert_eq!(standing(&it, &pool().timeouts, at(5)), Standing::Confirmed, "{state}");
    }
}

#[test]
fn i1_a_registration_for_another_run_counts_for_nothing() {
    let mut it = tracked(record("i-1", State::Claimed, RUN, at(0)));
    it.vitals = Vitals { heartbeat: Some(beat(at(3))), signal: Some(said(Signal::Registered, "1111")) };
    it.record.sealed = "sealed".into();
    assert_eq!(standing(&it, &pool().timeouts, at(5)), Standing::Waiting);
    assert!(matches!(standing(&it, &pool().timeouts, at(11)), Standing::Failed(FailureReason::RegistrationTimeout, _)));
}

#[test]
fn each_failed_check_has_its_reason() {
    use FailureReason::*;
    let silent = Vitals::default();
    let with = |signal, run| Vitals { heartbeat: Some(beat(at(0))), signal: Some(said(signal, run)) };
    for (state, vitals, seconds, reason) in [
        (State::Claimed, silent.clone(), 11, RegistrationTimeout),
        (State::Claimed, with(Signal::RegistrationFailed, RUN), 1, RegistrationFailed),
        (State::Claimed, with(Signal::Registered, RUN), 16, HeartbeatStale),
        (State::Created, silent.clone(), 181, ValidationTimeout),
        (State::Created, with(Signal::ScriptFailed, RUN), 1, PreRunnerFailed),
        (State::Created, with(Signal::RegistrationFailed, RUN), 1, RegistrationFailed),
        (State::Idle, silent.clone(), 1, InstanceGone),
        (State::Terminated, silent, 1, InstanceGone),
    ] {
        let it = Tracked { vitals, ..tracked(record("i-1", state, RUN, at(0))) };
        match standing(&it, &pool().timeouts, at(seconds)) {
            Standing::Failed(found, message) => assert_eq!(found, reason, "{state} {message}"),
            other => panic!("{state} after {seconds} s: {other:?}, not {reason:?}"),
        }
    }
}

#[test]
fn a_created_instance_gets_its_token_once_its_key_is_known() {
    let mut it = tracked(record("i-1", State::Created, RUN, at(0)));
    assert_eq!(standing(&it, &pool().timeouts, at(1)), Standing::Waiting);
    it.vitals.heartbeat = Some(Heartbeat { public_key: Some(KeyPair::generate().public()), ..beat(at(1)) });
    assert_eq!(standing(&it, &pool().timeouts, at(1)), Standing::NeedsToken);
    it.record.sealed = "sealed".into();
    assert_eq!(standing(&it, &pool().timeouts, at(1)), Standing::Waiting);
}

#[test]
fn i2_whatever_its_state_an_instance_past_its_threshold_ends() {
    for state in [State::Created, State::Running, State::Idle, State::Claimed] {
        let it = tracked(record("i-1", state, RUN, at(0)));
        let threshold = it.record.threshold.unwrap();
        assert!(
            matches!(upkeep(&it, &pool(), false, threshold), Upkeep::End(FailureReason::ThresholdPassed, _)),
            "{state}"
        );
    }
    assert_eq!(
        upkeep(&tracked(record("i-1", State::Terminated, "", at(0))), &pool(), false, at(1_000_000)),
        Upkeep::Leave
    );
}

#[test]
fn a_machine_kept_warm_is_pooled_when_its_script_is_done_and_given_up_when_it_failed() {
    let mut it = tracked(record("i-1", State::Created, "", at(0)));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave);
    it.vitals.signal = Some(said(Signal::ScriptOk, ""));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "no claim could use it without its key");
    it.vitals.heartbeat = Some(Heartbeat { public_key: Some(KeyPair::generate().public()), ..beat(at(1)) });
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Warm);
    it.record.state = State::Running;
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Warm, "a crash between its two moves is finished");
    it.record.state = State::Created;
    it.vitals.signal = Some(said(Signal::ScriptFailed, ""));
    assert!(matches!(upkeep(&it, &pool(), false, at(1)), Upkeep::End(FailureReason::PreRunnerFailed, _)));
}

#[test]
fn a_released_instance_is_offered_only_after_it_deregistered_from_that_run() {
    let mut it = tracked(Instance { leaving: RUN.into(), ..record("i-1", State::Idle, "", at(0)) });
    assert!(it.awaits_agent());
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave);
    it.vitals.signal = Some(said(Signal::Deregistered, "1111"));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "that was an earlier run");
    it.vitals.signal = Some(said(Signal::Deregistered, RUN));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Offer);
    it.vitals.signal = Some(said(Signal::DeregistrationFailed, RUN));
    assert!(matches!(upkeep(&it, &pool(), false, at(1)), Upkeep::End(FailureReason::DeregistrationFailed, _)));
    it.vitals.signal = None;
    assert!(matches!(upkeep(&it, &pool(), false, at(121)), Upkeep::End(FailureReason::DeregistrationTimeout, _)));
}

#[test]
fn what_was_said_before_the_release_does_not_count_for_it() {
    let mut it = tracked(Instance { leaving: RUN.into(), ..record("i-1", State::Idle, "", at(60)) });
    it.vitals.signal = Some(said(Signal::Deregistered, RUN));
    assert_eq!(upkeep(&it, &pool(), false, at(61)), Upkeep::Leave, "that was the run's first attempt");
    it.vitals.signal.as_mut().unwrap().updated_at = at(61);
    assert_eq!(upkeep(&it, &pool(), false, at(61)), Upkeep::Offer);
}

#[test]
fn a_machine_that_is_kept_warm_has_its_idle_time_renewed_and_others_have_not() {
    let mut it = tracked(record("i-1", State::Idle, "", at(0)));
    it.record.threshold = Some(at(420));
    assert_eq!(upkeep(&it, &pool(), true, at(209)), Upkeep::Leave);
    assert_eq!(upkeep(&it, &pool(), true, at(211)), Upkeep::Renew);
    assert_eq!(upkeep(&it, &pool(), false, at(211)), Upkeep::Leave);
    assert!(matches!(upkeep(&it, &pool(), true, at(420)), Upkeep::End(FailureReason::ThresholdPassed, _)));
}

#[test]
fn an_idle_message_carries_what_claims_filter_by() {
    let it = tracked(record("i-1", State::Idle, "", at(0)));
    let message = it.idle_message();
    assert_eq!((message.instance_id.as_str(), message.cpu, message.mem), ("i-1", 2, 4096));
    assert_eq!(IdleMessage::read(&message.write(), at(1)), Ok(message));
}

#[test]
fn a_machine_that_could_not_be_scrubbed_is_never_offered_and_says_why() {
    let mut it = tracked(Instance { leaving: RUN.into(), ..record("i-1", State::Idle, "", at(0)) });
    let failure = said(Signal::DeregistrationFailed, RUN);
    it.vitals.signal =
        Some(WorkerSignal { reason: SCRUB.into(), detail: "the scrub script: exit 1".into(), ..failure });
    let why = "it is not clean for another claim: the scrub script: exit 1".to_owned();
    assert_eq!(upkeep(&it, &pool(), true, at(1)), Upkeep::End(FailureReason::ScrubFailed, why));
}

#[test]
fn a_machine_that_has_served_its_claims_ends_once_it_has_left_github() {
    let mut pool = pool();
    pool.reuse.max_claims = Some(2);
    for (claims, leaving, signal, ends) in [
        (1, RUN, Some(Signal::Deregistered), false),
        (2, RUN, None, false),
        (2, RUN, Some(Signal::Deregistered), true),
        (1, "", None, false),
        (2, "", None, true),
    ] {
        let mut it = tracked(Instance { leaving: leaving.into(), claims, ..record("i-1", State::Idle, "", at(0)) });
        it.vitals.signal = signal.map(|signal| said(signal, RUN));
        let decided = upkeep(&it, &pool, true, at(1));
        assert_eq!(matches!(decided, Upkeep::End(FailureReason::MaxClaimsServed, _)), ends, "{claims} {leaving:?}");
    }
    let mut serving = tracked(Instance { claims: 2, ..record("i-1", State::Running, RUN, at(0)) });
    assert_eq!(upkeep(&serving, &pool, true, at(1)), Upkeep::Leave);
    serving.record.state = State::Claimed;
    assert_eq!(upkeep(&serving, &pool, true, at(1)), Upkeep::Leave);
}

#[test]
fn a_lost_machine_says_who_took_it_and_a_young_one_is_not_missed_yet() {
    use FailureReason::{InstanceGone, SpotReclaimed};
    let (alive, gone) = (Seen { gone: false, reclaimed: false }, Seen { gone: true, reclaimed: false });
    let reclaimed = Seen { gone: true, reclaimed: true };
    for (state, seen, seconds, reason) in [
        (State::Running, Some(alive), 3600, None),
        (State::Running, Some(gone), 1, Some(InstanceGone)),
        (State::Running, Some(reclaimed), 1, Some(SpotReclaimed)),
        (State::Created, None, 59, None),
        (State::Created, None, 60, Some(InstanceGone)),
        (State::Terminated, Some(reclaimed), 3600, None),
        (State::Terminated, None, 3600, None),
    ] {
        let it = tracked(record("i-1", state, RUN, at(0)));
        assert_eq!(lost(&it, seen, at(seconds)).map(|(reason, _)| reason), reason, "{state} {seen:?} {seconds}");
    }
}
