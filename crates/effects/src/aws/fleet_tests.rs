use axum::http::StatusCode;
use jiff::Timestamp;
use paddock_core::{
    api::{LaunchTemplate, OrderSubnet},
    ec2::{
        launch::{Wanted, tags},
        requirements::Requirements,
    },
    names::PoolKey,
};

use super::{
    super::ec2_stand_in::{ec2, ec2_that_takes},
    *,
};

/// How long the stand-in of EC2 takes for a slow fleet, and how long other calls may take then.
const FLEET_TIME: Duration = Duration::from_millis(1500);
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(500);

fn needs(usage_class: UsageClass, types: &[&str]) -> Requirements {
    Requirements {
        usage_class,
        resource_class: "medium".into(),
        cpu: 2,
        memory_mib: 4096,
        allowed_instance_types: types.iter().map(|kind| (*kind).to_owned()).collect(),
        scope: String::new(),
    }
}

fn order(needs: &Requirements) -> LaunchOrder {
    let subnet = |id: &str, zone: &str| OrderSubnet { id: id.into(), zone: zone.into() };
    let wanted = Wanted {
        client_token: "token".into(),
        attempt: 1,
        template: &LaunchTemplate { id: "lt-1".into(), version: 2, ..LaunchTemplate::default() },
        count: 3,
        usage_class: needs.usage_class,
        subnets: vec![subnet("subnet-1", "zone-a"), subnet("subnet-2", "zone-b")],
        needs,
        tags: tags("prod", &PoolKey::new("ci", "linux"), Some(("build", "77"))),
    };
    wanted.order(Timestamp::UNIX_EPOCH)
}

fn fleet(inner: &str) -> (StatusCode, String) {
    let text = format!("<CreateFleetResponse><fleetId>fleet-1</fleetId>{inner}</CreateFleetResponse>");
    (StatusCode::OK, text)
}

fn refusal(code: &str) -> (StatusCode, String) {
    let error = format!("<Error><Code>{code}</Code><Message>No.</Message></Error>");
    (StatusCode::BAD_REQUEST, format!("<Response><Errors>{error}</Errors></Response>"))
}

#[tokio::test]
async fn a_fleet_is_all_that_the_order_says_and_is_waited_for() {
    let (machines, requests) = ec2_that_takes(FLEET_TIME, ATTEMPT_TIMEOUT, |_| fleet("")).await;
    let spot = order(&needs(UsageClass::Spot, &["t3.*"]));
    machines.create_fleet(&spot).await.expect("a fleet takes longer than other calls");
    machines.create_fleet(&spot).await.unwrap();
    machines.create_fleet(&order(&needs(UsageClass::OnDemand, &["*"]))).await.unwrap();
    let requests = requests.lock().unwrap().clone();
    assert_eq!(requests.len(), 3, "none is repeated");
    assert_eq!(requests[0], requests[1]);
    let requirements = "LaunchTemplateConfigs.1.Overrides.2.InstanceRequirements";
    let sent = |request: usize, name: &str| requests[request].get(name).map(String::as_str);
    let required = |request, name: &str| sent(request, &format!("{requirements}.{name}"));
    assert_eq!(sent(0, "LaunchTemplateConfigs.1.Overrides.2.SubnetId"), Some("subnet-2"));
    assert_eq!(sent(0, "SpotOptions.AllocationStrategy"), Some("price-capacity-optimized"));
    assert_eq!(sent(2, "OnDemandOptions.AllocationStrategy"), Some("lowest-price"));
    assert_eq!(required(0, "AllowedInstanceType.1"), Some("t3.*"));
    assert_eq!(
        (required(0, "BurstablePerformance"), required(2, "BurstablePerformance")),
        (Some("included"), Some("excluded"))
    );
    assert_eq!(required(0, "SpotMaxPricePercentageOverLowestPrice"), Some("999999"));
    assert_eq!(required(2, "OnDemandMaxPricePercentageOverLowestPrice"), None);
    assert_eq!(sent(0, "TagSpecification.1.Tag.2.Key"), Some("paddock:claim"));
    assert_eq!(sent(0, "TagSpecification.1.Tag.2.Value"), Some("build"));
}

