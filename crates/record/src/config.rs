use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

/// Interval of the agent's heartbeats. The operator considers an instance healthy while its last heartbeat is younger
/// than 15 s, so two may be lost.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// Interval at which the agent looks at its runner, and at its record while no queue tells it of changes. A claim waits for
/// the registration, which includes this interval.
pub const POLL: Duration = Duration::from_millis(250);

/// How long after its threshold an instance terminates itself. The operator terminates it at the threshold; the agent
/// counts from when it has read that threshold, by its own clock.
pub const EXPIRY_SLACK: Duration = Duration::from_secs(60);

/// The agent's configuration, in the instance's user data. Every process on the instance can read it, so it holds no
/// secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentConfig {
    pub cluster: String,
    /// `namespace/name` of the RunnerPool.
    pub pool: String,
    /// The DynamoDB table of the cluster.
    pub table: String,
    /// Region of the table. Default: the instance's own region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Runs once, before the first registration. Empty: no script.
    #[serde(default)]
    pub pre_runner_script: String,
    /// Runs after each deregistration, before the instance may serve another run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_script: Option<String>,
    /// Release of the GitHub runner to download if the machine image has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner_version: Option<String>,
    /// Its archives, by the architecture in their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub runner_archives: BTreeMap<String, RunnerArchive>,
    /// The newest release that GitHub lists. It refuses an older one some weeks after a newer one has appeared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed_runner_version: Option<String>,
    /// Whether jobs may reach the metadata service, and with it the instance's role.
    #[serde(default)]
    pub runner_metadata_access: bool,
    /// How long an instance may run without a record before it terminates itself.
    pub created_lifetime_seconds: u64,
    #[serde(default = "heartbeat_seconds")]
    pub heartbeat_seconds: u64,
    #[serde(default = "poll_milliseconds")]
    pub poll_milliseconds: u64,
}

/// An archive of the GitHub runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunnerArchive {
    pub url: String,
    /// Without it the archive must not be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

const fn heartbeat_seconds() -> u64 {
    HEARTBEAT.as_secs()
}

const fn poll_milliseconds() -> u64 {
    POLL.as_millis() as u64
}

impl AgentConfig {
    /// The configuration of a pool without scripts, with the default intervals.
    pub fn new(cluster: &str, pool: &str, created_lifetime: Duration) -> Self {
        Self {
            cluster: cluster.to_owned(),
            pool: pool.to_owned(),
            table: crate::table_name(cluster),
            region: None,
            pre_runner_script: String::new(),
            scrub_script: None,
            runner_version: None,
            runner_archives: BTreeMap::new(),
            listed_runner_version: None,
            runner_metadata_access: false,
            created_lifetime_seconds: created_lifetime.as_secs(),
            heartbeat_seconds: heartbeat_seconds(),
            poll_milliseconds: poll_milliseconds(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn omitted_fields_have_their_defaults() {
        let text = r#"{"cluster":"c","pool":"ci/linux","table":"paddock-c","createdLifetimeSeconds":600}"#;
        let read: AgentConfig = serde_json::from_str(text).unwrap();
        assert_eq!(read, AgentConfig::new("c", "ci/linux", Duration::from_secs(600)));
        assert_eq!((read.heartbeat_seconds, read.poll_milliseconds), (5, 250));
    }
}
