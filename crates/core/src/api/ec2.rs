//! `RunnerPool.spec.ec2`: warm machines.

use std::collections::BTreeMap;

use kube_derive::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    common::{Duration, SecretRef, UsageClass, duration_or_zero, instance_types_schema, pattern},
    machine::{Ami, BlockDevice, Proxy, ca_bundle_schema, runner_sha256_schema, tags_schema},
};

/// Warm machines in EC2 that are reused across workflows.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    cel,
    validation = Rule::new("self.minIdle <= self.maxInstances")
        .message("minIdle must not be greater than maxInstances").field_path(".minIdle"),
    validation = Rule::new("!has(self.defaults.resourceClass) || self.resourceClasses.exists(c, c.name == self.defaults.resourceClass)")
        .message("defaults.resourceClass must name one of resourceClasses").field_path(".defaults.resourceClass"),
    validation = Rule::new("!has(self.amiId)")
        .message("moved to ami.id").field_path(".amiId").reason(Reason::FieldValueForbidden),
    validation = Rule::new("has(self.amiId) || has(self.ami.id) != has(self.ami.ssmParameter)")
        .message("exactly one of id and ssmParameter must be set").field_path(".ami"),
    validation = Rule::new("!has(self.runnerVersion) || size(self.runnerSha256) > 0")
        .message("runnerVersion needs the checksums of its archives: GitHub lists those of its newest version only").field_path(".runnerSha256")
)]
#[serde(rename_all = "camelCase")]
pub struct Ec2Pool {
    /// The machine image.
    #[serde(default)]
    pub ami: Ami,

    /// Moved to `ami.id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub ami_id: Option<String>,

    /// The instance profile, by name or ARN, that lets the agent reach the cluster's table.
    #[schemars(length(min = 1, max = 512), regex(pattern = pattern::INSTANCE_PROFILE))]
    pub instance_profile: String,

    /// Security groups of the machines. They need outbound HTTPS only.
    #[schemars(length(min = 1, max = 16), inner(length(max = 20), regex(pattern = pattern::SECURITY_GROUP)), extend("x-kubernetes-list-type" = "set"))]
    pub security_group_ids: Vec<String>,

    /// Subnets in any zones: the more zones, the more capacity there is to choose from. An order has one subnet of each
    /// zone, the one with most free addresses, and four zones at most; the others are asked next.
    #[schemars(length(min = 1, max = 64), inner(length(max = 24), regex(pattern = pattern::SUBNET)), extend("x-kubernetes-list-type" = "set"))]
    pub subnet_ids: Vec<String>,

    /// A script that runs as root once, before a new machine takes its first job. Becomes part of the user data, which
    /// EC2 limits to 16 KiB as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16384), regex(pattern = pattern::TEXT))]
    pub pre_runner_script: Option<String>,

    /// The version of GitHub's runner that machines install where their image has none. Left out: the one that GitHub lists, and
    /// machines are replaced when it lists a newer one. GitHub refuses a version 30 days after a newer one was released.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = pattern::VERSION))]
    pub runner_version: Option<String>,

    /// The SHA-256 of the runner's archive by architecture, `x64` or `arm64`: for `runnerVersion`, and where GitHub's list has none. A
    /// machine refuses an archive with another one, and one without.
    #[serde(default)]
    #[schemars(schema_with = "runner_sha256_schema")]
    pub runner_sha256: BTreeMap<String, String>,

    /// Where a new machine fetches Paddock's agent from.
    pub agent: Agent,

    /// Sizes that a claim can ask for by name. Idle machines are pooled by class.
    #[schemars(length(min = 1, max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub resource_classes: Vec<ResourceClass>,

    /// What a claim gets where it does not ask.
    #[serde(default)]
    pub defaults: Ec2Defaults,

    /// How many idle machines of the default class to keep warm, for any claim: one that `reuse.scope` keeps for earlier
    /// claims does not count.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub min_idle: u32,

    /// The most machines that the pool may have at once, whatever their state.
    #[serde(default = "max_instances")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_instances: u32,

