//! What EC2 makes is seen by other calls only after a while.

use paddock_bed_aws::{
    Aws, Service,
    faults::{Effect, Rule},
};

use crate::{
    fleet::{fleet, ids, template},
    support::{ec2, eventually, texts},
};

const TYPE: &[(&str, &str)] = &[("InstanceType", "m5.large")];

fn hide(aws: &Aws, action: &str, contains: &str, ms: u64) {
    aws.add_fault(Rule::on(Service::Ec2, action, Effect::Invisible { ms }).containing(contains).once());
}

fn code(answer: &(u16, String)) -> (u16, String) {
    (answer.0, texts(&answer.1, "Code").concat())
}

pub async fn new_launch_template_is_missing_for_a_while(aws: &Aws) {
    let subnet = &aws.subnets()[0].0;
    hide(aws, "CreateLaunchTemplate", "unseen", 600_000);
    template(aws, "unseen", "").await;
    let unknown = (400, "InvalidLaunchTemplateName.NotFoundException".to_owned());
    assert_eq!(code(&fleet(aws, "unseen", 1, &[(subnet, TYPE)], &[]).await), unknown);
    let named = [("LaunchTemplateName", "unseen"), ("LaunchTemplateVersion.1", "$Latest")];
    assert_eq!(code(&ec2(aws, "DescribeLaunchTemplateVersions", &named).await), unknown);
    let again = [("LaunchTemplateName", "unseen"), ("LaunchTemplateData.ImageId", aws.ami_id())];
    let taken = (400, "InvalidLaunchTemplateName.AlreadyExistsException".to_owned());
    assert_eq!(code(&ec2(aws, "CreateLaunchTemplate", &again).await), taken, "its name is taken all the same");

    hide(aws, "CreateLaunchTemplate", "soon-seen", 300);
    template(aws, "soon-seen", "").await;
    let launched = async || {
        let answer = fleet(aws, "soon-seen", 1, &[(subnet, TYPE)], &[]).await;
        Some(answer).filter(|answer| answer.0 == 200)
    };
    eventually("the template to be seen", launched).await;
}

pub async fn new_version_is_missing_for_a_while(aws: &Aws) {
    template(aws, "versions", "").await;
    hide(aws, "CreateLaunchTemplateVersion", "versions", 600_000);
    let fields = [("LaunchTemplateName", "versions"), ("LaunchTemplateData.ImageId", aws.ami_id())];
    let (status, text) = ec2(aws, "CreateLaunchTemplateVersion", &fields).await;
    assert_eq!((status, texts(&text, "versionNumber")), (200, vec!["2".to_owned()]));
    let id = &texts(&text, "launchTemplateId")[0];
    let describe = async |version: &str| {
        let named = [("LaunchTemplateId", id.as_str()), ("LaunchTemplateVersion.1", version)];
        ec2(aws, "DescribeLaunchTemplateVersions", &named).await
    };
    assert_eq!(texts(&describe("$Latest").await.1, "versionNumber"), ["1"]);
    let unknown = (400, "InvalidLaunchTemplateId.VersionNotFound".to_owned());
    assert_eq!(code(&describe("2").await), unknown);
    let launch = [
        ("Type", "instant"),
        ("TargetCapacitySpecification.TotalTargetCapacity", "1"),
        ("LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateId", id),
        ("LaunchTemplateConfigs.1.LaunchTemplateSpecification.Version", "2"),
        ("LaunchTemplateConfigs.1.Overrides.1.InstanceType", "m5.large"),
    ];
    assert_eq!(code(&ec2(aws, "CreateFleet", &launch).await), unknown);
}

pub async fn new_instance_is_unknown_for_a_while(aws: &Aws) {
    template(aws, "newborn", "").await;
    hide(aws, "CreateFleet", "newborn", 600_000);
    let subnet = &aws.subnets()[0].0;
    let new = ids(&fleet(aws, "newborn", 1, &[(subnet, TYPE)], &[]).await.1).remove(0);
    let old = ids(&fleet(aws, "newborn", 1, &[(subnet, TYPE)], &[]).await.1).remove(0);
    let unknown = (400, "InvalidInstanceID.NotFound".to_owned());
    let both = [("InstanceId.1", old.as_str()), ("InstanceId.2", new.as_str())];
    assert_eq!(code(&ec2(aws, "TerminateInstances", &both).await), unknown);
    let (_, text) = ec2(aws, "DescribeInstances", &both[..1]).await;
    assert!(texts(&text, "name").contains(&"running".to_owned()), "none is terminated: {text}");
    let tag = [("ResourceId.1", new.as_str()), ("Tag.1.Key", "a"), ("Tag.1.Value", "b")];
    assert_eq!(code(&ec2(aws, "CreateTags", &tag).await), unknown);
}
