use proptest::prelude::*;

use super::*;
use crate::{
    api::LaunchTemplate,
    plan::{fleet::Wanted, sample_ec2::at},
};

const MEMORY: Duration = Duration::from_mins(3);

fn needs(usage_class: UsageClass, cpu: u32, types: &[&str]) -> Needs {
    let allowed_instance_types = types.iter().map(|kind| (*kind).to_owned()).collect();
    Needs { usage_class, resource_class: "medium".into(), cpu, memory_mib: 4096, allowed_instance_types }
}

fn order(needs: &Needs, requested: u32) -> FleetOrder {
    let template = LaunchTemplate::default();
    let (client_token, usage_class, subnet_ids) = ("t".into(), needs.usage_class, subnets());
    Wanted { client_token, attempt: 1, template: &template, count: requested, usage_class, subnet_ids, needs }
        .order(at(0))
}

fn subnets() -> Vec<String> {
    vec!["subnet-a".into(), "subnet-b".into()]
}

fn out(place: &str, instance_type: &str) -> Cause {
    Cause {
        code: "InsufficientInstanceCapacity".into(),
        message: "We currently do not have sufficient capacity.".into(),
        subnet: format!("subnet-{place}"),
        zone: format!("zone-{place}"),
        instance_type: instance_type.into(),
    }
}

fn ask(usage_class: UsageClass, places: &[&str]) -> Order {
    Order::Ask { usage_class, subnet_ids: places.iter().map(|place| format!("subnet-{place}")).collect() }
}

use UsageClass::{OnDemand, Spot};

#[test]
fn an_empty_zone_is_not_asked_again_until_it_is_forgotten() {
    let wanted = needs(OnDemand, 2, &["c7i.*"]);
    let mut known = Shortages::new(MEMORY);
    assert_eq!(known.order(&wanted, &subnets(), false, at(0)), ask(OnDemand, &["a", "b"]));
    known.note(&order(&wanted, 3), 2, &[out("a", "c7i.large")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), false, at(179)), ask(OnDemand, &["b"]));
    assert_eq!(known.order(&wanted, &subnets(), false, at(180)), ask(OnDemand, &["a", "b"]));
}

#[test]
fn when_every_zone_is_empty_a_claim_waits_and_says_where_and_until_when() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let mut known = Shortages::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("b", "c7i.large"), out("a", "m7i.large")], at(0));
    known.note(&order(&wanted, 1), 0, &[out("b", "c7i.large")], at(60));
    let message = "insufficient capacity in zones zone-a, zone-b, retry at 2025-06-15T15:09:40Z".to_owned();
    assert_eq!(known.order(&wanted, &subnets(), false, at(61)), Order::Wait { until: at(180), message });
}

#[test]
fn what_is_empty_for_one_is_empty_for_the_same_or_more_and_for_nobody_else() {
    let wanted = needs(OnDemand, 4, &["c7*", "m7i.large"]);
    let mut known = Shortages::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("a", "c7i.large"), out("b", "c7i.large")], at(0));
    let waits = |needs: Needs| matches!(known.order(&needs, &subnets(), false, at(1)), Order::Wait { .. });
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
    let mut known = Shortages::new(MEMORY);
    known.note(&order(&wanted, 1), 1, &[out("a", "c7i.large")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), false, at(1)), ask(OnDemand, &["a", "b"]));
    assert_eq!(known.order(&needs(OnDemand, 2, &["c7i.large"]), &subnets(), false, at(1)), ask(OnDemand, &["b"]));
}

#[test]
fn spot_falls_back_to_on_demand_only_where_the_pool_allows_and_spot_is_out_everywhere() {
    let wanted = needs(Spot, 2, &["*"]);
    let mut known = Shortages::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[out("a", "")], at(0));
    assert_eq!(known.order(&wanted, &subnets(), true, at(1)), ask(Spot, &["b"]));
    known.note(&order(&wanted, 1), 0, &[out("b", "")], at(1));
    assert_eq!(known.order(&wanted, &subnets(), true, at(2)), ask(OnDemand, &["a", "b"]));
    assert!(matches!(known.order(&wanted, &subnets(), false, at(2)), Order::Wait { .. }));
    let dear = needs(OnDemand, 2, &["*"]);
    known.note(&order(&dear, 1), 0, &[out("a", ""), out("b", "")], at(2));
    assert!(matches!(known.order(&wanted, &subnets(), true, at(3)), Order::Wait { .. }));
}

#[test]
fn only_capacity_is_remembered_and_the_rest_is_the_pools_trouble() {
    let wanted = needs(OnDemand, 2, &["*"]);
    let cause = |code: &str| Cause { code: code.into(), message: "No.".into(), ..out("a", "") };
    let mut known = Shortages::new(MEMORY);
    known.note(&order(&wanted, 1), 0, &[cause("InvalidSubnetID.NotFound")], at(0));
    assert_eq!(known, Shortages::new(MEMORY));
    for (code, expected) in [
        ("InvalidSubnetID.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.subnetIds")),
        ("InvalidAMIID.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.amiId")),
        ("InvalidGroup.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.securityGroupIds")),
        ("InvalidIamInstanceProfile.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.instanceProfile")),
        ("UnauthorizedOperation", (PoolReason::AwsDenied, "grant the operator's role this action (docs/iam)")),
    ] {
        let (reason, message) = trouble(&[out("b", "c7i.large"), cause(code)]).unwrap();
        let words = format!("EC2 cannot launch machines: {code} in zone-a: No; {}", expected.1);
        assert_eq!((reason, message), (expected.0, words));
    }
    assert_eq!(trouble(&[out("a", "c7i.large")]), None);
}

#[test]
fn causes_are_told_by_zone_and_type() {
    let types = ["a", "b", "c", "d", "e", "f"].map(|kind| out("a", kind));
    let limit = Cause { code: "VcpuLimitExceeded".into(), message: "Too many.".into(), ..out("b", "") };
    let causes = [&types[..], &[out("b", "c7i.large"), out("b", "c7i.large"), limit.clone(), limit]].concat();
    assert_eq!(
        in_words(&causes),
        "insufficient capacity in zones zone-a (a, b, c, d and 2 more types), zone-b (c7i.large); \
         VcpuLimitExceeded in zone-b: Too many"
    );
    assert_eq!(in_words(&[]), "it gives no reason");
}

proptest! {
    #[test]
    fn an_order_never_asks_where_the_same_was_refused_and_always_waits_into_the_future(
        empty in proptest::collection::vec((0..3usize, 0..300i64), 0..8), now in 0..400i64,
    ) {
        let all: Vec<_> = ["a", "b", "c"].iter().map(|place| format!("subnet-{place}")).collect();
        let wanted = needs(OnDemand, 2, &["*"]);
        let mut known = Shortages::new(MEMORY);
        let mut events = empty;
        events.sort_by_key(|(_, when)| *when);
        events.retain(|(_, when)| *when <= now);
        for (place, when) in &events {
            known.note(&order(&wanted, 1), 0, &[out(["a", "b", "c"][*place], "")], at(*when));
        }
        let recent = |index: usize| events.iter().any(|(place, when)| *place == index && now - when < 180);
        match known.order(&wanted, &all, false, at(now)) {
            Order::Ask { subnet_ids, .. } => for (index, subnet) in all.iter().enumerate() {
                prop_assert_eq!(subnet_ids.contains(subnet), !recent(index));
            },
            Order::Wait { until, .. } => {
                prop_assert!(until > at(now));
                prop_assert!((0..3).all(recent));
            }
        }
    }
}