    /// How long a machine may stay in each state before it is terminated.
    #[serde(default)]
    pub lifetimes: Lifetimes,

    /// How long to wait for a machine's signals.
    #[serde(default)]
    pub timeouts: Ec2Timeouts,

    /// Where the runners register.
    pub github: Ec2GitHub,

    /// How often and in which shape a machine serves again.
    #[serde(default)]
    pub reuse: Reuse,

    /// What to do when EC2 has not enough capacity.
    #[serde(default)]
    pub fallback: Fallback,

    /// Whether jobs that failed because EC2 took their spot machine back are run again at GitHub, once in each workflow
    /// run, when that has completed. The App, or the token, needs the repository permission Actions: read and write.
    #[serde(default)]
    pub rerun_interrupted: bool,

    /// The machines' volumes, where they are to differ from the image's.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["deviceName"]))]
    pub block_devices: Vec<BlockDevice>,

    /// Tags of the machines and their volumes, beside Paddock's own; `Name` may be among them.
    #[serde(default)]
    #[schemars(schema_with = "tags_schema")]
    pub tags: BTreeMap<String, String>,

    /// Whether the machines have a public IPv4 address; left out: as their subnet says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_address: Option<bool>,

    /// The proxies of agent, runner and jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<Proxy>,

    /// Certificates (PEM) of authorities that agent, runner and jobs trust beside those of the image, such as that of a GitHub
    /// Enterprise Server. Becomes part of the user data, which EC2 limits to 16 KiB as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "ca_bundle_schema")]
    pub ca_bundle: Option<String>,

    /// Who on a machine may reach the metadata service, and with it the role of the instance profile.
    #[serde(default)]
    pub metadata: Metadata,
}

impl Ec2Pool {
    pub fn resource_class(&self, name: &str) -> Option<&ResourceClass> {
        self.resource_classes.iter().find(|class| class.name == name)
    }

    /// The class of claims that ask for none: the pool's default, or its first.
    pub fn default_resource_class(&self) -> Option<&ResourceClass> {
        match &self.defaults.resource_class {
            Some(name) => self.resource_class(name),
            None => self.resource_classes.first(),
        }
    }
}

fn max_instances() -> u32 {
    20
}

/// Paddock's agent, which runs on each machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Agent {
    /// An `https` or `http` address of the `paddock-agent` binary; the checksum is what makes it safe.
    #[schemars(length(max = 2048), regex(pattern = pattern::HTTP_URL))]
    pub url: String,
    /// The SHA-256 of the binary, 64 lower-case hexadecimal digits. A machine that fetches anything else stops.
    #[schemars(length(max = 64), regex(pattern = pattern::SHA256))]
    pub sha256: String,
}

/// A size of machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResourceClass {
    /// The name that claims use.
    #[schemars(length(max = 20), regex(pattern = pattern::DNS_LABEL))]
    pub name: String,
    /// The least number of vCPUs.
    #[schemars(range(min = 1, max = 1024))]
    pub cpu: u32,
    /// The least memory in MiB.
    #[serde(rename = "memoryMiB")]
    #[schemars(range(min = 128, max = 33_554_432))]
    pub memory_mib: u32,
}

/// What a claim gets where it does not ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Ec2Defaults {
    /// `on-demand` or `spot`.
    pub usage_class: UsageClass,
    /// One of `resourceClasses`; left out: the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 20), regex(pattern = pattern::DNS_LABEL))]
    pub resource_class: Option<String>,
    /// Instance types that EC2 may choose from; `*` stands for any text (`c7*`, `m6i.*`). Named types are taken at any
    /// price, burstable ones only where all are burstable; with `*` alone EC2 leaves out dear and burstable types.
    #[schemars(schema_with = "instance_types_schema")]
    pub allowed_instance_types: Vec<String>,
}

impl Default for Ec2Defaults {
    fn default() -> Self {
        Self { usage_class: UsageClass::OnDemand, resource_class: None, allowed_instance_types: vec!["*".into()] }
    }
}

