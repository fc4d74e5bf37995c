use aws_sdk_dynamodb::types::AttributeValue;
use paddock_record::{attribute, instance_key, stamp};

use super::*;

const NOW: &str = "2025-05-31T12:00:00Z";
const MINUTE: SignedDuration = SignedDuration::from_secs(60);
const SECOND: SignedDuration = SignedDuration::from_secs(1);

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn instance(state: State, run: &str, sealed: &str) -> Instance {
    let text = |text: &str| AttributeValue::S(text.to_owned());
    let mut item = instance_key("i-1");
    item.extend([
        (attribute::STATE.to_owned(), text(state.as_str())),
        (attribute::RUN_ID.to_owned(), text(run)),
        (attribute::THRESHOLD.to_owned(), text(&stamp(now() + MINUTE))),
        (attribute::SEALED.to_owned(), text(sealed)),
    ]);
    Instance::from_item(&item)
}

fn seen(instance: Instance) -> Record {
    Record::Seen { instance: Box::new(instance), read_at: now(), since: now() }
}

/// A machine whose script has succeeded and that serves no run.
fn facts(record: &Record) -> Facts<'_> {
    Facts {
        record,
        script: Script::Succeeded,
        serving: None,
        runner: Runner::Absent,
        reported: None,
        reclaimed: false,
        failures: 0,
        retry_at: now(),
        first_start: now(),
        created_lifetime: Duration::from_secs(600),
    }
}

#[test]
fn the_script_comes_first_and_its_failure_keeps_the_instance_out() {
    let record = seen(instance(State::Created, "7", "token"));
    for (script, action) in
        [(Script::NotRun, Action::RunScript), (Script::Running, Action::Wait), (Script::Failed, Action::Wait)]
    {
        assert_eq!(step(&Facts { script, ..facts(&record) }, now()), action);
        assert_eq!(step(&Facts { script, ..facts(&Record::Never) }, now()), action);
    }
}

#[test]
fn a_runner_that_has_ended_for_good_is_reported_once_and_leaves_with_its_run() {
    let serving = seen(instance(State::Running, "A", ""));
    let ended = Facts { serving: Some("A"), runner: Runner::Ended, ..facts(&serving) };
    assert_eq!(step(&ended, now()), Action::Report(Signal::RegistrationFailed, "A"));
    let said = Facts { reported: Some((Signal::RegistrationFailed, "A", 0)), ..ended.clone() };
    assert_eq!(step(&said, now()), Action::Wait);
    assert_eq!(step(&Facts { reclaimed: true, ..ended }, now()), Action::Wait);
    let released = seen(instance(State::Idle, "", "token"));
    let leaving = Facts { serving: Some("A"), runner: Runner::Ended, ..facts(&released) };
    assert_eq!(step(&leaving, now()), Action::Deregister { run: "A", sealed: Some("token") });
}

#[test]
fn a_release_is_reported_even_if_an_earlier_one_of_the_same_run_was() {
    let mut leaving = instance(State::Idle, "", "token");
    (leaving.leaving, leaving.claims) = ("A".into(), 2);
    let record = seen(leaving);
    let first = Facts { reported: Some((Signal::Deregistered, "A", 1)), ..facts(&record) };
    assert_eq!(step(&first, now()), Action::Report(Signal::Deregistered, "A"));
    let second = Facts { reported: Some((Signal::Deregistered, "A", 2)), ..facts(&record) };
    assert_eq!(step(&second, now()), Action::Wait);
}

#[test]
fn a_registration_is_reported_again_to_the_next_claim_of_the_same_run() {
    let mut again = instance(State::Claimed, "A", "token");
    again.claims = 2;
    let record = seen(again);
    for (claims, action) in [(1, Action::Report(Signal::Registered, "A")), (2, Action::Wait)] {
        let reported = Some((Signal::Registered, "A", claims));
        let facts = Facts { serving: Some("A"), runner: Runner::Idle, reported, ..facts(&record) };
        assert_eq!(step(&facts, now()), action, "{claims}");
    }
}

