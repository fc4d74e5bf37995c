//! `Worker`: one EC2 machine or one runner pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube_derive::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    common::{Owner, Runner, UsageClass, conditions_schema, label_set_schema, pattern},
    failure::Failure,
};

/// What the worker is. Workers are made by the operator and never change.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    crates(kube = "::kube_derive", kube_core = "::kube_core"),
    attr = r#"x_kube(crates(kube_core = "::kube_core"))"#,
    group = "paddock.dev",
    version = "v1alpha1",
    kind = "Worker",
    namespaced,
    status = "WorkerStatus",
    derive = "PartialEq",
    cel,
    shortname = "wk",
    category = "paddock",
    doc = "One EC2 machine or one runner pod, as the operator sees it. Made and removed by the operator.",
    selectable = ".spec.pool",
    selectable = ".status.state",
    selectable = ".status.claim",
    selectable = ".status.runId",
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.pool", description = "The pool it belongs to"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state", description = "What it does"),
    printcolumn(name = "Claim", type_ = "string", json_path = ".status.claim", description = "The claim it serves"),
    printcolumn(
        name = "Where",
        type_ = "string",
        json_path = ".status.location",
        description = "The type and zone of a machine, or the node of a pod"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Run",
        type_ = "string",
        json_path = ".status.runId",
        description = "The workflow run it serves",
        priority = 1
    ),
    printcolumn(
        name = "Runner",
        type_ = "string",
        json_path = ".status.runner.name",
        description = "Its name at GitHub",
        priority = 1
    ),
    printcolumn(
        name = "Zone",
        type_ = "string",
        json_path = ".status.instance.zone",
        description = "Its availability zone",
        priority = 1
    ),
    printcolumn(
        name = "Heartbeat",
        type_ = "string",
        json_path = ".status.heartbeat.state",
        description = "Whether its agent is alive",
        priority = 1
    ),
    printcolumn(
        name = "Until",
        type_ = "string",
        json_path = ".status.threshold",
        description = "When it is terminated unless its state changes",
        priority = 1
    ),
    printcolumn(
        name = "Scope",
        type_ = "string",
        json_path = ".status.scope",
        description = "Whose claims it may serve next",
        priority = 1
    ),
    printcolumn(
        name = "Failure",
        type_ = "string",
        json_path = ".status.failure.reason",
        description = "Why it failed",
        priority = 1
    )
)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("self == oldSelf").message("a worker's spec cannot be changed").reason(Reason::FieldValueForbidden),
    validation = Rule::new("has(self.ec2) != has(self.board)").message("exactly one of spec.ec2 and spec.board must be set")
)]
#[serde(rename_all = "camelCase")]
pub struct WorkerSpec {
    /// The pool that the worker belongs to.
    #[schemars(length(max = 40), regex(pattern = pattern::DNS_LABEL))]
    pub pool: String,

    /// Set for a machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ec2: Option<Ec2Worker>,

    /// Set for a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub board: Option<BoardWorker>,
}

impl Worker {
    /// The claim that a pod's worker was created for.
    pub fn claim_uid(&self) -> Option<&str> {
        self.spec.board.as_ref().map(|board| board.claim_uid.as_str())
    }
}

/// A machine in EC2.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ec2Worker {
    /// The instance.
    #[schemars(length(max = 64), regex(pattern = pattern::INSTANCE))]
    pub instance_id: String,
}

/// A pod on a board: all that is needed to count it, and to remove its runner from GitHub when its claim is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoardWorker {
    /// The claim that the pod was made for.
    #[schemars(length(max = 63), regex(pattern = pattern::DNS_SUBDOMAIN))]
    pub claim: String,
    /// The claim's uid, which tells it from another one of the same name.
    #[schemars(length(min = 1, max = 63))]
    pub claim_uid: String,
    /// Which of its claim's workers it is, from 1.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub attempt: u32,
    /// Whom limits count for: the organisation's number, or the repository's for a personal account.
    #[schemars(length(max = 63), regex(pattern = pattern::LABEL_VALUE))]
    pub entity: String,
    /// The labels of its runner.
    #[schemars(schema_with = "label_set_schema")]
    pub labels: Vec<String>,
    /// The account that its runner belongs to.
    pub owner: Owner,
    /// The repository with its owner, which a personal account's runner is registered with.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 201), regex(pattern = pattern::FULL_REPOSITORY))]
    pub repository: Option<String>,
    /// The installation of the GitHub App.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub installation_id: Option<i64>,
}

