use std::collections::BTreeSet;

use super::*;
use crate::{KeyPair, item::tests::instance};

pub(crate) const CLAIM: ClaimRef = ClaimRef { name: "build-8000", uid: "8f1c", run: "8000" };

/// The time of the tests: after the last update of [`instance`] and before its threshold.
pub(crate) fn now() -> Timestamp {
    "2025-05-31T11:55:00Z".parse().unwrap()
}

/// The key of another agent than [`instance`]'s.
fn key() -> PublicKey {
    KeyPair::from_bytes([2; 32]).public()
}

fn threshold() -> Timestamp {
    "2025-05-31T13:00:00Z".parse().unwrap()
}

pub(crate) fn identity() -> Identity {
    let seen = instance(State::Idle);
    Identity {
        instance_id: seen.instance_id,
        pool: seen.pool,
        resource_class: seen.resource_class,
        instance_type: seen.instance_type,
        usage_class: seen.usage_class,
        zone: seen.zone,
        cpu: seen.cpu,
        mem: seen.mem,
        github_url: seen.github_url,
        runner_group: seen.runner_group,
        template: seen.template,
        image: seen.image,
    }
}

type Function = fn(&Instance) -> Option<Transition>;

/// Every function that starts from a record, with a known key.
pub(crate) const FUNCTIONS: [(&str, Function); 10] = [
    ("seal", |seen| seal(seen, Some(&key()), Some("new".into()))),
    ("claim", |seen| claim(seen, CLAIM, "owner:acme", "Fast", Some("new".into()), threshold(), now())),
    ("start", |seen| start(seen, threshold(), now())),
    ("release", |seen| release(seen, Some("new".into()), threshold(), now())),
    ("warm_up", |seen| warm_up(seen, Some(&key()), threshold(), now())),
    ("make_idle", |seen| make_idle(seen, threshold(), now())),
    ("renew", |seen| renew(seen, threshold(), now())),
    ("pool", pool),
    ("terminate", |seen| terminate(seen, "threshold_passed", "it expired", "the end", now())),
    ("runner_gone", runner_gone),
];

/// A record in every state, with and without `run_id` and `leaving`, and one of another claim of the same name and run.
pub(crate) fn records() -> Vec<Instance> {
    let mut records = Vec::new();
    for state in State::ALL {
        for (run_id, leaving) in [("", ""), ("7890", ""), ("", "7889"), ("7890", "7889")] {
            records.push(Instance { run_id: run_id.into(), leaving: leaving.into(), ..instance(*state) });
        }
        let another = Instance { claim_uid: "made-again".into(), leaving: String::new(), ..instance(*state) };
        let never_claimed = Instance { claims: 0, leaving: String::new(), ..instance(*state) };
        records.splice(0..0, [another, never_claimed]);
    }
    records
}

/// The table has the states that a function starts from, the state it leads to, and its guards: `R` and `r` require a
/// `run_id` that is set or empty, `L` and `l` the same for `leaving`.
#[test]
fn each_function_starts_where_the_table_says_and_nowhere_else() {
    use State::*;
    let table: [(&str, &[State], Option<State>, &str); 10] = [
        ("seal", &[Created, Claimed], None, ""),
        ("claim", &[Idle], Some(Claimed), "l"),
        ("start", &[Created, Claimed], Some(Running), "R"),
        ("release", &[Running, Claimed], Some(Idle), "R"),
        ("warm_up", &[Created], Some(Running), "r"),
        ("make_idle", &[Running], Some(Idle), "r"),
        ("renew", &[Idle], None, "l"),
        ("pool", &[Idle], None, "L"),
        ("terminate", &[Created, Running, Idle, Claimed, Unknown], Some(Terminated), ""),
        ("runner_gone", &[Terminated], None, "L"),
    ];
    for ((name, function), (row, from, to, guards)) in FUNCTIONS.into_iter().zip(table) {
        assert_eq!(name, row);
        for seen in records() {
            let (run, leaving) = (!seen.run_id.is_empty(), !seen.leaving.is_empty());
            let guarded = guards.chars().all(|guard| match guard {
                'R' => run,
                'r' => !run,
                'L' => leaving,
                'l' => !leaving,
                other => panic!("unknown guard {other}"),
            });
            let made = function(&seen);
            assert_eq!(made.is_some(), from.contains(&seen.state) && guarded, "{name} {seen:?}");
            let Some(made) = made else { continue };
            assert_eq!((made.seen(), made.next().state), (Some(&seen), to.unwrap_or(seen.state)), "{name}");
            assert!(to.is_none_or(|to| seen.state.may_become(to)), "{name} {seen:?}");
        }
    }
}

