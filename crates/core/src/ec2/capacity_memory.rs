//! Where EC2 had no capacity: remembered for a while by zone and type, so that the next order goes elsewhere.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    launch_error::{Cause, Kind},
    requirements::{Requirements, glob},
};
use crate::api::{LaunchOrder, UsageClass};

/// What to order now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchChoice {
    Ask { usage_class: UsageClass, subnet_ids: Vec<String> },
    Wait { until: Timestamp, message: String },
}

/// `message` with the time of the next attempt.
pub fn with_retry(message: &str, at: Timestamp) -> String {
    format!("{message}, retry at {}", at.strftime("%Y-%m-%dT%H:%M:%SZ"))
}

/// Subnets that recently had no capacity. Capacity belongs to the account, so all pools share this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapacityMemory {
    shortages: Vec<Shortage>,
    /// How long a shortage is remembered.
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

impl CapacityMemory {
    pub const fn new(memory: Duration) -> Self {
        Self { shortages: Vec::new(), memory }
    }

    /// Records the outcome of an order. One that fell short tried every allowed type in the zones of its causes;
    /// otherwise only the types of the causes are out of capacity.
    pub fn note(&mut self, order: &LaunchOrder, launched: usize, causes: &[Cause], now: Timestamp) {
        self.shortages.retain(|shortage| shortage.until > now);
        let short = launched < order.requested as usize;
        for cause in causes.iter().filter(|cause| cause.kind() == Kind::Capacity) {
            let (cpu, memory_mib, types) = match short || cause.instance_type.is_empty() {
                true => (order.cpu, order.memory_mib, order.allowed_instance_types.clone()),
                false => (0, 0, vec![cause.instance_type.clone()]),
            };
            let (subnet, zone) = (cause.subnet.clone(), cause.zone_or_subnet().to_owned());
            let usage_class = order.usage_class;
            let new = Shortage { subnet, zone, usage_class, cpu, memory_mib, types, until: now + self.memory };
            self.shortages.retain(|shortage| Shortage { until: new.until, ..shortage.clone() } != new);
            self.shortages.push(new);
        }
    }

    /// What to order for `needs`: skips subnets without capacity, uses on-demand if `fallback` allows and spot has none
    /// anywhere, and waits while every subnet is out.
    pub fn order(&self, needs: &Requirements, subnet_ids: &[String], fallback: bool, now: Timestamp) -> LaunchChoice {
        let fallback_class = (needs.usage_class == UsageClass::Spot && fallback).then_some(UsageClass::OnDemand);
        let mut closed = Vec::new();
        for usage_class in [Some(needs.usage_class), fallback_class].into_iter().flatten() {
            let (empty, open): (Vec<_>, Vec<_>) =
                subnet_ids.iter().partition(|subnet| self.lacks_capacity(subnet, usage_class, needs, now));
            if !open.is_empty() {
                return LaunchChoice::Ask { usage_class, subnet_ids: open.into_iter().cloned().collect() };
            }
            closed.extend(empty.into_iter().flat_map(|subnet| self.applicable(subnet, usage_class, needs, now)));
        }
        let until = closed.iter().map(|shortage| shortage.until).min().unwrap_or(now);
        let mut zones: Vec<_> = closed.iter().map(|shortage| shortage.zone.as_str()).collect();
        zones.sort_unstable();
        zones.dedup();
        LaunchChoice::Wait { until, message: format!("insufficient capacity in zones {}", zones.join(", ")) }
    }

    fn lacks_capacity(&self, subnet: &str, usage_class: UsageClass, needs: &Requirements, now: Timestamp) -> bool {
        let types = &needs.allowed_instance_types;
        let out = |wanted: &String| {
            self.applicable(subnet, usage_class, needs, now)
                .any(|shortage| shortage.types.iter().any(|pattern| glob(pattern, wanted)))
        };
        !types.is_empty() && types.iter().all(out)
    }

    /// Shortages that apply to machines of this size: where a smaller one is unavailable, so is a larger one.
    fn applicable<'a>(
        &'a self,
        subnet: &'a str,
        usage_class: UsageClass,
        needs: &'a Requirements,
        now: Timestamp,
    ) -> impl Iterator<Item = &'a Shortage> {
        self.shortages.iter().filter(move |shortage| {
            shortage.subnet == subnet
                && shortage.usage_class == usage_class
                && shortage.until > now
                && shortage.cpu <= needs.cpu
                && shortage.memory_mib <= needs.memory_mib
        })
    }
}

#[cfg(test)]
#[path = "capacity_memory_tests.rs"]
mod tests;
