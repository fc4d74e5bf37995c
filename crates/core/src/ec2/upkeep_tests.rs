use paddock_record::{Heartbeat, KeyPair, RUNNER_ENDED, WorkerSignal};

use super::*;
use crate::fixtures::ec2::{at, beat, leaving, pool, record, said, tracked};

const RUN: &str = "7890";

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
    it.report.signal = Some(said(Signal::ScriptOk, ""));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "no claim could use it without its key");
    it.report.heartbeat = Some(Heartbeat { public_key: Some(KeyPair::generate().public()), ..beat(at(1)) });
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Warm);
    it.record.state = State::Running;
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Warm, "a crash between its two transitions is repaired");
    it.record.state = State::Created;
    it.report.signal = Some(said(Signal::ScriptFailed, ""));
    assert!(matches!(upkeep(&it, &pool(), false, at(1)), Upkeep::End(FailureReason::PreRunnerFailed, _)));
}

#[test]
fn a_released_instance_is_pooled_only_after_it_deregistered_from_that_run() {
    let mut it = tracked(leaving(RUN, record("i-1", State::Idle, "", at(0))));
    assert!(it.awaits_agent());
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave);
    it.report.signal = Some(said(Signal::Deregistered, "1111"));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "that was an earlier run");
    it.report.signal = Some(said(Signal::Deregistered, RUN));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Pool);
    it.report.signal = Some(said(Signal::DeregistrationFailed, RUN));
    assert!(matches!(upkeep(&it, &pool(), false, at(1)), Upkeep::End(FailureReason::DeregistrationFailed, _)));
    it.report.signal = None;
    assert!(matches!(upkeep(&it, &pool(), false, at(121)), Upkeep::End(FailureReason::DeregistrationTimeout, _)));
}

#[test]
fn a_machine_held_for_a_claim_that_does_not_exist_is_abandoned() {
    for state in State::ALL {
        let mut it = record("i-1", *state, RUN, at(0));
        assert!(!is_abandoned(&it, |_| false), "{state}: no claim holds it");
        it.claim = "c".into();
        assert!(!is_abandoned(&it, |_| true), "{state}");
        let held = matches!(state, State::Created | State::Claimed | State::Running);
        assert_eq!(is_abandoned(&it, |_| false), held, "{state}");
    }
}

