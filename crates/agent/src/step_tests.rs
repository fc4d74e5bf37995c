use aws_sdk_dynamodb::types::AttributeValue;
use paddock_record::{attribute, entity, key, stamp};

use super::*;

const NOW: &str = "2025-05-31T12:00:00Z";
const MINUTE: SignedDuration = SignedDuration::from_secs(60);
const SECOND: SignedDuration = SignedDuration::from_secs(1);

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn instance(state: State, run: &str, sealed: &str) -> Instance {
    let text = |text: &str| AttributeValue::S(text.to_owned());
    let mut item = key(entity::INSTANCE, "i-1");
    item.extend([
        (attribute::STATE.to_owned(), text(state.as_str())),
        (attribute::RUN_ID.to_owned(), text(run)),
        (attribute::THRESHOLD.to_owned(), text(&stamp(now() + MINUTE))),
        (attribute::SEALED.to_owned(), text(sealed)),
    ]);
    Instance::from_item(&item).unwrap()
}

fn seen(instance: Instance) -> Record {
    Record::Seen { instance: Box::new(instance), read_at: now() }
}

/// A settled machine that serves nobody.
fn facts(record: &Record) -> Facts<'_> {
    Facts {
        record,
        script: Script::Succeeded,
        serving: None,
        runner: Runner::Absent,
        said: None,
        said_at: now(),
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
fn a_release_is_answered_even_if_the_same_was_said_for_an_earlier_one() {
    let mut leaving = instance(State::Idle, "", "token");
    (leaving.leaving, leaving.updated_at) = ("A".into(), now());
    let record = seen(leaving);
    let said = Some((Signal::Deregistered, "A"));
    let before = Facts { said, said_at: now() - SECOND, ..facts(&record) };
    assert_eq!(step(&before, now()), Action::Say(Signal::Deregistered, "A"));
    let after = Facts { said, said_at: now(), ..facts(&record) };
    assert_eq!(step(&after, now()), Action::Wait);
}

#[test]
fn each_turn_brings_the_machine_nearer_to_what_its_record_shows() {
    use Runner::*;
    let registered = Some((Signal::Registered, "A"));
    let (a, b) = (instance(State::Running, "A", "token"), instance(State::Claimed, "B", "token"));
    let (nobody, tokenless) = (instance(State::Idle, "", "token"), instance(State::Idle, "", ""));
    let waiting = instance(State::Created, "A", "");
    let mut leaving = nobody.clone();
    leaving.leaving = "A".into();
    let remove = Action::Deregister { run: "A", sealed: Some("token") };
    let forget = Action::Deregister { run: "A", sealed: None };
    let table = [
        // record, serving, runner, said → action
        (&nobody, None, Absent, None, Action::Wait),
        (&leaving, None, Absent, None, Action::Say(Signal::Deregistered, "A")),
        (&leaving, None, Absent, Some((Signal::Deregistered, "A")), Action::Wait),
        (&leaving, Some("A"), Idle, registered, Action::StopRunner),
        (&leaving, Some("A"), Stopped, registered, remove),
        (&waiting, None, Absent, None, Action::Wait),
        (&a, None, Absent, None, Action::Register(&a)),
        (&a, Some("A"), Absent, None, Action::Register(&a)),
        (&a, Some("A"), Stopped, None, Action::StartRunner),
        (&a, Some("A"), Starting, None, Action::Wait),
        (&a, Some("A"), Idle, None, Action::Say(Signal::Registered, "A")),
        (&a, Some("A"), Busy, None, Action::Say(Signal::Registered, "A")),
        (&a, Some("A"), Idle, Some((Signal::Registered, "Z")), Action::Say(Signal::Registered, "A")),
        (&a, Some("A"), Idle, registered, Action::Wait),
        (&a, Some("A"), Busy, registered, Action::Wait),
        (&a, Some("A"), Stopped, registered, Action::StartRunner),
        (&nobody, Some("A"), Starting, None, Action::StopRunner),
        (&nobody, Some("A"), Idle, registered, Action::StopRunner),
        (&nobody, Some("A"), Busy, registered, Action::StopRunner),
        (&nobody, Some("A"), Stopped, registered, remove),
        (&tokenless, Some("A"), Idle, registered, Action::StopRunner),
        (&tokenless, Some("A"), Stopped, registered, Action::Wait),
        (&tokenless, Some("A"), Absent, registered, forget),
        (&b, Some("A"), Busy, registered, Action::StopRunner),
        (&b, Some("A"), Stopped, registered, forget),
        (&b, Some("A"), Absent, registered, forget),
    ];
    for (record, serving, runner, said, action) in table {
        let record = seen(record.clone());
        let decided = step(&Facts { serving, runner, said, ..facts(&record) }, now());
        assert_eq!(decided, action, "{record:?} {serving:?} {runner:?} {said:?}");
    }
}

#[test]
fn attempts_pause_and_the_operator_hears_of_a_failure_that_lasts() {
    let (a, nobody) = (instance(State::Claimed, "A", "token"), instance(State::Idle, "", "token"));
    let cases = [
        (&a, None, Runner::Absent, Action::Register(&a), Signal::RegistrationFailed),
        (&a, Some("A"), Runner::Stopped, Action::StartRunner, Signal::RegistrationFailed),
        (
            &nobody,
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
        assert_eq!(step(&Facts { failures: ATTEMPTS - 1, ..base.clone() }, now()), action);
        let failing = Facts { failures: ATTEMPTS, retry_at: later, ..base.clone() };
        assert_eq!(step(&failing, now()), Action::Say(failed, "A"));
        let said = Facts { said: Some((failed, "A")), ..failing };
        assert_eq!(step(&said, now()), Action::Wait);
        assert_eq!(step(&said, later), action);
    }
}

#[test]
fn a_reclaimed_spot_instance_finishes_its_job_and_takes_no_other() {
    let record = seen(instance(State::Running, "A", "token"));
    let of = |serving, runner, said| step(&Facts { serving, runner, said, reclaimed: true, ..facts(&record) }, now());
    let registered = Some((Signal::Registered, "A"));
    assert_eq!(of(Some("A"), Runner::Busy, registered), Action::Wait);
    assert_eq!(of(Some("A"), Runner::Idle, registered), Action::StopRunner);
    assert_eq!(of(Some("A"), Runner::Stopped, registered), Action::Wait);
    assert_eq!(of(None, Runner::Absent, None), Action::Say(Signal::RegistrationFailed, "A"));
    assert_eq!(of(None, Runner::Absent, Some((Signal::RegistrationFailed, "A"))), Action::Wait);
}

#[test]
fn an_instance_ends_itself_when_its_time_is_over_whatever_it_does() {
    let expiring = |passed: SignedDuration, read_at: Timestamp| {
        let mut instance = instance(State::Running, "A", "");
        instance.threshold = Some(now() - passed);
        Record::Seen { instance: Box::new(instance), read_at }
    };
    let (hour, long_ago) = (SignedDuration::from_hours(1), now() - SignedDuration::from_hours(2));
    let table = [
        (seen(instance(State::Terminated, "", "")), now(), Some(End::Terminated)),
        (Record::Gone, now(), Some(End::RecordGone)),
        (Record::Never, now() - MINUTE * 11, None),
        (Record::Never, now() - MINUTE * 11 - SECOND, Some(End::Unclaimed)),
        (expiring(MINUTE, now()), long_ago, None),
        (expiring(MINUTE + SECOND, now()), long_ago, Some(End::Expired)),
        // Read before it passed, and not readable since: a later threshold may be there to be read.
        (expiring(hour, now() - hour), long_ago, None),
        (expiring(hour + SECOND, now() - hour), long_ago, Some(End::Blind)),
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
            assert!(matches!(step(&facts, now()), Action::Wait | Action::Say(Signal::Registered, "A")));
        }
    }
}
