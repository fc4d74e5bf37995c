//! Where EC2 had no capacity: remembered for a while by zone and type, so that the next order goes elsewhere.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    launch_error::{Cause, Kind},
    requirements::{Requirements, glob},
};
use crate::api::{LaunchOrder, UsageClass};

/// What to order for whoever needs machines now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchChoice {
    Ask { usage_class: UsageClass, subnet_ids: Vec<String> },
    Wait { until: Timestamp, message: String },
}

/// The places that were empty a moment ago. Capacity is the account's, not a pool's: all pools share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapacityMemory {
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

impl CapacityMemory {
    pub const fn new(memory: Duration) -> Self {
        Self { known: Vec::new(), memory }
    }

    /// Learns from the answer to an order. One that fell short has tried everything in the zones that it names; one that
    /// did not has still met types that are out.
    pub fn note(&mut self, order: &LaunchOrder, launched: usize, causes: &[Cause], now: Timestamp) {
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
    pub fn order(&self, needs: &Requirements, subnet_ids: &[String], fallback: bool, now: Timestamp) -> LaunchChoice {
        let instead = (needs.usage_class == UsageClass::Spot && fallback).then_some(UsageClass::OnDemand);
        let mut closed = Vec::new();
        for usage_class in [Some(needs.usage_class), instead].into_iter().flatten() {
            let (empty, open): (Vec<_>, Vec<_>) =
                subnet_ids.iter().partition(|subnet| self.is_empty(subnet, usage_class, needs, now));
            if !open.is_empty() {
                return LaunchChoice::Ask { usage_class, subnet_ids: open.into_iter().cloned().collect() };
            }
            closed.extend(empty.into_iter().flat_map(|subnet| self.about(subnet, usage_class, needs, now)));
        }
        let until = closed.iter().map(|known| known.until).min().unwrap_or(now);
        let mut zones: Vec<_> = closed.iter().map(|known| known.zone.as_str()).collect();
        zones.sort_unstable();
        zones.dedup();
        let at = until.strftime("%Y-%m-%dT%H:%M:%SZ");
        LaunchChoice::Wait {
            until,
            message: format!("insufficient capacity in zones {}, retry at {at}", zones.join(", ")),
        }
    }

    fn is_empty(&self, subnet: &str, usage_class: UsageClass, needs: &Requirements, now: Timestamp) -> bool {
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
        needs: &'a Requirements,
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
#[path = "capacity_memory_tests.rs"]
mod tests;