#[test]
fn i1_a_signal_of_the_runs_first_attempt_does_not_count_for_the_second_whatever_its_time() {
    let mut it = tracked(leaving(RUN, record("i-1", State::Idle, "", at(60))));
    it.record.claims = 2;
    let mut after = |signal, claims, second| {
        it.report.signal = Some(WorkerSignal { claims, updated_at: at(second), ..said(signal, RUN) });
        upkeep(&it, &pool(), false, at(61))
    };
    for signal in [Signal::Deregistered, Signal::DeregistrationFailed] {
        assert_eq!(after(signal, Some(1), 9999), Upkeep::Leave);
    }
    assert_eq!(after(Signal::Deregistered, Some(2), -9999), Upkeep::Pool);
    assert_eq!(after(Signal::Deregistered, None, 61), Upkeep::Leave, "an earlier version does not say for which");
    for claims in [Some(2), None] {
        let ended = after(Signal::DeregistrationFailed, claims, -9999);
        assert!(matches!(ended, Upkeep::End(FailureReason::DeregistrationFailed, _)), "{ended:?}");
    }
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
fn a_machine_that_could_not_be_scrubbed_is_never_pooled_and_reports_why() {
    let mut it = tracked(leaving(RUN, record("i-1", State::Idle, "", at(0))));
    let failure = said(Signal::DeregistrationFailed, RUN);
    it.report.signal =
        Some(WorkerSignal { reason: SCRUB.into(), detail: "the scrub script: exit 1".into(), ..failure });
    let why = "it is not clean for another claim: the scrub script: exit 1".to_owned();
    assert_eq!(upkeep(&it, &pool(), true, at(1)), Upkeep::End(FailureReason::ScrubFailed, why));
}

#[test]
fn a_machine_that_has_served_its_claims_ends_once_it_has_left_github() {
    let mut pool = pool();
    pool.reuse.max_claims = Some(2);
    for (claims, last_run, signal, ends) in [
        (1, RUN, Some(Signal::Deregistered), false),
        (2, RUN, None, false),
        (2, RUN, Some(Signal::Deregistered), true),
        (1, "", None, false),
        (2, "", None, true),
    ] {
        let mut it = tracked(leaving(last_run, record("i-1", State::Idle, "", at(0))));
        it.record.claims = claims;
        it.report.signal = signal.map(|signal| WorkerSignal { claims: Some(claims), ..said(signal, RUN) });
        let decided = upkeep(&it, &pool, true, at(1));
        assert_eq!(matches!(decided, Upkeep::End(FailureReason::MaxClaimsServed, _)), ends, "{claims} {last_run:?}");
    }
    let mut serving = tracked(record("i-1", State::Running, RUN, at(0)));
    serving.record.claims = 2;
    assert_eq!(upkeep(&serving, &pool, true, at(1)), Upkeep::Leave);
    serving.record.state = State::Claimed;
    assert_eq!(upkeep(&serving, &pool, true, at(1)), Upkeep::Leave);
}

#[test]
fn a_lost_machine_has_its_reason_and_a_new_one_is_not_missed_yet() {
    use FailureReason::{InstanceGone, SpotReclaimed};
    let alive = Ec2State { gone: false, reclaimed: false, reason: "" };
    let gone = Ec2State { gone: true, ..alive };
    let reclaimed = Ec2State { reclaimed: true, ..gone };
    for (state, seen, missing_for_long, reason) in [
        (State::Running, Some(alive), true, None),
        (State::Running, Some(gone), false, Some(InstanceGone)),
        (State::Running, Some(reclaimed), false, Some(SpotReclaimed)),
        (State::Created, None, false, None),
        (State::Created, None, true, Some(InstanceGone)),
        (State::Terminated, Some(reclaimed), true, None),
        (State::Terminated, None, true, None),
    ] {
        let it = tracked(record("i-1", state, RUN, at(0)));
        let found = lost(&it, seen, missing_for_long).map(|(reason, _)| reason);
        assert_eq!(found, reason, "{state} {seen:?} {missing_for_long}");
    }
    for (seen, missing_for_long, reason) in [
        (Some(alive), true, None),
        (Some(gone), false, Some(SpotReclaimed)),
        (None, false, None),
        (None, true, Some(SpotReclaimed)),
    ] {
        let it = noticed(record("i-1", State::Running, RUN, at(0)));
        let found = lost(&it, seen, missing_for_long).map(|(reason, _)| reason);
        assert_eq!(found, reason, "after a notice: {seen:?} {missing_for_long}");
    }
}

/// A spot machine that EC2 has announced to take back.
fn noticed(mut record: Instance) -> Machine {
    record.usage_class = "spot".into();
    let mut it = tracked(record);
    it.report.heartbeat = Some(Heartbeat { reclaimed: true, ..beat(at(1)) });
    it
}

#[test]
fn a_machine_that_ec2_takes_back_ends_at_once_unless_it_serves_or_leaves() {
    let ends = |it: &Machine| matches!(upkeep(it, &pool(), true, at(2)), Upkeep::End(FailureReason::SpotReclaimed, _));
    for state in [State::Created, State::Running, State::Idle] {
        assert!(ends(&noticed(record("i-1", state, "", at(0)))), "{state}");
    }
    for state in [State::Created, State::Claimed, State::Running] {
        let serving = noticed(record("i-1", state, RUN, at(0)));
        assert_eq!(upkeep(&serving, &pool(), true, at(2)), Upkeep::Leave, "{state}: its claim decides");
    }
    let mut it = noticed(leaving(RUN, record("i-1", State::Idle, "", at(0))));
    assert_eq!(upkeep(&it, &pool(), true, at(2)), Upkeep::Leave, "its runner leaves GitHub first");
    it.report.signal = Some(said(Signal::Deregistered, RUN));
    assert!(ends(&it));
}

#[test]
fn of_a_machine_that_shut_itself_down_ec2s_reason_is_shown() {
    let reason = "Client.InstanceInitiatedShutdown: Instance initiated shutdown";
    let gone = Some(Ec2State { gone: true, reclaimed: false, reason });
    let mut it = tracked(record("i-1", State::Created, RUN, at(0)));
    let said = |it: &Machine| lost(it, gone, false).unwrap().1;
    assert!(said(&it).starts_with("the machine has shut itself down before its agent had started"), "{}", said(&it));
    assert!(said(&it).ends_with(&format!("({reason})")), "{}", said(&it));
    it.report.heartbeat = Some(beat(at(0)));
    assert_eq!(said(&it), format!("the machine has shut itself down ({reason})"));
}

#[test]
fn a_machine_whose_runner_has_ended_for_good_ends_and_one_that_starts_it_again_does_not() {
    let mut it = tracked(record("i-1", State::Running, RUN, at(0)));
    let ended = WorkerSignal {
        reason: RUNNER_ENDED.into(),
        detail: "the runner was deleted at GitHub".into(),
        ..said(Signal::RegistrationFailed, RUN)
    };
    it.report.signal = Some(ended.clone());
    let message = "its runner has ended for good: the runner was deleted at GitHub".to_owned();
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::End(FailureReason::RunnerEnded, message));
    for other in [
        WorkerSignal { reason: String::new(), ..ended.clone() },
        WorkerSignal { run_id: "another".into(), ..ended.clone() },
        WorkerSignal { claims: Some(9), ..ended },
    ] {
        it.report.signal = Some(other.clone());
        assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "{other:?}");
    }
}

#[test]
fn the_record_of_an_ended_machine_stays_for_its_retention_and_longer_while_its_runner_may_be_left() {
    let (mut ended, hour) = (record("i-1", State::Terminated, "", at(0)), Duration::from_secs(3600));
    assert!(!is_forgotten(&ended, hour, at(3600)) && is_forgotten(&ended, hour, at(3601)));
    ended.leaving = "7".into();
    assert!(!is_forgotten(&ended, hour, at(3601)) && is_forgotten(&ended, hour, at(7201)));
    assert!(!is_forgotten(&record("i-2", State::Idle, "", at(0)), hour, at(9000)), "it lives");
    ended.failure_reason = FailureReason::Dumped.as_str().into();
    assert!(!is_forgotten(&ended, hour, at(1)), "its runner may still be registered");
    ended.leaving.clear();
    assert!(is_forgotten(&ended, hour, at(1)));
}

#[test]
fn an_idle_machine_that_is_silent_for_too_long_ends() {
    let mut it = tracked(record("i-1", State::Idle, "", at(0)));
    it.silent = SignedDuration::from_secs(99);
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "its heartbeat was not read yet");
    it.report.heartbeat = Some(beat(at(0)));
    assert!(matches!(upkeep(&it, &pool(), true, at(1)), Upkeep::End(FailureReason::HeartbeatStale, _)));
    it.silent = SignedDuration::from(pool().timeouts.heartbeat);
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave);
    it.silent = SignedDuration::from_secs(99);
    it.record.leaving = RUN.into();
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "it has its own time limit");
    it.record = record("i-1", State::Running, RUN, at(0));
    assert_eq!(upkeep(&it, &pool(), false, at(1)), Upkeep::Leave, "it may be running a job");
}
