//! Instance types: their sizes, because EC2's answer to a launch names the type alone and a machine may be larger than what
//! it was ordered for; and how many of them meet requirements.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::Duration,
};

use aws_sdk_ec2::{
    Client,
    types::{ArchitectureType, InstanceType, VirtualizationType},
};
use paddock_core::ec2::{launch::included, requirements::Requirements};

use super::{AwsError, ec2::Machines, fleet::requirements, word};
use crate::{cache::ExpiringCache, lock};

/// The records of launched machines wait for the answer, so it must not take as long as other calls may.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a count of types is taken for true: EC2 has new types a few times a year.
const COUNT_MEMORY: Duration = Duration::from_mins(10);
/// The most counts that are remembered.
const COUNTS: usize = 1000;

/// The most types that EC2 describes in one call. A fleet is of far fewer.
const TYPES_PER_CALL: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub cpu: u32,
    pub memory_mib: u32,
}

/// The sizes that EC2 has described. They never change.
#[derive(Default)]
pub struct Sizes(Mutex<HashMap<String, Size>>);

impl Sizes {
    /// The sizes of these types. One that cannot be described now is missing, and asked for again with the next launch.
    pub async fn of(&self, client: &Client, kinds: &HashSet<String>) -> HashMap<String, Size> {
        let unknown: Vec<_> = {
            let known = lock(&self.0);
            kinds.iter().filter(|kind| !kind.is_empty() && !known.contains_key(*kind)).cloned().collect()
        };
        if !unknown.is_empty() {
            match tokio::time::timeout(DESCRIBE_TIMEOUT, describe(client, &unknown)).await {
                Ok(Ok(found)) => lock(&self.0).extend(found),
                Ok(Err(error)) => tracing::warn!(?unknown, %error, "sizes of instance types unknown"),
                Err(_) => tracing::warn!(?unknown, "sizes of instance types unknown: EC2 did not answer in time"),
            }
        }
        let known = lock(&self.0);
        kinds.iter().filter_map(|kind| Some((kind.clone(), *known.get(kind)?))).collect()
    }
}

async fn describe(client: &Client, kinds: &[String]) -> Result<Vec<(String, Size)>, AwsError> {
    let kinds = kinds.iter().take(TYPES_PER_CALL).map(|kind| InstanceType::from(kind.as_str())).collect();
    let describe = client.describe_instance_types().set_instance_types(Some(kinds));
    let answer = describe.send().await.map_err(word("DescribeInstanceTypes"))?;
    let size = |info: aws_sdk_ec2::types::InstanceTypeInfo| {
        let cpu = u32::try_from(info.v_cpu_info?.default_v_cpus?).ok()?;
        let memory_mib = u32::try_from(info.memory_info?.size_in_mib?).ok()?;
        Some((info.instance_type?.as_str().to_owned(), Size { cpu, memory_mib }))
    };
    Ok(answer.instance_types.unwrap_or_default().into_iter().filter_map(size).collect())
}

/// Types that are counted: architecture, vCPUs, memory in MiB, allowed types.
type Counted = (String, u32, u32, Vec<String>);

/// How many types EC2 has found.
pub struct TypeCounts(ExpiringCache<Counted, u32>);

impl Default for TypeCounts {
    fn default() -> Self {
        Self(ExpiringCache::new(COUNTS))
    }
}

impl Machines {
    /// How many instance types of this architecture meet `needs`, whatever they cost.
    pub async fn count_types(&self, architecture: &str, needs: &Requirements) -> Result<u32, AwsError> {
        let Requirements { cpu, memory_mib, allowed_instance_types, .. } = needs;
        let key = (architecture.to_owned(), *cpu, *memory_mib, allowed_instance_types.clone());
        let fetch = async {
            let include = included(allowed_instance_types);
            let mut pages = self
                .client
                .get_instance_types_from_instance_requirements()
                .architecture_types(ArchitectureType::from(architecture))
                .virtualization_types(VirtualizationType::Hvm)
                .instance_requirements(requirements(*cpu, *memory_mib, allowed_instance_types, include).build())
                .into_paginator()
                .send();
            let mut count = 0;
            while let Some(page) = pages.next().await {
                let page = page.map_err(word("GetInstanceTypesFromInstanceRequirements"))?;
                count += page.instance_types.unwrap_or_default().len() as u32;
            }
            Ok((count, COUNT_MEMORY))
        };
        self.type_counts.0.get_or_fetch(key, Box::pin(fetch)).await
    }
}
