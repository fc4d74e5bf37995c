//! Why a worker failed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::reasons::FailureReason;

/// Why a worker failed, with what a person needs to find the cause after the pod or machine is gone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// Why, in one word for programs.
    pub reason: FailureReason,
    /// Why, for a person.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = FAILURE_MESSAGE_MAX))]
    pub message: String,
    /// How each container of the pod ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub containers: Vec<ContainerEnd>,
    /// The last events about the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub events: Vec<PodEvent>,
    /// The end of the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LOG_TAIL_MAX))]
    pub log_tail: Option<String>,
}

/// The longest `failure.logTail`, in characters.
pub const LOG_TAIL_MAX: usize = 16384;
/// The longest message inside `failure`, in characters.
pub const FAILURE_MESSAGE_MAX: usize = 4096;

/// How a container ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEnd {
    /// The container's name.
    #[schemars(length(max = 63))]
    pub name: String,
    /// Its exit code; absent when it never started or still waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The kubelet's reason, such as `OOMKilled` or `ImagePullBackOff`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub reason: Option<String>,
    /// The kubelet's message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = FAILURE_MESSAGE_MAX))]
    pub message: Option<String>,
}

/// An event about a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodEvent {
    /// When it was last seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
    /// The event's reason, such as `FailedScheduling`.
    #[schemars(length(max = 256))]
    pub reason: String,
    /// The event's message.
    #[schemars(length(max = FAILURE_MESSAGE_MAX))]
    pub message: String,
    /// How often it was seen.
    #[serde(default)]
    pub count: u32,
}
