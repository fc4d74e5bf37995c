use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::{
    api::LaunchTemplate,
    ec2::{
        launch::Wanted,
        launch_error::{in_words, tests::out},
    },
    fixtures::ec2::at,
};

const MEMORY: Duration = Duration::from_mins(3);

fn needs(usage_class: UsageClass, cpu: u32, types: &[&str]) -> Requirements {
    let allowed_instance_types = types.iter().map(|kind| (*kind).to_owned()).collect();
    Requirements {
        usage_class,
        resource_class: "medium".into(),
        cpu,
        memory_mib: 4096,
        allowed_instance_types,
        scope: String::new(),
    }
}

/// An order in these places.
fn order_in(places: &[&str], needs: &Requirements, count: u32) -> LaunchOrder {
    let (template, client_token, usage_class) = (&LaunchTemplate::default(), "t".into(), needs.usage_class);
    let (subnets, tags) = (places.iter().map(|place| OrderSubnet::from(&subnet(place))).collect(), BTreeMap::new());
    Wanted { client_token, attempt: 1, template, count, usage_class, subnets, needs, tags }.order(at(0))
}

fn order(needs: &Requirements, count: u32) -> LaunchOrder {
    order_in(&["a", "b"], needs, count)
}

fn subnet(place: &str) -> Subnet {
    Subnet { id: format!("subnet-{place}"), zone: format!("zone-{place}"), free_addresses: 250 }
}

fn subnets() -> Vec<Subnet> {
    ["a", "b"].map(subnet).into()
}

fn ask(usage_class: UsageClass, places: &[&str]) -> LaunchChoice {
    LaunchChoice::Ask { usage_class, subnets: places.iter().map(|place| OrderSubnet::from(&subnet(place))).collect() }
}

use UsageClass::{OnDemand, Spot};

#[test]
fn an_empty_zone_is_not_asked_again_until_it_is_forgotten() {
    let wanted = needs(OnDemand, 2, &["c7i.*"]);
    let mut known = CapacityMemory::new(MEMORY);
    assert_eq!(known.order(&wanted, &subnets(), false, at(0)), ask(OnDemand, &["a", "b"]));
    known.note(&order_in(&["a"], &wanted, 3), 2, &[out("a", "c7i.large")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), false, at(179)), ask(OnDemand, &["b"]));
    assert_eq!(known.order(&wanted, &subnets(), false, at(180)), ask(OnDemand, &["a", "b"]));
}

#[test]
fn a_short_order_closes_each_of_its_zones_whichever_ec2_names() {
    let named = |zone: &str, code: &str, subnet: &str| Cause {
        code: code.into(),
        message: "No.".into(),
        subnet: subnet.into(),
        zone: zone.into(),
        instance_type: String::new(),
    };
    let short = "InsufficientInstanceCapacity";
    for (name, causes, left, words) in [
        ("no reason", vec![], "c d", "insufficient capacity in zones zone-a, zone-b"),
        ("one zone", vec![out("a", "c7i.large")], "c d", "insufficient capacity in zones zone-a (c7i.large), zone-b"),
        ("by its zone", vec![named("zone-a", short, "")], "c d", "insufficient capacity in zones zone-a, zone-b"),
        (
            "no zone",
            vec![named("", "UnfulfillableCapacity", "")],
            "c d",
            "insufficient capacity in zones zone-a, zone-b",
        ),
        ("a quota", vec![named("", "VcpuLimitExceeded", "")], "c d", "VcpuLimitExceeded: No"),
        ("not asked in b", vec![out("a", ""), named("zone-b", "InternalError", "subnet-b")], "b c d", ""),
        ("refused in b", vec![out("a", ""), named("zone-b", "InvalidSubnetID.NotFound", "subnet-b")], "b c d", ""),
        ("not asked at all", vec![named("", "RequestLimitExceeded", "")], "a b c d", ""),
    ] {
        let wanted = needs(Spot, 2, &["*"]);
        let mut known = CapacityMemory::new(MEMORY);
        known.note(&order(&wanted, 3), 1, &causes, at(0));
        let all: Vec<_> = ["a", "b", "c", "d"].map(subnet).into();
        let left: Vec<_> = left.split(' ').collect();
        assert_eq!(known.order(&wanted, &all, false, at(1)), ask(Spot, &left), "{name}");
        if let LaunchChoice::Wait { causes, .. } = known.order(&wanted, &subnets(), false, at(1)) {
            assert_eq!(in_words(&causes), words, "{name}");
        }
    }
}