/// What the worker does. Machines: `created → running → idle → claimed → running … → terminated`; pods: `pending →
/// running → completed | failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// A machine that starts.
    Created,
    /// Serving a claim.
    Running,
    /// A machine that waits to be claimed.
    Idle,
    /// A machine that a claim took and has not checked yet.
    Claimed,
    /// A machine that is gone.
    Terminated,
    /// A pod that does not run yet.
    Pending,
    /// A pod that ended well.
    Completed,
    /// A pod that failed.
    Failed,
}

impl WorkerState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Idle => "idle",
            Self::Claimed => "claimed",
            Self::Terminated => "terminated",
            Self::Pending => "pending",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// Whether the worker has ended: it holds nothing and uses no quota.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Terminated | Self::Completed | Self::Failed)
    }
}

/// The longest `scope`, in characters.
pub const SCOPE_MAX: usize = 256;

/// What the worker does and where it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerStatus {
    /// What the worker does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<WorkerState>,

    /// Since when it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_since: Option<Time>,

    /// The claim that it serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub claim: Option<String>,

    /// The workflow run that it serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub run_id: Option<String>,

    /// The machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceInfo>,

    /// The pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodPlace>,

    /// Where it runs, in one text for `kubectl get`: a machine's type and the end of its zone, or a pod's node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub location: Option<String>,

    /// When it is terminated unless its state changes before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<Time>,

    /// Whether its agent is alive. Only changes are written here, not every beat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<Heartbeat>,

    /// Whether EC2 has announced that it takes the spot machine back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reclaimed: bool,

    /// Its runner at GitHub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner: Option<Runner>,

    /// How many claims a machine has served.
    #[serde(default)]
    pub claims_served: u32,

    /// Whose claims a machine may serve after its last one (`reuse.scope`); absent before its first claim, and where the
    /// pool gives it to any.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = SCOPE_MAX))]
    pub scope: Option<String>,

    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Box<Failure>>,

    /// `Ready` says whether a job can run on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,

    /// The generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

impl WorkerStatus {
    /// Sets the machine and the text that `kubectl get` shows for it.
    pub fn set_instance(&mut self, instance: InstanceInfo) {
        let zone = instance.zone.rsplit('-').next().unwrap_or_default();
        self.location = Some(format!("{} {zone}", instance.type_));
        self.instance = Some(instance);
    }

    /// Sets the pod and the text that `kubectl get` shows for it.
    pub fn set_pod(&mut self, pod: PodPlace) {
        self.location = pod.node.clone();
        self.pod = Some(pod);
    }
}

/// A machine in EC2.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceInfo {
    /// The instance id.
    #[schemars(length(max = 64))]
    pub id: String,
    /// The instance type that EC2 chose.
    #[serde(rename = "type")]
    #[schemars(length(max = 64))]
    pub type_: String,
    /// `on-demand` or `spot`.
    pub usage_class: UsageClass,
    /// The resource class that it is pooled in.
    #[schemars(length(max = 63))]
    pub resource_class: String,
    /// The availability zone.
    #[schemars(length(max = 64))]
    pub zone: String,
}

/// A pod and its node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PodPlace {
    /// The pod's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The node, once the pod is scheduled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
}

/// Whether a machine's agent is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Heartbeat {
    /// `fresh`, or `stale` when the last beat is older than the pool's `timeouts.heartbeat`.
    pub state: HeartbeatState,
    /// Since when.
    pub since: Time,
}

/// `fresh` or `stale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeartbeatState {
    Fresh,
    Stale,
}
