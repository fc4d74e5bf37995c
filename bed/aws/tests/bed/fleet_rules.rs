//! What EC2 refuses of a fleet, and what its answers look like.

use paddock_bed_aws::{
    Aws, Limit, Service, Usage,
    faults::{Effect, Rule},
};

use crate::{
    fleet::{fleet, ids, template},
    support::{ec2, texts},
};

const TWO: &[(&str, &str)] = &[
    ("InstanceRequirements.VCpuCount.Min", "2"),
    ("InstanceRequirements.VCpuCount.Max", "2"),
    ("InstanceRequirements.MemoryMiB.Min", "4096"),
];
const LARGE: &[(&str, &str)] = &[("InstanceType", "m5.large")];

/// The status, code and message of a refusal.
fn refused((status, text): (u16, String)) -> (u16, String, String) {
    (status, texts(&text, "Code").concat(), texts(&text, "Message").concat())
}

/// A second subnet in the zone of the first.
async fn neighbour(aws: &Aws, cidr: &str) -> String {
    let (first, zone) = aws.subnets()[0].clone();
    let (_, text) = ec2(aws, "DescribeSubnets", &[("SubnetId.1", &first)]).await;
    let vpc = texts(&text, "vpcId").remove(0);
    let fields = [("VpcId", vpc.as_str()), ("CidrBlock", cidr), ("AvailabilityZone", &zone)];
    let (status, text) = ec2(aws, "CreateSubnet", &fields).await;
    assert_eq!(status, 200, "{text}");
    texts(&text, "subnetId").remove(0)
}

pub async fn fleet_has_one_subnet_of_a_zone(aws: &Aws) {
    template(aws, "zones", "").await;
    let (first, second) = (aws.subnets()[0].0.clone(), neighbour(aws, "172.31.96.0/20").await);
    for choice in [TWO, LARGE] {
        let (status, code, message) =
            refused(fleet(aws, "zones", 1, &[(&first, choice), (&second, choice)], &[]).await);
        assert_eq!((status, code.as_str()), (400, "InvalidFleetConfig"), "{message}");
        assert!(message.contains("duplicate instance pools"), "{message}");
    }
    let twice = refused(fleet(aws, "zones", 1, &[(&first, LARGE), (&first, LARGE)], &[]).await);
    assert_eq!(twice.1, "InvalidFleetConfig", "one type twice: {twice:?}");
    let overlapping = refused(fleet(aws, "zones", 1, &[(&first, TWO), (&first, TWO)], &[]).await);
    assert!(overlapping.1 == "InvalidParameterValue" && overlapping.2.contains("overlapping"), "{overlapping:?}");
    let other = aws.subnets()[1].0.clone();
    let types: &[_] = &[("InstanceType", "m5a.large")];
    let (status, text) = fleet(aws, "zones", 1, &[(&first, LARGE), (&first, types), (&other, LARGE)], &[]).await;
    assert_eq!(status, 200, "{text}");
}

pub async fn fleet_has_at_most_four_requirements(aws: &Aws) {
    template(aws, "five", "").await;
    let subnets = aws.subnets();
    let overrides: Vec<_> = subnets.iter().map(|(subnet, _)| (subnet.as_str(), TWO)).collect();
    let (status, code, message) = refused(fleet(aws, "five", 1, &overrides[..5], &[]).await);
    assert_eq!((status, code.as_str()), (400, "InvalidParameterValue"));
    assert!(message.contains("maximum allowed number of InstanceRequirements (4)"), "{message}");
    let (status, text) = fleet(aws, "five", 1, &overrides[..4], &[]).await;
    assert_eq!(status, 200, "{text}");
}

pub async fn requirements_that_leave_no_type_are_refused(aws: &Aws) {
    template(aws, "nothing", "").await;
    let subnet = &aws.subnets()[0].0;
    let dear: &[_] = &[("InstanceRequirements.AllowedInstanceType.1", "nonsense*")];
    let (status, code, message) = refused(fleet(aws, "nothing", 1, &[(subnet, &[TWO, dear].concat())], &[]).await);
    assert_eq!((status, code.as_str()), (400, "InvalidParameterValue"));
    assert!(message.contains("couldn't find any instance pools"), "{message}");
    let both: &[_] = &[("InstanceType", "m5.large")];
    let (_, code, _) = refused(fleet(aws, "nothing", 1, &[(subnet, &[TWO, both].concat())], &[]).await);
    assert_eq!(code, "InvalidParameterCombination");
}

