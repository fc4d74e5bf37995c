//! `RunnerClaim`: what a workflow asks for, and what it got.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube_derive::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    common::{
        Duration, Owner, Runner, UsageClass, conditions_schema, instance_types_schema, label_set_schema, pattern,
    },
    launch_order::{CapacityShortage, LaunchOrder},
    rerun::{Interruption, Rerun},
    worker::WorkerState,
};

/// What is asked for. Nothing of it can be changed later: delete the claim, which releases what it holds, and apply
/// another.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    crates(kube = "::kube_derive", kube_core = "::kube_core"),
    attr = r#"x_kube(crates(kube_core = "::kube_core"))"#,
    group = "paddock.dev",
    version = "v1alpha1",
    kind = "RunnerClaim",
    namespaced,
    status = "RunnerClaimStatus",
    derive = "PartialEq",
    cel,
    shortname = "rclaim",
    shortname = "rclaims",
    category = "paddock",
    doc = "A workflow's request for runners. It is Ready when all of them are registered with GitHub; deleting it releases them.",
    selectable = ".spec.pool",
    selectable = ".spec.runId",
    selectable = ".spec.repository",
    selectable = ".status.phase",
    selectable = ".status.pool",
    validation = Rule::new("size(self.metadata.name) <= 63")
        .message("a claim's name is also a label: at most 63 characters"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".status.pool", description = "The pool that serves the claim"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", description = "How far the claim is"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.progress", description = "Ready and requested runners"),
    printcolumn(name = "Run", type_ = "string", json_path = ".spec.runId", description = "The workflow run"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason", description = "Why the claim is ready or waits"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].message", description = "The same for a person", priority = 1),
    printcolumn(name = "Repository", type_ = "string", json_path = ".spec.repository", description = "The repository of the workflow", priority = 1),
)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("self == oldSelf")
        .message("a claim cannot be changed: delete it, which releases what it holds, and apply another")
        .reason(Reason::FieldValueForbidden),
    validation = Rule::new("has(self.pool) || has(self.labels)")
        .message("a claim needs spec.pool, or spec.labels that exactly one pool serves"),
    validation = Rule::new("!has(self.owner) || self.owner.type != 'User' || (has(self.repository) && has(self.repositoryId))")
        .message("a personal account's runners are registered with its repository: set repository and repositoryId"),
    validation = Rule::new("!has(self.owner) || !has(self.repository) || self.repository.lowerAscii().startsWith(self.owner.login.lowerAscii() + '/')")
        .message("repository must be the owner's: owner.login, a slash, and the repository's name").field_path(".repository")
)]
#[serde(rename_all = "camelCase")]
pub struct RunnerClaimSpec {
    /// The pool; may be left out when `labels` selects exactly one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 40), regex(pattern = pattern::DNS_LABEL))]
    pub pool: Option<String>,

    /// The workflow run, `${{ github.run_id }}` (in quotes: it is a string). EC2 runners carry it as their only label,
    /// so that `runs-on: ${{ github.run_id }}` reaches them and nothing else does.
    #[schemars(length(min = 1, max = 63), regex(pattern = pattern::LABEL_VALUE))]
    pub run_id: String,

    /// How many runners. The claim gets all of them or none.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 256))]
    pub count: u32,

    /// `on-demand` or `spot`; left out: the pool's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_class: Option<UsageClass>,

    /// A resource class of the pool; left out: the pool's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 20), regex(pattern = pattern::DNS_LABEL))]
    pub resource_class: Option<String>,

    /// Instance types that will do, `*` standing for any text (`c7*`); left out: the pool's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "instance_types_schema")]
    pub allowed_instance_types: Option<Vec<String>>,

    /// The least number of vCPUs, where the resource class is not enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub cpu: Option<u32>,

    /// The least memory in MiB, where the resource class is not enough.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 128, max = 33_554_432))]
    pub memory_mib: Option<u32>,

    /// How long the machines may serve the claim; left out: the pool's `lifetimes.maxRuntime`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_runtime: Option<Duration>,

    /// The `runs-on` labels of the job. A board pool that lists exactly this set, in any order and case, serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_set_schema")]
    pub labels: Option<Vec<String>>,

    /// The repository of the workflow with its owner, `${{ github.repository }}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 201), regex(pattern = pattern::FULL_REPOSITORY))]
    pub repository: Option<String>,

    /// The repository's number at GitHub, `${{ github.repository_id }}`. Limits of a personal account count by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub repository_id: Option<i64>,

    /// The account that owns the repository. Limits of an organisation count by its number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,

    /// The installation of the GitHub App; left out: found by owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub installation_id: Option<i64>,

    /// The job that the claim was made for, where a webhook made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
}

fn one() -> u32 {
    1
}

impl RunnerClaimSpec {
    /// The quota owner: the organisation, or the repository of a personal account.
    pub fn entity(&self) -> Option<String> {
        use super::OwnerType::{Organization, User};
        match self.owner.as_ref().map(|owner| (owner.type_, owner.id))? {
            (Organization, id) => Some(id.to_string()),
            (User, _) => self.repository_id.map(|id| id.to_string()),
        }
    }

    /// The repository's name without its owner.
    pub fn repository_name(&self) -> Option<&str> {
        self.repository.as_deref()?.split_once('/').map(|(_, name)| name)
    }
}

/// A job of a workflow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Job {
    /// The job's number at GitHub.
    #[schemars(range(min = 1))]
    pub id: i64,
    /// Where a person can read about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048), regex(pattern = pattern::HTTP_URL))]
    pub url: Option<String>,
    /// The job's name, any text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub name: Option<String>,
}

