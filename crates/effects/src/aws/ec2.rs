//! EC2: launch templates, fleets and termination.

use std::sync::Arc;

use aws_sdk_ec2::{
    Client,
    types::{
        BurstablePerformance, DefaultTargetCapacityType, Filter, FleetLaunchTemplateConfigRequest,
        FleetLaunchTemplateOverridesRequest, FleetLaunchTemplateSpecificationRequest, FleetOnDemandAllocationStrategy,
        FleetType, InstanceRequirementsRequest, InstanceStateName, LaunchTemplateHttpTokensState,
        LaunchTemplateIamInstanceProfileSpecificationRequest, LaunchTemplateInstanceMetadataOptionsRequest,
        LaunchTemplateInstanceMetadataTagsState, LaunchTemplateTagSpecificationRequest, MemoryMiBRequest,
        OnDemandOptionsRequest, RequestLaunchTemplateData, ResourceType, ShutdownBehavior, SpotAllocationStrategy,
        SpotOptionsRequest, Tag, TagSpecification, TargetCapacitySpecificationRequest, VCpuCountRangeRequest,
    },
};
use paddock_core::{
    api::{Ec2Pool, LaunchOrder, LaunchTemplate, TAG_CLUSTER, TAG_POOL, UsageClass},
    ec2::{launch::TemplateRequest, launch_error::Cause},
    names::PoolKey,
};

use super::{
    AwsError,
    instance_types::{Size, Sizes},
    without_encoded_details, word,
};

/// The state reason of a spot instance that EC2 reclaimed.
const SPOT_RECLAIMED: &str = "Server.SpotInstanceTermination";

#[derive(Clone)]
pub struct Machines {
    client: Client,
    sizes: Arc<Sizes>,
}

/// An instance that a fleet launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    pub id: String,
    pub instance_type: String,
    pub zone: String,
    pub usage_class: UsageClass,
    /// None if EC2 did not describe its type.
    pub size: Option<Size>,
}

/// The result of a fleet request. It may contain both instances and causes, because a fleet can be fulfilled partially.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FleetOutcome {
    pub fleet_id: String,
    pub launched: Vec<Launched>,
    /// Why the remaining instances were not launched, by zone and type.
    pub causes: Vec<Cause>,
}

/// An instance as EC2 describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    pub id: String,
    pub gone: bool,
    /// EC2 reclaimed the spot instance.
    pub reclaimed: bool,
    /// Its tag with the pool (`namespace/name`); empty without one.
    pub pool: String,
    pub instance_type: String,
    pub zone: String,
    pub usage_class: UsageClass,
}

impl Machines {
    pub fn new(client: Client) -> Self {
        Self { client, sizes: Arc::default() }
    }

