//! One-word reasons: of conditions, and of workers that failed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Declares an enum of reasons, each with its machine-readable name and its sentence in the reference.
macro_rules! reasons {
    ($(#[$attribute:meta])* $name:ident { $($(#[doc = $doc:literal])+ $variant:ident = $text:literal,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum $name { $($(#[doc = $doc])+ #[serde(rename = $text)] $variant,)* }

        impl $name {
            /// Every reason with what it means.
            pub const ALL: &[(Self, &str)] = &[$((Self::$variant, concat!($($doc),+)),)*];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl From<$name> for &'static str {
            fn from(reason: $name) -> Self {
                reason.as_str()
            }
        }
    };
}

reasons! {
    /// Reasons of a pool's `Ready` condition.
    PoolReason {
        /// The pool serves claims.
        Ready = "Ready",
        /// Table, queues or launch template are being made, or not visible yet.
        Preparing = "Preparing",
        /// The Secret, or a key in it, is missing.
        CredentialsMissing = "CredentialsMissing",
        /// GitHub does not accept the credentials.
        CredentialsRefused = "CredentialsRefused",
        /// GitHub does not answer as it should.
        GitHubUnavailable = "GitHubUnavailable",
        /// AWS does not answer as it should.
        AwsUnavailable = "AwsUnavailable",
        /// AWS denies a call that the pool needs.
        AwsDenied = "AwsDenied",
        /// EC2 has no capacity for the machines that are to be kept warm.
        InsufficientCapacity = "InsufficientCapacity",
        /// Machines fail after their launch, and new ones are launched less often.
        MachinesFailing = "MachinesFailing",
        /// The rendered user data is longer than EC2 takes.
        UserDataTooLarge = "UserDataTooLarge",
        /// No ready node carries the board.
        NoBoards = "NoBoards",
        /// The spec asks for something that cannot be done.
        InvalidSpec = "InvalidSpec",
        /// The pool is being deleted and waits for its claims and machines.
        Deleting = "Deleting",
    }
}

reasons! {
    /// Reasons of a claim's `Ready` condition.
    ClaimReason {
        /// All runners are registered.
        Ready = "Ready",
        /// No pool has the name that the claim gives.
        PoolNotFound = "PoolNotFound",
        /// No pool serves the labels.
        NoPoolForLabels = "NoPoolForLabels",
        /// Several pools serve the labels.
        AmbiguousLabels = "AmbiguousLabels",
        /// The pool is not ready; the message repeats why.
        PoolNotReady = "PoolNotReady",
        /// The claim asks for what the pool cannot have, such as an unknown resource class or an instance type that EC2
        /// does not have.
        InvalidSpec = "InvalidSpec",
        /// The owner runs as many workers as it may.
        QuotaReached = "QuotaReached",
        /// No board has a free slot.
        NoFreeSlot = "NoFreeSlot",
        /// Earlier claims of the same owner and labels come first.
        WaitingInLine = "WaitingInLine",
        /// The pool has as many machines as it may.
        PoolFull = "PoolFull",
        /// EC2 has no capacity in any zone of the pool.
        InsufficientCapacity = "InsufficientCapacity",
        /// Taking idle machines from the pool.
        Claiming = "Claiming",
        /// Making new machines or a pod.
        Creating = "Creating",
        /// Waiting for new machines or a pod to report.
        Validating = "Validating",
        /// New machines did not report in time.
        ValidationFailed = "ValidationFailed",
        /// A worker was lost while it served the claim, such as a reclaimed spot machine.
        WorkerLost = "WorkerLost",
        /// EC2 has announced that it takes a spot machine of the claim back. It finishes its job if it can, and takes no other.
        SpotInterruption = "SpotInterruption",
        /// A runner ended while it served the claim; its machine starts it again.
        RunnerEnded = "RunnerEnded",
        /// The machines served the claim for as long as they may.
        MaxRuntimeReached = "MaxRuntimeReached",
        /// GitHub does not know the job any more.
        JobNotFound = "JobNotFound",
        /// The workflow run is over although the job is still queued.
        JobStuckQueued = "JobStuckQueued",
        /// GitHub does not answer as it should.
        GitHubUnavailable = "GitHubUnavailable",
        /// AWS does not answer as it should.
        AwsUnavailable = "AwsUnavailable",
        /// Giving everything back.
        Releasing = "Releasing",
        /// Over, and everything is given back.
        Completed = "Completed",
        /// AWS kept refusing a call while machines were provisioned; all of them were terminated.
        InternalError = "InternalError",
    }
}

reasons! {
    /// Why a worker failed.
    FailureReason {
        /// The pod runs and GitHub never heard of its runner.
        RunnerNeverRegistered = "runner_never_registered",
        /// The pod never started.
        PodStuckPending = "pod_stuck_pending",
        /// The runner was online and got no job.
        RunnerIdle = "runner_idle",
        /// The runner's pod ended well without having run a job.
        RunnerWithoutJob = "runner_without_job",
        /// The node does not answer.
        NodeUnreachable = "node_unreachable",
        /// The node was deleted.
        NodeDeleted = "node_deleted",
        /// The pod ended with an error.
        PodFailed = "pod_failed",
        /// The pod is gone.
        PodMissing = "pod_missing",
        /// The pod could not be created.
        PodRefused = "pod_refused",
        /// The machine's pre-runner script failed.
        PreRunnerFailed = "pre_runner_failed",
        /// The machine did not report in time after its launch.
        ValidationTimeout = "validation_timeout",
        /// The machine did not register for its claim in time.
        RegistrationTimeout = "registration_timeout",
        /// The machine said that it could not register.
        RegistrationFailed = "registration_failed",
        /// The machine's runner ended for good while it served a claim: GitHub refuses its version, or an admin deleted it.
        RunnerEnded = "runner_ended",
        /// The machine did not leave GitHub in time after its release.
        DeregistrationTimeout = "deregistration_timeout",
        /// The machine said that it could not leave GitHub.
        DeregistrationFailed = "deregistration_failed",
        /// The machine could not be cleaned between two claims.
        ScrubFailed = "scrub_failed",
        /// The machine has served as many claims as it may.
        MaxClaimsServed = "max_claims_served",
        /// The machine was made from an earlier template or image of its pool.
        Outdated = "outdated",
        /// The machine made room for a claim that it must not serve (`reuse.scope`).
        ScopeEvicted = "scope_evicted",
        /// The machine's heartbeat stopped.
        HeartbeatStale = "heartbeat_stale",
        /// The machine stayed in one state for too long.
        ThresholdPassed = "threshold_passed",
        /// Another version of Paddock wrote the machine's record, and it cannot be used.
        RecordUnreadable = "record_unreadable",
        /// EC2 took the spot machine back.
        SpotReclaimed = "spot_reclaimed",
        /// The machine was terminated by someone else.
        InstanceGone = "instance_gone",
        /// The creation that the machine was part of failed as a whole.
        CreationAborted = "creation_aborted",
        /// The machine's claim could not be provisioned, and everything of it was terminated. Its record is not kept.
        Dumped = "dumped",
    }
}
