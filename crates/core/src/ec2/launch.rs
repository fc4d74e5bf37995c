//! Requests to EC2 for pools and claims.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use sha2::{Digest, Sha256};

use super::requirements::Requirements;
use crate::{
    api::{Ec2Pool, LaunchOrder, LaunchTemplate, TAG_CLUSTER, TAG_POOL, UsageClass},
    names::PoolKey,
};

/// The launch template of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRequest {
    pub name: String,
    pub ami_id: String,
    pub instance_profile: String,
    pub security_group_ids: Vec<String>,
    /// In base64, as EC2 takes it.
    pub user_data: String,
    pub tags: Vec<(String, String)>,
    /// Digest of all the above; stored as the description of the template's version to detect drift.
    pub digest: String,
}

/// Input of a launch order, which is recorded before it is sent.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub client_token: String,
    pub attempt: u32,
    pub template: &'a LaunchTemplate,
    pub count: u32,
    pub usage_class: UsageClass,
    pub subnet_ids: Vec<String>,
    pub needs: &'a Requirements,
}

impl Wanted<'_> {
    pub fn order(self, now: Timestamp) -> LaunchOrder {
        LaunchOrder {
            client_token: self.client_token,
            attempt: self.attempt,
            requested: self.count,
            usage_class: self.usage_class,
            ordered_at: Time(now),
            launch_template: self.template.clone(),
            subnet_ids: self.subnet_ids,
            resource_class: self.needs.resource_class.clone(),
            cpu: self.needs.cpu,
            memory_mib: self.needs.memory_mib,
            allowed_instance_types: self.needs.allowed_instance_types.clone(),
            fleet_id: None,
            instance_ids: Vec::new(),
        }
    }
}

pub fn template(cluster: &str, key: &PoolKey, pool: &Ec2Pool, user_data: String) -> TemplateRequest {
    let mut request = TemplateRequest {
        name: template_name(cluster, key),
        ami_id: pool.ami_id.clone(),
        instance_profile: pool.instance_profile.clone(),
        security_group_ids: pool.security_group_ids.clone(),
        user_data,
        tags: vec![
            (TAG_CLUSTER.into(), cluster.into()),
            (TAG_POOL.into(), key.to_string()),
            ("Name".into(), format!("paddock {key}")),
        ],
        digest: String::new(),
    };
    request.digest = hex(&format!("{request:?}"));
    request
}

/// EC2 allows 128 characters.
pub fn template_name(cluster: &str, pool: &PoolKey) -> String {
    unique(&["paddock", cluster, &pool.namespace, &pool.name], 128)
}

/// The queue of a pool's resource class; SQS allows 80 characters.
pub fn queue_name(cluster: &str, pool: &PoolKey, class: &str) -> String {
    unique(&["paddock", cluster, &pool.namespace, &pool.name, class], 80)
}

/// The same order always has the same token, across crashes and replicas; a further attempt has another.
pub fn client_token(uid: &str, attempt: u32) -> String {
    format!("paddock-{}-{attempt}", &hex(uid)[..40])
}

/// The parts joined by dashes, cut where they are too long together, with a digest: parts contain dashes themselves, so
/// that different parts may look the same. None contains a slash, so the digest differs for every split.
fn unique(parts: &[&str], max: usize) -> String {
    let (readable, digest) = (parts.join("-"), &hex(&parts.join("/"))[..16]);
    format!("{}-{digest}", &readable[..readable.len().min(max - digest.len() - 1)])
}

fn hex(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_of_different_clusters_namespaces_pools_and_classes_differ() {
        let (mut queues, mut templates) = (HashSet::new(), HashSet::new());
        let parts = ["a", "b", "a-b", "b-a", "a-b-a"];
        for cluster in parts {
            for pool in parts.iter().flat_map(|namespace| parts.map(|name| PoolKey::new(*namespace, name))) {
                templates.insert(template_name(cluster, &pool));
                queues.extend(parts.map(|class| queue_name(cluster, &pool, class)));
            }
        }
        assert_eq!((queues.len(), templates.len()), (625, 125));
        let small = queue_name("prod", &PoolKey::new("ci", "linux-arm"), "small");
        assert_ne!(queue_name("prod", &PoolKey::new("ci", "linux"), "arm-small"), small);
        assert!(small.starts_with("paddock-prod-ci-linux-arm-small-"), "{small}");
    }

    #[test]
    fn long_names_are_cut() {
        let (long, cluster) = ("n".repeat(63), "c".repeat(63));
        let pool = PoolKey::new(long, "p".repeat(40));
        let (a, b) = (queue_name(&cluster, &pool, "medium"), queue_name(&cluster, &pool, "large"));
        assert_eq!((a.len(), b.len(), template_name(&cluster, &pool).len()), (80, 80, 128));
        assert_ne!(a, b);
    }

    #[test]
    fn a_token_depends_on_claim_and_attempt_alone_and_fits_64_characters() {
        assert_eq!(client_token("uid-1", 1), client_token("uid-1", 1));
        assert_ne!(client_token("uid-1", 1), client_token("uid-1", 2));
        assert_ne!(client_token("uid-1", 1), client_token("uid-2", 1));
        assert!(client_token("uid-1", u32::MAX).len() <= 64);
    }
}
