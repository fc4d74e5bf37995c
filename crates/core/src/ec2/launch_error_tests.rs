use super::*;

pub fn out(place: &str, instance_type: &str) -> Cause {
    Cause {
        code: "InsufficientInstanceCapacity".into(),
        message: "We currently do not have sufficient capacity.".into(),
        subnet: format!("subnet-{place}"),
        zone: format!("zone-{place}"),
        instance_type: instance_type.into(),
    }
}

#[test]
fn what_is_not_capacity_is_the_pools_problem_and_says_what_to_change() {
    let cause = |code: &str| Cause { code: code.into(), message: "No.".into(), ..out("a", "") };
    for (code, expected) in [
        ("InvalidSubnetID.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.subnetIds")),
        ("InvalidAMIID.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.amiId")),
        ("InvalidGroup.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.securityGroupIds")),
        ("InvalidIamInstanceProfile.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.instanceProfile")),
        ("UnauthorizedOperation", (PoolReason::AwsDenied, "grant the operator's role this action (docs/iam)")),
    ] {
        let (reason, message) = launch_problem(&[out("b", "c7i.large"), cause(code)]).unwrap();
        let words = format!("EC2 cannot launch machines: {code} in zone-a: No; {}", expected.1);
        assert_eq!((reason, message), (expected.0, words));
    }
    assert_eq!(launch_problem(&[out("a", "c7i.large")]), None);
}

#[test]
fn causes_are_described_by_zone_and_type() {
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
