//! EC2: launch templates.

use std::time::{Duration, Instant};

use aws_sdk_ec2::types::{
    LaunchTemplateBlockDeviceMappingRequest, LaunchTemplateEbsBlockDeviceRequest, LaunchTemplateHttpTokensState,
    LaunchTemplateIamInstanceProfileSpecificationRequest, LaunchTemplateInstanceMetadataOptionsRequest,
    LaunchTemplateInstanceMetadataTagsState, LaunchTemplateInstanceNetworkInterfaceSpecificationRequest,
    LaunchTemplateTagSpecificationRequest, RequestLaunchTemplateData, ResourceType, ShutdownBehavior, VolumeType,
};
use paddock_core::{
    api::{BlockDevice, LaunchTemplate, SSM_PREFIX},
    ec2::launch::TemplateRequest,
};

use super::{
    AwsError,
    ec2::{Machines, tag_list, tags},
    fleet::to_i32,
    word,
};
use crate::lock;

/// How long EC2 may take to show a new version of a launch template.
const VISIBLE_AFTER: Duration = Duration::from_secs(60);

impl Machines {
    /// Creates a template version unless the latest one has the digest of `wanted`.
    /// Its image is the one that it leads to now, or none if EC2 does not show a new version yet.
    pub async fn ensure_template(&self, wanted: &TemplateRequest) -> Result<LaunchTemplate, AwsError> {
        let template = self.ensure_version(wanted).await?;
        let image = match wanted.image.starts_with(SSM_PREFIX) {
            true => self.resolved_image(&template).await?,
            false => Some(wanted.image.clone()),
        };
        Ok(LaunchTemplate { image, ..template })
    }

