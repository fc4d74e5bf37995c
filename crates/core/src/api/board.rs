//! `RunnerPool.spec.board`: boards of the cluster.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube_derive::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{
    RUNNER_RESOURCE,
    common::{Duration, SecretRef, label_sets_schema, pattern, quantity_schema},
};

/// Boards that are nodes of this cluster. Each job gets a pod with a runner that serves it alone.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    cel,
    validation = Rule::new("size(self.labels) > 0 || size(self.overrides) > 0")
        .message("a board pool needs labels or overrides: without them no job can select it").field_path(".labels")
)]
#[serde(rename_all = "camelCase")]
pub struct BoardPool {
    /// The board: the value of the label `riseproject.dev/board` on the nodes that carry it.
    #[schemars(length(max = 63), regex(pattern = pattern::LABEL_VALUE))]
    pub board: String,

    /// The exact `runs-on` label sets that the pool serves, each a list of labels in any order; GitHub compares
    /// labels without case.
    #[serde(default)]
    #[schemars(schema_with = "label_sets_schema")]
    pub labels: Vec<Vec<String>>,

    /// Label sets that the pool serves for one owner or repository alone. They come before what any pool serves for
    /// all, and a repository's before its owner's.
    #[serde(default)]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub overrides: Vec<LabelOverride>,

    /// The container image with GitHub's runner; it must start a runner from `RUNNER_JITCONFIG`.
    #[schemars(length(min = 1, max = 512), regex(pattern = pattern::IMAGE))]
    pub image: String,

    /// The extended resource that counts the boards' slots; each pod takes one.
    #[serde(default = "resource_name")]
    #[schemars(length(min = 1, max = 317), regex(pattern = pattern::QUALIFIED_NAME))]
    pub resource_name: String,

    /// Labels that a node must have beside the board's.
    #[serde(default)]
    #[schemars(schema_with = "node_selector_schema")]
    pub node_selector: BTreeMap<String, String>,

    /// Whether pods use the network of their node.
    #[serde(default)]
    pub host_network: bool,

    /// Whether the container is privileged, which a Docker daemon inside needs.
    #[serde(default)]
    pub privileged: bool,

    /// Local disk that a pod asks for; left out: it asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ephemeral_storage: Option<EphemeralStorage>,

    /// How long a pod may run; the default of 146h is 525600s.
    #[serde(default = "active_deadline")]
    pub active_deadline: Duration,

    /// When a job or pod that does not move on is given up.
    #[serde(default)]
    pub timeouts: BoardTimeouts,

    /// Where the runners register.
    pub github: BoardGitHub,
}

fn resource_name() -> String {
    RUNNER_RESOURCE.into()
}

fn active_deadline() -> Duration {
    Duration::from_secs(525_600)
}

fn node_selector_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {
            "type": "string", "maxLength": 63, "pattern": "^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$",
        },
        "x-kubernetes-validations": [{
            "rule": format!("self.all(key, size(key) <= 317 && key.matches('{}'))", pattern::QUALIFIED_NAME),
            "message": "each key must be a label name such as kubernetes.io/arch",
        }],
    })
}

/// Label sets for one owner or repository alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelOverride {
    /// The organisation or user, compared without case.
    #[schemars(length(max = 100), regex(pattern = pattern::LOGIN))]
    pub owner: String,
    /// One repository of the owner, without the owner's name; left out: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 100), regex(pattern = pattern::REPOSITORY))]
    pub repository: Option<String>,
    /// The exact `runs-on` label sets, as in the pool's own `labels`.
    #[schemars(schema_with = "label_sets_schema", length(min = 1, max = 8))]
    pub labels: Vec<Vec<String>>,
}

/// Local disk of a pod.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    cel,
    validation = Rule::new("quantity(self.request).compareTo(quantity(self.limit)) <= 0")
        .message("request must not be greater than limit").field_path(".request")
)]
pub struct EphemeralStorage {
    /// What a node must have free, for example `40Gi`.
    #[schemars(schema_with = "quantity_schema")]
    pub request: Quantity,
    /// What a pod may use before it is evicted, for example `90Gi`.
    #[schemars(schema_with = "quantity_schema")]
    pub limit: Quantity,
}

/// When a job or pod that does not move on is given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct BoardTimeouts {
    /// A running pod whose runner GitHub does not know.
    pub registration: Duration,
    /// A pod that does not start.
    pub pod_pending: Duration,
    /// A runner that is online and gets no job.
    pub idle: Duration,
    /// A job that is queued although its workflow run is over.
    pub stuck_queued: Duration,
    /// How long an ended pod is kept for its logs.
    pub pod_grace: Duration,
}

impl Default for BoardTimeouts {
    fn default() -> Self {
        Self {
            registration: Duration::from_secs(120),
            pod_pending: Duration::from_secs(600),
            idle: Duration::from_secs(600),
            stuck_queued: Duration::from_mins(10),
            pod_grace: Duration::from_mins(6 * 60),
        }
    }
}

/// Where a board pool's runners register: with the organisation or repository of each job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoardGitHub {
    /// The Secret of the App that organisations install, with `github_app_id` and `github_app_private_key`.
    pub credentials_ref: SecretRef,
    /// The Secret of the App that personal accounts install; left out: the first App serves them too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub personal_credentials_ref: Option<SecretRef>,
    /// The runner group of organisations that the runners join; it is made where it is missing.
    #[serde(default = "runner_group")]
    #[schemars(length(min = 1, max = 100), regex(pattern = pattern::ONE_LINE))]
    pub runner_group: String,
}

fn runner_group() -> String {
    "Paddock".into()
}
