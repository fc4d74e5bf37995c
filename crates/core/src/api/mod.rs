//! The API, `paddock.dev/v1alpha1`: the three kinds, and every name that users, instances and other programs rely on.
//!
//! The API server does the checking: ranges, patterns and CEL rules are part of the schemas. Unknown fields are refused
//! under strict field validation, which `kubectl` asks for by default, and pruned otherwise.

#![allow(clippy::duplicated_attributes, reason = "every printer column has a type of its own")]

pub mod board;
pub mod claim;
pub mod common;
pub mod ec2;
pub mod failure;
mod generate;
pub mod launch_order;
pub mod machine;
pub mod pool;
pub mod reasons;
mod reference;
pub mod rerun;
#[cfg(test)]
mod tests;
pub mod worker;

pub use board::{BoardGitHub, BoardPool, BoardTimeouts, EphemeralStorage, LabelOverride};
pub use claim::{
    ClaimPhase, ClaimWorker, Job, PhaseTimes, RunnerClaim, RunnerClaimSpec, RunnerClaimStatus, WorkerSource,
};
pub use common::{
    CLOCK_SKEW, Duration, METADATA_ACCESS, Owner, OwnerType, READY, RUNNER_NAME_MAX, RUNNER_OUTDATED, Runner,
    SecretRef, UsageClass, clip, condition, head, ready_condition, set_condition,
};
pub use ec2::{
    Agent, Ec2Defaults, Ec2GitHub, Ec2Pool, Ec2Timeouts, Fallback, Lifetimes, Metadata, ResourceClass, Reuse,
    ReuseScope,
};
pub use failure::{ContainerEnd, FAILURE_MESSAGE_MAX, Failure, LOG_TAIL_MAX, PodEvent};
pub use generate::{crds, crds_yaml};
pub use launch_order::{CapacityShortage, IncludedTypes, LaunchOrder, OrderSubnet};
pub use machine::{Ami, BlockDevice, Proxy, SSM_PREFIX, VolumeType};
pub use pool::{
    ClassTypes, Hardware, LaunchTemplate, PoolKind, Queue, RunnerPool, RunnerPoolSpec, RunnerPoolStatus, RunnerRelease,
    Slots, WorkerCounts,
};
pub use reasons::{ClaimReason, FailureReason, PoolReason};
pub use reference::reference_markdown;
pub use rerun::{Interruption, RERUN_MESSAGE_MAX, Rerun, RerunOutcome};
pub use worker::{
    BoardWorker, Ec2Worker, Heartbeat, HeartbeatState, InstanceInfo, PodPlace, SCOPE_MAX, Worker, WorkerSpec,
    WorkerState, WorkerStatus,
};

pub const GROUP: &str = "paddock.dev";
pub const VERSION: &str = "v1alpha1";

/// Field manager and event source of everything that the operator writes.
pub const FIELD_MANAGER: &str = "paddock";
/// Keeps an object until the operator has released what it holds.
pub const FINALIZER: &str = "paddock.dev/release";

/// Labels of workers, pods and Secrets that the operator creates.
pub const LABEL_POOL: &str = "paddock.dev/pool";
pub const LABEL_CLAIM: &str = "paddock.dev/claim";
pub const LABEL_ENTITY: &str = "paddock.dev/entity";

/// Annotations of claims: facts from webhooks, written by the replica that received them. They only move forward, and
/// the status is derived from them.
///
/// Progress of the claim's job: `queued`, `in_progress` or `completed`.
pub const ANNOTATION_JOB_STATE: &str = "paddock.dev/job-state";
/// The runner that took the job: its id at GitHub, a slash, its name.
pub const ANNOTATION_JOB_RUNNER: &str = "paddock.dev/job-runner";
/// `completed` once the claim's workflow run is completed.
pub const ANNOTATION_RUN_STATE: &str = "paddock.dev/run-state";

/// Tags of EC2 instances.
pub const TAG_CLUSTER: &str = "paddock:cluster";
pub const TAG_POOL: &str = "paddock:pool";
pub const TAG_CLAIM: &str = "paddock:claim";
/// The run that an instance was created for; empty when it was created to be kept warm.
pub const TAG_INITIAL_RUN_ID: &str = "InitialRunId";

/// The label of nodes and pods that names the board.
pub const LABEL_BOARD: &str = "riseproject.dev/board";
/// The label that every runner pod has, with [`APP`].
pub const LABEL_APP: &str = "app";
pub const APP: &str = "rise-riscv-runner";
/// The extended resource that counts a board's slots, unless the pool sets another one.
pub const RUNNER_RESOURCE: &str = "riseproject.com/runner";

/// Keys of the Secret that `credentialsRef` names, the same as ARC's.
pub const SECRET_APP_ID: &str = "github_app_id";
pub const SECRET_APP_PRIVATE_KEY: &str = "github_app_private_key";
pub const SECRET_APP_INSTALLATION_ID: &str = "github_app_installation_id";
pub const SECRET_TOKEN: &str = "github_token";
