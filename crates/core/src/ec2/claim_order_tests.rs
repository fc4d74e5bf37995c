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

fn in_zones(zones: &[&str]) -> Vec<Subnet> {
    let subnet = |zone: &&str| Subnet { id: format!("subnet-{zone}"), zone: (*zone).to_owned(), free_addresses: 9 };
    zones.iter().map(subnet).collect()
}

/// An order that fell short for these causes, and the pool's subnets in these zones.
fn fell_short(scenario: Scenario, zones: &[&str], order: &LaunchOrder, causes: Vec<Cause>) -> Scenario {
    let mut scenario = scenario.claim(json!({"status": {"fleet": order}}));
    scenario.offer = Some(Offer { subnets: in_zones(zones), instance_types: Some(9) });
    scenario.capacity.note(order, 1, &causes, at(1));
    scenario.last(Applied::Short { launched: vec!["i-1".into()], causes })
}

fn placed(scenario: &Scenario) -> Box<LaunchOrder> {
    match scenario.decide() {
        ClaimAction::PlaceOrder(order) | ClaimAction::FallBack { order, .. } => order,
        other => panic!("{other:?}"),
    }
}

fn zones(order: &LaunchOrder) -> Vec<&str> {
    order.subnets.iter().map(|subnet| subnet.zone.as_str()).collect()
}

#[test]
fn an_order_that_falls_short_is_followed_by_one_in_the_next_zones_before_the_claim_waits() {
    let six = ["a", "b", "c", "d", "e", "f"];
    let spot = json!({"spec": {"ec2": {"defaults": {"usageClass": "spot"}, "fallback": {"spotToOnDemand": true}}}});
    let out = |zone: &str| Cause { zone: zone.into(), subnet: format!("subnet-{zone}"), ..out_of_capacity() };
    let claim = || scenario(2, &[]).exhausted().pool(json!({"spec": {"ec2": {"timeouts": {"capacity": "0s"}}}}));
    let mut first = claim();
    first.offer = Some(Offer { subnets: in_zones(&six), instance_types: Some(9) });
    let order = placed(&first);
    assert_eq!(zones(&order), ["a", "b", "c", "d"]);
    // EC2 names one of the four zones.
    let second = fell_short(claim(), &six, &order, vec![out("c")]);
    let next = placed(&second);
    assert_eq!((zones(&next), next.attempt), (vec!["e", "f"], 2));
    let mut third = fell_short(claim(), &six, &next, vec![out("e")]);
    third.capacity.note(&order, 1, &[out("c")], at(1));
    match third.decide() {
        ClaimAction::Finish(ClaimPhase::Failed, ClaimReason::InsufficientCapacity, message) => {
            assert!(message.contains("insufficient capacity in zones a, b, c, d, e, f"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let mut spot_in_two = claim().pool(spot.clone());
    spot_in_two.offer = Some(Offer { subnets: in_zones(&six[..2]), instance_types: Some(9) });
    let order = placed(&spot_in_two);
    let unfulfillable = Cause { code: "UnfulfillableCapacity".into(), ..Cause::default() };
    for causes in [vec![out("a")], vec![unfulfillable], Vec::new()] {
        let short = fell_short(claim().pool(spot.clone()), &six[..2], &order, causes.clone());
        let next = placed(&short);
        assert_eq!((next.usage_class, zones(&next)), (UsageClass::OnDemand, vec!["a", "b"]), "{causes:?}");
    }
}

#[test]
fn what_passes_is_tried_again_and_no_shortage() {
    let code = |code: &str| Cause { code: code.into(), ..out_of_capacity() };
    let sent = |causes| {
        scenario(2, &[]).ordered(UsageClass::OnDemand, 1, &[]).last(Applied::Short { launched: Vec::new(), causes })
    };
    let at_once = |scenario: Scenario| scenario.pool(json!({"spec": {"ec2": {"timeouts": {"capacity": "0s"}}}}));
    check([
        ("throttled", at_once(sent(vec![code("RequestLimitExceeded")])), "abandon AwsUnavailable"),
        ("an internal error", sent(vec![code("InternalError")]), "abandon AwsUnavailable"),
        ("beside a shortage", sent(vec![code("InternalError"), out_of_capacity()]), "abandon AwsUnavailable"),
        ("not visible", sent(vec![code("InvalidLaunchTemplateId.VersionNotFound")]), "abandon AwsUnavailable"),
        ("denied", sent(vec![code("UnauthorizedOperation")]), "finish Failed AwsUnavailable"),
    ]);
    match sent(vec![code("InternalError")]).decide() {
        ClaimAction::Abandon(wait) => assert_eq!(wait.retry_at, Some(at(7))),
        other => panic!("{other:?}"),
    }
    let condition = json!({"type": "Ready", "status": "False", "reason": "AwsUnavailable", "message": "throttled",
        "lastTransitionTime": at(0)});
    let waits = json!({"status": {"retryAt": at(7), "conditions": [condition]}});
    check([("its own status does not end the wait", scenario(1, &[]).exhausted().claim(waits), "wait AwsUnavailable")]);
}

#[test]
fn nothing_is_ordered_before_it_is_known_what_ec2_offers() {
    let offering = |offer, scenario: Scenario| Scenario { offer, ..scenario };
    let none = || Some(Offer { subnets: in_zones(&["a"]), instance_types: Some(0) });
    let unknown = || Some(Offer { subnets: in_zones(&["a"]), instance_types: None });
    let full = |scenario: Scenario| Scenario { live: 20, ..scenario };
    let refused = || Applied::NoOffer("no".into());
    check([
        ("idle machines come first", offering(None, scenario(1, &[])), "select 1"),
        ("then it is asked", offering(None, scenario(1, &[]).exhausted()), "look up offer"),
        ("without an answer", offering(None, scenario(1, &[]).exhausted().last(refused())), "wait AwsUnavailable"),
        ("without one and room", offering(None, full(scenario(1, &[])).last(refused())), "wait PoolFull"),
        ("no type", offering(none(), scenario(1, &[]).exhausted()), "finish Failed InvalidSpec"),
        ("no type and no room", offering(none(), full(scenario(1, &[]))), "finish Failed InvalidSpec"),
        ("types unknown", offering(unknown(), scenario(1, &[]).exhausted()), "place order 1: 1 on-demand"),
    ]);
}

#[test]
fn a_fleet_is_ordered_once() {
    let lost = scenario(1, &[]).exhausted().ordered(UsageClass::OnDemand, 1, &["i-1"]);
    check([("its machine is lost", lost, "finish Failed WorkerLost")]);
}