#[test]
fn each_step_moves_the_machine_towards_its_record() {
    use Runner::*;
    let registered = Some((Signal::Registered, "A", 0));
    let (a, b) = (instance(State::Running, "A", "token"), instance(State::Claimed, "B", "token"));
    let (unclaimed, tokenless) = (instance(State::Idle, "", "token"), instance(State::Idle, "", ""));
    let waiting = instance(State::Created, "A", "");
    let mut leaving = unclaimed.clone();
    leaving.leaving = "A".into();
    let remove = Action::Deregister { run: "A", sealed: Some("token") };
    let forget = Action::Deregister { run: "A", sealed: None };
    let table = [
        // record, serving, runner, reported → action
        (&unclaimed, None, Absent, None, Action::Wait),
        (&leaving, None, Absent, None, Action::Report(Signal::Deregistered, "A")),
        (&leaving, None, Absent, Some((Signal::Deregistered, "A", 0)), Action::Wait),
        (&leaving, Some("A"), Idle, registered, Action::StopRunner),
        (&leaving, Some("A"), Stopped, registered, remove),
        (&waiting, None, Absent, None, Action::Wait),
        (&a, None, Absent, None, Action::Register(&a)),
        (&a, Some("A"), Absent, None, Action::Register(&a)),
        (&a, Some("A"), Stopped, None, Action::StartRunner),
        (&a, Some("A"), Starting, None, Action::Wait),
        (&a, Some("A"), Idle, None, Action::Report(Signal::Registered, "A")),
        (&a, Some("A"), Busy, None, Action::Report(Signal::Registered, "A")),
        (&a, Some("A"), Idle, Some((Signal::Registered, "Z", 0)), Action::Report(Signal::Registered, "A")),
        (&a, Some("A"), Idle, registered, Action::Wait),
        (&a, Some("A"), Busy, registered, Action::Wait),
        (&a, Some("A"), Stopped, registered, Action::StartRunner),
        (&unclaimed, Some("A"), Starting, None, Action::StopRunner),
        (&unclaimed, Some("A"), Idle, registered, Action::StopRunner),
        (&unclaimed, Some("A"), Busy, registered, Action::StopRunner),
        (&unclaimed, Some("A"), Stopped, registered, remove),
        (&tokenless, Some("A"), Idle, registered, Action::StopRunner),
        (&tokenless, Some("A"), Stopped, registered, Action::Wait),
        (&tokenless, Some("A"), Absent, registered, forget),
        (&b, Some("A"), Busy, registered, Action::StopRunner),
        (&b, Some("A"), Stopped, registered, forget),
        (&b, Some("A"), Absent, registered, forget),
    ];
    for (record, serving, runner, reported, action) in table {
        let record = seen(record.clone());
        let decided = step(&Facts { serving, runner, reported, ..facts(&record) }, now());
        assert_eq!(decided, action, "{record:?} {serving:?} {runner:?} {reported:?}");
    }
}

#[test]
fn attempts_back_off_and_a_repeated_failure_is_reported() {
    let (a, unclaimed) = (instance(State::Claimed, "A", "token"), instance(State::Idle, "", "token"));
    let cases = [
        (&a, None, Runner::Absent, Action::Register(&a), Signal::RegistrationFailed),
        (&a, Some("A"), Runner::Stopped, Action::StartRunner, Signal::RegistrationFailed),
        (
            &unclaimed,
            Some("A"),
            Runner::Stopped,
            Action::Deregister { run: "A", sealed: Some("token") },
            Signal::DeregistrationFailed,
        ),
    ];
    for (record, serving, runner, action, failed) in cases {
        let record = seen(record.clone());
        let base = Facts { serving, runner, ..facts(&record) };
        let later = now() + SECOND;
        assert_eq!(step(&Facts { failures: 1, retry_at: later, ..base.clone() }, now()), Action::Wait);
        assert_eq!(step(&Facts { failures: FAILURES_BEFORE_REPORT - 1, ..base.clone() }, now()), action);
        let failing = Facts { failures: FAILURES_BEFORE_REPORT, retry_at: later, ..base.clone() };
        assert_eq!(step(&failing, now()), Action::Report(failed, "A"));
        let reported = Facts { reported: Some((failed, "A", 0)), ..failing };
        assert_eq!(step(&reported, now()), Action::Wait);
        assert_eq!(step(&reported, later), action);
    }
}

