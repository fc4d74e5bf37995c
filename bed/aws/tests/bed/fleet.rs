use std::process::Command;

use base64::{Engine, engine::general_purpose::STANDARD};
use futures::future::join_all;
use paddock_bed_aws::{
    Aws, Ending, Limit, Service, Usage,
    faults::{Effect, Rule},
};

use crate::support::{ec2, eventually, texts};

/// A launch template that runs this script.
pub async fn template(aws: &Aws, name: &str, script: &str) {
    let user_data = STANDARD.encode(script);
    let fields = [
        ("LaunchTemplateName", name),
        ("LaunchTemplateData.ImageId", aws.ami_id()),
        ("LaunchTemplateData.UserData", &user_data),
        ("LaunchTemplateData.InstanceInitiatedShutdownBehavior", "terminate"),
        ("LaunchTemplateData.MetadataOptions.InstanceMetadataTags", "enabled"),
        ("LaunchTemplateData.IamInstanceProfile.Name", "paddock-runner"),
        ("LaunchTemplateData.TagSpecification.1.ResourceType", "instance"),
        ("LaunchTemplateData.TagSpecification.1.Tag.1.Key", "paddock:pool"),
        ("LaunchTemplateData.TagSpecification.1.Tag.1.Value", name),
    ];
    let (status, text) = ec2(aws, "CreateLaunchTemplate", &fields).await;
    assert_eq!(status, 200, "{text}");
}

/// A fleet of `count` from a template, with one override for each (subnet, field, value).
pub async fn fleet(
    aws: &Aws,
    template: &str,
    count: u32,
    overrides: &[(&str, &[(&str, &str)])],
    more: &[(&str, &str)],
) -> (u16, String) {
    let count = count.to_string();
    let mut fields = vec![
        ("Type".to_owned(), "instant"),
        ("TargetCapacitySpecification.TotalTargetCapacity".to_owned(), &count),
        ("LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName".to_owned(), template),
        ("LaunchTemplateConfigs.1.LaunchTemplateSpecification.Version".to_owned(), "$Latest"),
    ];
    for ((subnet, choice), index) in overrides.iter().zip(1..) {
        let prefix = format!("LaunchTemplateConfigs.1.Overrides.{index}");
        fields.push((format!("{prefix}.SubnetId"), subnet));
        fields.extend(choice.iter().map(|(key, value)| (format!("{prefix}.{key}"), *value)));
    }
    fields.extend(more.iter().map(|(key, value)| (key.to_string(), *value)));
    let fields: Vec<_> = fields.iter().map(|(key, value)| (key.as_str(), *value)).collect();
    ec2(aws, "CreateFleet", &fields).await
}

/// The instance ids of a fleet's response.
pub fn ids(answer: &str) -> Vec<String> {
    texts(answer, "item").into_iter().filter(|text| text.starts_with("i-")).collect()
}

const SMALL: &[(&str, &str)] = &[
    ("InstanceRequirements.VCpuCount.Min", "2"),
    ("InstanceRequirements.VCpuCount.Max", "4"),
    ("InstanceRequirements.MemoryMiB.Min", "8192"),
    ("InstanceRequirements.AllowedInstanceType.1", "m6i.*"),
    ("InstanceRequirements.AllowedInstanceType.2", "t3*"),
];

fn subnet(aws: &Aws, zone: usize) -> (String, String) {
    aws.subnets()[zone].clone()
}

fn limit(zone: &str, instance_type: &str, usage: Option<Usage>, available: u32) -> Limit {
    Limit { zone: zone.into(), instance_type: instance_type.into(), usage, available }
}

pub async fn requirements_become_the_cheapest_type(aws: &Aws) {
    template(aws, "requirements", "").await;
    let (status, text) = fleet(aws, "requirements", 2, &[(&subnet(aws, 0).0, SMALL)], &[]).await;
    assert_eq!((status, ids(&text).len()), (200, 2), "{text}");
    assert!(texts(&text, "instanceType").iter().all(|kind| kind == "m6i.large"), "{text}");
    assert!(texts(&text, "errorCode").is_empty() && texts(&text, "fleetId")[0].starts_with("fleet-"));
}

pub async fn burstable_types_can_be_had_when_asked_for(aws: &Aws) {
    template(aws, "burstable", "").await;
    let choice = [SMALL, &[("InstanceRequirements.BurstablePerformance", "required")]].concat();
    let (_, text) = fleet(aws, "burstable", 1, &[(&subnet(aws, 0).0, &choice)], &[]).await;
    assert!(texts(&text, "instanceType").iter().all(|kind| kind.starts_with("t3")), "{text}");
}

