//! What AWS's error codes mean, why EC2 launched less than was ordered, and messages for both.

use std::collections::BTreeMap;

use super::pool_status::PoolProblem;
use crate::api::{OrderSubnet, PoolReason};

/// The most types listed for a zone; with requirements instead of types, EC2 tries dozens.
const TYPES_LISTED_MAX: usize = 4;

const NO_ADDRESSES: &str = "InsufficientFreeAddressesInSubnet";

/// Why EC2 launched nothing, or less, of one type in one zone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cause {
    pub code: String,
    pub message: String,
    pub subnet: String,
    pub zone: String,
    pub instance_type: String,
}

/// What an error code of EC2 or SQS says about the same call later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It may succeed in another zone, or when EC2 has capacity again.
    Capacity,
    /// It may succeed at once: too many calls were made, the service failed, or credentials have just expired.
    Throttled,
    Unavailable,
    /// It succeeds when AWS has forgotten or shows what it is about: changes become visible late.
    NotYet,
    /// It needs a permission.
    Denied,
    /// It needs another spec.
    Spec,
}

impl Kind {
    /// Whether the same call may succeed without any change, and says nothing about capacity.
    pub const fn passes(self) -> bool {
        matches!(self, Self::Throttled | Self::Unavailable | Self::NotYet)
    }

    pub fn of(code: &str) -> Self {
        match code {
            // The classes are those of Karpenter (pkg/errors/errors.go) and of the EC2 user guide.
            "InsufficientInstanceCapacity"
            | "InsufficientCapacity"
            | "InsufficientHostCapacity"
            | "InsufficientReservedInstanceCapacity"
            | NO_ADDRESSES
            | "UnfulfillableCapacity"
            | "Unsupported"
            | "ReservationCapacityExceeded"
            | "InstanceLimitExceeded"
            | "VcpuLimitExceeded"
            | "MaxFleetCountExceeded"
            | "MaxSpotInstanceCountExceeded"
            | "SpotMaxPriceTooLow" => Self::Capacity,
            "RequestLimitExceeded"
            | "Throttling"
            | "ThrottlingException"
            | "RequestThrottled"
            // Concurrent writes to one record: a retry sees their result.
            | "TransactionCanceledException"
            | "TransactionConflictException"
            | "ProvisionedThroughputExceededException"
            | "TooManyRequestsException" => Self::Throttled,
            "InternalError"
            | "InternalServerError"
            | "InternalFailure"
            | "ServiceUnavailable"
            | "Unavailable"
            // Credentials that have expired are renewed.
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "RequestExpired" => Self::Unavailable,
            "UnauthorizedOperation"
            | "AccessDenied"
            | "AccessDeniedException"
            | "UnrecognizedClientException"
            | "InvalidClientTokenId" => Self::Denied,
            _ if code.starts_with("AuthFailure") => Self::Denied,
            _ if is_queue_deleted_recently(code) || is_template_invisible(code) => Self::NotYet,
            _ => Self::Spec,
        }
    }
}

/// A queue of this name was deleted less than 60 s ago.
fn is_queue_deleted_recently(code: &str) -> bool {
    code.ends_with("QueueDeletedRecently")
}

/// A launch template, or its version, is not there or not visible yet. One that exists already was not visible before.
fn is_template_invisible(code: &str) -> bool {
    code.starts_with("InvalidLaunchTemplate") && (code.contains("NotFound") || code.contains("AlreadyExists"))
}

impl Cause {
    pub fn kind(&self) -> Kind {
        Kind::of(&self.code)
    }

    /// EC2 launched less than was ordered, and named neither this zone nor a reason.
    pub(super) fn no_capacity(subnet: &OrderSubnet) -> Self {
        let (code, OrderSubnet { id, zone }) = ("InsufficientInstanceCapacity".into(), subnet.clone());
        Self { code, subnet: id, zone, ..Self::default() }
    }

    pub(super) const fn is_placeless(&self) -> bool {
        self.subnet.is_empty() && self.zone.is_empty()
    }

    /// The same about one of the subnets that it concerns. A quota of the account concerns none.
    pub(super) fn at(&self, subnet: &OrderSubnet) -> Self {
        match self.is_empty_zone() {
            true => Self { subnet: subnet.id.clone(), zone: subnet.zone.clone(), ..self.clone() },
            false => self.clone(),
        }
    }

    fn is_empty_zone(&self) -> bool {
        matches!(self.code.as_str(), "InsufficientInstanceCapacity" | "UnfulfillableCapacity")
    }

    /// Whether it is about this subnet. EC2 may name the zone alone.
    pub(super) fn is_about(&self, subnet: &OrderSubnet) -> bool {
        if self.subnet.is_empty() {
            self.zone == subnet.zone && !self.zone.is_empty()
        } else {
            self.subnet == subnet.id
        }
    }

    /// Whether another subnet of the same zone may do.
    pub fn concerns_subnet_only(&self) -> bool {
        self.code == NO_ADDRESSES
    }

    pub(super) fn zone_or_subnet(&self) -> &str {
        if self.zone.is_empty() { &self.subnet } else { &self.zone }
    }
}

