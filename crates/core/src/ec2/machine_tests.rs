use paddock_record::KeyPair;

use super::*;
use crate::fixtures::ec2::{at, beat, pool, record, said, tracked};

const RUN: &str = "7890";

/// The most that a gap between two reads of one machine counts as silence.
fn gap_max() -> SignedDuration {
    HeartbeatReads::of(1).gap_max()
}

#[test]
fn an_instance_that_registered_for_this_run_and_beats_is_confirmed() {
    for state in [State::Created, State::Claimed] {
        let mut it = tracked(record("i-1", state, RUN, at(0)));
        it.report = AgentReport { heartbeat: Some(beat(at(3))), signal: Some(said(Signal::Registered, RUN)) };
        assert_eq!(check(&it, &pool().timeouts, at(5)), MachineCheck::Confirmed, "{state}");
    }
}

#[test]
fn i1_a_registration_for_another_run_counts_for_nothing() {
    let mut it = tracked(record("i-1", State::Claimed, RUN, at(0)));
    it.report = AgentReport { heartbeat: Some(beat(at(3))), signal: Some(said(Signal::Registered, "1111")) };
    it.record.sealed = "sealed".into();
    assert_eq!(check(&it, &pool().timeouts, at(50)), MachineCheck::Waiting);
    assert!(matches!(
        check(&it, &pool().timeouts, at(61)),
        MachineCheck::Failed(FailureReason::RegistrationTimeout, _)
    ));
}

#[test]
fn i1_a_registration_for_an_earlier_claim_of_the_run_counts_for_nothing() {
    let mut it = tracked(record("i-1", State::Claimed, RUN, at(0)));
    (it.record.sealed, it.record.claims) = ("sealed".into(), 2);
    for signal in [Signal::Registered, Signal::RegistrationFailed] {
        let signal = WorkerSignal { claims: Some(1), updated_at: at(9), ..said(signal, RUN) };
        it.report = AgentReport { heartbeat: Some(beat(at(3))), signal: Some(signal) };
        assert_eq!(check(&it, &pool().timeouts, at(5)), MachineCheck::Waiting);
    }
    // Without a number it is of an agent of an earlier version.
    for claims in [Some(2), None] {
        it.report.signal = Some(WorkerSignal { claims, updated_at: at(-9), ..said(Signal::Registered, RUN) });
        assert_eq!(check(&it, &pool().timeouts, at(5)), MachineCheck::Confirmed, "{claims:?}");
    }
}

#[test]
fn each_failed_check_has_its_reason() {
    use FailureReason::*;
    let silent = AgentReport::default();
    let with = |signal, run| AgentReport { heartbeat: Some(beat(at(0))), signal: Some(said(signal, run)) };
    for (state, report, seconds, reason) in [
        (State::Claimed, silent.clone(), 61, RegistrationTimeout),
        (State::Claimed, with(Signal::RegistrationFailed, RUN), 1, RegistrationFailed),
        (State::Created, silent.clone(), 181, ValidationTimeout),
        (State::Created, with(Signal::ScriptFailed, RUN), 1, PreRunnerFailed),
        (State::Created, with(Signal::RegistrationFailed, RUN), 1, RegistrationFailed),
        (State::Idle, silent.clone(), 1, InstanceGone),
        (State::Terminated, silent, 1, InstanceGone),
    ] {
        let it = Machine { report, ..tracked(record("i-1", state, RUN, at(0))) };
        match check(&it, &pool().timeouts, at(seconds)) {
            MachineCheck::Failed(found, message) => assert_eq!(found, reason, "{state} {message}"),
            other => panic!("{state} after {seconds} s: {other:?}, not {reason:?}"),
        }
    }
}

#[test]
fn a_machine_whose_heartbeat_stays_the_same_is_dead_whatever_its_clock_says() {
    let key = KeyPair::generate().public();
    for skew in [-290, 0, 290] {
        let beat = |second| Some(Heartbeat { public_key: Some(key.clone()), ..beat(at(second + skew)) });
        let report = AgentReport { heartbeat: beat(0), signal: None };
        let mut it = Machine::new(record("i-1", State::Claimed, RUN, at(0)), report, at(0));
        it.record.sealed = "sealed".into();
        let timeouts = Ec2Timeouts { registration: crate::api::Duration::from_secs(600), ..pool().timeouts };
        for second in [2, 4, 6] {
            it.read_heartbeat(beat(second), gap_max(), at(second));
            assert!(it.heartbeat_is_fresh(&timeouts));
        }
        for second in [8, 10, 12, 14, 16, 18, 20] {
            it.read_heartbeat(beat(6), gap_max(), at(second));
            assert_eq!(check(&it, &timeouts, at(second)), MachineCheck::Waiting, "{second} {skew}");
        }
        it.read_heartbeat(beat(6), gap_max(), at(22));
        assert!(matches!(check(&it, &timeouts, at(22)), MachineCheck::Failed(FailureReason::HeartbeatStale, _)));
        it.report.signal = Some(said(Signal::Registered, RUN));
        assert_eq!(check(&it, &timeouts, at(22)), MachineCheck::Waiting, "it registered: it may beat again");
        assert!(matches!(check(&it, &timeouts, at(601)), MachineCheck::Failed(FailureReason::HeartbeatStale, _)));
        it.read_heartbeat(beat(23), gap_max(), at(24));
        assert_eq!(check(&it, &timeouts, at(24)), MachineCheck::Confirmed);
    }
}

