use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How often the agent says that it lives. The operator takes an instance for healthy while its last beat is younger
/// than 15 s, so two beats may be lost before anyone doubts it.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// How often the agent reads its record. A claimer waits 10 s in all for the registration, and each wait for the next
/// look is on that path; four small reads a second cost an instance less than a cent a day.
pub const POLL: Duration = Duration::from_millis(250);

/// How far past its threshold an instance ends itself. The operator ends it at the threshold; the agent is the second
/// line, and must not be the first because of a clock that runs ahead.
pub const EXPIRY_SLACK: Duration = Duration::from_secs(60);

/// What the operator tells an agent at boot, in the instance's user data: anyone on the instance can read it, so it
/// holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentConfig {
    pub cluster: String,
    /// `namespace/name` of the RunnerPool.
    pub pool: String,
    /// The DynamoDB table of the cluster.
    pub table: String,
    /// Where the table is; left out, the instance's own region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Runs once, before the first registration; empty: nothing to run.
    #[serde(default)]
    pub pre_runner_script: String,
    /// Runs after each deregistration, before the instance may serve another run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_script: Option<String>,
    /// The release of the GitHub runner to fetch where the machine image has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner_version: Option<String>,
    /// How long an instance may go without a record before it is nobody's.
    pub created_lifetime_seconds: u64,
    #[serde(default = "heartbeat_seconds")]
    pub heartbeat_seconds: u64,
    #[serde(default = "poll_milliseconds")]
    pub poll_milliseconds: u64,
}

const fn heartbeat_seconds() -> u64 {
    HEARTBEAT.as_secs()
}

const fn poll_milliseconds() -> u64 {
    POLL.as_millis() as u64
}

impl AgentConfig {
    /// The configuration of a pool without scripts, with the usual periods.
    pub fn new(cluster: &str, pool: &str, created_lifetime: Duration) -> Self {
        Self {
            cluster: cluster.to_owned(),
            pool: pool.to_owned(),
            table: crate::table_name(cluster),
            region: None,
            pre_runner_script: String::new(),
            scrub_script: None,
            runner_version: None,
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
    fn what_is_left_out_has_its_usual_value() {
        let text = r#"{"cluster":"c","pool":"ci/linux","table":"paddock-c","createdLifetimeSeconds":600}"#;
        let read: AgentConfig = serde_json::from_str(text).unwrap();
        assert_eq!(read, AgentConfig::new("c", "ci/linux", Duration::from_secs(600)));
        assert_eq!((read.heartbeat_seconds, read.poll_milliseconds), (5, 250));
    }
}