#[test]
fn a_reclaimed_spot_instance_finishes_its_job_and_takes_no_other() {
    let record = seen(instance(State::Running, "A", "token"));
    let of = |serving, runner, reported| {
        step(&Facts { serving, runner, reported, reclaimed: true, ..facts(&record) }, now())
    };
    let registered = Some((Signal::Registered, "A", 0));
    assert_eq!(of(Some("A"), Runner::Busy, registered), Action::Wait);
    assert_eq!(of(Some("A"), Runner::Idle, registered), Action::StopRunner);
    assert_eq!(of(Some("A"), Runner::Stopped, registered), Action::Wait);
    assert_eq!(of(None, Runner::Absent, None), Action::Report(Signal::RegistrationFailed, "A"));
    assert_eq!(of(None, Runner::Absent, Some((Signal::RegistrationFailed, "A", 0))), Action::Wait);
}

#[test]
fn an_expired_instance_shuts_down_in_every_phase() {
    let expiring = |since: SignedDuration, read_at: Timestamp| {
        let mut instance = instance(State::Running, "A", "");
        // By a clock that is years away. Its time is ten minutes from when it was first read.
        instance.updated_at = Timestamp::UNIX_EPOCH + MINUTE;
        instance.threshold = Some(instance.updated_at + MINUTE * 10);
        Record::Seen { instance: Box::new(instance), read_at, since: now() - since }
    };
    let past = |since| {
        let mut instance = instance(State::Running, "A", "");
        (instance.updated_at, instance.threshold) = (now(), Some(now() - MINUTE * 60));
        Record::Seen { instance: Box::new(instance), read_at: now(), since: now() - since }
    };
    let undated = |since| {
        let mut instance = instance(State::Running, "A", "");
        instance.threshold = Some(now() - since + MINUTE);
        Record::Seen { instance: Box::new(instance), read_at: now(), since: now() - since }
    };
    let (hour, long_ago) = (SignedDuration::from_hours(1), now() - SignedDuration::from_hours(2));
    let table = [
        (seen(instance(State::Terminated, "", "")), now(), Some(End::Terminated)),
        (Record::Gone, now(), Some(End::RecordGone)),
        (Record::Never, now() - MINUTE * 11, None),
        (Record::Never, now() - MINUTE * 11 - SECOND, Some(End::Unclaimed)),
        (expiring(MINUTE * 11, now()), long_ago, None),
        (expiring(MINUTE * 11 + SECOND, now()), long_ago, Some(End::Expired)),
        (past(MINUTE), long_ago, None),
        (past(MINUTE + SECOND), long_ago, Some(End::Expired)),
        // Without `updatedAt`, of another version: its threshold is a minute ahead.
        (seen(instance(State::Running, "A", "")), long_ago, None),
        (undated(MINUTE * 2), long_ago, None),
        (undated(MINUTE * 2 + SECOND), long_ago, Some(End::Expired)),
        // Read before its time ended and unreadable since: the operator may have extended it.
        (expiring(MINUTE * 10 + hour, now() - hour), long_ago, None),
        (expiring(MINUTE * 10 + hour + SECOND, now() - hour), long_ago, Some(End::RecordUnreadable)),
    ];
    for (record, first_start, ends) in table {
        for runner in [Runner::Absent, Runner::Stopped, Runner::Starting, Runner::Idle, Runner::Busy] {
            for script in [Script::NotRun, Script::Running, Script::Succeeded, Script::Failed] {
                let serving = Some("A");
                let facts = Facts { serving, runner, script, first_start, ..facts(&record) };
                let decided = match step(&facts, now()) {
                    Action::ShutDown(end) => Some(end),
                    _ => None,
                };
                assert_eq!(decided, ends, "{record:?}");
            }
        }
    }
}

#[test]
fn i8_a_job_is_never_interrupted_while_its_run_is_the_records() {
    for state in [State::Created, State::Running, State::Idle, State::Claimed] {
        let record = seen(instance(state, "A", "token"));
        for (reclaimed, failures) in [(false, 0), (true, 0), (false, 9), (true, 9)] {
            let facts = Facts { serving: Some("A"), runner: Runner::Busy, reclaimed, failures, ..facts(&record) };
            assert!(matches!(step(&facts, now()), Action::Wait | Action::Report(Signal::Registered, "A")));
        }
    }
}