    /// Creates a template version unless the latest one has the digest of `wanted`.
    pub async fn ensure_template(&self, wanted: &TemplateRequest) -> Result<LaunchTemplate, AwsError> {
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
            Err(error) if error.code().is_some_and(|code| code.starts_with("InvalidLaunchTemplateName.NotFound")) => {
                Vec::new()
            }
            Err(error) => return Err(error),
        };
        let existing = versions.first().map(|version| LaunchTemplate {
            id: version.launch_template_id.clone().unwrap_or_default(),
            version: version.version_number.unwrap_or_default(),
            digest: version.version_description.clone(),
        });
        match existing {
            Some(existing) if existing.digest.as_deref() == Some(&wanted.digest) => Ok(existing),
            Some(existing) => {
                let create = self.client.create_launch_template_version().launch_template_id(&existing.id);
                let create = create.version_description(&wanted.digest).launch_template_data(template_data(wanted));
                let answer = create.send().await.map_err(word("CreateLaunchTemplateVersion"))?;
                let version = answer.launch_template_version.and_then(|version| version.version_number);
                Ok(LaunchTemplate {
                    version: version.unwrap_or(existing.version + 1),
                    digest: Some(wanted.digest.clone()),
                    ..existing
                })
            }
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
                })
            }
        }
    }

    pub async fn remove_template(&self, name: &str) -> Result<(), AwsError> {
        let delete = self.client.delete_launch_template().launch_template_name(name).send().await;
        match delete.map_err(word("DeleteLaunchTemplate")) {
            Err(error) if !error.code().is_some_and(|code| code.contains("NotFound")) => Err(error),
            _ => Ok(()),
        }
    }

    /// Checks that the subnets, image and security groups of a pool exist.
    pub async fn check(&self, pool: &Ec2Pool) -> Result<(), AwsError> {
        let subnets = self.client.describe_subnets().set_subnet_ids(Some(pool.subnet_ids.clone())).send();
        let images = self.client.describe_images().image_ids(&pool.ami_id).send();
        let groups = self.client.describe_security_groups();
        let groups = groups.set_group_ids(Some(pool.security_group_ids.clone())).send();
        let (subnets, images, groups) = tokio::join!(subnets, images, groups);
        subnets.map_err(word("DescribeSubnets"))?;
        let images = images.map_err(word("DescribeImages"))?.images.unwrap_or_default();
        groups.map_err(word("DescribeSecurityGroups"))?;
        if images.is_empty() {
            // EC2 does not list images that are not shared with the account.
            let (call, code) = ("DescribeImages", "InvalidAMIID.NotFound".to_owned());
            let message = format!("the image {} is not there, or not for this account", pool.ami_id);
            return Err(AwsError::Refused { call, code, message });
        }
        Ok(())
    }

    /// Requests a fleet. The client token makes the call idempotent, so it can be repeated after a lost response.
    pub async fn create_fleet(
        &self,
        order: &LaunchOrder,
        instance_tags: &[(String, String)],
    ) -> Result<FleetOutcome, AwsError> {
        let count = i32::try_from(order.requested).unwrap_or(i32::MAX);
        let requirements = InstanceRequirementsRequest::builder()
            .v_cpu_count(VCpuCountRangeRequest::builder().min(to_i32(order.cpu)).build())
            .memory_mib(MemoryMiBRequest::builder().min(to_i32(order.memory_mib)).build())
            .set_allowed_instance_types(Some(order.allowed_instance_types.clone()))
            .burstable_performance(BurstablePerformance::Excluded)
            .build();
        let overrides = order.subnet_ids.iter().map(|subnet| {
            FleetLaunchTemplateOverridesRequest::builder()
                .subnet_id(subnet)
                .instance_requirements(requirements.clone())
                .build()
        });
        let template = FleetLaunchTemplateSpecificationRequest::builder()
            .launch_template_id(&order.launch_template.id)
            .version(order.launch_template.version.to_string())
            .build();
        let config = FleetLaunchTemplateConfigRequest::builder()
            .launch_template_specification(template)
            .set_overrides(Some(overrides.collect()))
            .build();
        let (kind, on_demand, spot) = match order.usage_class {
            UsageClass::OnDemand => (DefaultTargetCapacityType::OnDemand, count, 0),
            UsageClass::Spot => (DefaultTargetCapacityType::Spot, 0, count),
        };
        let capacity = TargetCapacitySpecificationRequest::builder()
            .total_target_capacity(count)
            .on_demand_target_capacity(on_demand)
            .spot_target_capacity(spot)
            .default_target_capacity_type(kind)
            .build();
        let on_demand_options =
            OnDemandOptionsRequest::builder().allocation_strategy(FleetOnDemandAllocationStrategy::LowestPrice).build();
        let spot_options =
            SpotOptionsRequest::builder().allocation_strategy(SpotAllocationStrategy::PriceCapacityOptimized).build();
        let answer = self
            .client
            .create_fleet()
            .r#type(FleetType::Instant)
            .client_token(&order.client_token)
            .launch_template_configs(config)
            .target_capacity_specification(capacity)
            .on_demand_options(on_demand_options)
            .spot_options(spot_options)
            .tag_specifications(tags(ResourceType::Instance, instance_tags))
            .send()
            .await
            .map_err(word("CreateFleet"))?;
        let mut launched = Vec::new();
        for group in answer.instances.unwrap_or_default() {
            let chosen = group.launch_template_and_overrides.and_then(|chosen| chosen.overrides);
            let zone = chosen.and_then(|chosen| chosen.availability_zone).unwrap_or_default();
            let instance_type = group.instance_type.map(|kind| kind.as_str().to_owned()).unwrap_or_default();
            for id in group.instance_ids.unwrap_or_default() {
                let (instance_type, zone) = (instance_type.clone(), zone.clone());
                launched.push(Launched { id, instance_type, zone, usage_class: order.usage_class, size: None });
            }
        }
        let kinds = launched.iter().map(|launched| launched.instance_type.clone()).collect();
        let sizes = self.sizes.of(&self.client, &kinds).await;
        launched.iter_mut().for_each(|launched| launched.size = sizes.get(&launched.instance_type).copied());
        let causes = answer.errors.unwrap_or_default().into_iter().map(|error| {
            let chosen = error.launch_template_and_overrides.and_then(|chosen| chosen.overrides);
            let (subnet, zone, kind) = chosen.map_or((None, None, None), |chosen| {
                (chosen.subnet_id, chosen.availability_zone, chosen.instance_type)
            });
            Cause {
                code: error.error_code.unwrap_or_default(),
                message: without_encoded_details(&error.error_message.unwrap_or_default()).to_owned(),
                subnet: subnet.unwrap_or_default(),
                zone: zone.unwrap_or_default(),
                instance_type: kind.map(|kind| kind.as_str().to_owned()).unwrap_or_default(),
            }
        });
        Ok(FleetOutcome { fleet_id: answer.fleet_id.unwrap_or_default(), launched, causes: causes.collect() })
    }

    /// Lists every instance with the tags of a cluster's pool.
    pub async fn of_pool(&self, cluster: &str, pool: &PoolKey) -> Result<Vec<Described>, AwsError> {
        self.tagged(&[(TAG_CLUSTER, cluster), (TAG_POOL, &pool.to_string())]).await
    }

    /// The instances with this cluster's tag, recently terminated ones included.
    pub async fn of_cluster(&self, cluster: &str) -> Result<Vec<Described>, AwsError> {
        self.tagged(&[(TAG_CLUSTER, cluster)]).await
    }

    async fn tagged(&self, tags: &[(&str, &str)]) -> Result<Vec<Described>, AwsError> {
        let filter = |(tag, value): &(&str, &str)| Filter::builder().name(format!("tag:{tag}")).values(*value).build();
        let describe = self.client.describe_instances().set_filters(Some(tags.iter().map(filter).collect()));
        let mut pages = describe.into_paginator().page_size(1000).send();
        let mut found = Vec::new();
        while let Some(page) = pages.next().await {
            let page = page.map_err(word("DescribeInstances"))?;
            let instances =
                page.reservations.unwrap_or_default().into_iter().flat_map(|r| r.instances.unwrap_or_default());
            found.extend(instances.filter_map(described));
        }
        Ok(found)
    }

    /// Terminates instances. An unknown id is no error. EC2 refuses a whole call for one unknown or protected instance;
    /// then each gets a call of its own, so that it does not save the others, and the first error is returned.
    pub async fn terminate(&self, ids: &[String]) -> Result<(), AwsError> {
        if ids.is_empty() {
            return Ok(());
        }
        let all = self.terminate_together(ids).await;
        if ids.len() == 1 || !matches!(all, Err(AwsError::Refused { .. } | AwsError::Denied { .. })) {
            return all.or_else(unless_not_found);
        }
        let mut outcome = Ok(());
        for id in ids {
            outcome = outcome.and(self.terminate_together(std::slice::from_ref(id)).await.or_else(unless_not_found));
        }
        outcome
    }

    async fn terminate_together(&self, ids: &[String]) -> Result<(), AwsError> {
        let call = self.client.terminate_instances().set_instance_ids(Some(ids.to_vec()));
        call.send().await.map_err(word("TerminateInstances")).map(drop)
    }
}

