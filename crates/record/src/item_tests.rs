use super::*;
use crate::{KeyPair, key::tests::arns};

/// A record with a value in every attribute.
pub(crate) fn instance(state: State) -> Instance {
    Instance {
        instance_id: "i-123456".into(),
        state,
        run_id: "7890".into(),
        threshold: (state != State::Terminated).then(|| "2025-05-31T12:00:00Z".parse().unwrap()),
        updated_at: "2025-05-31T11:50:00Z".parse().unwrap(),
        pool: "ci/linux".into(),
        claim: "build-7890".into(),
        claim_uid: "7d2e".into(),
        resource_class: "medium".into(),
        instance_type: "c6i.large".into(),
        usage_class: "spot".into(),
        zone: "us-east-1a".into(),
        cpu: 2,
        mem: 4096,
        github_url: "https://github.com/acme".into(),
        runner_group: "EC2".into(),
        template: "0a1b2c".into(),
        image: "ami-12345678".into(),
        sealed: "c2VhbGVk".into(),
        public_key: Some(KeyPair::from_bytes([1; 32]).public()),
        leaving: "7889".into(),
        initial_run_id: "7000".into(),
        claims: 3,
        scope: "repository:acme/rocket".into(),
        failure_reason: "heartbeat_stale".into(),
        failure_message: "silent".into(),
        failure_log: "agent: beat".into(),
    }
}

#[test]
fn records_survive_a_round_trip() {
    for state in State::ALL {
        assert_eq!(Instance::from_item(&instance(*state).to_item()), instance(*state));
    }
    let time = "2025-05-31T12:00:00Z".parse().unwrap();
    let beat = Heartbeat::new("i-1", Some(KeyPair::generate().public()), time);
    assert_eq!(Heartbeat::from_item(&as_read(beat.to_item(&arns()))), Ok(beat.clone()));
    let warned = Heartbeat { reclaimed: true, signalled_at: Some(time), warning: "no firewall".into(), ..beat };
    assert_eq!(Heartbeat::from_item(&as_read(warned.to_item(&arns()))), Ok(warned));
    let signal = WorkerSignal::new("i-1", Signal::Registered, "9", 2, time);
    assert_eq!(WorkerSignal::from_item(&as_read(signal.to_item(&arns()))), Ok(signal.clone()));
    let earlier = WorkerSignal { claims: None, ..signal.clone() };
    assert_eq!(WorkerSignal::from_item(&as_read(earlier.to_item(&arns()))), Ok(earlier));
    let (detail, log) = ("exit status: 1".into(), "rm: busy".into());
    let failure = WorkerSignal { reason: SCRUB.into(), detail, log, ..signal };
    assert_eq!(WorkerSignal::from_item(&as_read(failure.to_item(&arns()))), Ok(failure));
}

/// What the operator reads of an agent's item.
fn as_read(mut item: Item) -> Item {
    item.retain(|name, _| REPORT_ATTRIBUTES.contains(&name.as_str()));
    item
}

#[test]
fn what_a_machine_wrote_is_cut_and_found_to_be_too_long() {
    let honest =
        WorkerSignal { detail: "\u{1F4BE}".repeat(1000), log: log_tail(&"x".repeat(9000)).into(), ..failure() };
    assert!(!is_oversized(&honest.to_item(&arns())));
    assert_eq!(WorkerSignal::from_item(&honest.to_item(&arns())), Ok(honest));
    let flood = WorkerSignal { detail: format!("no disk {}", "\u{1F4BE}".repeat(90_000)), ..failure() };
    let item = flood.to_item(&arns());
    assert!(is_oversized(&item));
    let read = WorkerSignal::from_item(&item).unwrap();
    assert!(read.detail.starts_with("no disk") && read.detail.len() <= REPORT_TEXT_MAX);

    let mut beat = report_key(entity::HEARTBEAT, &arns(), "i-1");
    let list = AttributeValue::L(vec![AttributeValue::S("x".repeat(1000)); 9]);
    beat.insert(a::UPDATED_AT.into(), AttributeValue::M(HashMap::from([("deep".to_owned(), list)])));
    assert!(is_oversized(&beat));
    beat.insert(a::UPDATED_AT.into(), AttributeValue::S("x".repeat(300_000)));
    assert!(Heartbeat::from_item(&beat).unwrap_err().to_string().len() < 200);
}

#[test]
fn of_a_long_log_the_last_whole_lines_are_kept() {
    assert_eq!(log_tail("one\ntwo\n"), "one\ntwo");
    let lines = |count: usize| (0..count).map(|n| format!("line {n:04}\n")).collect::<String>();
    let tail = log_tail(&lines(1000)).to_owned();
    assert!(tail.starts_with("line 0") && tail.ends_with("line 0999") && tail.len() <= LOG_MAX, "{tail}");
    assert_eq!(log_tail(&"ü".repeat(LOG_MAX)).len(), LOG_MAX);
}

fn failure() -> WorkerSignal {
    WorkerSignal::new("i-1", Signal::ScriptFailed, "9", 1, Timestamp::UNIX_EPOCH)
}

#[test]
fn a_record_of_another_version_is_read() {
    let mut item = instance(State::Idle).to_item();
    item.retain(|name, _| [a::PK, a::SK, a::STATE, a::THRESHOLD].contains(&name.as_str()));
    let read = Instance::from_item(&item);
    assert_eq!((read.instance_id.as_str(), read.state, read.run_id.as_str()), ("i-123456", State::Idle, ""));
    item.insert(a::THRESHOLD.into(), AttributeValue::S("never".into()));
    item.insert(a::STATE.into(), AttributeValue::S("hibernated".into()));
    let read = Instance::from_item(&item);
    assert_eq!((read.state, read.threshold), (State::Unknown, None));
    item.retain(|name, _| [a::PK, a::SK].contains(&name.as_str()));
    assert_eq!(Instance::from_item(&item).state, State::Unknown);
}

#[test]
fn an_instance_serves_the_claim_of_its_uid_and_without_one_that_of_its_run() {
    let serves = |claim_uid: &str, name, uid, run| {
        let record = Instance { claim_uid: claim_uid.into(), ..instance(State::Running) };
        record.serves(ClaimRef { name, uid, run })
    };
    assert!(serves("7d2e", "build-7890", "7d2e", "7890"));
    assert!(!serves("7d2e", "build-7890", "made-again", "7890"), "a later claim of the same name and run");
    assert!(!serves("7d2e", "another", "7d2e", "7890"));
    assert!(serves("", "build-7890", "7d2e", "7890") && !serves("", "build-7890", "7d2e", "7891"));
}

#[test]
fn an_invalid_attribute_is_named_in_the_error() {
    let mut item = report_key(entity::HEARTBEAT, &arns(), "i-123456");
    assert_eq!(Heartbeat::from_item(&item).unwrap_err().to_string(), "attribute updatedAt of i-123456 is missing");
    item.insert(a::UPDATED_AT.into(), AttributeValue::S("never".into()));
    let error = Heartbeat::from_item(&item).unwrap_err();
    assert_eq!((error.id.as_str(), error.attribute), ("i-123456", "updatedAt"));
}