#[test]
fn a_subnet_without_addresses_is_left_for_another_one_of_its_zone() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    let cause = Cause { code: "InsufficientFreeAddressesInSubnet".into(), ..out("a", "c7i.large") };
    known.note(&order(&wanted, 1), 0, &[cause], at(0));
    let other = Subnet { id: "subnet-other".into(), free_addresses: 9, ..subnet("a") };
    let LaunchChoice::Ask { subnets, .. } = known.order(&wanted, &[subnet("a"), other], false, at(1)) else {
        panic!("a subnet is left");
    };
    assert_eq!(subnets.iter().map(|subnet| subnet.id.as_str()).collect::<Vec<_>>(), ["subnet-other"]);
}

#[test]
fn orders_go_through_all_zones_four_at_a_time() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    let all: Vec<_> = ["a", "b", "c", "d", "e", "f"].map(subnet).into();
    assert_eq!(known.order(&wanted, &all, false, at(0)), ask(OnDemand, &["a", "b", "c", "d"]));
    known.note(&order_in(&["a", "b", "c", "d"], &wanted, 1), 0, &[out("a", "c7i.large")], at(0));
    assert_eq!(known.order(&wanted, &all, false, at(0)), ask(OnDemand, &["e", "f"]));
    known.note(&order_in(&["e", "f"], &wanted, 1), 0, &[out("e", "m7i.large")], at(0));
    let LaunchChoice::Wait { until, causes } = known.order(&wanted, &all, false, at(0)) else { panic!("none is left") };
    let words = "insufficient capacity in zones zone-a (c7i.large), zone-b, zone-c, zone-d, zone-e (m7i.large), zone-f";
    assert_eq!((until, in_words(&causes).as_str()), (at(180), words));
}

#[test]
fn when_every_zone_is_empty_a_claim_waits_and_says_where_and_until_when() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("b", "c7i.large"), out("a", "m7i.large")], at(0));
    known.note(&order_in(&["b"], &wanted, 1), 0, &[out("b", "c7i.large")], at(60));
    let LaunchChoice::Wait { until, causes } = known.order(&wanted, &subnets(), false, at(61)) else {
        panic!("it waits")
    };
    assert_eq!(in_words(&causes), "insufficient capacity in zones zone-a (m7i.large), zone-b (c7i.large)");
    assert_eq!(until, at(180));
}

#[test]
fn a_claim_waits_for_its_own_types_only() {
    let mut known = CapacityMemory::new(MEMORY);
    let (wanted, other) = (needs(OnDemand, 2, &["r5.large"]), needs(OnDemand, 2, &["m5ad.large"]));
    known.note(&order(&other, 1), 0, &[out("a", "m5ad.large"), out("b", "m5ad.large")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), false, at(1)), ask(OnDemand, &["a", "b"]));
    known.note(&order(&wanted, 1), 0, &[out("a", "r5.large"), out("b", "r5.large")], at(60));
    let LaunchChoice::Wait { until, causes } = known.order(&wanted, &subnets(), false, at(61)) else {
        panic!("it waits")
    };
    assert_eq!(in_words(&causes), "insufficient capacity in zones zone-a (r5.large), zone-b (r5.large)");
    assert_eq!(until, at(240));
}