fn unless_not_found(error: AwsError) -> Result<(), AwsError> {
    if error.code() == Some("InvalidInstanceID.NotFound") { Ok(()) } else { Err(error) }
}

fn described(instance: aws_sdk_ec2::types::Instance) -> Option<Described> {
    let gone = matches!(
        instance.state.and_then(|state| state.name),
        Some(InstanceStateName::Terminated | InstanceStateName::ShuttingDown)
    );
    let tags = instance.tags.unwrap_or_default();
    let pool = tags.into_iter().find(|tag| tag.key.as_deref() == Some(TAG_POOL)).and_then(|tag| tag.value);
    let spot = matches!(instance.instance_lifecycle, Some(aws_sdk_ec2::types::InstanceLifecycleType::Spot));
    Some(Described {
        id: instance.instance_id?,
        gone,
        reclaimed: instance.state_reason.and_then(|reason| reason.code).is_some_and(|code| code == SPOT_RECLAIMED),
        pool: pool.unwrap_or_default(),
        instance_type: instance.instance_type.map(|kind| kind.as_str().to_owned()).unwrap_or_default(),
        zone: instance.placement.and_then(|placement| placement.availability_zone).unwrap_or_default(),
        usage_class: if spot { UsageClass::Spot } else { UsageClass::OnDemand },
    })
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
        .instance_metadata_tags(LaunchTemplateInstanceMetadataTagsState::Enabled)
        .build();
    RequestLaunchTemplateData::builder()
        .image_id(&wanted.ami_id)
        .iam_instance_profile(profile.build())
        .set_security_group_ids(Some(wanted.security_group_ids.clone()))
        .user_data(&wanted.user_data)
        .metadata_options(metadata)
        // An agent terminates its machine by shutting it down, which needs no AWS permission.
        .instance_initiated_shutdown_behavior(ShutdownBehavior::Terminate)
        .tag_specifications(
            LaunchTemplateTagSpecificationRequest::builder()
                .resource_type(ResourceType::Instance)
                .set_tags(Some(tag_list(&wanted.tags)))
                .build(),
        )
        .build()
}

fn tags(resource: ResourceType, tags: &[(String, String)]) -> TagSpecification {
    TagSpecification::builder().resource_type(resource).set_tags(Some(tag_list(tags))).build()
}

fn tag_list(tags: &[(String, String)]) -> Vec<Tag> {
    tags.iter().map(|(name, value)| Tag::builder().key(name).value(value).build()).collect()
}

fn to_i32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
