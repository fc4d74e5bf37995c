use paddock_record::Heartbeat;
use proptest::prelude::*;

use super::*;
use crate::{
    api::UsageClass,
    fixtures::ec2::{at, beat, record, tracked},
};

pub(in crate::ec2) const NOW: Timestamp = Timestamp::UNIX_EPOCH;

pub(in crate::ec2) fn idle_message(id: &str, class: &str, kind: &str) -> IdleMessage {
    IdleMessage {
        instance_id: id.into(),
        usage_class: "on-demand".into(),
        instance_type: kind.into(),
        cpu: 2,
        mem: 4096,
        resource_class: class.into(),
        scope: String::new(),
        threshold: "2030-01-01T00:00:00Z".into(),
    }
}

pub(in crate::ec2) fn needs(types: &str) -> Requirements {
    Requirements {
        usage_class: UsageClass::OnDemand,
        resource_class: "medium".into(),
        cpu: 2,
        memory_mib: 4096,
        allowed_instance_types: vec![types.into()],
        scope: String::new(),
    }
}

#[test]
fn a_batch_is_matched_against_all_requests_before_anything_is_put_back() {
    let bodies = [
        idle_message("i-1", "medium", "m6i.large").write(),
        "garbage".into(),
        idle_message("i-2", "medium", "c6i.large").write(),
        idle_message("i-3", "medium", "c6i.large").write(),
    ];
    let mut open = [(needs("c*"), 1), (needs("m*"), 1)];
    let picks = pick(&bodies, &mut open, |_| Availability::Free, NOW);
    assert!(matches!(&picks[0], Pickup::Take(1, message) if message.instance_id == "i-1"));
    assert!(matches!(&picks[1], Pickup::Discard(Discard::Malformed(_))));
    assert!(matches!(&picks[2], Pickup::Take(0, message) if message.instance_id == "i-2"));
    assert!(matches!(&picks[3], Pickup::PutBack(message) if message.instance_id == "i-3"));
    assert_eq!(open.map(|(_, left)| left), [0, 0]);
}

#[test]
fn machines_of_the_own_scope_are_taken_before_new_ones_and_none_of_another() {
    let of = |id: &str, scope: &str| IdleMessage { scope: scope.into(), ..idle_message(id, "medium", "c6i.large") };
    let bodies = [of("i-new", ""), of("i-b", "b"), of("i-a", "a")].map(|message| message.write());
    let mut open = [(Requirements { scope: "a".into(), ..needs("*") }, 1), (needs("*"), 0)];
    let picks = pick(&bodies, &mut open, |_| Availability::Free, NOW);
    assert!(matches!(&picks[..], [Pickup::PutBack(_), Pickup::PutBack(_), Pickup::Take(0, _)]), "{picks:?}");
    let mut open = [(Requirements { scope: "a".into(), ..needs("*") }, 3)];
    let picks = pick(&bodies, &mut open, |_| Availability::Free, NOW);
    assert!(matches!(&picks[..], [Pickup::Take(0, _), Pickup::PutBack(_), Pickup::Take(0, _)]), "{picks:?}");
    let picks = pick(&bodies, &mut [(needs("*"), 3)], |_| Availability::Free, NOW);
    assert!(picks.iter().all(|pick| matches!(pick, Pickup::Take(0, _))), "any will do: {picks:?}");
}

#[test]
fn a_message_is_outdated_once_its_machine_has_served_a_claim() {
    let mut machine = tracked(record("i-1", State::Idle, "", at(0)));
    let key = paddock_record::KeyPair::generate().public();
    machine.report.heartbeat = Some(Heartbeat { public_key: Some(key), ..beat(at(0)) });
    let sent = machine.idle_message();
    assert_eq!(Availability::of(Some(&machine), &sent, at(1)), Availability::Free);
    (machine.record.claims, machine.record.scope) = (1, "repository:acme/a".into());
    assert_eq!(Availability::of(Some(&machine), &sent, at(1)), Availability::Outdated);
    assert_eq!(Availability::of(Some(&machine), &machine.idle_message(), at(1)), Availability::Free);
    machine.record.usage_class = "spot".into();
    machine.report.heartbeat.as_mut().unwrap().reclaimed = true;
    assert_eq!(
        Availability::of(Some(&machine), &machine.idle_message(), at(1)),
        Availability::Taken,
        "EC2 takes it back"
    );
}

#[test]
fn a_pool_is_exhausted_by_empty_polls_in_a_row_or_one_id_seen_too_often() {
    let mut global = Exhaustion::default();
    for received in [0, 0, 1, 0, 0] {
        global.note(received, []);
        assert!(!global.is_exhausted());
    }
    global.note(0, []);
    assert!(global.is_exhausted());

    let mut local = Exhaustion::default();
    for _ in 1..SEEN_LIMIT {
        local.note(1, ["i-1"]);
    }
    assert!(!local.is_exhausted());
    local.note(1, ["i-1"]);
    assert!(local.is_exhausted());
}

