//! What the machines of an EC2 pool are made from: image, volumes, and the way out of their network.

use kube_derive::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{
    TAG_INITIAL_RUN_ID,
    common::{pattern, set_schema},
};

/// The machine image: exactly one of `id` and `ssmParameter`. It needs `bash`, `curl`, `tar`, `gzip` and `sha256sum`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ami {
    /// The image's id, for example `ami-0abcdef1234567890`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 21), regex(pattern = pattern::AMI))]
    pub id: Option<String>,
    /// The SSM parameter that holds the image's id: a name such as `/ci/runner-image`, or the ARN of one that another account
    /// shares, with `:VERSION` or `:LABEL` where one of them is meant. When it moves, machines are replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1200), regex(pattern = pattern::SSM_PARAMETER))]
    pub ssm_parameter: Option<String>,
}

impl Ami {
    /// As EC2 takes it in a launch template; none if neither is set.
    pub fn reference(&self) -> Option<String> {
        let parameter = self.ssm_parameter.as_ref().map(|name| format!("{SSM_PREFIX}{name}"));
        self.id.clone().or(parameter)
    }
}

/// How EC2 marks an image that it looks up in SSM.
pub const SSM_PREFIX: &str = "resolve:ssm:";

/// A volume of each machine: the image's root volume if it has that device name, otherwise one more. It is deleted with its
/// machine.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    cel,
    validation = Rule::new("!has(self.iops) || self.type in ['gp3', 'io1', 'io2']")
        .message("iops are for volumes of type gp3, io1 and io2").field_path(".iops"),
    validation = Rule::new("has(self.iops) || !(self.type in ['io1', 'io2'])")
        .message("a volume of type io1 or io2 needs iops").field_path(".iops"),
    validation = Rule::new("!has(self.throughput) || self.type == 'gp3'")
        .message("throughput is for volumes of type gp3").field_path(".throughput")
)]
#[serde(rename_all = "camelCase")]
pub struct BlockDevice {
    /// The device, for example `/dev/xvda`; the image says which one is its root.
    #[schemars(length(max = 32), regex(pattern = pattern::DEVICE))]
    pub device_name: String,
    /// The size in GiB; left out: that of the image's volume. A volume that the image does not have needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536))]
    pub size: Option<u32>,
    /// The volume type at EBS.
    #[serde(default, rename = "type")]
    pub type_: VolumeType,
    /// I/O operations a second; left out: those that are included.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 256_000))]
    pub iops: Option<u32>,
    /// MiB a second; left out: those that are included.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 125, max = 2_000))]
    pub throughput: Option<u32>,
    /// Whether it is encrypted, with the account's default key; left out: as the account and the image say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

/// Volume types of EBS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeType {
    #[default]
    Gp3,
    Gp2,
    Io1,
    Io2,
    St1,
    Sc1,
    Standard,
}

impl VolumeType {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gp3 => "gp3",
            Self::Gp2 => "gp2",
            Self::Io1 => "io1",
            Self::Io2 => "io2",
            Self::St1 => "st1",
            Self::Sc1 => "sc1",
            Self::Standard => "standard",
        }
    }
}

/// The proxies that a machine's agent, its runner and jobs use.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    cel,
    validation = Rule::new("has(self.http) || has(self.https)").message("a proxy needs http or https")
)]
#[serde(rename_all = "camelCase")]
pub struct Proxy {
    /// For `http` addresses: `http://HOST:PORT`, without a password, which every job could read.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 300), regex(pattern = pattern::PROXY_URL))]
    pub http: Option<String>,
    /// For `https` addresses, also an `http` proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 300), regex(pattern = pattern::PROXY_URL))]
    pub https: Option<String>,
    /// Hosts, domains and addresses that are reached directly. Those of the machine itself and of EC2's metadata service always
    /// are.
    #[serde(default)]
    #[schemars(schema_with = "no_proxy_schema")]
    pub no_proxy: Vec<String>,
}

fn no_proxy_schema(_: &mut SchemaGenerator) -> Schema {
    set_schema(0, 64, 253, pattern::PROXY_EXCEPTION)
}

/// Tags for instances and volumes. The metadata service shows them to the machine, and it allows fewer characters in keys than EC2.
pub(super) fn tags_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 40,
        "additionalProperties": { "type": "string", "maxLength": 256, "pattern": r"^[\p{L}\p{Z}\p{N}_.:/=+\-@]*$" },
        "x-kubernetes-validations": [
            {
                "rule": "self.all(key, size(key) <= 128 && key.matches('^[-0-9A-Za-z_+=,.@:]+$'))",
                "message": "each key must have 1 to 128 letters, digits and characters of -_+=,.@:, as EC2's metadata service wants it",
            },
            {
                "rule": format!(
                    "self.all(key, !key.startsWith('paddock:') && !key.lowerAscii().startsWith('aws:') && key != '{TAG_INITIAL_RUN_ID}')"
                ),
                "message": format!("keys that begin with paddock: or aws:, and {TAG_INITIAL_RUN_ID}, are not for users"),
            },
        ],
    })
}

/// Certificates. Every process on a machine can read its user data, so a private key must not be among them.
pub(super) fn ca_bundle_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": 16384,
        "pattern": pattern::CERTIFICATES,
        "x-kubernetes-validations": [{
            "rule": "!self.contains('PRIVATE KEY')",
            "message": "certificates only: every program on a machine can read this",
        }],
    })
}

/// Checksums of the runner's archive by its architecture.
pub(super) fn runner_sha256_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 2,
        "additionalProperties": { "type": "string", "maxLength": 64, "pattern": pattern::SHA256 },
        "x-kubernetes-validations": [{
            "rule": "self.all(key, key in ['x64', 'arm64'])",
            "message": "checksums go by the architecture in the archive's name: x64 or arm64",
        }],
    })
}
