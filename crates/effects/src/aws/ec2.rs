//! EC2: what a pool needs there, its instances, and their termination.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Instant,
};

use aws_sdk_ec2::{
    Client,
    types::{Filter, InstanceStateName, ResourceType, Tag, TagSpecification},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use paddock_core::{
    api::{Ec2Pool, LaunchTemplate, TAG_CLUSTER, TAG_POOL, UsageClass},
    ec2::{launch_error::Cause, zones::Subnet},
    names::PoolKey,
};

use super::{
    AwsError,
    instance_types::{Size, Sizes, TypeCounts},
    word,
};

/// The state reason of a spot instance that EC2 reclaimed.
const SPOT_RECLAIMED: &str = "Server.SpotInstanceTermination";

#[derive(Clone)]
pub struct Machines {
    pub(super) client: Client,
    pub(super) sizes: Arc<Sizes>,
    pub(super) type_counts: Arc<TypeCounts>,
    /// The template versions that were created last, by their template's id.
    pub(super) new_versions: Arc<Mutex<HashMap<String, (Instant, LaunchTemplate)>>>,
}

/// Where a pool's machines are launched, as EC2 describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    pub subnets: Vec<Subnet>,
    /// Of the image.
    pub architecture: String,
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
    /// EC2's reason for its state, as code and message; empty if there is none.
    pub state_reason: String,
    /// Its tag with the pool (`namespace/name`); empty without one.
    pub pool: String,
    pub instance_type: String,
    pub zone: String,
    pub usage_class: UsageClass,
}

impl Machines {
    pub fn new(client: Client) -> Self {
        Self { client, sizes: Arc::default(), type_counts: Arc::default(), new_versions: Arc::default() }
    }

    /// Checks that the subnets, image and security groups of a pool exist, and describes where machines are launched.
    pub async fn check(&self, pool: &Ec2Pool, image: &str) -> Result<Site, AwsError> {
        let subnets = self.client.describe_subnets().set_subnet_ids(Some(pool.subnet_ids.clone())).send();
        let images = self.client.describe_images().image_ids(image).send();
        let groups = self.client.describe_security_groups();
        let groups = groups.set_group_ids(Some(pool.security_group_ids.clone())).send();
        let (subnets, images, groups) = tokio::join!(subnets, images, groups);
        let subnets = subnets.map_err(word("DescribeSubnets"))?.subnets.unwrap_or_default();
        let images = images.map_err(word("DescribeImages"))?.images.unwrap_or_default();
        groups.map_err(word("DescribeSecurityGroups"))?;
        let Some(image) = images.into_iter().next() else {
            // EC2 does not list images that are not shared with the account.
            let (call, code) = ("DescribeImages", "InvalidAMIID.NotFound".to_owned());
            let message = format!("the image {image} is not there, or not for this account");
            return Err(AwsError::Refused { call, code, message });
        };
        Ok(Site {
            subnets: subnets.into_iter().filter_map(described_subnet).collect(),
            architecture: image.architecture.map_or_else(|| "x86_64".to_owned(), |it| it.as_str().to_owned()),
        })
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

    /// What an instance has written to its console, as far as EC2 has it: it keeps up to 64 KB, for an hour after the end.
    pub async fn console(&self, id: &str) -> Result<String, AwsError> {
        let answer = self.client.get_console_output().instance_id(id).send().await.map_err(word("GetConsoleOutput"))?;
        let output = BASE64_STANDARD.decode(answer.output.unwrap_or_default()).unwrap_or_default();
        // A terminal's line ends.
        Ok(String::from_utf8_lossy(&output).replace('\r', ""))
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
    let reason = instance.state_reason.map(|reason| (reason.code, reason.message)).unwrap_or_default();
    let (code, message) = (reason.0.unwrap_or_default(), reason.1.unwrap_or_default());
    let spot = matches!(instance.instance_lifecycle, Some(aws_sdk_ec2::types::InstanceLifecycleType::Spot));
    Some(Described {
        id: instance.instance_id?,
        gone,
        reclaimed: code == SPOT_RECLAIMED,
        // The message repeats the code.
        state_reason: if message.starts_with(&code) { message } else { format!("{code}: {message}") },
        pool: pool.unwrap_or_default(),
        instance_type: instance.instance_type.map(|kind| kind.as_str().to_owned()).unwrap_or_default(),
        zone: instance.placement.and_then(|placement| placement.availability_zone).unwrap_or_default(),
        usage_class: if spot { UsageClass::Spot } else { UsageClass::OnDemand },
    })
}

fn described_subnet(subnet: aws_sdk_ec2::types::Subnet) -> Option<Subnet> {
    Some(Subnet {
        id: subnet.subnet_id?,
        zone: subnet.availability_zone?,
        free_addresses: subnet.available_ip_address_count.and_then(|count| u32::try_from(count).ok()).unwrap_or(0),
    })
}

pub(super) fn tags(resource: ResourceType, tags: &[(String, String)]) -> TagSpecification {
    TagSpecification::builder().resource_type(resource).set_tags(Some(tag_list(tags))).build()
}

pub(super) fn tag_list(tags: &[(String, String)]) -> Vec<Tag> {
    tags.iter().map(|(name, value)| Tag::builder().key(name).value(value).build()).collect()
}