#[test]
fn each_function_sets_what_the_table_says_and_keeps_the_rest() {
    use crate::attribute::*;
    let table: [(&str, State, &[&str]); 10] = [
        ("seal", State::Created, &[SEALED]),
        (
            "claim",
            State::Idle,
            &[STATE, CLAIM, CLAIM_UID, RUN_ID, RUNNER_GROUP, SEALED, CLAIMS, SCOPE, THRESHOLD, UPDATED_AT],
        ),
        ("start", State::Claimed, &[STATE, SEALED, THRESHOLD, UPDATED_AT]),
        ("release", State::Running, &[STATE, CLAIM, CLAIM_UID, RUN_ID, LEAVING, SEALED, THRESHOLD, UPDATED_AT]),
        ("warm_up", State::Created, &[STATE, THRESHOLD, UPDATED_AT]),
        ("make_idle", State::Running, &[STATE, THRESHOLD, UPDATED_AT]),
        ("renew", State::Idle, &[THRESHOLD, UPDATED_AT]),
        ("pool", State::Idle, &[LEAVING, SEALED]),
        (
            "terminate",
            State::Running,
            &[STATE, RUN_ID, LEAVING, SEALED, FAILURE_REASON, FAILURE_MESSAGE, FAILURE_LOG, THRESHOLD, UPDATED_AT],
        ),
        ("runner_gone", State::Terminated, &[LEAVING]),
    ];
    for ((name, function), (row, from, sets)) in FUNCTIONS.into_iter().zip(table) {
        assert_eq!(name, row);
        // The last records have a run and `leaving` set, unless the guard forbids it.
        let made = records().into_iter().rev().filter(|seen| seen.state == from).find_map(|seen| function(&seen));
        let made = made.unwrap_or_else(|| panic!("{name} starts from {from}"));
        let (before, after) = (made.seen().unwrap().to_item(), made.next().to_item());
        let set: BTreeSet<_> = after.keys().filter(|name| before[*name] != after[*name]).map(String::as_str).collect();
        assert_eq!(set, sets.iter().copied().collect(), "{name}");
    }
}

#[test]
fn a_launch_is_for_a_claim_or_warm() {
    let launched = |claim, scope| launch(None, identity(), claim, scope, threshold(), now()).unwrap();
    let for_claim = launched(Some(CLAIM), "owner:acme");
    let expected = Instance {
        run_id: "8000".into(),
        initial_run_id: "8000".into(),
        claim: "build-8000".into(),
        claim_uid: "8f1c".into(),
        claims: 1,
        scope: "owner:acme".into(),
        threshold: Some(threshold()),
        updated_at: now(),
        sealed: String::new(),
        public_key: None,
        leaving: String::new(),
        failure_reason: String::new(),
        failure_message: String::new(),
        failure_log: String::new(),
        ..instance(State::Created)
    };
    assert_eq!((for_claim.seen(), for_claim.next()), (None, &expected));
    let none = String::new;
    let warm = Instance {
        run_id: none(),
        initial_run_id: none(),
        claim: none(),
        claim_uid: none(),
        claims: 0,
        scope: none(),
        ..expected
    };
    assert_eq!(launched(None, "").next(), &warm);
    assert_eq!(launch(Some(&warm), identity(), None, "", threshold(), now()), None, "it already has a record");
}

#[test]
fn without_a_key_no_change_carries_a_token_and_no_machine_is_pooled() {
    for seen in records() {
        let made = [
            seal(&seen, None, Some("new".into())),
            seal(&seen, Some(&key()), None),
            warm_up(&seen, None, threshold(), now()),
            claim(&seen, CLAIM, "", "", None, threshold(), now()),
            release(&seen, None, threshold(), now()),
        ];
        assert_eq!(made, [None, None, None, None, None], "{seen:?}");
    }
}

