use paddock_bed_aws::Aws;

use crate::{
    fleet::{fleet, ids},
    support::{ec2, texts},
};

const TYPE: &[(&str, &str)] = &[("InstanceType", "m6i.large")];

async fn create(aws: &Aws, name: &str, fields: &[(&str, &str)]) {
    let fields = [&[("LaunchTemplateName", name)], fields].concat();
    let (status, text) = ec2(aws, "CreateLaunchTemplate", &fields).await;
    assert_eq!(status, 200, "{text}");
}

pub async fn an_image_is_looked_up_in_ssm_when_it_is_needed(aws: &Aws) {
    let newer = aws.register_image("newer").await.unwrap();
    create(aws, "by-parameter", &[("LaunchTemplateData.ImageId", "resolve:ssm:/ci/image")]).await;
    let image = async |resolve| {
        let fields =
            [("LaunchTemplateName", "by-parameter"), ("LaunchTemplateVersion.1", "1"), ("ResolveAlias", resolve)];
        let (status, text) = ec2(aws, "DescribeLaunchTemplateVersions", &fields).await;
        (status, texts(&text, "imageId"))
    };
    let subnet = aws.subnets()[0].0.clone();
    let launched = async || fleet(aws, "by-parameter", 1, &[(&subnet, TYPE)], &[]).await;

    assert_eq!(image("true").await.0, 400, "there is no such parameter");
    assert!(ids(&launched().await.1).is_empty());
    aws.set_parameter("/ci/image", aws.ami_id());
    assert_eq!(image("false").await, (200, vec!["resolve:ssm:/ci/image".to_owned()]));
    assert_eq!(image("true").await, (200, vec![aws.ami_id().to_owned()]));
    aws.set_parameter("/ci/image", &newer);
    assert_eq!(image("true").await, (200, vec![newer.clone()]));
    let (_, text) = launched().await;
    let id = ids(&text).pop().unwrap_or_else(|| panic!("{text}"));
    assert_eq!(aws.instances().into_iter().find(|instance| instance.id == id).unwrap().image_id, newer);
}

pub async fn volumes_and_an_address_come_from_the_template(aws: &Aws) {
    let subnet = aws.subnets()[0].0.clone();
    let interface = [
        ("LaunchTemplateData.ImageId", aws.ami_id()),
        ("LaunchTemplateData.NetworkInterface.1.DeviceIndex", "0"),
        ("LaunchTemplateData.NetworkInterface.1.AssociatePublicIpAddress", "true"),
        ("LaunchTemplateData.NetworkInterface.1.SecurityGroupId.1", aws.security_group_id()),
    ];
    let volume = [
        ("LaunchTemplateData.BlockDeviceMapping.1.DeviceName", "/dev/xvdb"),
        ("LaunchTemplateData.BlockDeviceMapping.1.Ebs.VolumeSize", "30"),
        ("LaunchTemplateData.BlockDeviceMapping.1.Ebs.VolumeType", "gp3"),
        ("LaunchTemplateData.TagSpecification.1.ResourceType", "volume"),
        ("LaunchTemplateData.TagSpecification.1.Tag.1.Key", "team"),
        ("LaunchTemplateData.TagSpecification.1.Tag.1.Value", "a"),
    ];
    create(aws, "whole", &[&interface[..], &volume].concat()).await;
    let (_, text) = fleet(aws, "whole", 1, &[(&subnet, TYPE)], &[]).await;
    let id = ids(&text).pop().unwrap_or_else(|| panic!("{text}"));
    let filter = [("Filter.1.Name", "attachment.instance-id"), ("Filter.1.Value.1", id.as_str())];
    let (_, text) = ec2(aws, "DescribeVolumes", &filter).await;
    // Beside the image's root volume.
    let volumes: Vec<_> = texts(&text, "size").into_iter().zip(texts(&text, "volumeType")).collect();
    assert!(volumes.contains(&("30".to_owned(), "gp3".to_owned())), "{volumes:?}");
    assert!(text.contains("<key>team</key>"), "{text}");
    let (_, text) = ec2(aws, "DescribeInstances", &[("InstanceId.1", &id)]).await;
    assert!(!texts(&text, "publicIp").is_empty(), "{text}");
    assert!(texts(&text, "groupId").iter().any(|group| group == aws.security_group_id()), "{text}");

    let both = [("LaunchTemplateData.SecurityGroupId.1", aws.security_group_id())];
    create(aws, "both", &[&interface[..], &both].concat()).await;
    let (_, text) = fleet(aws, "both", 1, &[(&subnet, TYPE)], &[]).await;
    assert_eq!(texts(&text, "errorCode"), ["InvalidParameterCombination"], "{text}");
}