#[test]
fn the_skew_of_a_machine_is_that_of_a_heartbeat_that_was_just_written() {
    let mut it = Machine::new(record("i-1", State::Idle, "", at(0)), AgentReport::default(), at(0));
    let mut skew_after = |beat_at, read_at| {
        it.read_heartbeat(Some(beat(at(beat_at))), gap_max(), at(read_at));
        it.skew.map(|skew| skew.as_secs())
    };
    assert_eq!(skew_after(290, 2), None, "the first may have been there for long");
    assert_eq!(skew_after(290, 4), None);
    assert_eq!(skew_after(304, 6), Some(298));
    assert_eq!(skew_after(304, 8), Some(298), "no new one");
    assert_eq!(skew_after(324, 98), Some(298), "the table could not be read");
    assert_eq!(skew_after(-201, 100), Some(-301));
}

#[test]
fn time_without_reads_is_not_silence() {
    let mut it = Machine::new(record("i-1", State::Idle, "", at(0)), AgentReport::default(), at(0));
    it.read_heartbeat(Some(beat(at(0))), gap_max(), at(1));
    it.read_heartbeat(Some(beat(at(0))), gap_max(), at(500));
    assert!(it.heartbeat_is_fresh(&pool().timeouts), "the table could not be read: {}", it.silent);
    it.read_heartbeat(None, gap_max(), at(501));
    assert_eq!(it.report.heartbeat, Some(beat(at(0))), "a read may miss it");
    let mut booting = tracked(record("i-1", State::Created, "", at(0)));
    booting.read_heartbeat(None, gap_max(), at(3));
    assert_eq!(booting.silent, SignedDuration::ZERO, "an agent that has not spoken yet is not silent");
    let report = AgentReport { heartbeat: Some(beat(at(0))), signal: None };
    let found = |second| Machine::new(record("i-1", State::Idle, "", at(0)), report.clone(), at(second));
    assert!(found(360).heartbeat_is_fresh(&pool().timeouts), "clocks may differ by five minutes");
    assert!(!found(361).heartbeat_is_fresh(&pool().timeouts), "a new leader finds an old heartbeat");
}

#[test]
fn a_created_instance_gets_its_token_once_its_key_is_known() {
    let mut it = tracked(record("i-1", State::Created, RUN, at(0)));
    assert_eq!(check(&it, &pool().timeouts, at(1)), MachineCheck::Waiting);
    it.report.heartbeat = Some(Heartbeat { public_key: Some(KeyPair::generate().public()), ..beat(at(1)) });
    assert_eq!(check(&it, &pool().timeouts, at(1)), MachineCheck::NeedsToken);
    it.record.sealed = "sealed".into();
    assert_eq!(check(&it, &pool().timeouts, at(1)), MachineCheck::Waiting);
}

#[test]
fn an_idle_message_carries_what_claims_filter_by() {
    let it = tracked(record("i-1", State::Idle, "", at(0)));
    let message = it.idle_message();
    assert_eq!((message.instance_id.as_str(), message.cpu, message.mem), ("i-1", 2, 4096));
    assert_eq!(IdleMessage::read(&message.write(), at(1)), Ok(message));
}

#[test]
fn of_two_keys_only_the_first_one_is_the_machines() {
    let [ours, theirs] = [1, 2].map(|byte| KeyPair::from_bytes([byte; 32]).public());
    let beat = |second, key: Option<&PublicKey>| Some(Heartbeat { public_key: key.cloned(), ..beat(at(second)) });
    let mut it = tracked(record("i-1", State::Idle, "", at(0)));
    it.read_heartbeat(beat(0, Some(&ours)), gap_max(), at(0));
    it.read_heartbeat(beat(5, None), gap_max(), at(2));
    for second in (4..=20).step_by(2) {
        it.read_heartbeat(beat(second, Some(&theirs)), gap_max(), at(second));
    }
    assert_eq!(it.public_key(), Some(&ours));
    assert!(!it.heartbeat_is_fresh(&pool().timeouts), "the agent itself was silent");
    it.read_heartbeat(beat(21, Some(&ours)), gap_max(), at(22));
    assert!(it.heartbeat_is_fresh(&pool().timeouts));

    // A new leader has the key in the record.
    it.record.public_key = Some(ours.clone());
    let report = AgentReport { heartbeat: beat(30, Some(&theirs)), signal: None };
    let mut found = Machine::new(it.record, report, at(30));
    assert_eq!((found.public_key(), &found.report.heartbeat), (Some(&ours), &None));
    for second in (32..=46).step_by(2) {
        assert!(found.heartbeat_is_fresh(&pool().timeouts), "it may still speak");
        found.read_heartbeat(beat(second, Some(&theirs)), gap_max(), at(second));
    }
    assert!(!found.heartbeat_is_fresh(&pool().timeouts), "what is forged is no sign of life");
}