    /// The image that a template's SSM parameter holds.
    async fn resolved_image(&self, template: &LaunchTemplate) -> Result<Option<String>, AwsError> {
        let describe = self.client.describe_launch_template_versions().launch_template_id(&template.id);
        let describe = describe.versions(template.version.to_string()).resolve_alias(true);
        match describe.send().await.map_err(word("DescribeLaunchTemplateVersions")) {
            Ok(answer) => {
                let version = answer.launch_template_versions.unwrap_or_default().into_iter().next();
                Ok(version.and_then(|version| version.launch_template_data?.image_id))
            }
            Err(error) if error.code().is_some_and(|code| code.starts_with("InvalidLaunchTemplate")) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn ensure_version(&self, wanted: &TemplateRequest) -> Result<LaunchTemplate, AwsError> {
        let is_wanted = |template: &LaunchTemplate| template.digest.as_deref() == Some(&wanted.digest);
        let latest = self
            .client
            .describe_launch_template_versions()
            .launch_template_name(&wanted.name)
            .versions("$Latest")
            .send()
            .await
            .map_err(word("DescribeLaunchTemplateVersions"));
        let versions = match latest {
            Ok(answer) => answer.launch_template_versions.unwrap_or_default(),
            Err(error) if error.is_template_gone() => Vec::new(),
            Err(error) => return Err(error),
        };
        let existing = versions.first().map(|version| LaunchTemplate {
            id: version.launch_template_id.clone().unwrap_or_default(),
            version: version.version_number.unwrap_or_default(),
            digest: version.version_description.clone(),
            image: None,
        });
        match existing {
            Some(existing) if is_wanted(&existing) => Ok(existing),
            Some(existing) => match self.new_version(&existing).filter(is_wanted) {
                Some(new) => Ok(new),
                None => self.add_template_version(wanted, existing).await,
            },
            None => {
                let create = self.client.create_launch_template().launch_template_name(&wanted.name);
                let create = create
                    .version_description(&wanted.digest)
                    .launch_template_data(template_data(wanted))
                    .tag_specifications(tags(ResourceType::LaunchTemplate, &wanted.tags));
                let answer = create.send().await.map_err(word("CreateLaunchTemplate"))?;
                let template = answer.launch_template;
                Ok(LaunchTemplate {
                    version: template.as_ref().and_then(|template| template.latest_version_number).unwrap_or(1),
                    id: template.and_then(|template| template.launch_template_id).unwrap_or_default(),
                    digest: Some(wanted.digest.clone()),
                    image: None,
                })
            }
        }
    }

    async fn add_template_version(
        &self,
        wanted: &TemplateRequest,
        existing: LaunchTemplate,
    ) -> Result<LaunchTemplate, AwsError> {
        let create = self.client.create_launch_template_version().launch_template_id(&existing.id);
        let create = create.version_description(&wanted.digest).launch_template_data(template_data(wanted));
        let answer = create.send().await.map_err(word("CreateLaunchTemplateVersion"))?;
        let version = answer.launch_template_version.and_then(|version| version.version_number);
        let (version, digest) = (version.unwrap_or(existing.version + 1), Some(wanted.digest.clone()));
        let new = LaunchTemplate { version, digest, ..existing };
        lock(&self.new_versions).insert(new.id.clone(), (Instant::now(), new.clone()));
        Ok(new)
    }

    /// A version that was created a moment ago, and that EC2 may not show yet.
    fn new_version(&self, latest: &LaunchTemplate) -> Option<LaunchTemplate> {
        let mut versions = lock(&self.new_versions);
        versions.retain(|_, (at, _)| at.elapsed() < VISIBLE_AFTER);
        versions.get(&latest.id).map(|(_, new)| new.clone()).filter(|new| new.version > latest.version)
    }

    pub async fn remove_template(&self, name: &str) -> Result<(), AwsError> {
        let delete = self.client.delete_launch_template().launch_template_name(name).send().await;
        match delete.map_err(word("DeleteLaunchTemplate")) {
            Err(error) if !error.code().is_some_and(|code| code.contains("NotFound")) => Err(error),
            _ => Ok(()),
        }
    }
}

fn template_data(wanted: &TemplateRequest) -> RequestLaunchTemplateData {
    let profile = LaunchTemplateIamInstanceProfileSpecificationRequest::builder();
    let profile = if wanted.instance_profile.starts_with("arn:") {
        profile.arn(&wanted.instance_profile)
    } else {
        profile.name(&wanted.instance_profile)
    };
    let metadata = LaunchTemplateInstanceMetadataOptionsRequest::builder()
        .http_tokens(LaunchTemplateHttpTokensState::Required)
        .http_put_response_hop_limit(i32::from(wanted.hop_limit))
        .instance_metadata_tags(LaunchTemplateInstanceMetadataTagsState::Enabled)
        .build();
    // EC2 takes either security groups or a network interface that has them. The subnet comes with the fleet.
    let (groups, interface) = match wanted.public_address {
        None => (Some(wanted.security_group_ids.clone()), None),
        Some(public) => (None, Some(interface(public, &wanted.security_group_ids))),
    };
    RequestLaunchTemplateData::builder()
        .image_id(&wanted.image)
        .iam_instance_profile(profile.build())
        .set_security_group_ids(groups)
        .set_network_interfaces(interface.map(|interface| vec![interface]))
        .set_block_device_mappings(mappings(&wanted.block_devices))
        .user_data(&wanted.user_data)
        .metadata_options(metadata)
        // An agent terminates its machine by shutting it down, which needs no AWS permission.
        .instance_initiated_shutdown_behavior(ShutdownBehavior::Terminate)
        .tag_specifications(tagged(ResourceType::Instance, wanted))
        .tag_specifications(tagged(ResourceType::Volume, wanted))
        .build()
}

fn tagged(resource: ResourceType, wanted: &TemplateRequest) -> LaunchTemplateTagSpecificationRequest {
    let tags = LaunchTemplateTagSpecificationRequest::builder().resource_type(resource);
    tags.set_tags(Some(tag_list(&wanted.tags))).build()
}

/// The first network interface, which ends with its machine.
fn interface(public: bool, groups: &[String]) -> LaunchTemplateInstanceNetworkInterfaceSpecificationRequest {
    LaunchTemplateInstanceNetworkInterfaceSpecificationRequest::builder()
        .device_index(0)
        .associate_public_ip_address(public)
        .delete_on_termination(true)
        .set_groups(Some(groups.to_vec()))
        .build()
}

/// None without volumes: EC2 takes no empty list for none.
fn mappings(devices: &[BlockDevice]) -> Option<Vec<LaunchTemplateBlockDeviceMappingRequest>> {
    let mapping = |device: &BlockDevice| {
        let volume = LaunchTemplateEbsBlockDeviceRequest::builder()
            .volume_type(VolumeType::from(device.type_.as_str()))
            .set_volume_size(device.size.map(to_i32))
            .set_iops(device.iops.map(to_i32))
            .set_throughput(device.throughput.map(to_i32))
            .set_encrypted(device.encrypted)
            .delete_on_termination(true)
            .build();
        LaunchTemplateBlockDeviceMappingRequest::builder().device_name(&device.device_name).ebs(volume).build()
    };
    (!devices.is_empty()).then(|| devices.iter().map(mapping).collect())
}

#[cfg(test)]
#[path = "launch_template_tests.rs"]
mod tests;