#[test]
fn a_message_of_an_unavailable_machine_is_discarded_and_one_that_is_busy_put_back() {
    let bodies = ["i-free", "i-busy", "i-taken", "i-foreign"].map(|id| idle_message(id, "medium", "c6i.large").write());
    let known = |message: &IdleMessage| match message.instance_id.as_str() {
        "i-free" => Availability::Free,
        "i-busy" => Availability::Busy,
        "i-taken" => Availability::Taken,
        _ => Availability::Foreign,
    };
    let picks = pick(&bodies, &mut [(needs("*"), 9)], known, NOW);
    assert!(matches!(&picks[0], Pickup::Take(0, _)));
    assert!(matches!(&picks[1], Pickup::PutBack(_)));
    assert_eq!(picks[2..], [Pickup::Discard(Discard::Taken), Pickup::Discard(Discard::Foreign)]);
}

/// Messages that differ in all that a claim may ask for, some of them expired, some of unavailable machines.
fn messages() -> impl Strategy<Value = Vec<(IdleMessage, Availability)>> {
    let known = prop_oneof![6 => Just(Availability::Free), 1 => Just(Availability::Busy), 1 => Just(Availability::Taken), 1 => Just(Availability::Foreign), 1 => Just(Availability::Outdated)];
    let parts = (any::<bool>(), 0..3usize, 1..4u32, 0..2usize, 0..3usize, prop::bool::weighted(0.9), known);
    let build = |(spot, kind, cpu, class, scope, alive, known): (_, usize, _, usize, usize, bool, Availability)| {
        let message = IdleMessage {
            usage_class: if spot { "spot" } else { "on-demand" }.into(),
            cpu,
            scope: ["", "a", "b"][scope].into(),
            threshold: if alive { "2030-01-01T00:00:00Z" } else { "1969-12-31T00:00:00Z" }.into(),
            ..idle_message("", ["medium", "large"][class], ["c6i.large", "c6g.large", "m6i.large"][kind])
        };
        (message, known)
    };
    let numbered = |messages: Vec<(IdleMessage, Availability)>| {
        let number = |(index, (message, known))| (IdleMessage { instance_id: format!("i-{index}"), ..message }, known);
        messages.into_iter().enumerate().map(number).collect()
    };
    prop::collection::vec(parts.prop_map(build), 0..30).prop_map(numbered)
}

fn requests() -> impl Strategy<Value = Vec<(Requirements, u32)>> {
    let parts = (any::<bool>(), 0..4usize, 1..4u32, 0..3usize, 0..5u32);
    let request = |(spot, types, cpu, scope, count): (bool, usize, u32, usize, u32)| {
        let usage_class = if spot { UsageClass::Spot } else { UsageClass::OnDemand };
        let scope = ["", "a", "b"][scope].into();
        (Requirements { usage_class, cpu, scope, ..needs(["*", "c*", "m*", "*g.*"][types]) }, count)
    };
    prop::collection::vec(parts.prop_map(request), 0..6)
}

proptest! {
    #[test]
    fn any_body_is_taken_put_back_or_discarded_without_a_panic(bodies in proptest::collection::vec(".*", 0..8)) {
        prop_assert_eq!(pick(&bodies, &mut [(needs("*"), 3)], |_| Availability::Free, NOW).len(), bodies.len());
    }

    /// Each message has one decision. Those taken fit, in order of arrival after those with a scope, and no request gets more than it asked for.
    /// Those put back fit no open request. Only expired, taken and foreign ones are discarded.
    #[test]
    fn no_message_is_lost_and_first_come_is_first_served(messages in messages(), requests in requests()) {
        let bodies: Vec<_> = messages.iter().map(|(message, _)| message.write()).collect();
        let known = |message: &IdleMessage| {
            messages.iter().find(|(other, _)| other == message).map_or(Availability::Foreign, |(_, known)| *known)
        };
        let mut open = requests.clone();
        let picks = pick(&bodies, &mut open, known, NOW);
        prop_assert_eq!(picks.len(), messages.len());
        let mut left: Vec<_> = requests.iter().map(|(_, count)| *count).collect();
        let (new, used): (Vec<_>, Vec<_>) = messages.iter().zip(&picks).partition(|((it, _), _)| it.scope.is_empty());
        for ((message, known), pickup) in used.into_iter().chain(new) {
            let alive = message.threshold.starts_with("2030");
            let first = (0..requests.len()).find(|index| left[*index] > 0 && requests[*index].0.met_by(message));
            match pickup {
                Pickup::Take(index, taken) => {
                    prop_assert!(alive && *known == Availability::Free && taken == message);
                    prop_assert_eq!(Some(*index), first);
                    left[*index] -= 1;
                }
                Pickup::PutBack(back) => {
                    prop_assert!(alive && back == message);
                    prop_assert!(*known == Availability::Busy || (*known == Availability::Free && first.is_none()));
                }
                Pickup::Discard(Discard::Expired) => prop_assert!(!alive),
                Pickup::Discard(Discard::Taken) => prop_assert!(alive && *known == Availability::Taken),
                Pickup::Discard(Discard::Foreign) => prop_assert!(alive && *known == Availability::Foreign),
                Pickup::Discard(Discard::Outdated) => prop_assert!(alive && *known == Availability::Outdated),
                Pickup::Discard(Discard::Malformed(why)) => prop_assert!(false, "{}", why),
            }
        }
        prop_assert_eq!(open.into_iter().map(|(_, left)| left).collect::<Vec<_>>(), left);
    }
}
