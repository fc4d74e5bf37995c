//! Why EC2 launched less than was ordered: the meaning of its codes, and messages for them.

use std::collections::BTreeMap;

use super::pool_status::PoolProblem;
use crate::api::PoolReason;

/// The most types listed for a zone; with requirements instead of types, EC2 tries dozens.
const TYPES_LISTED_MAX: usize = 4;

/// Why EC2 launched nothing, or less, of one type in one zone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cause {
    pub code: String,
    pub message: String,
    pub subnet: String,
    pub zone: String,
    pub instance_type: String,
}

/// How a cause can be resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By a retry, later or in another zone.
    Capacity,
    /// By a permission.
    Denied,
    /// By another spec.
    Spec,
}

impl Cause {
    pub fn kind(&self) -> Kind {
        match self.code.as_str() {
            "InsufficientInstanceCapacity"
            | "InsufficientCapacity"
            | "InsufficientHostCapacity"
            | "InsufficientReservedInstanceCapacity"
            | "InsufficientFreeAddressesInSubnet"
            | "InstanceLimitExceeded"
            | "VcpuLimitExceeded"
            | "MaxSpotInstanceCountExceeded"
            | "SpotMaxPriceTooLow" => Kind::Capacity,
            "UnauthorizedOperation" | "AccessDenied" | "AuthFailure" => Kind::Denied,
            _ => Kind::Spec,
        }
    }

    pub(super) fn zone_or_subnet(&self) -> &str {
        if self.zone.is_empty() { &self.subnet } else { &self.zone }
    }
}

/// What to change, if EC2's code implies it.
pub fn hint(code: &str) -> &'static str {
    let about = [
        ("InvalidSubnet", "check spec.ec2.subnetIds"),
        ("InvalidAMI", "check spec.ec2.amiId"),
        ("InvalidGroup", "check spec.ec2.securityGroupIds"),
        ("InvalidSecurityGroup", "check spec.ec2.securityGroupIds"),
        ("InvalidIamInstanceProfile", "check spec.ec2.instanceProfile"),
        ("InvalidParameterValue", "check spec.ec2.instanceProfile and the other names in the spec"),
        (
            "UnfulfillableCapacity",
            "no instance type has what resourceClasses and allowedInstanceTypes ask for together",
        ),
        ("ResourceNotFoundException", "the table was deleted; it is created again"),
        ("UnauthorizedOperation", "grant the operator's role this action (docs/iam)"),
        ("AccessDenied", "grant the operator's role this action (docs/iam)"),
    ];
    about.iter().find(|(prefix, _)| code.starts_with(prefix)).map_or("", |(_, hint)| hint)
}

/// Describes the causes: `insufficient capacity in zones a (c7i.large), b (c7i.large)`, then the others.
pub fn in_words(causes: &[Cause]) -> String {
    let mut empty: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut others = Vec::new();
    for cause in causes {
        if cause.code == "InsufficientInstanceCapacity" {
            let types = empty.entry(cause.zone_or_subnet()).or_default();
            types.extend(Some(cause.instance_type.as_str()).filter(|kind| !kind.is_empty() && !types.contains(kind)));
        } else {
            let (hint, Cause { code, message, .. }) = (hint(&cause.code), cause);
            let words = format!("{code} in {}: {}", cause.zone_or_subnet(), message.trim_end_matches('.'));
            let words = if hint.is_empty() { words } else { format!("{words}; {hint}") };
            others.extend(Some(words.clone()).filter(|words| !others.contains(words)));
        }
    }
    let zones: Vec<_> = empty.iter().map(|(zone, types)| describe_zone(zone, types)).collect();
    let capacity = (!zones.is_empty()).then(|| format!("insufficient capacity in zones {}", zones.join(", ")));
    let words: Vec<_> = capacity.into_iter().chain(others).collect();
    if words.is_empty() { "it gives no reason".into() } else { words.join("; ") }
}

fn describe_zone(zone: &str, types: &[&str]) -> String {
    let named = types.iter().take(TYPES_LISTED_MAX).copied().collect::<Vec<_>>().join(", ");
    match types.len() {
        0 => zone.to_owned(),
        more if more > TYPES_LISTED_MAX => format!("{zone} ({named} and {} more types)", more - TYPES_LISTED_MAX),
        _ => format!("{zone} ({named})"),
    }
}

/// Why a pool's machines cannot be launched, unless that is capacity alone.
pub fn launch_problem(causes: &[Cause]) -> Option<PoolProblem> {
    let rest: Vec<_> = causes.iter().filter(|cause| cause.kind() != Kind::Capacity).cloned().collect();
    let denied = rest.iter().any(|cause| cause.kind() == Kind::Denied);
    let reason = if denied { PoolReason::AwsDenied } else { PoolReason::InvalidSpec };
    (!rest.is_empty()).then(|| (reason, format!("EC2 cannot launch machines: {}", in_words(&rest))))
}

#[cfg(test)]
#[path = "launch_error_tests.rs"]
pub(super) mod tests;
