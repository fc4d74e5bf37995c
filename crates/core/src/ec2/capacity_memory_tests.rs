use proptest::prelude::*;

use super::*;
use crate::{
    api::LaunchTemplate,
    ec2::{launch::Wanted, launch_error::tests::out},
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

fn order(needs: &Requirements, requested: u32) -> LaunchOrder {
    let template = LaunchTemplate::default();
    let (client_token, usage_class, subnet_ids) = ("t".into(), needs.usage_class, subnets());
    Wanted { client_token, attempt: 1, template: &template, count: requested, usage_class, subnet_ids, needs }
        .order(at(0))
}

fn subnets() -> Vec<String> {
    vec!["subnet-a".into(), "subnet-b".into()]
}

fn ask(usage_class: UsageClass, places: &[&str]) -> LaunchChoice {
    LaunchChoice::Ask { usage_class, subnet_ids: places.iter().map(|place| format!("subnet-{place}")).collect() }
}

use UsageClass::{OnDemand, Spot};

#[test]
fn an_empty_zone_is_not_asked_again_until_it_is_forgotten() {
    let wanted = needs(OnDemand, 2, &["c7i.*"]);
    let mut known = CapacityMemory::new(MEMORY);
    assert_eq!(known.order(&wanted, &subnets(), false, at(0)), ask(OnDemand, &["a", "b"]));
    known.note(&order(&wanted, 3), 2, &[out("a", "c7i.large")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), false, at(179)), ask(OnDemand, &["b"]));
    assert_eq!(known.order(&wanted, &subnets(), false, at(180)), ask(OnDemand, &["a", "b"]));
}

#[test]
fn when_every_zone_is_empty_a_claim_waits_and_says_where_and_until_when() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("b", "c7i.large"), out("a", "m7i.large")], at(0));
    known.note(&order(&wanted, 1), 0, &[out("b", "c7i.large")], at(60));
    let message = "insufficient capacity in zones zone-a, zone-b".to_owned();
    assert_eq!(known.order(&wanted, &subnets(), false, at(61)), LaunchChoice::Wait { until: at(180), message });
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
    assert_eq!(known.order(&wanted, &subnets(), false, at(1)), ask(OnDemand, &["a", "b"]));
    assert_eq!(known.order(&needs(OnDemand, 2, &["c7i.large"]), &subnets(), false, at(1)), ask(OnDemand, &["b"]));
}

#[test]
fn spot_falls_back_to_on_demand_only_where_the_pool_allows_and_spot_is_out_everywhere() {
    let wanted = needs(Spot, 2, &["*"]);
    let mut known = CapacityMemory::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("a", "")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), true, at(1)), ask(Spot, &["b"]));
    known.note(&order(&wanted, 1), 0, &[out("b", "")], at(1));
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
        let all: Vec<_> = ["a", "b", "c"].iter().map(|place| format!("subnet-{place}")).collect();
        let wanted = needs(OnDemand, 2, &["*"]);
        let mut known = CapacityMemory::new(MEMORY);
        let mut events = empty;
        events.sort_by_key(|(_, when)| *when);
        events.retain(|(_, when)| *when <= now);
        for (place, when) in &events {
            known.note(&order(&wanted, 1), 0, &[out(["a", "b", "c"][*place], "")], at(*when));
        }
        let recent = |index: usize| events.iter().any(|(place, when)| *place == index && now - when < 180);
        match known.order(&wanted, &all, false, at(now)) {
            LaunchChoice::Ask { subnet_ids, .. } => for (index, subnet) in all.iter().enumerate() {
                prop_assert_eq!(subnet_ids.contains(subnet), !recent(index));
            },
            LaunchChoice::Wait { until, .. } => {
                prop_assert!(until > at(now));
                prop_assert!((0..3).all(recent));
            }
        }
    }
}
