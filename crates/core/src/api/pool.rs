//! `RunnerPool`: where runners come from.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube_derive::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{board::BoardPool, common::conditions_schema, ec2::Ec2Pool, launch_order::LaunchOrder};

/// What a pool's runners run on: exactly one of `ec2` and `board`.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    crates(kube = "::kube_derive", kube_core = "::kube_core"),
    attr = r#"x_kube(crates(kube_core = "::kube_core"))"#,
    group = "paddock.dev",
    version = "v1alpha1",
    kind = "RunnerPool",
    namespaced,
    status = "RunnerPoolStatus",
    derive = "PartialEq",
    cel,
    shortname = "rpool",
    shortname = "rpools",
    category = "paddock",
    doc = "A supply of GitHub Actions runners: warm EC2 machines that are reused across workflows, or boards of the cluster that run one pod per job.",
    validation = Rule::new("size(self.metadata.name) <= 40 && !self.metadata.name.contains('.')")
        .message("a pool's name is part of queue names and labels: at most 40 characters, without dots"),
    printcolumn(name = "Kind", type_ = "string", json_path = ".status.kind", description = "ec2 or board"),
    printcolumn(name = "Idle", type_ = "integer", json_path = ".status.workers.idle", description = "Machines that wait to be claimed"),
    printcolumn(name = "Claimed", type_ = "integer", json_path = ".status.workers.claimed", description = "Machines on their way to a claim"),
    printcolumn(name = "Running", type_ = "integer", json_path = ".status.workers.running", description = "Workers that serve jobs"),
    printcolumn(name = "Slots", type_ = "string", json_path = ".status.slots.summary", description = "Free and all slots of the boards"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status", description = "Whether the pool can serve claims"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason", description = "Why the pool is ready or not", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].message", description = "The same for a person", priority = 1),
)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("has(self.ec2) != has(self.board)")
        .message("exactly one of spec.ec2 and spec.board must be set"),
    validation = Rule::new("has(self.ec2) == has(oldSelf.ec2)")
        .message("a pool cannot change between ec2 and board: create another pool and delete this one")
        .reason(Reason::FieldValueForbidden)
)]
#[serde(rename_all = "camelCase")]
pub struct RunnerPoolSpec {
    /// Machines in EC2, kept warm between workflows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ec2: Option<Ec2Pool>,

    /// Boards that are nodes of this cluster; each job gets a pod of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub board: Option<BoardPool>,
}

/// A pool's hardware, for exhaustive matches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hardware<'a> {
    Ec2(&'a Ec2Pool),
    Board(&'a BoardPool),
}

impl RunnerPoolSpec {
    /// The hardware that is set. The CEL rules refuse none and both, so `None` means that the object bypassed them.
    pub fn hardware(&self) -> Option<Hardware<'_>> {
        match (&self.ec2, &self.board) {
            (Some(ec2), None) => Some(Hardware::Ec2(ec2)),
            (None, Some(board)) => Some(Hardware::Board(board)),
            (None, None) | (Some(_), Some(_)) => None,
        }
    }
}

/// What a pool's workers are: `ec2` machines or `board` pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PoolKind {
    Ec2,
    Board,
}

impl From<Hardware<'_>> for PoolKind {
    fn from(hardware: Hardware<'_>) -> Self {
        match hardware {
            Hardware::Ec2(_) => Self::Ec2,
            Hardware::Board(_) => Self::Board,
        }
    }
}

/// What the operator sees of the pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerPoolStatus {
    /// `ec2` or `board`, whichever the spec has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<PoolKind>,

    /// How many workers are in each state.
    #[serde(default)]
    pub workers: WorkerCounts,

    /// Machines that were made from an earlier template or image. Idle ones are replaced a few at a time, the others when they are
    /// released.
    #[serde(default)]
    pub outdated: u32,

    /// Slots of the boards; absent for EC2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<Slots>,

    /// The queue of idle machines for each resource class; empty for boards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["resourceClass"]))]
    pub queues: Vec<Queue>,

    /// How many instance types each resource class leaves EC2 to choose from; empty for boards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub classes: Vec<ClassTypes>,

    /// The launch template that new machines are made from; absent for boards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_template: Option<LaunchTemplate>,

    /// The release of GitHub's runner that new machines install, unless their image has one; absent for boards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner: Option<RunnerRelease>,

    /// The order for machines to be kept warm, from before it is sent until its machines are on record: the next leader
    /// repeats it and gets the same machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fleet: Option<Box<LaunchOrder>>,

    /// `Ready` says whether the pool can serve claims, and why not. `ClockSkew` is True while the operator's clock or that
    /// of an EC2 machine differs by more than 30 s. `RunnerOutdated` is True while the pool's `runnerVersion` is older than the
    /// one that GitHub lists. `MetadataAccess` is True while jobs of an EC2 machine can reach the metadata service although
    /// `metadata.runnerAccess` is false.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,

    /// The generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// Workers by state; the first five are states of EC2 machines, the last four (with `running`) of board pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkerCounts {
    /// Started, not yet ready for a job.
    pub created: u32,
    /// Serving a claim.
    pub running: u32,
    /// Waiting to be claimed.
    pub idle: u32,
    /// Taken by a claim, not yet checked.
    pub claimed: u32,
    /// Terminated, kept for the record until the retention time is over.
    pub terminated: u32,
    /// Pods that do not run yet.
    pub pending: u32,
    /// Pods that ended well.
    pub completed: u32,
    /// Pods that failed.
    pub failed: u32,
}

/// Slots of a pool's boards on nodes that are ready and schedulable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Slots {
    /// All slots.
    pub total: u32,
    /// Slots that no pod holds.
    pub free: u32,
    /// The two in one text for `kubectl get`: `3/4` means that 3 of 4 are free.
    #[schemars(length(max = 32))]
    pub summary: String,
}

impl Slots {
    pub fn new(total: u32, free: u32) -> Self {
        Self { total, free, summary: format!("{free}/{total}") }
    }
}

/// The queue that holds one message for each idle machine of a resource class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// The resource class.
    #[schemars(length(max = 63))]
    pub resource_class: String,
    /// The queue's URL.
    #[schemars(length(max = 2048))]
    pub url: String,
}

/// The instance types of a resource class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClassTypes {
    /// The resource class.
    #[schemars(length(max = 63))]
    pub name: String,
    /// How many types have its size and are among `defaults.allowedInstanceTypes`, whatever they cost. With none, nothing
    /// can be launched.
    pub instance_types: u32,
}

/// A release of GitHub's runner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerRelease {
    /// The version: `runnerVersion`, or the one that GitHub lists.
    #[schemars(length(max = 32))]
    pub version: String,
    /// The version that GitHub lists.
    #[schemars(length(max = 32))]
    pub latest: String,
    /// When a newer version was first seen; absent while the version is the newest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub newer_since: Option<Time>,
    /// Until when GitHub takes the version, by its rule of 30 days after a newer one; it has refused some at once, and others late.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
}

/// A launch template and the version that the pool uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LaunchTemplate {
    /// The template's id (`lt-…`).
    #[schemars(length(max = 128))]
    pub id: String,
    /// The version that matches the spec.
    pub version: i64,
    /// A digest of what the version was made from: while it stays, no new version is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub digest: Option<String>,
    /// The image that new machines are made from, where the template names an SSM parameter the one that it holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub image: Option<String>,
}