/// How long a machine may stay in each state before it is terminated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Lifetimes {
    /// From launch to ready for jobs.
    pub created: Duration,
    /// From the claim to ready for jobs.
    pub claimed: Duration,
    /// Unused in the pool.
    pub idle: Duration,
    /// Serving one claim; a claim's own `maxRuntime` comes before it.
    pub max_runtime: Duration,
}

impl Default for Lifetimes {
    fn default() -> Self {
        Self {
            created: Duration::from_mins(10),
            claimed: Duration::from_mins(5),
            idle: Duration::from_mins(7),
            max_runtime: Duration::from_mins(360),
        }
    }
}

/// How long to wait for machines and their signals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Ec2Timeouts {
    /// For a claimed machine to register with GitHub.
    pub registration: Duration,
    /// How long its heartbeat may stay the same before a machine counts as dead.
    pub heartbeat: Duration,
    /// For a new machine to run its script and register.
    pub validation: Duration,
    /// For a released machine to leave GitHub before it is pooled again.
    pub deregistration: Duration,
    /// For EC2 to have capacity for a claim before it fails; `0s` fails it at once. A claim that waits for room under
    /// `maxInstances` has no time limit.
    #[schemars(schema_with = "duration_or_zero")]
    pub capacity: Duration,
}

impl Default for Ec2Timeouts {
    fn default() -> Self {
        Self {
            registration: Duration::from_secs(60),
            heartbeat: Duration::from_secs(15),
            validation: Duration::from_secs(180),
            deregistration: Duration::from_secs(120),
            capacity: Duration::from_secs(600),
        }
    }
}

/// Where an EC2 pool's runners register.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    cel,
    validation = Rule::new("!has(self.runnerGroup) || !has(self.repository)")
        .message("runner groups are for organisations: a repository has none").field_path(".runnerGroup")
)]
#[serde(rename_all = "camelCase")]
pub struct Ec2GitHub {
    /// The organisation or user.
    #[schemars(length(max = 100), regex(pattern = pattern::LOGIN))]
    pub owner: String,
    /// A repository of the owner, without the owner's name; left out: runners register with the organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 100), regex(pattern = pattern::REPOSITORY))]
    pub repository: Option<String>,
    /// The runner group of the organisation that the runners join; it must exist and be open to the repositories that are to use
    /// them. Left out: the default group. A change takes effect with the next claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 100), regex(pattern = pattern::ONE_LINE))]
    pub runner_group: Option<String>,
    /// The Secret with `github_app_id`, `github_app_private_key` and, unless it is to be found by owner,
    /// `github_app_installation_id`; or with `github_token`.
    pub credentials_ref: SecretRef,
}

/// How often and in which shape a machine serves again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reuse {
    /// How many claims a machine may serve before it is terminated; left out: any number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub max_claims: Option<u32>,
    /// A script that runs as root between two claims; a machine where it fails is terminated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16384), regex(pattern = pattern::TEXT))]
    pub scrub_script: Option<String>,
    /// How far apart two claims may be that use one machine after each other. What a scrub cannot undo reaches no further.
    #[serde(default)]
    pub scope: ReuseScope,
}

/// Whose claims a machine serves after its first one: `Repository` (those of the same repository), `Owner` (those of the
/// repository's owner) or `Pool` (all). A claim that names no repository counts as its namespace's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ReuseScope {
    #[default]
    Repository,
    Owner,
    Pool,
}

/// What to do when EC2 has not enough capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Fallback {
    /// Whether a claim for spot machines may get on-demand ones, which cost more, when there are none.
    pub spot_to_on_demand: bool,
}

/// Who on a machine may reach the metadata service, and with it the role of the instance profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// How many hops away its answers reach: with `1` no container on a bridge, which is one hop further.
    #[schemars(range(min = 1, max = 64))]
    pub hop_limit: u8,
    /// Whether jobs may reach it. If not, the agent refuses it to the user `runner` by a firewall rule; a pool whose image
    /// cannot do that has the condition `MetadataAccess`.
    pub runner_access: bool,
}

impl Default for Metadata {
    fn default() -> Self {
        Self { hop_limit: 1, runner_access: false }
    }
}