pub async fn same_token_same_fleet_even_at_once(aws: &Aws) {
    template(aws, "token", "").await;
    let (subnet, more) = (subnet(aws, 0).0, [("ClientToken", "claim-1")]);
    let overrides: [(&str, &[_]); 1] = [(&subnet, SMALL)];
    let answers = join_all((0..5).map(|_| fleet(aws, "token", 3, &overrides, &more))).await;
    let again = fleet(aws, "token", 3, &overrides, &more).await;
    assert!(answers.iter().all(|answer| *answer == again && again.0 == 200), "{answers:?}");
    let (_, all) =
        ec2(aws, "DescribeInstances", &[("Filter.1.Name", "tag:paddock:pool"), ("Filter.1.Value.1", "token")]).await;
    assert_eq!((ids(&again.1).len(), texts(&all, "instanceId").len()), (3, 3));
}

pub async fn same_token_other_request_is_refused(aws: &Aws) {
    template(aws, "mismatch", "").await;
    let (subnet, more) = (subnet(aws, 0).0, [("ClientToken", "claim-2")]);
    assert_eq!(fleet(aws, "mismatch", 1, &[(&subnet, SMALL)], &more).await.0, 200);
    let (status, text) = fleet(aws, "mismatch", 2, &[(&subnet, SMALL)], &more).await;
    assert_eq!((status, texts(&text, "Code")), (400, vec!["IdempotentParameterMismatch".to_owned()]));
}

pub async fn a_zone_without_capacity_sends_the_fleet_elsewhere(aws: &Aws) {
    template(aws, "elsewhere", "").await;
    let ((dry, dry_zone), (wet, wet_zone)) = (subnet(aws, 1), subnet(aws, 2));
    aws.set_capacity(limit(&dry_zone, "c6i.large", Some(Usage::OnDemand), 0));
    let choice: &[_] = &[("InstanceType", "c6i.large")];
    let (_, text) = fleet(aws, "elsewhere", 2, &[(&dry, choice), (&wet, choice)], &[]).await;
    assert_eq!(ids(&text).len(), 2, "{text}");
    assert_eq!(texts(&text, "errorCode"), ["InsufficientInstanceCapacity"]);
    assert!(texts(&text, "errorMessage")[0].contains(&dry_zone), "{text}");
    let zones: Vec<_> =
        aws.instances().into_iter().filter(|one| ids(&text).contains(&one.id)).map(|one| one.zone).collect();
    assert_eq!(zones, [wet_zone.clone(), wet_zone]);
}

pub async fn a_fleet_is_fulfilled_in_part(aws: &Aws) {
    template(aws, "part", "").await;
    let (subnet, zone) = subnet(aws, 3);
    aws.set_capacity(limit(&zone, "c6i.xlarge", Some(Usage::Spot), 2));
    let spot = [("TargetCapacitySpecification.DefaultTargetCapacityType", "spot")];
    let (status, text) = fleet(aws, "part", 5, &[(&subnet, &[("InstanceType", "c6i.xlarge")])], &spot).await;
    assert_eq!((status, ids(&text).len(), texts(&text, "errorCode").len()), (200, 2, 1), "{text}");
    assert!(texts(&text, "lifecycle").iter().all(|lifecycle| lifecycle == "spot"));
}

pub async fn a_fleet_without_capacity_has_only_errors(aws: &Aws) {
    template(aws, "dry", "").await;
    let subnets: Vec<_> = aws.subnets().into_iter().map(|(id, _)| id).collect();
    aws.set_capacity(limit("*", "r6i.large", None, 0));
    let overrides: Vec<(&str, &[_])> =
        subnets.iter().map(|subnet| (subnet.as_str(), [("InstanceType", "r6i.large")].as_slice())).collect();
    let (status, text) = fleet(aws, "dry", 1, &overrides, &[]).await;
    assert_eq!((status, ids(&text).len(), texts(&text, "errorCode").len()), (200, 0, subnets.len()), "{text}");
}

pub async fn fleet_below_its_minimum_launches_nothing(aws: &Aws) {
    template(aws, "minimum", "").await;
    let (subnet, zone) = subnet(aws, 4);
    aws.set_capacity(limit(&zone, "r6i.xlarge", None, 2));
    let choice: &[_] = &[("InstanceType", "r6i.xlarge")];
    let all = [("OnDemandOptions.MinTargetCapacity", "3")];
    let (_, text) = fleet(aws, "minimum", 3, &[(&subnet, choice)], &all).await;
    assert_eq!((ids(&text).len(), texts(&text, "errorCode").len()), (0, 1), "{text}");
    let (_, text) = fleet(aws, "minimum", 2, &[(&subnet, choice)], &[]).await;
    assert_eq!(ids(&text).len(), 2, "what was not launched is still available: {text}");
}

