//! The names of pools, and of workers on boards with their pods and runners.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::api::{RunnerClaim, RunnerPool};

/// Identifies a pool; written as `namespace/name` in records and tags.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolKey {
    pub namespace: String,
    pub name: String,
}

impl PoolKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    pub fn of(pool: &RunnerPool) -> Self {
        let meta = &pool.metadata;
        Self::new(meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
    }

    /// The pool that a record or a tag names.
    pub fn parse(text: &str) -> Option<Self> {
        text.split_once('/').map(|(namespace, name)| Self::new(namespace, name))
    }
}

impl fmt::Display for PoolKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The name prefix of a cluster's workers and of their runners at GitHub. Runners without it are never removed.
pub fn name_prefix(cluster: &str) -> String {
    format!("paddock-{}-", digest(cluster, 2))
}

/// At most 63 characters, which is a pod's host name; GitHub takes 64 for a runner's name.
pub fn worker_name(prefix: &str, pool: &str, claim_uid: &str, attempt: u32) -> String {
    let pool: String = pool.chars().take(36).collect();
    format!("{prefix}{pool}-{}", digest(&format!("{claim_uid}/{attempt}"), 6))
}

/// The claim for the jobs of a claim that are run again; at most 63 characters, because it is also a label.
pub fn rerun_name(claim: &RunnerClaim) -> String {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    if name.len() <= 57 {
        return format!("{name}-rerun");
    }
    format!("{}-{}-rerun", name[..44].trim_end_matches(['-', '.']), digest(name, 6))
}

fn digest(text: &str, bytes: usize) -> String {
    Sha256::digest(text).iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_key_is_parsed_from_its_text() {
        let key = PoolKey::new("ci", "linux");
        assert_eq!(PoolKey::parse(&key.to_string()), Some(key));
        assert_eq!(PoolKey::parse("linux"), None);
    }

    #[test]
    fn the_claim_of_a_rerun_has_a_name_of_its_own_that_is_a_label() {
        let name = |name: &str| {
            let spec = serde_json::from_value(serde_json::json!({"runId": "1"})).unwrap();
            rerun_name(&RunnerClaim::new(name, spec))
        };
        assert_eq!(name("run-7890-1"), "run-7890-1-rerun");
        let long = ["a", "b"].map(|end| name(&format!("{}.{end}", "x".repeat(61))));
        assert!(long[0] != long[1] && long.iter().all(|name| name.len() <= 63), "{long:?}");
    }

    #[test]
    fn names_fit_github_and_dns() {
        let prefix = name_prefix("production");
        let name = worker_name(&prefix, &"p".repeat(40), "uid", u32::MAX);
        assert!(name.starts_with("paddock-") && name.len() <= 63, "{name}");
        assert_ne!(worker_name(&prefix, "p", "uid", 0), worker_name(&prefix, "p", "uid", 1));
        assert_ne!(prefix, name_prefix("staging"), "another cluster's runners are not ours");
    }
}