#[test]
fn the_first_key_of_an_agent_is_kept() {
    let new = Instance { public_key: None, run_id: String::new(), ..instance(State::Created) };
    let (first, second) = (key(), KeyPair::from_bytes([3; 32]).public());
    let sealed = seal(&new, Some(&first), Some("new".into())).unwrap();
    assert_eq!(sealed.next().public_key, Some(first.clone()));
    let again = seal(sealed.next(), Some(&second), Some("new".into())).unwrap();
    assert_eq!(again.next().public_key, Some(first.clone()));
    let warm = warm_up(&new, Some(&first), threshold(), now()).unwrap();
    assert_eq!(make_idle(warm.next(), threshold(), now()).unwrap().next().public_key, Some(first));
}

#[test]
fn a_claim_and_its_release_set_what_agents_act_on() {
    let free = Instance { run_id: String::new(), leaving: String::new(), ..instance(State::Idle) };
    let claimed = claim(&free, CLAIM, "owner:acme", "Fast", Some("new".into()), threshold(), now()).unwrap();
    let next = claimed.next();
    assert_eq!((next.claim.as_str(), next.run_id.as_str(), next.sealed.as_str()), ("build-8000", "8000", "new"));
    assert_eq!((next.runner_group.as_str(), next.image.as_str()), ("Fast", "ami-12345678"), "a group for each claim");
    assert_eq!((next.claims, next.threshold, next.updated_at), (4, Some(threshold()), now()));
    let running = start(next, threshold(), now()).unwrap();
    assert_eq!(running.next().sealed, "");
    let released = release(running.next(), Some("other".into()), threshold(), now()).unwrap();
    let next = released.next();
    assert_eq!((next.claim.as_str(), next.run_id.as_str(), next.leaving.as_str()), ("", "", "8000"));
    assert_eq!((next.sealed.as_str(), next.claims, next.scope.as_str()), ("other", 4, "owner:acme"));
    let pooled = pool(next).unwrap();
    assert_eq!(pooled.next(), &Instance { leaving: String::new(), sealed: String::new(), ..next.clone() });
}

#[test]
fn a_terminated_record_keeps_its_last_run_until_the_runner_is_gone() {
    let end = |run_id: &str, leaving: &str| {
        let seen = Instance { run_id: run_id.into(), leaving: leaving.into(), ..instance(State::Idle) };
        terminate(&seen, "threshold_passed", "it expired", "the end", now()).unwrap().next().clone()
    };
    for (run_id, leaving, last) in [("", "", ""), ("7890", "", "7890"), ("", "7889", "7889"), ("7890", "7889", "7890")]
    {
        assert_eq!(end(run_id, leaving).leaving, last, "{run_id:?} {leaving:?}");
    }
    let ended = end("7890", "");
    assert_eq!((ended.threshold, ended.run_id.as_str(), ended.sealed.as_str()), (None, "", ""));
    assert_eq!((ended.failure_reason.as_str(), ended.failure_message.as_str()), ("threshold_passed", "it expired"));
    assert_eq!(ended.claim, "build-7890", "the claim reports the failure");
    assert_eq!(runner_gone(&ended).unwrap().next(), &Instance { leaving: String::new(), ..ended });
}

#[test]
fn i1_a_change_is_stored_only_over_what_it_was_made_from() {
    for (name, function) in FUNCTIONS {
        for made in records().iter().filter_map(function) {
            let seen = made.seen().unwrap();
            assert!(made.holds(Some(seen), now()), "{name}");
            assert!(!made.holds(None, now()), "{name}");
            for stored in records() {
                let of =
                    |it: &Instance| (it.state, it.run_id.clone(), it.claim_uid.clone(), it.leaving.clone(), it.claims);
                let same = of(&stored) == of(seen);
                assert_eq!(made.holds(Some(&stored), now()), same, "{name} {stored:?}");
            }
            let expiry = instance(State::Idle).threshold.unwrap();
            let ends = ["terminate", "runner_gone"].contains(&name);
            assert_eq!(made.holds(Some(seen), expiry), ends, "{name} at its threshold");
        }
    }
    let first = launch(None, identity(), None, "", threshold(), now()).unwrap();
    assert!(first.holds(None, now()) && !first.holds(Some(&instance(State::Created)), now()));
}
