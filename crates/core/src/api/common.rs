//! What the three kinds share: durations, string rules, references and conditions.

use std::{borrow::Cow, fmt, str::FromStr};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::redaction::redact;

/// Patterns of the API. Each is anchored, and every string of a spec also has a maximum length: the API server
/// estimates the cost of CEL rules from these limits.
pub(super) mod pattern {
    /// A name that is also a label value, a queue name and a tag: no dots.
    pub const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
    /// The name of a Kubernetes object.
    pub const DNS_SUBDOMAIN: &str = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$";
    /// The value of a Kubernetes label; a run id is one too, and so is safe as a runner label, a tag and an argument.
    pub const LABEL_VALUE: &str = "^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$";
    /// The key of a Kubernetes label, or the name of an extended resource.
    pub const QUALIFIED_NAME: &str = "^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$";
    /// A runner label: any text that GitHub's comma-separated lists can carry.
    pub const RUNNER_LABEL: &str = r"^[^\s,\x00-\x1f\x7f]([^,\x00-\x1f\x7f]*[^\s,\x00-\x1f\x7f])?$";
    /// One line of any text.
    pub const ONE_LINE: &str = r"^[^\x00-\x1f\x7f]+$";
    /// Any text that a file can hold and a shell can read: everything but NUL.
    pub const TEXT: &str = r"^[^\x00]*$";
    /// A GitHub login, including those of managed users (`name_company`).
    pub const LOGIN: &str = "^[A-Za-z0-9][-_A-Za-z0-9]*$";
    pub const REPOSITORY: &str = "^[-._A-Za-z0-9]+$";
    pub const FULL_REPOSITORY: &str = "^[A-Za-z0-9][-_A-Za-z0-9]*/[-._A-Za-z0-9]+$";
    /// A URL of RFC 3986 characters only: no quotes, no spaces.
    pub const HTTP_URL: &str = r"^https?://[-A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%]+$";
    pub const SHA256: &str = "^[0-9a-f]{64}$";
    pub const AMI: &str = "^ami-([0-9a-f]{8}|[0-9a-f]{17})$";
    /// The name or ARN of an SSM parameter, and a version or label of it.
    pub const SSM_PARAMETER: &str =
        "^(arn:aws[-a-z]*:ssm:[-a-z0-9]+:[0-9]{12}:parameter/)?[-._/A-Za-z0-9]+(:[-._A-Za-z0-9]+)?$";
    pub const DEVICE: &str = "^(/dev/)?[a-z][a-z0-9/]*$";
    /// An address without user and password, of characters that need no quotes anywhere.
    pub const PROXY_URL: &str = r"^https?://([-A-Za-z0-9._]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?$";
    /// A host, a domain (`.example.com`), an address or a network.
    pub const PROXY_EXCEPTION: &str = r"^[-A-Za-z0-9._:/*\[\]]+$";
    pub const CERTIFICATES: &str =
        r"^[^\x00]*-----BEGIN CERTIFICATE-----[-A-Za-z0-9+/=\s]+-----END CERTIFICATE-----[^\x00]*$";
    pub const SUBNET: &str = "^subnet-([0-9a-f]{8}|[0-9a-f]{17})$";
    pub const INSTANCE: &str = "^i-([0-9a-f]{8}|[0-9a-f]{17})$";
    pub const SECURITY_GROUP: &str = "^sg-([0-9a-f]{8}|[0-9a-f]{17})$";
    /// The name of an instance profile, or its ARN.
    pub const INSTANCE_PROFILE: &str =
        r"^(arn:aws[-a-z]*:iam::[0-9]{12}:instance-profile/([!-~]+/)?)?[-+=,.@_A-Za-z0-9]+$";
    /// An instance type in which `*` stands for any text, as `CreateFleet` reads it.
    pub const INSTANCE_TYPES: &str = "^[a-z0-9*][-.a-z0-9*]*$";
    pub const VERSION: &str = r"^[0-9]+\.[0-9]+\.[0-9]+$";
    /// A container image: one printable word, because registries agree on nothing stricter.
    pub const IMAGE: &str = "^[!-~]+$";
    pub const DURATION: &str = "^([0-9]{1,8}[hms])+$";
    pub const QUANTITY: &str = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$";
}

/// A length of time in whole seconds, written as Kubernetes users write it: `30s`, `10m`, `6h`, `1h30m`.
///
/// The API server accepts one second to 366 days; zero only where that has a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Duration(u64);

