//! Where EC2 had nothing to give: told apart by zone and type, said in words, and remembered for a while, so that the next
//! claim does not ask there again.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;

use super::pickup::{Needs, glob};
use crate::api::{FleetOrder, PoolReason, UsageClass};

/// Types named for a zone; with requirements instead of types, EC2 tries dozens.
const TYPES_NAMED: usize = 4;

/// Why EC2 launched nothing, or less, of one type in one place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cause {
    pub code: String,
    pub message: String,
    pub subnet: String,
    pub zone: String,
    pub instance_type: String,
}

/// What a cause asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Time, or another place.
    Capacity,
    /// A permission.
    Denied,
    /// Another spec.
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

    fn place(&self) -> &str {
        if self.zone.is_empty() { &self.subnet } else { &self.zone }
    }
}

/// What to mend, where a code of EC2's tells.
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
        ("ResourceNotFoundException", "the table was deleted; it is made anew"),
        ("UnauthorizedOperation", "grant the operator's role this action (docs/iam)"),
        ("AccessDenied", "grant the operator's role this action (docs/iam)"),
    ];
    about.iter().find(|(prefix, _)| code.starts_with(prefix)).map_or("", |(_, hint)| hint)
}

/// The causes for a person: `insufficient capacity in zones a (c7i.large), b (c7i.large)`, and what else there is.
pub fn in_words(causes: &[Cause]) -> String {
    let mut empty: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut others = Vec::new();
    for cause in causes {
        if cause.code == "InsufficientInstanceCapacity" {
            let types = empty.entry(cause.place()).or_default();
            types.extend(Some(cause.instance_type.as_str()).filter(|kind| !kind.is_empty() && !types.contains(kind)));
        } else {
            let (hint, Cause { code, message, .. }) = (hint(&cause.code), cause);
            let words = format!("{code} in {}: {}", cause.place(), message.trim_end_matches('.'));
            let words = if hint.is_empty() { words } else { format!("{words}; {hint}") };
            others.extend(Some(words.clone()).filter(|words| !others.contains(words)));
        }
    }
    let zones: Vec<_> = empty.iter().map(|(zone, types)| place_in_words(zone, types)).collect();
    let capacity = (!zones.is_empty()).then(|| format!("insufficient capacity in zones {}", zones.join(", ")));
    let words: Vec<_> = capacity.into_iter().chain(others).collect();
    if words.is_empty() { "it gives no reason".into() } else { words.join("; ") }
}

fn place_in_words(zone: &str, types: &[&str]) -> String {
    let named = types.iter().take(TYPES_NAMED).copied().collect::<Vec<_>>().join(", ");
    match types.len() {
        0 => zone.to_owned(),
        more if more > TYPES_NAMED => format!("{zone} ({named} and {} more types)", more - TYPES_NAMED),
        _ => format!("{zone} ({named})"),
    }
}

/// Why a pool cannot have machines made, if that is not capacity.
pub fn trouble(causes: &[Cause]) -> Option<(PoolReason, String)> {
    let rest: Vec<_> = causes.iter().filter(|cause| cause.kind() != Kind::Capacity).cloned().collect();
    let denied = rest.iter().any(|cause| cause.kind() == Kind::Denied);
    let reason = if denied { PoolReason::AwsDenied } else { PoolReason::InvalidSpec };
    (!rest.is_empty()).then(|| (reason, format!("EC2 cannot launch machines: {}", in_words(&rest))))
}

/// What to order for whoever needs machines now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    Ask { usage_class: UsageClass, subnet_ids: Vec<String> },
    Wait { until: Timestamp, message: String },
}

/// The places that were empty a moment ago. Capacity is the account's, not a pool's: all pools share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortages {
    known: Vec<Shortage>,
    /// How long a place stays empty in our memory.
    memory: Duration,
}

/// One subnet has no machine of these types and at least this size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shortage {
    subnet: String,
    zone: String,
    usage_class: UsageClass,
    cpu: u32,
    memory_mib: u32,
    types: Vec<String>,
    until: Timestamp,
}

impl Shortages {
    pub const fn new(memory: Duration) -> Self {
        Self { known: Vec::new(), memory }
    }

    /// Learns from the answer to an order. One that fell short has tried everything in the zones that it names; one that
    /// did not has still met types that are out.
    pub fn note(&mut self, order: &FleetOrder, launched: usize, causes: &[Cause], now: Timestamp) {
        self.known.retain(|known| known.until > now);
        let short = launched < order.requested as usize;
        for cause in causes.iter().filter(|cause| cause.kind() == Kind::Capacity) {
            let (cpu, memory_mib, types) = match short || cause.instance_type.is_empty() {
                true => (order.cpu, order.memory_mib, order.allowed_instance_types.clone()),
                false => (0, 0, vec![cause.instance_type.clone()]),
            };
            let (subnet, zone) = (cause.subnet.clone(), cause.place().to_owned());
            let usage_class = order.usage_class;
            let new = Shortage { subnet, zone, usage_class, cpu, memory_mib, types, until: now + self.memory };
            self.known.retain(|known| Shortage { until: new.until, ..known.clone() } != new);
            self.known.push(new);
        }
    }

    /// What to order for `needs`: not where it is known to be empty, on-demand instead of spot where `fallback` allows and
    /// spot is empty everywhere, and nothing while all is empty.
    pub fn order(&self, needs: &Needs, subnet_ids: &[String], fallback: bool, now: Timestamp) -> Order {
        let instead = (needs.usage_class == UsageClass::Spot && fallback).then_some(UsageClass::OnDemand);
        let mut closed = Vec::new();
        for usage_class in [Some(needs.usage_class), instead].into_iter().flatten() {
            let (empty, open): (Vec<_>, Vec<_>) =
                subnet_ids.iter().partition(|subnet| self.is_empty(subnet, usage_class, needs, now));
            if !open.is_empty() {
                return Order::Ask { usage_class, subnet_ids: open.into_iter().cloned().collect() };
            }
            closed.extend(empty.into_iter().flat_map(|subnet| self.about(subnet, usage_class, needs, now)));
        }
        let until = closed.iter().map(|known| known.until).min().unwrap_or(now);
        let mut zones: Vec<_> = closed.iter().map(|known| known.zone.as_str()).collect();
        zones.sort_unstable();
        zones.dedup();
        let at = until.strftime("%Y-%m-%dT%H:%M:%SZ");
        Order::Wait { until, message: format!("insufficient capacity in zones {}, retry at {at}", zones.join(", ")) }
    }

    fn is_empty(&self, subnet: &str, usage_class: UsageClass, needs: &Needs, now: Timestamp) -> bool {
        let types = &needs.allowed_instance_types;
        let out = |wanted: &String| {
            self.about(subnet, usage_class, needs, now)
                .any(|known| known.types.iter().any(|pattern| glob(pattern, wanted)))
        };
        !types.is_empty() && types.iter().all(out)
    }

    /// What is known of a place for machines of this size: where a smaller one is not to be had, a larger one is not.
    fn about<'a>(
        &'a self,
        subnet: &'a str,
        usage_class: UsageClass,
        needs: &'a Needs,
        now: Timestamp,
    ) -> impl Iterator<Item = &'a Shortage> {
        self.known.iter().filter(move |known| {
            known.subnet == subnet
                && known.usage_class == usage_class
                && known.until > now
                && known.cpu <= needs.cpu
                && known.memory_mib <= needs.memory_mib
        })
    }
}

#[cfg(test)]
#[path = "shortage_tests.rs"]
mod tests;