#[test]
fn a_shortage_applies_to_the_same_or_larger_requirements_only() {
    let wanted = needs(OnDemand, 4, &["c7*", "m7i.large"]);
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("a", "c7i.large"), out("b", "c7i.large")], at(0));
    let waits =
        |needs: Requirements| matches!(known.order(&needs, &subnets(), false, at(1)), LaunchChoice::Wait { .. });
    for (usage_class, cpu, types, empty) in [
        (OnDemand, 4, &["c7*", "m7i.large"][..], true),
        (OnDemand, 8, &["c7i.*"], true),
        (OnDemand, 4, &["m7i.large"], true),
        (OnDemand, 2, &["c7*"], false),
        (OnDemand, 4, &["*"], false),
        (OnDemand, 4, &["c7*", "r7i.*"], false),
        (Spot, 4, &["c7*"], false),
    ] {
        assert_eq!(waits(needs(usage_class, cpu, types)), empty, "{usage_class:?} {cpu} {types:?}");
    }
}

#[test]
fn a_type_that_was_out_while_others_were_not_is_remembered_alone() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order(&wanted, 1), 1, &[out("a", "c7i.large")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), false, at(1)), ask(OnDemand, &["b", "a"]), "asked last");
    assert_eq!(known.order(&needs(OnDemand, 2, &["c7i.large"]), &subnets(), false, at(1)), ask(OnDemand, &["b"]));
}

#[test]
fn spot_falls_back_to_on_demand_only_where_the_pool_allows_and_spot_is_out_everywhere() {
    let wanted = needs(Spot, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order_in(&["a"], &wanted, 1), 0, &[out("a", "")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), true, at(1)), ask(Spot, &["b"]));
    known.note(&order_in(&["b"], &wanted, 1), 0, &[out("b", "")], at(1));
    assert_eq!(known.order(&wanted, &subnets(), true, at(2)), ask(OnDemand, &["a", "b"]));
    assert!(matches!(known.order(&wanted, &subnets(), false, at(2)), LaunchChoice::Wait { .. }));
    let on_demand = needs(OnDemand, 2, &["*"]);
    known.note(&order(&on_demand, 1), 0, &[out("a", ""), out("b", "")], at(2));
    assert!(matches!(known.order(&wanted, &subnets(), true, at(3)), LaunchChoice::Wait { .. }));
}

#[test]
fn only_capacity_is_remembered() {
    let cause = Cause { code: "InvalidSubnetID.NotFound".into(), ..out("a", "") };
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order(&needs(OnDemand, 2, &["*"]), 1), 0, &[cause], at(0));
    assert_eq!(known, CapacityMemory::new(MEMORY));
}

proptest! {
    #[test]
    fn an_order_never_asks_where_the_same_was_refused_and_always_waits_into_the_future(
        empty in proptest::collection::vec((0..3usize, 0..300i64), 0..8), now in 0..400i64,
    ) {
        let all: Vec<_> = ["a", "b", "c"].map(subnet).into();
        let wanted = needs(OnDemand, 2, &["*"]);
        let mut known = CapacityMemory::new(MEMORY);
        let mut events = empty;
        events.sort_by_key(|(_, when)| *when);
        events.retain(|(_, when)| *when <= now);
        for (place, when) in &events {
            let place = ["a", "b", "c"][*place];
            known.note(&order_in(&[place], &wanted, 1), 0, &[out(place, "")], at(*when));
        }
        let recent = |index: usize| events.iter().any(|(place, when)| *place == index && now - when < 180);
        match known.order(&wanted, &all, false, at(now)) {
            LaunchChoice::Ask { subnets, .. } => for (index, subnet) in all.iter().enumerate() {
                prop_assert_eq!(subnets.contains(&OrderSubnet::from(subnet)), !recent(index));
            },
            LaunchChoice::Wait { until, .. } => {
                prop_assert!(until > at(now));
                prop_assert!((0..3).all(recent));
            }
        }
    }
}