/// How far the claim is: `Pending` (waits), `Claiming` (takes idle machines), `Creating` (makes new ones), `Validating`
/// (waits for their signals), `Ready`, `Releasing` (gives everything back), `Completed`; or `Failed`, holding nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ClaimPhase {
    /// Nothing is held yet; the `Ready` condition says what it waits for.
    #[default]
    Pending,
    /// Taking idle machines from the pool.
    Claiming,
    /// Making what the pool could not give.
    Creating,
    /// Waiting for new machines to report.
    Validating,
    /// All runners are registered.
    Ready,
    /// Giving everything back.
    Releasing,
    /// Over, and everything is given back.
    Completed,
    /// Over without success; nothing is held.
    Failed,
}

impl ClaimPhase {
    /// In order of progress.
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::Claiming,
        Self::Creating,
        Self::Validating,
        Self::Ready,
        Self::Releasing,
        Self::Completed,
        Self::Failed,
    ];

    /// Describes the phase, for Events.
    pub const fn doing(self) -> &'static str {
        match self {
            Self::Pending => "the claim was seen",
            Self::Claiming => "taking idle machines from the pool",
            Self::Creating => "making what the pool could not give",
            Self::Validating => "waiting for machines to report",
            Self::Ready => "all runners are registered",
            Self::Releasing => "giving everything back",
            Self::Completed => "over, and everything is given back",
            Self::Failed => "over without success; nothing is held",
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Claiming => "Claiming",
            Self::Creating => "Creating",
            Self::Validating => "Validating",
            Self::Ready => "Ready",
            Self::Releasing => "Releasing",
            Self::Completed => "Completed",
            Self::Failed => "Failed",
        }
    }

    /// Whether the claim has finished and holds nothing.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

/// What the claim got so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerClaimStatus {
    /// How far the claim is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<ClaimPhase>,

    /// How many runners are ready.
    #[serde(default)]
    pub ready: u32,

    /// How many runners were asked for.
    #[serde(default)]
    pub count: u32,

    /// The two in one text for `kubectl get`: `1/2`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32))]
    pub progress: String,

    /// The pool that serves the claim, found by `labels` where the spec names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub pool: Option<String>,

    /// The workers that serve the claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 512), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub workers: Vec<ClaimWorker>,

    /// The order for new machines, written before it is sent: the next leader repeats it with the
    /// same token and gets the same machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fleet: Option<Box<LaunchOrder>>,

    /// EC2 had no capacity for the claim's last order; the claim holds nothing while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shortage: Option<CapacityShortage>,

    /// How often AWS refused a call while machines were provisioned; after five times the claim fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_tries: Option<u32>,

    /// The spot machines that EC2 took back, or announced to, while they served the claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 512), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["worker"]))]
    pub interruptions: Vec<Interruption>,

    /// Whether the jobs that they ran are run again, once the claim is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rerun: Option<Box<Rerun>>,

    /// The runner that took the job, as GitHub says; it may be another than the one made for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner: Option<Runner>,

    /// When each phase was first entered.
    #[serde(default)]
    pub phase_times: PhaseTimes,

    /// When a claim that waits tries again; absent when an event will wake it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<Time>,

    /// `Ready` says whether all runners are registered, and what the claim waits for while they are not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,

    /// The generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

impl RunnerClaimStatus {
    /// Enters `phase` and records the time of its first entry.
    pub fn enter(&mut self, phase: ClaimPhase, now: jiff::Timestamp) {
        self.phase = Some(phase);
        self.phase_times.of_mut(phase).get_or_insert(Time(now));
    }

    /// Sets both numbers and the text made from them.
    pub fn set_progress(&mut self, ready: u32, count: u32) {
        (self.ready, self.count, self.progress) = (ready, count, format!("{ready}/{count}"));
    }
}

/// A worker as the claim sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClaimWorker {
    /// The Worker's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The Worker's state.
    pub state: WorkerState,
    /// Whether it came from the `pool` or was `created` for the claim.
    pub source: WorkerSource,
}

/// Where a claim's worker came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WorkerSource {
    Pool,
    Created,
}

/// When each phase was first entered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PhaseTimes {
    /// When the operator first saw the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<Time>,
    /// When it began to take idle machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claiming: Option<Time>,
    /// When it began to make new ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creating: Option<Time>,
    /// When it began to wait for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validating: Option<Time>,
    /// When all runners were registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<Time>,
    /// When it began to give them back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub releasing: Option<Time>,
    /// When all were given back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<Time>,
    /// When it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<Time>,
}

impl PhaseTimes {
    pub fn of(&self, phase: ClaimPhase) -> Option<&Time> {
        match phase {
            ClaimPhase::Pending => self.pending.as_ref(),
            ClaimPhase::Claiming => self.claiming.as_ref(),
            ClaimPhase::Creating => self.creating.as_ref(),
            ClaimPhase::Validating => self.validating.as_ref(),
            ClaimPhase::Ready => self.ready.as_ref(),
            ClaimPhase::Releasing => self.releasing.as_ref(),
            ClaimPhase::Completed => self.completed.as_ref(),
            ClaimPhase::Failed => self.failed.as_ref(),
        }
    }

    fn of_mut(&mut self, phase: ClaimPhase) -> &mut Option<Time> {
        match phase {
            ClaimPhase::Pending => &mut self.pending,
            ClaimPhase::Claiming => &mut self.claiming,
            ClaimPhase::Creating => &mut self.creating,
            ClaimPhase::Validating => &mut self.validating,
            ClaimPhase::Ready => &mut self.ready,
            ClaimPhase::Releasing => &mut self.releasing,
            ClaimPhase::Completed => &mut self.completed,
            ClaimPhase::Failed => &mut self.failed,
        }
    }
}
