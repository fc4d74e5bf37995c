//! How workers on boards, and with them their pods and runners, are called.

use sha2::{Digest, Sha256};

/// How the names of a cluster's workers begin, and with them those of its runners at GitHub: nobody else's are touched.
pub fn name_prefix(cluster: &str) -> String {
    format!("paddock-{}-", digest(cluster, 2))
}

/// At most 63 characters, which is a pod's host name; GitHub takes 64 for a runner's name.
pub fn worker_name(prefix: &str, pool: &str, claim_uid: &str, attempt: u32) -> String {
    let pool: String = pool.chars().take(36).collect();
    format!("{prefix}{pool}-{}", digest(&format!("{claim_uid}/{attempt}"), 6))
}

fn digest(text: &str, bytes: usize) -> String {
    Sha256::digest(text).iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_github_and_dns() {
        let prefix = name_prefix("production");
        let name = worker_name(&prefix, &"p".repeat(40), "uid", u32::MAX);
        assert!(name.starts_with("paddock-") && name.len() <= 63, "{name}");
        assert_ne!(worker_name(&prefix, "p", "uid", 0), worker_name(&prefix, "p", "uid", 1));
        assert_ne!(prefix, name_prefix("staging"), "another cluster's runners are not ours");
    }
}