#[test]
fn reading_heartbeats_of_1100_machines_takes_less_than_three_calls_a_second() {
    let per_second = |machines: usize| HeartbeatReads::of(machines).pause([].into_iter()).as_secs_f64().recip();
    for (machines, calls) in [(0, 0.5), (1, 0.5), (100, 0.5), (101, 1.0), (400, 2.0), (1_100, 2.38), (100_000, 2.38)] {
        assert!((per_second(machines) - calls).abs() < 0.01, "{machines}: {}", per_second(machines));
    }
    assert_eq!(HeartbeatReads::of(1).period(), Duration::from_secs(2));
    assert_eq!(HeartbeatReads::of(1_100).period(), Duration::from_millis(4_620));
}

/// How long a call takes.
const CALL: SignedDuration = SignedDuration::from_millis(15);

/// Reads machines as the ledger does, and returns how long after its limit a machine that dies at a given time is found.
fn found_dead_after(machines: usize, limit: SignedDuration, dies_at: SignedDuration) -> SignedDuration {
    let (reads, start) = (HeartbeatReads::of(machines), at(0));
    let key = KeyPair::from_bytes([1; 32]).public();
    let mut all: Vec<_> = (0..machines).map(|_| tracked(record("i-1", State::Idle, "", start))).collect();
    // Every agent beats every 5 s, each at its own time. The last one dies right after a beat.
    let beat_of = |index: usize, now: Timestamp| {
        let phase = SignedDuration::from_millis(5_000 * index as i64 / machines as i64);
        let last = if index + 1 == machines { now.min(start + dies_at) } else { now };
        let beats = (last.duration_since(start + phase).as_millis()).div_euclid(5_000) as i64;
        let updated_at = start + phase + SignedDuration::from_secs(5 * beats);
        Some(Heartbeat { public_key: Some(key.clone()), ..beat(updated_at) })
    };
    let mut now = start;
    loop {
        let decisions = all.iter().map(|machine| HeartbeatReads::decision(machine, limit, now));
        now += SignedDuration::try_from(reads.pause(decisions)).unwrap() + CALL;
        let mut due: Vec<_> = (0..machines).collect();
        due.sort_by_key(|index| HeartbeatReads::order(&all[*index], limit, now));
        for index in due.into_iter().take(HEARTBEATS_PER_READ) {
            all[index].read_heartbeat(beat_of(index, now), reads.gap_max(), now);
        }
        if let Some(dead) = all.iter().position(|machine| machine.silent > limit) {
            assert_eq!(dead, machines - 1, "a machine that beats is not dead");
            let last = beat_of(dead, now).unwrap().updated_at;
            return now.duration_since(last) - limit;
        }
    }
}

#[test]
fn a_machine_that_dies_idle_is_found_at_most_five_seconds_after_its_limit() {
    for machines in [1, 100, 150, 500, 1_100] {
        for dies_at in (30_000..36_000).step_by(500).map(SignedDuration::from_millis) {
            let late = found_dead_after(machines, SignedDuration::from_secs(15), dies_at);
            assert!(late <= SignedDuration::from_secs(5), "{machines}: {late:?} late");
        }
    }
}

#[test]
fn a_spot_machine_that_ec2_takes_back_is_not_used_and_its_notice_is_never_taken_back() {
    let key = KeyPair::generate().public();
    let beat = |second, reclaimed| Some(Heartbeat { public_key: Some(key.clone()), reclaimed, ..beat(at(second)) });
    let spot = |state, run| {
        let mut it = tracked(record("i-1", state, run, at(0)));
        it.record.usage_class = "spot".into();
        it
    };
    let mut it = spot(State::Idle, "");
    it.read_heartbeat(beat(1, false), gap_max(), at(1));
    assert!(it.is_claimable(at(1)) && !it.is_reclaimed());
    it.read_heartbeat(beat(2, true), gap_max(), at(2));
    it.read_heartbeat(beat(3, false), gap_max(), at(3));
    assert!(it.is_reclaimed() && !it.is_claimable(at(3)), "a restarted agent has not read the notice yet");
    it.record.usage_class = "on-demand".into();
    assert!(!it.is_reclaimed(), "only spot machines are taken back");

    for (state, failed) in [(State::Created, true), (State::Claimed, true), (State::Running, false)] {
        let mut it = spot(state, RUN);
        it.report = AgentReport { heartbeat: beat(3, true), signal: Some(said(Signal::Registered, RUN)) };
        let checked = check(&it, &pool().timeouts, at(4));
        assert_eq!(matches!(checked, MachineCheck::Failed(FailureReason::SpotReclaimed, _)), failed, "{state}");
    }
}