impl Duration {
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds)
    }

    pub const fn from_mins(minutes: u64) -> Self {
        Self(minutes * 60)
    }

    pub const fn as_secs(self) -> u64 {
        self.0
    }

    /// `start` plus this duration, saturating at [`Timestamp::MAX`].
    pub fn after(self, start: Timestamp) -> Timestamp {
        start.saturating_add(SignedDuration::from(self)).unwrap_or(Timestamp::MAX)
    }
}

impl From<Duration> for std::time::Duration {
    fn from(duration: Duration) -> Self {
        Self::from_secs(duration.0)
    }
}

impl From<Duration> for SignedDuration {
    fn from(duration: Duration) -> Self {
        Self::from_secs(i64::try_from(duration.0).unwrap_or(i64::MAX))
    }
}

/// In the largest unit that is exact.
impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            s if s > 0 && s % 3600 == 0 => write!(f, "{}h", s / 3600),
            s if s > 0 && s % 60 == 0 => write!(f, "{}m", s / 60),
            s => write!(f, "{s}s"),
        }
    }
}

impl FromStr for Duration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || format!("`{text}` is not a duration such as 30s, 10m, 6h or 1h30m");
        let (mut rest, mut seconds) = (text, 0u64);
        while let Some(digits) = rest.find(|c: char| !c.is_ascii_digit()) {
            let number: u64 = rest[..digits].parse().map_err(|_| invalid())?;
            let unit = match rest.as_bytes()[digits] {
                b'h' => 3600,
                b'm' => 60,
                b's' => 1,
                _ => return Err(invalid()),
            };
            seconds = number.checked_mul(unit).and_then(|more| seconds.checked_add(more)).ok_or_else(invalid)?;
            rest = &rest[digits + 1..];
        }
        if text.is_empty() || !rest.is_empty() { Err(invalid()) } else { Ok(Self(seconds)) }
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<str>::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl JsonSchema for Duration {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        duration_schema("1s")
    }
}

/// A duration for which zero has a meaning.
pub(super) fn duration_or_zero(_: &mut SchemaGenerator) -> Schema {
    duration_schema("0s")
}

fn duration_schema(least: &str) -> Schema {
    // A text that is no duration fails the pattern; without the first part it would also fail the rule, with a
    // confusing conversion error.
    let (pattern, most) = (pattern::DURATION, "8784h");
    let rule = format!(
        "!self.matches('{pattern}') || duration(self) >= duration('{least}') && duration(self) <= duration('{most}')"
    );
    json_schema!({
        "type": "string",
        "pattern": pattern,
        "maxLength": 27,
        "x-kubernetes-validations": [{
            "rule": rule,
            "message": format!("must be between {least} and {most} (366 days)"),
        }],
    })
}

/// When a machine is paid for, and what may take it away.
///
/// `on-demand` machines stay until they are terminated; `spot` machines cost less and may be reclaimed at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UsageClass {
    #[default]
    OnDemand,
    Spot,
}

impl UsageClass {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OnDemand => "on-demand",
            Self::Spot => "spot",
        }
    }
}

/// A Secret in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct SecretRef {
    /// The Secret's name.
    #[schemars(length(max = 253), regex(pattern = pattern::DNS_SUBDOMAIN))]
    pub name: String,
}

/// Whether an account is an organisation or a person's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum OwnerType {
    Organization,
    User,
}

/// A GitHub account.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Owner {
    /// The account's number at GitHub (`github.repository_owner_id` in a workflow).
    #[schemars(range(min = 1))]
    pub id: i64,
    /// The account's name (`github.repository_owner` in a workflow).
    #[schemars(length(max = 100), regex(pattern = pattern::LOGIN))]
    pub login: String,
    /// `Organization` or `User`; runners of a personal account are registered with its repository.
    #[serde(rename = "type")]
    pub type_: OwnerType,
}

/// A runner as GitHub knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Runner {
    /// The runner's number at GitHub; absent until GitHub has given one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<i64>,
    /// The runner's name at GitHub.
    #[schemars(length(max = RUNNER_NAME_MAX))]
    pub name: String,
}

/// The longest name of a runner that is kept.
pub const RUNNER_NAME_MAX: usize = 256;

/// The type of the one condition that every kind has, for `kubectl wait --for=condition=Ready`.
pub const READY: &str = "Ready";

/// The type of a pool's condition that is True while a clock differs: the operator's, or a machine's.
pub const CLOCK_SKEW: &str = "ClockSkew";

/// The type of a pool's condition that is True while its runner is older than the one that GitHub lists.
pub const RUNNER_OUTDATED: &str = "RunnerOutdated";

