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
        ("InvalidAMIID.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.ami")),
        ("InvalidGroup.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.securityGroupIds")),
        ("InvalidIamInstanceProfile.NotFound", (PoolReason::InvalidSpec, "check spec.ec2.instanceProfile")),
        (
            "UnauthorizedOperation",
            (
                PoolReason::AwsDenied,
                "grant the operator's role ec2:CreateFleet, ec2:RunInstances, ec2:CreateTags and iam:PassRole (docs/iam)",
            ),
        ),
    ] {
        let (reason, message) = launch_problem(&[out("b", "c7i.large"), cause(code)]).unwrap();
        let words = format!("EC2 cannot launch machines: {code} in zone-a: No; {}", expected.1);
        assert_eq!((reason, message), (expected.0, words));
    }
    assert_eq!(launch_problem(&[out("a", "c7i.large")]), None);
}

#[test]
fn a_code_says_what_helps() {
    let classes = [
        (
            Kind::Capacity,
            "InsufficientInstanceCapacity UnfulfillableCapacity Unsupported MaxFleetCountExceeded VcpuLimitExceeded \
             MaxSpotInstanceCountExceeded InsufficientFreeAddressesInSubnet ReservationCapacityExceeded \
             InsufficientHostCapacity",
        ),
        (Kind::Throttled, "RequestLimitExceeded Throttling RequestThrottled"),
        (Kind::Unavailable, "InternalError ServiceUnavailable ExpiredToken ExpiredTokenException RequestExpired"),
        (
            Kind::NotYet,
            "QueueDeletedRecently AWS.SimpleQueueService.QueueDeletedRecently InvalidLaunchTemplateId.NotFound \
             InvalidLaunchTemplateId.VersionNotFound InvalidLaunchTemplateName.NotFoundException \
             InvalidLaunchTemplateName.AlreadyExistsException",
        ),
        (
            Kind::Denied,
            "UnauthorizedOperation AccessDenied AuthFailure AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        ),
        (Kind::Spec, "InvalidSubnetID.NotFound InvalidFleetConfig InvalidParameterValue IdempotentParameterMismatch"),
    ];
    for (kind, code) in classes.iter().flat_map(|(kind, codes)| codes.split(' ').map(move |code| (kind, code))) {
        assert_eq!(Kind::of(code), *kind, "{code}");
    }
}

#[test]
fn what_passes_is_not_the_pools_problem() {
    let throttled = Cause { code: "RequestLimitExceeded".into(), message: "Slow down.".into(), ..out("a", "") };
    let causes = [out("b", "c7i.large"), throttled];
    assert_eq!(launch_problem(&causes), None);
    let message = "EC2 cannot launch machines now: RequestLimitExceeded in zone-a: Slow down".to_owned();
    assert_eq!(passing_problem(&causes), Some((PoolReason::AwsUnavailable, message)));
    assert_eq!(passing_problem(&causes[..1]), None);
}

#[test]
fn a_denial_names_what_is_missing_and_how_to_grant_it() {
    let told = |code: &str, message: &str| hint(code, message, "TerminateInstances");
    let denied = "User: u is not authorized to perform: ec2:TerminateInstances on resource: i-1";
    assert_eq!(told("UnauthorizedOperation", denied), "grant the operator's role ec2:TerminateInstances (docs/iam)");
    let unnamed = "grant the operator's role the action TerminateInstances (docs/iam)";
    assert_eq!(told("UnauthorizedOperation", "You are not authorized."), unnamed);
    let role = Cause { code: "AuthFailure.ServiceLinkedRoleCreationNotPermitted".into(), ..out("a", "") };
    let (reason, message) = launch_problem(&[role]).unwrap();
    let command = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com";
    assert!(reason == PoolReason::AwsDenied && message.contains(command), "{message}");
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