pub async fn tags_come_from_template_and_fleet(aws: &Aws) {
    template(aws, "tagged", "").await;
    let tags = [
        ("TagSpecification.1.ResourceType", "instance"),
        ("TagSpecification.1.Tag.1.Key", "paddock:claim"),
        ("TagSpecification.1.Tag.1.Value", "a & b"),
    ];
    let (_, text) = fleet(aws, "tagged", 1, &[(&subnet(aws, 0).0, SMALL)], &tags).await;
    let id = &ids(&text)[0];
    let (_, described) = ec2(aws, "DescribeInstances", &[("InstanceId.1", id)]).await;
    for tag in ["tagged", "a & b", &texts(&text, "fleetId")[0]] {
        assert!(texts(&described, "value").iter().any(|value| value == tag), "{tag}: {described}");
    }
}

pub async fn instances_are_described_in_pages(aws: &Aws) {
    template(aws, "pages", "").await;
    fleet(aws, "pages", 12, &[(&subnet(aws, 0).0, SMALL)], &[]).await;
    let filter = [("Filter.1.Name", "tag:paddock:pool"), ("Filter.1.Value.1", "pages"), ("MaxResults", "5")];
    let (mut sizes, mut seen, mut token) = (Vec::new(), Vec::new(), None::<String>);
    loop {
        let mut fields = filter.to_vec();
        fields.extend(token.as_deref().map(|token| ("NextToken", token)));
        let (_, page) = ec2(aws, "DescribeInstances", &fields).await;
        sizes.push(texts(&page, "instanceId").len());
        seen.extend(texts(&page, "instanceId"));
        match texts(&page, "nextToken").pop() {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!((sizes, seen.len()), (vec![5, 5, 2], 12));
}

pub async fn fresh_instance_is_missing_for_a_while(aws: &Aws) {
    template(aws, "invisible", "").await;
    let rule = |ms| Rule::on(Service::Ec2, "CreateFleet", Effect::Invisible { ms }).containing("invisible").once();
    aws.add_fault(rule(600_000));
    aws.add_fault(rule(300));
    for found_in_the_end in [false, true] {
        let (_, text) = fleet(aws, "invisible", 1, &[(&subnet(aws, 0).0, SMALL)], &[]).await;
        let id = &ids(&text)[0];
        if found_in_the_end {
            let find = async || {
                Some(ec2(aws, "DescribeInstances", &[("InstanceId.1", id)]).await).filter(|answer| answer.0 == 200)
            };
            eventually("the instance to be seen", find).await;
            continue;
        }
        let (status, text) = ec2(aws, "DescribeInstances", &[("InstanceId.1", id)]).await;
        assert_eq!((status, texts(&text, "Code")), (400, vec!["InvalidInstanceID.NotFound".to_owned()]));
        let (_, all) = ec2(aws, "DescribeInstances", &[]).await;
        assert!(!texts(&all, "instanceId").contains(id));
    }
}

pub async fn one_fleet_falls_short_and_others_do_not(aws: &Aws) {
    template(aws, "short", "").await;
    let subnet = subnet(aws, 0).0;
    let short = Effect::Short { available: 1, usage: None };
    aws.add_fault(Rule::on(Service::Ec2, "CreateFleet", short).containing("short").once());
    let (_, text) = fleet(aws, "short", 3, &[(&subnet, SMALL)], &[]).await;
    assert_eq!(ids(&text).len(), 1, "{text}");
    assert!(texts(&text, "errorCode").iter().any(|code| code == "InsufficientInstanceCapacity"), "{text}");
    let (_, text) = fleet(aws, "short", 3, &[(&subnet, SMALL)], &[]).await;
    assert_eq!((ids(&text).len(), texts(&text, "errorCode").len()), (3, 0), "{text}");
}

/// Prices protect fleets, not the preview.
pub async fn requirements_are_previewed_in_pages(aws: &Aws) {
    let (mut seen, mut token) = (Vec::new(), None::<String>);
    let fields = [
        ("ArchitectureType.1", "x86_64"),
        ("VirtualizationType.1", "hvm"),
        ("InstanceRequirements.VCpuCount.Min", "2"),
        ("InstanceRequirements.VCpuCount.Max", "2"),
        ("InstanceRequirements.MemoryMiB.Min", "4096"),
        ("InstanceRequirements.MemoryMiB.Max", "16384"),
        ("MaxResults", "20"),
    ];
    loop {
        let mut fields = fields.to_vec();
        fields.extend(token.as_deref().map(|token| ("NextToken", token)));
        let (status, page) = ec2(aws, "GetInstanceTypesFromInstanceRequirements", &fields).await;
        assert_eq!(status, 200, "{page}");
        let types = texts(&page, "instanceType");
        assert!(types.len() <= 20, "{page}");
        seen.extend(types);
        match texts(&page, "nextToken").pop() {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    let has = |name: &str| seen.iter().filter(|known| *known == name).count() == 1;
    assert!(seen.len() > 20 && has("c5.large") && has("r5.large") && has("m4.large"), "{seen:?}");
    assert!(!has("t3.medium") && !has("m6g.large"), "{seen:?}");
}

pub async fn image_has_its_root_on_ebs(aws: &Aws) {
    let (_, text) = ec2(aws, "DescribeImages", &[("ImageId.1", aws.ami_id())]).await;
    assert_eq!(texts(&text, "rootDeviceType"), ["ebs"], "{text}");
}

pub async fn an_ended_instance_says_why(aws: &Aws) {
    template(aws, "endings", "").await;
    let (_, text) = fleet(aws, "endings", 2, &[(&subnet(aws, 0).0, SMALL)], &[]).await;
    let ids = ids(&text);
    ec2(aws, "TerminateInstances", &[("InstanceId.1", &ids[0])]).await;
    aws.terminate_because(&ids[1], Ending::server("Client.VolumeLimitExceeded", "Volume limit exceeded"))
        .await
        .unwrap();
    for (id, code) in ids.iter().zip(["Client.UserInitiatedShutdown", "Client.VolumeLimitExceeded"]) {
        let (_, text) = ec2(aws, "DescribeInstances", &[("InstanceId.1", id)]).await;
        let reason = format!("<stateReason><code>{code}</code><message>{code}: ");
        assert!(text.contains(&reason) && text.matches("<stateReason>").count() == 1, "{text}");
    }
}

pub async fn user_data_over_16_kib_is_refused(aws: &Aws) {
    let user_data = STANDARD.encode("x".repeat(16385));
    let fields = [("LaunchTemplateName", "fat"), ("LaunchTemplateData.UserData", &user_data)];
    let (status, text) = ec2(aws, "CreateLaunchTemplate", &fields).await;
    assert_eq!((status, texts(&text, "Code")), (400, vec!["InvalidParameterValue".to_owned()]));
}

/// boto3 comes with moto and checks that other clients can parse the responses too.
pub async fn boto3_reads_the_answer(aws: &Aws) {
    template(aws, "boto", "").await;
    aws.set_capacity(limit("*", "m7i.large", None, 1));
    let script = r#"
import boto3, sys
ec2 = boto3.client("ec2", region_name="us-east-1")
answer = ec2.create_fleet(Type="instant", ClientToken="boto", LaunchTemplateConfigs=[{
    "LaunchTemplateSpecification": {"LaunchTemplateName": "boto", "Version": "$Latest"},
    "Overrides": [{"SubnetId": sys.argv[1], "InstanceRequirements": {
        "VCpuCount": {"Min": 2, "Max": 2}, "MemoryMiB": {"Min": 8192}, "AllowedInstanceTypes": ["m7i.*"]}}]}],
    SpotOptions={"AllocationStrategy": "price-capacity-optimized"},
    TargetCapacitySpecification={"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"},
    TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "boto", "Value": "3"}]}])
[made], [error] = answer["Instances"], answer["Errors"]
assert made["Lifecycle"] == "spot" and made["InstanceType"] == "m7i.large" and len(made["InstanceIds"]) == 1, answer
assert made["LaunchTemplateAndOverrides"]["Overrides"]["SubnetId"] == sys.argv[1], answer
assert made["AvailabilityZone"] and made["SubnetId"] == sys.argv[1], answer
assert error["ErrorCode"] == "UnfulfillableCapacity" and error["Lifecycle"] == "spot", answer
pages = ec2.get_paginator("describe_instances").paginate(Filters=[{"Name": "tag:boto", "Values": ["3"]}])
found = [i for page in pages for r in page["Reservations"] for i in r["Instances"]]
assert [i["InstanceId"] for i in found] == made["InstanceIds"] and found[0]["InstanceLifecycle"] == "spot", found
"#;
    let mut python = Command::new("python3");
    python
        .args(["-c", script, &subnet(aws, 0).0])
        .envs(aws.env())
        .env("PYTHONPATH", paddock_bed_process::tool("moto").unwrap());
    let output = tokio::task::spawn_blocking(move || python.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
