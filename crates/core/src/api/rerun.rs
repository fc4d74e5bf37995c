//! `status.interruptions` and `status.rerun` of claims: machines that EC2 took back, and what became of their jobs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A spot machine that EC2 took back, or announced to, while it served the claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Interruption {
    /// The Worker's name.
    #[schemars(length(max = 253))]
    pub worker: String,
    /// Since when it may have interrupted its job.
    pub since: Time,
}

/// The longest `rerun.message`, in characters.
pub const RERUN_MESSAGE_MAX: usize = 1024;

/// Whether the jobs that spot interruptions ended are run again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rerun {
    /// The attempt of the workflow run whose jobs were interrupted. It is written before GitHub is told to run them
    /// again: a higher attempt at GitHub shows the next leader that this has happened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// When that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requested_at: Option<Time>,
    /// How many interrupted jobs are run again.
    #[serde(default)]
    pub jobs: u32,
    /// The claim that was made for them: the machines of this one are returned.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub claim: Option<String>,
    /// How often GitHub could not be asked.
    #[serde(default)]
    pub tries: u32,
    /// When it is asked again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<Time>,
    /// What came of it, in one word; absent while that is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<RerunOutcome>,
    /// The same for a person.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = RERUN_MESSAGE_MAX))]
    pub message: String,
}

/// `Done` (they run again), `Unneeded` (no job was interrupted) or `Skipped` (they are not run again).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum RerunOutcome {
    Done,
    Unneeded,
    Skipped,
}
