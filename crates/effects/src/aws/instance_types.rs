//! The sizes of instance types. EC2's answer to a launch names the type alone, and a machine may be larger than what it
//! was ordered for.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::Duration,
};

use aws_sdk_ec2::{Client, types::InstanceType};

use super::{AwsError, word};
use crate::lock;

/// The records of launched machines wait for the answer, so it must not take as long as other calls may.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

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