/// Types that cost much more than the cheapest are left out without a word, unless the request says otherwise.
pub async fn price_protection_leaves_types_out(aws: &Aws) {
    template(aws, "prices", "").await;
    let subnet = &aws.subnets()[4];
    let allowed = [
        ("InstanceRequirements.AllowedInstanceType.1", "c7i.large"),
        ("InstanceRequirements.AllowedInstanceType.2", "r7i.large"),
    ];
    aws.set_capacity(Limit { zone: subnet.1.clone(), instance_type: "c7i.large".into(), usage: None, available: 0 });
    let limits = [("InstanceRequirements.OnDemandMaxPricePercentageOverLowestPrice", "999999")];
    let protected = [TWO, &allowed].concat();
    let (_, text) = fleet(aws, "prices", 1, &[(&subnet.0, &protected)], &[]).await;
    assert_eq!((ids(&text).len(), texts(&text, "errorCode").len()), (0, 1), "{text}");
    let lifted = [&protected[..], &limits].concat();
    let (_, text) = fleet(aws, "prices", 1, &[(&subnet.0, &lifted)], &[]).await;
    assert_eq!((ids(&text).len(), texts(&text, "errorCode").len()), (1, 1), "{text}");
    assert!(texts(&text, "instanceType").contains(&"r7i.large".to_owned()), "{text}");
}

/// An answer repeats the override, which has no zone unless the request had one; the zone is with the instances.
pub async fn answer_says_where_instances_are(aws: &Aws) {
    template(aws, "where", "").await;
    let (subnet, zone) = aws.subnets()[0].clone();
    let (_, text) = fleet(aws, "where", 1, &[(&subnet, TWO)], &[]).await;
    assert_eq!(texts(&text, "availabilityZone"), [zone], "{text}");
    assert_eq!((texts(&text, "subnetId").len(), texts(&text, "vCpuCount").len()), (2, 0), "{text}");
    assert!(text.contains("<vCpuCount><min>2</min><max>2</max></vCpuCount>"), "{text}");
    aws.add_fault(Rule::on(Service::Ec2, "CreateFleet", Effect::Older).containing("where").once());
    let (_, text) = fleet(aws, "where", 1, &[(&subnet, TWO)], &[]).await;
    assert!(texts(&text, "availabilityZone").is_empty() && texts(&text, "subnetId") == [subnet], "{text}");
}

/// Spot capacity that is missing is told once, without type and zone.
pub async fn missing_spot_capacity_is_told_once(aws: &Aws) {
    template(aws, "no-spot", "").await;
    aws.set_capacity(Limit {
        zone: "*".into(),
        instance_type: "c6a.large".into(),
        usage: Some(Usage::Spot),
        available: 0,
    });
    let subnets = aws.subnets();
    let overrides: Vec<(&str, &[_])> =
        subnets.iter().map(|(subnet, _)| (subnet.as_str(), [("InstanceType", "c6a.large")].as_slice())).collect();
    let spot = [("TargetCapacitySpecification.DefaultTargetCapacityType", "spot")];
    let (_, text) = fleet(aws, "no-spot", 1, &overrides, &spot).await;
    assert_eq!(texts(&text, "errorCode"), ["UnfulfillableCapacity"], "{text}");
    assert!(texts(&text, "instanceType").is_empty() && texts(&text, "availabilityZone").is_empty(), "{text}");
}

pub async fn errors_of_a_fleet_can_be_asked_for(aws: &Aws) {
    template(aws, "asked", "").await;
    let code = "AuthFailure.ServiceLinkedRoleCreationNotPermitted".to_owned();
    let effect = Effect::FleetError { code: code.clone(), message: "no".into() };
    aws.add_fault(Rule::on(Service::Ec2, "CreateFleet", effect).containing("asked").once());
    let subnets = aws.subnets();
    let (status, text) = fleet(aws, "asked", 1, &[(&subnets[0].0, TWO), (&subnets[1].0, TWO)], &[]).await;
    assert_eq!((status, ids(&text).len(), texts(&text, "errorCode")), (200, 0, vec![code.clone(), code]), "{text}");
}
