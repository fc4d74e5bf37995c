use paddock_core::{
    ec2::machine::AgentReport,
    fixtures::ec2::{at, beat, record, said, tracked},
};
use paddock_record::{Heartbeat, KeyPair, Signal};

use super::*;

fn held(id: &str, claim: &str, state: State) -> Machine {
    let mut machine = tracked(record(id, state, "7", at(0)));
    (machine.record.claim, machine.record.claim_uid) = (claim.into(), format!("uid-of-{claim}"));
    machine
}

const A: ClaimRef = ClaimRef { name: "a", uid: "uid-of-a", run: "7" };
const B: ClaimRef = ClaimRef { name: "b", uid: "uid-of-b", run: "7" };

fn ids<'a>(found: impl Iterator<Item = &'a Machine>) -> Vec<&'a str> {
    found.map(|machine| machine.record.instance_id.as_str()).collect()
}

#[test]
fn an_instance_is_indexed_by_its_current_claim_only() {
    let (mut index, now) = (LedgerIndex::default(), Instant::now());
    for (id, claim) in [("i-2", "a"), ("i-1", "a"), ("i-3", "b"), ("i-2", "b"), ("i-3", "")] {
        index.put(held(id, claim, State::Running), now);
    }
    assert_eq!(ids(index.of_claim("ci/linux", A)), ["i-1"]);
    assert_eq!(ids(index.of_claim("ci/linux", B)), ["i-2"]);
    let again = ClaimRef { uid: "made-again", ..B };
    assert!(ids(index.of_claim("ci/linux", again)).is_empty(), "another claim of the same name and run");
    assert_eq!(ids(index.of_pool("ci/linux")), ["i-1", "i-2", "i-3"]);
    assert!(index.remove("i-1").is_some() && index.remove("i-1").is_none());
    assert!(ids(index.of_claim("ci/linux", A)).is_empty());
    assert_eq!(ids(index.of_pool("ci/linux")), ["i-2", "i-3"]);
}

#[test]
fn only_awaited_agents_are_polled_and_less_often_over_time() {
    let (mut index, start) = (LedgerIndex::default(), Instant::now());
    index.put(held("i-1", "a", State::Running), start);
    assert!(index.next_poll().is_none() && !index.awaits_warm_agents(), "a settled system reads nothing");
    index.put(held("i-3", "a", State::Created), start);
    assert!(!index.awaits_warm_agents(), "a machine that boots takes long");
    index.remove("i-3");
    index.put(held("i-2", "a", State::Claimed), start);
    assert!(index.awaits_warm_agents());
    assert!(index.due(start).is_empty());
    let mut polls = Vec::new();
    while polls.last().is_none_or(|last: &Instant| last.duration_since(start) < Duration::from_secs(5)) {
        let at = index.next_poll().unwrap();
        let due = index.due(at);
        assert_eq!(due, [ReportQuery { id: "i-2".into(), heartbeat: true }]);
        index.update(&due, Reports::new(), at);
        polls.push(at);
    }
    let pauses: Vec<_> = polls.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.is_sorted() && pauses[0] <= Duration::from_millis(60), "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= Duration::from_millis(200)), "seen within 250 ms: {pauses:?}");
    index.put(held("i-2", "a", State::Running), start);
    assert!(index.next_poll().is_none() && !index.awaits_warm_agents());
}

#[test]
fn a_signal_and_a_first_key_are_changes_and_a_heartbeat_is_not() {
    let (mut index, now) = (LedgerIndex::default(), Instant::now());
    index.put(held("i-1", "a", State::Claimed), now);
    let both = [ReportQuery { id: "i-1".into(), heartbeat: true }];
    let with = |heartbeat, signal| {
        let report = AgentReport { heartbeat, signal };
        Reports::from([("i-1".to_owned(), ReadReport { report, fault: None })])
    };
    let key = KeyPair::generate().public();
    let beat = |second| Some(Heartbeat { public_key: Some(key.clone()), ..beat(at(second)) });
    assert_eq!(index.update(&both, with(beat(1), None), now).len(), 1);
    assert_eq!(index.update(&both, with(beat(2), None), now).len(), 0);
    let signal = Some(said(Signal::Registered, "7"));
    let one = [ReportQuery { id: "i-1".into(), heartbeat: false }];
    assert_eq!(index.update(&one, with(None, signal.clone()), now).len(), 1);
    assert_eq!(index.update(&one, with(None, signal), now).len(), 0);
    assert!(index.get("i-1").unwrap().report.heartbeat.is_some(), "a heartbeat that was not queried is kept");
    let unread = index.get("i-1").unwrap().clone();
    assert_eq!(index.update(&both, Reports::new(), now).len(), 0);
    assert_eq!(index.get("i-1"), Some(&unread), "what was not read is no news");
}