#[tokio::test]
async fn machines_and_causes_have_the_zone_of_their_subnet_where_ec2_names_none() {
    let instance = |place: &str, id: &str| {
        format!("<item>{place}<instanceIds><item>{id}</item></instanceIds><instanceType>m5.large</instanceType></item>")
    };
    let overrides = |place: &str| {
        format!("<launchTemplateAndOverrides><overrides>{place}</overrides></launchTemplateAndOverrides>")
    };
    let places = [
        instance("<availabilityZone>zone-x</availabilityZone>", "i-1"),
        instance(&overrides("<availabilityZone>zone-y</availabilityZone>"), "i-2"),
        instance(&overrides("<subnetId>subnet-2</subnetId>"), "i-3"),
    ];
    let error = format!("<errorCode>UnfulfillableCapacity</errorCode>{}", overrides("<subnetId>subnet-1</subnetId>"));
    let answer =
        format!("<errorSet><item>{error}</item></errorSet><fleetInstanceSet>{}</fleetInstanceSet>", places.concat());
    let (machines, _) = ec2(move |_| fleet(&answer)).await;
    let outcome = machines.create_fleet(&order(&needs(UsageClass::OnDemand, &["*"]))).await.unwrap();
    let zones: Vec<_> = outcome.launched.iter().map(|it| (it.id.as_str(), it.zone.as_str())).collect();
    assert_eq!(zones, [("i-1", "zone-x"), ("i-2", "zone-y"), ("i-3", "zone-b")]);
    assert_eq!((outcome.causes.len(), outcome.causes[0].zone.as_str()), (1, "zone-a"));
}

#[tokio::test]
async fn a_quota_is_missing_capacity_and_other_refusals_are_not() {
    let order = order(&needs(UsageClass::OnDemand, &["*"]));
    let (machines, _) = ec2(|_| refusal("VcpuLimitExceeded")).await;
    let outcome = machines.create_fleet(&order).await.unwrap();
    assert_eq!((outcome.launched.len(), outcome.causes[0].code.as_str()), (0, "VcpuLimitExceeded"));
    let (machines, _) = ec2(|_| refusal("InvalidFleetConfig")).await;
    assert!(matches!(machines.create_fleet(&order).await, Err(AwsError::Refused { .. })));
    let (machines, _) = ec2(|_| refusal("InvalidLaunchTemplateId.VersionNotFound")).await;
    let hidden = machines.create_fleet(&order).await.unwrap_err();
    assert!(hidden.is_template_gone() && hidden.is_transient(), "{hidden}");
}

#[tokio::test]
async fn types_are_counted_page_by_page_and_once() {
    let (machines, requests) = ec2(|fields| {
        let (names, token) = match fields.get("NextToken") {
            None => (["m5.large", "m6i.large"].as_slice(), "<nextToken>more</nextToken>"),
            Some(_) => (["c6i.large"].as_slice(), ""),
        };
        let items: String =
            names.iter().map(|name| format!("<item><instanceType>{name}</instanceType></item>")).collect();
        let name = "GetInstanceTypesFromInstanceRequirementsResponse";
        (StatusCode::OK, format!("<{name}><instanceTypeSet>{items}</instanceTypeSet>{token}</{name}>"))
    })
    .await;
    let needs = needs(UsageClass::OnDemand, &["c7*"]);
    for _ in 0..2 {
        assert_eq!(machines.count_types("arm64", &needs).await, Ok(3));
    }
    let requests = requests.lock().unwrap().clone();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[0]["ArchitectureType.1"], "arm64");
    // EC2 refuses it here.
    assert!(requests[0].keys().all(|name| !name.contains("PricePercentage")), "{requests:?}");
}