/// The type of a pool's condition that is True while jobs can reach the metadata service although the pool keeps them away.
pub const METADATA_ACCESS: &str = "MetadataAccess";

/// Adds `condition` to `conditions`, or replaces the one of its type; the transition time moves only when the status
/// does, so that an unchanged object is not written again.
pub fn set_condition(conditions: &mut Vec<Condition>, mut condition: Condition) {
    match conditions.iter_mut().find(|c| c.type_ == condition.type_) {
        Some(old) => {
            if old.status == condition.status {
                condition.last_transition_time = old.last_transition_time.clone();
            }
            *old = condition;
        }
        None => conditions.push(condition),
    }
}

/// The `Ready` condition; `reason` is one of the reason enums of this API, `message` is for a person.
pub fn ready_condition(
    ready: bool,
    reason: impl Into<&'static str>,
    message: impl AsRef<str>,
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    condition(READY, ready, reason, message, generation, now)
}

/// A condition of another type.
pub fn condition(
    type_: &str,
    holds: bool,
    reason: impl Into<&'static str>,
    message: impl AsRef<str>,
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    Condition {
        type_: type_.into(),
        status: if holds { "True" } else { "False" }.into(),
        reason: reason.into().into(),
        message: clip(message.as_ref(), MESSAGE_MAX),
        observed_generation: generation,
        last_transition_time: Time(now),
    }
}

/// The longest message of a condition, as in Kubernetes' own conditions.
pub const MESSAGE_MAX: usize = 32768;

/// A text that others wrote, as it may be shown: without credentials, and cut to at most `max` characters, marked where it was
/// cut. Keeps the end, which matters most in a log.
pub fn clip(text: &str, max: usize) -> String {
    let text = redact(text);
    match text.chars().count() {
        n if n <= max => text.into_owned(),
        n => std::iter::once('…').chain(text.chars().skip(n - max + 1)).collect(),
    }
}

/// `text` cut to at most `max` characters. Keeps the beginning, which identifies a name.
pub fn head(text: &str, max: usize) -> String {
    match text.chars().count() {
        n if n <= max => text.to_owned(),
        _ => text.chars().take(max - 1).chain(['…']).collect(),
    }
}

/// Kubernetes' own condition list: one entry per type, limits as in its Go types.
pub(super) fn conditions_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {
                    "description": "What the condition is about: `Ready`.",
                    "type": "string", "maxLength": 316, "pattern": pattern::QUALIFIED_NAME,
                },
                "status": {
                    "description": "`True`, `False` or `Unknown`.",
                    "type": "string", "enum": ["True", "False", "Unknown"],
                },
                "reason": {
                    "description": "Why, in one word for programs.",
                    "type": "string", "minLength": 1, "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "message": {
                    "description": "Why, for a person.",
                    "type": "string", "maxLength": MESSAGE_MAX,
                },
                "observedGeneration": {
                    "description": "The generation of the spec that this says something about.",
                    "type": "integer", "format": "int64", "minimum": 0,
                },
                "lastTransitionTime": {
                    "description": "When `status` last changed.",
                    "type": "string", "format": "date-time",
                },
            },
        },
    })
}

/// A list of instance types, each possibly with `*`.
pub(super) fn instance_types_schema(_: &mut SchemaGenerator) -> Schema {
    set_schema(1, 64, 30, pattern::INSTANCE_TYPES)
}

/// One set of `runs-on` labels. GitHub compares labels without case, so neither may two differ in case alone.
pub(super) fn label_set_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array", "minItems": 1, "maxItems": 16, "x-kubernetes-list-type": "set",
        "items": { "type": "string", "minLength": 1, "maxLength": 100, "pattern": pattern::RUNNER_LABEL },
        "x-kubernetes-validations": [{
            "rule": "self.all(a, self.exists_one(b, a.lowerAscii() == b.lowerAscii()))",
            "message": "labels must differ in more than case: GitHub compares them without it",
        }],
    })
}

/// A list of label sets.
pub(super) fn label_sets_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array", "maxItems": 32, "x-kubernetes-list-type": "atomic",
        "items": label_set_schema(generator),
    })
}

/// A set of texts.
pub(super) fn set_schema(min: usize, max: usize, length: usize, pattern: &str) -> Schema {
    json_schema!({
        "type": "array", "minItems": min, "maxItems": max, "x-kubernetes-list-type": "set",
        "items": { "type": "string", "minLength": 1, "maxLength": length, "pattern": pattern },
    })
}

pub(super) fn quantity_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 20, "pattern": pattern::QUANTITY })
}