/// What to do about an error of `call`, if its code or message implies it.
pub fn hint(code: &str, message: &str, call: &str) -> String {
    let about = [
        ("InvalidSubnet", "check spec.ec2.subnetIds"),
        ("InvalidAMI", "check spec.ec2.ami"),
        ("InvalidGroup", "check spec.ec2.securityGroupIds"),
        ("InvalidSecurityGroup", "check spec.ec2.securityGroupIds"),
        ("InvalidIamInstanceProfile", "check spec.ec2.instanceProfile"),
        ("InvalidParameterValue", "check spec.ec2.instanceProfile and the other names in the spec"),
        ("ResourceNotFoundException", "the table was deleted; it is created again"),
        (
            "AuthFailure.ServiceLinkedRole",
            "the account has no role for spot machines yet: create it once with \
             `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`",
        ),
        ("AuthFailure", "check the operator's AWS credentials"),
        ("UnrecognizedClient", "check the operator's AWS credentials"),
        ("InvalidClientTokenId", "check the operator's AWS credentials"),
    ];
    match about.iter().find(|(prefix, _)| code.starts_with(prefix)) {
        Some((_, hint)) => (*hint).to_owned(),
        None if Kind::of(code) == Kind::Denied => grant(message, call),
        None if is_queue_deleted_recently(code) => "SQS creates it again 60 s after its deletion".into(),
        None if is_template_invisible(code) => "EC2 shows a new launch template after a while".into(),
        None => String::new(),
    }
}

/// The action to grant is in the message. A fleet needs more than `CreateFleet`, and some messages name none.
fn grant(message: &str, call: &str) -> String {
    let named = message.split_once("not authorized to perform: ").and_then(|(_, rest)| rest.split_whitespace().next());
    match (named, call) {
        (Some(action), _) => format!("grant the operator's role {action} (docs/iam)"),
        (None, "CreateFleet") => {
            let actions = "ec2:CreateFleet, ec2:RunInstances, ec2:CreateTags and iam:PassRole";
            format!("grant the operator's role {actions} (docs/iam)")
        }
        (None, call) => format!("grant the operator's role the action {call} (docs/iam)"),
    }
}

/// Describes the causes: `insufficient capacity in zones a (c7i.large), b (c7i.large)`, then the others.
pub fn in_words(causes: &[Cause]) -> String {
    let mut empty: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut others = Vec::new();
    for cause in causes {
        let place = cause.zone_or_subnet();
        if cause.is_empty_zone() && !place.is_empty() {
            let types = empty.entry(place).or_default();
            types.extend(Some(cause.instance_type.as_str()).filter(|kind| !kind.is_empty() && !types.contains(kind)));
        } else {
            let Cause { code, message, .. } = cause;
            let (hint, place) = (hint(code, message, "CreateFleet"), separated(" in ", place));
            let words = format!("{code}{place}: {}{}", message.trim_end_matches('.'), separated("; ", &hint));
            others.extend(Some(words.clone()).filter(|words| !others.contains(words)));
        }
    }
    let zones: Vec<_> = empty.iter().map(|(zone, types)| describe_zone(zone, types)).collect();
    let capacity = (!zones.is_empty()).then(|| format!("insufficient capacity in zones {}", zones.join(", ")));
    let words: Vec<_> = capacity.into_iter().chain(others).collect();
    if words.is_empty() { "it gives no reason".into() } else { words.join("; ") }
}

/// `text` after `separator`, or nothing.
pub fn separated(separator: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{separator}{text}") }
}

fn describe_zone(zone: &str, types: &[&str]) -> String {
    let named = types.iter().take(TYPES_LISTED_MAX).copied().collect::<Vec<_>>().join(", ");
    match types.len() {
        0 => zone.to_owned(),
        more if more > TYPES_LISTED_MAX => format!("{zone} ({named} and {} more types)", more - TYPES_LISTED_MAX),
        _ => format!("{zone} ({named})"),
    }
}

/// Why a pool's machines cannot be launched, unless that is capacity or passes by itself.
pub fn launch_problem(causes: &[Cause]) -> Option<PoolProblem> {
    let is_permanent = |cause: &&Cause| matches!(cause.kind(), Kind::Denied | Kind::Spec);
    let rest: Vec<_> = causes.iter().filter(is_permanent).cloned().collect();
    let denied = rest.iter().any(|cause| cause.kind() == Kind::Denied);
    let reason = if denied { PoolReason::AwsDenied } else { PoolReason::InvalidSpec };
    (!rest.is_empty()).then(|| (reason, format!("EC2 cannot launch machines: {}", in_words(&rest))))
}

/// Why a pool's machines cannot be launched for a moment.
pub fn passing_problem(causes: &[Cause]) -> Option<PoolProblem> {
    let passing: Vec<_> = causes.iter().filter(|cause| cause.kind().passes()).cloned().collect();
    let message = || format!("EC2 cannot launch machines now: {}", in_words(&passing));
    (!passing.is_empty()).then(|| (PoolReason::AwsUnavailable, message()))
}

#[cfg(test)]
#[path = "launch_error_tests.rs"]
pub(super) mod tests;