#[test]
fn ec2s_notice_in_a_heartbeat_is_a_change() {
    let (mut index, now) = (LedgerIndex::default(), Instant::now());
    let mut machine = held("i-1", "a", State::Running);
    machine.record.usage_class = "spot".into();
    index.put(machine, now);
    let mut read = |second, reclaimed| {
        let beat = Heartbeat { reclaimed, ..beat(at(second)) };
        let report = AgentReport { heartbeat: Some(beat), signal: None };
        let reports = Reports::from([("i-1".to_owned(), ReadReport { report, fault: None })]);
        index.update_heartbeats(reports, at(second)).len()
    };
    assert_eq!([read(1, false), read(6, true), read(11, true)], [0, 1, 0]);
}

#[test]
fn a_machine_that_floods_the_table_is_heard_once_and_then_falls_silent() {
    let (mut index, now) = (LedgerIndex::default(), Instant::now());
    for (id, state) in [("i-1", State::Claimed), ("i-2", State::Claimed), ("i-3", State::Idle)] {
        index.put(held(id, "a", state), now);
    }
    let oversized = |id: &str| {
        let report = AgentReport { heartbeat: Some(beat(at(0))), signal: Some(said(Signal::Registered, "7")) };
        (id.to_owned(), ReadReport { report, fault: Some(ReportFault::Oversized) })
    };
    let query = [ReportQuery { id: "i-1".into(), heartbeat: true }];
    let changed = index.update(&query, Reports::from([oversized("i-1")]), now);
    assert_eq!(ids(changed.iter()), ["i-1"], "what it wrote first counts");
    let due: Vec<_> = index.due(now + Duration::from_secs(1)).into_iter().map(|query| query.id).collect();
    assert_eq!(due, ["i-2"]);
    index.put(held("i-1", "a", State::Claimed), now);
    assert_eq!(index.due(now + Duration::from_secs(1)).len(), 1, "another record does not give it its voice back");

    index.update_heartbeats(Reports::from([oversized("i-3")]), at(0));
    let limit = |_: &Machine| SignedDuration::from_secs(15);
    assert_eq!(index.next_heartbeats(limit, at(1)), ["i-2"]);
    for second in (2..=20).step_by(2) {
        index.update_heartbeats(Reports::new(), at(second));
    }
    assert!(index.get("i-3").unwrap().silent >= SILENCE_REPORTED);
    index.remove("i-3");
    index.put(held("i-3", "", State::Idle), now);
    assert_eq!(index.next_heartbeats(limit, at(21)).len(), 2);
}

#[test]
fn of_many_machines_those_read_the_longest_ago_are_read_next() {
    let (mut index, now) = (LedgerIndex::default(), Instant::now());
    (0..250).for_each(|number| index.put(held(&format!("i-{number:03}"), "", State::Idle), now));
    index.put(held("i-gone", "", State::Terminated), now);
    let (limit, mut read) = (|_: &Machine| SignedDuration::from_secs(15), HashMap::<String, u32>::new());
    for second in 1..=6 {
        let next = index.next_heartbeats(limit, at(second));
        assert_eq!(next.len(), HEARTBEATS_PER_READ);
        next.iter().for_each(|id| *read.entry(id.clone()).or_default() += 1);
        index.update_heartbeats(next.into_iter().map(|id| (id, ReadReport::default())).collect(), at(second));
    }
    assert!(read.len() == 250 && read.values().all(|count| *count >= 2), "{read:?}");
}

#[test]
fn a_signal_that_no_poll_awaits_is_read_once_when_a_heartbeat_tells_of_it() {
    let (mut index, start) = (LedgerIndex::default(), Instant::now());
    let mut machine = held("i-1", "a", State::Running);
    machine.report.heartbeat = Some(beat(at(0)));
    machine.report.signal = Some(said(Signal::Registered, "7"));
    index.put(machine, start);
    let ids = ["i-1".to_owned(), "i-2".to_owned()];
    let hear = |index: &mut LedgerIndex, second, signalled| {
        let heartbeat = Some(Heartbeat { signalled_at: Some(at(signalled)), ..beat(at(second)) });
        let report = ReadReport { report: AgentReport { heartbeat, signal: None }, fault: None };
        index.update_heartbeats(Reports::from([("i-1".to_owned(), report)]), at(second));
        index.unread_signals(&ids)
    };
    assert_eq!(hear(&mut index, 5, 0), [], "that is the one it knows");
    let unread = hear(&mut index, 10, 9);
    assert_eq!(unread, [ReportQuery { id: "i-1".into(), heartbeat: false }]);
    // It may be forged: there is no such signal.
    index.note_signals([&ids[0]].into_iter());
    assert_eq!(hear(&mut index, 15, 9), []);
    assert_eq!(hear(&mut index, 20, 19).len(), 1);
}
