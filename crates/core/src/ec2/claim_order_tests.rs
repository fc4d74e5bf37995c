use paddock_record::State;
use serde_json::json;

use super::*;
use crate::{
    ec2::claim_scenario::{Scenario, check, held, out_of_capacity, scenario},
    fixtures::ec2::{at, record},
};

#[test]
fn the_pool_is_asked_first_and_machines_are_created_only_when_it_has_none() {
    let claimed = held("i-1", State::Claimed, None);
    let one = std::slice::from_ref(&claimed);
    let with_live =
        |live, scenario: Scenario| Scenario { live, ..scenario }.pool(json!({"spec": {"ec2": {"maxInstances": 100}}}));
    check([
        ("nothing held", scenario(3, &[]), "select 3"),
        ("one of three", scenario(3, one), "select 2"),
        ("the pool has no more", scenario(3, one).exhausted(), "place order 1: 2 on-demand"),
        ("no room", with_live(99, scenario(3, one)), "return i-1"),
        ("no room after others took the idle ones", with_live(99, scenario(3, one).exhausted()), "return i-1"),
        ("no room, and nothing held", with_live(98, scenario(3, &[])), "wait PoolFull"),
        ("just enough room", with_live(98, scenario(3, one).exhausted()), "place order 1: 2 on-demand"),
        ("more than the pool may have", with_live(0, scenario(101, &[])), "finish Failed InvalidSpec"),
    ]);
}

#[test]
fn machines_of_another_scope_end_just_before_the_order_that_takes_their_room() {
    let used = |id: &str, scope: &str| {
        let mut used = record(id, State::Idle, "", at(0));
        (used.claims, used.scope) = (1, scope.into());
        used
    };
    let full = |scenario: Scenario| {
        let idle = vec![used("i-8", "repository:acme/b"), used("i-9", "namespace:ci")];
        Scenario { live: 4, idle, ..scenario }.pool(json!({"spec": {"ec2": {"maxInstances": 4}}}))
    };
    check([
        ("those that fit come first", full(scenario(2, &[])), "select 2"),
        ("the pool has no more", full(scenario(1, &[])).exhausted(), "terminate i-8, place order 1: 1 on-demand"),
        ("too few of them", full(scenario(4, &[])), "wait PoolFull"),
        (
            "any will do",
            full(scenario(2, &[])).pool(json!({"spec": {"ec2": {"reuse": {"scope": "Pool"}}}})).exhausted(),
            "wait PoolFull",
        ),
    ]);
    let mut short = full(scenario(1, &[])).exhausted();
    let ordered = short.decide();
    let ClaimAction::MakeRoom { order, .. } = ordered else { panic!("{ordered:?}") };
    short.capacity.note(&order, 0, &[out_of_capacity()], at(1));
    check([("where EC2 has no capacity none ends", short, "abandon InsufficientCapacity")]);
}

#[test]
fn nothing_is_ordered_where_ec2_has_no_capacity() {
    let spot = |fallback: bool| {
        let ec2 = json!({"defaults": {"usageClass": "spot", "allowedInstanceTypes": ["c6i.large"]},
            "fallback": {"spotToOnDemand": fallback}});
        scenario(1, &[]).exhausted().pool(json!({"spec": {"ec2": ec2}}))
    };
    let short = |mut scenario: Scenario| {
        let ordered = scenario.decide();
        let ClaimAction::PlaceOrder(order) = ordered else { panic!("{ordered:?}") };
        scenario.capacity.note(&order, 0, &[out_of_capacity()], at(1));
        scenario
    };
    check([
        ("with capacity", spot(false), "place order 1: 1 spot"),
        ("without", short(spot(false)), "abandon InsufficientCapacity"),
        ("with a fallback", short(spot(true)), "place order 1: 1 on-demand"),
        ("without either", short(short(spot(true))), "abandon InsufficientCapacity"),
    ]);
    match short(spot(false)).decide() {
        ClaimAction::Abandon(wait) => assert_eq!(wait.retry_at, Some(at(181))),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_claim_fails_when_it_has_waited_for_capacity_for_too_long() {
    let waiting = |since: i64, timeout: &str| {
        let shortage = json!({"since": at(since), "attempt": 2, "message": "none in zone-a"});
        let timeouts = json!({"spec": {"ec2": {"timeouts": {"capacity": timeout}}}});
        let short = Applied::Short { launched: Vec::new(), causes: vec![out_of_capacity()] };
        scenario(2, &[])
            .ordered(UsageClass::OnDemand, 1, &[])
            .last(short)
            .claim(json!({"status": {"shortage": shortage}}))
            .pool(timeouts)
    };
    check([
        ("in time", waiting(-7, "10s"), "abandon InsufficientCapacity"),
        ("too late", waiting(-8, "10s"), "finish Failed InsufficientCapacity"),
    ]);
    match waiting(-8, "10s").decide() {
        ClaimAction::Finish(_, _, message) => {
            assert_eq!(message, "EC2 had no capacity within 10s (timeouts.capacity): none in zone-a");
        }
        other => panic!("{other:?}"),
    }
    let again = scenario(1, &[]).exhausted().claim(json!({"status": {"shortage": {"attempt": 2}}}));
    check([("the next order has another number", again, "place order 3: 1 on-demand")]);
}

#[test]
fn an_order_is_sent_until_its_machines_have_records() {
    use UsageClass::{OnDemand, Spot};
    let sent = || scenario(2, &[]).ordered(OnDemand, 1, &[]);
    let short = |causes: Vec<Cause>| Applied::Short { launched: vec!["i-1".into()], causes };
    let other = Cause { code: "InvalidSubnetID.NotFound".into(), ..Cause::default() };
    let spot = || {
        scenario(2, &[]).ordered(Spot, 1, &[]).pool(json!({"spec": {"ec2": {"fallback": {"spotToOnDemand": true}}}}))
    };
    let gone = || Applied::TemplateGone("no template".into());
    check([
        ("found after a restart", sent(), "send order 1"),
        ("just placed", sent().last(Applied::Done), "send order 1"),
        ("refused", sent().last(Applied::Refused("no".into())), "finish Failed AwsUnavailable"),
        ("short", sent().last(short(vec![out_of_capacity()])), "abandon InsufficientCapacity"),
        (
            "short, and the pool does not wait",
            sent()
                .last(short(vec![out_of_capacity()]))
                .pool(json!({"spec": {"ec2": {"timeouts": {"capacity": "0s"}}}})),
            "finish Failed InsufficientCapacity",
        ),
        ("short for another reason", sent().last(short(vec![other.clone()])), "finish Failed AwsUnavailable"),
        ("spot is short", spot().last(short(vec![out_of_capacity()])), "terminate i-1, order 2 on-demand"),
        ("spot fails for another reason", spot().last(short(vec![other])), "finish Failed AwsUnavailable"),
        ("its template is gone", sent().last(gone()), "wait PoolNotReady"),
        (
            "the pool has another template by now",
            scenario(2, &[]).ordered(Spot, 7, &[]).last(gone()),
            "place order 2: 2 spot",
        ),
    ]);
}

#[test]
fn a_fleet_is_ordered_once() {
    let lost = scenario(1, &[]).exhausted().ordered(UsageClass::OnDemand, 1, &["i-1"]);
    check([("its machine is lost", lost, "finish Failed WorkerLost")]);
}
