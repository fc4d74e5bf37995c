//! Where EC2 had no capacity: remembered for a while by zone and type, so that the next order goes elsewhere.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;

use super::{
    launch_error::{Cause, Kind},
    requirements::{Requirements, glob},
    zones::{self, Subnet},
};
use crate::api::{LaunchOrder, OrderSubnet, UsageClass};

/// What to order now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchChoice {
    /// From these zones, of those that are not known to be out of capacity.
    Ask { usage_class: UsageClass, subnets: Vec<OrderSubnet> },
    /// Every zone is out of capacity, for these reasons.
    Wait { until: Timestamp, causes: Vec<Cause> },
}

/// `message` with the time of the next attempt.
pub fn with_retry(message: &str, at: Timestamp) -> String {
    format!("{message}, retry at {}", at.strftime("%Y-%m-%dT%H:%M:%SZ"))
}

/// Zones that recently had no capacity. Capacity belongs to the account, so all pools share this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapacityMemory {
    shortages: Vec<Shortage>,
    /// How long a shortage is remembered.
    memory: Duration,
}

/// One place has no machine of these types and at least this size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shortage {
    place: Place,
    usage_class: UsageClass,
    cpu: u32,
    memory_mib: u32,
    types: Vec<String>,
    until: Timestamp,
    /// What EC2 said.
    causes: Arc<[Cause]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Zone(String),
    /// It has no free addresses, whatever is asked for; another subnet of its zone may have some.
    Subnet(String),
}

impl Shortage {
    /// Whether at least one of the wanted types is out.
    fn covers_any(&self, wanted: &[String]) -> bool {
        wanted.iter().any(|wanted| self.types.iter().any(|pattern| glob(pattern, wanted)))
    }

    /// The same, or a part of a wanted pattern.
    fn overlaps(&self, wanted: &[String]) -> bool {
        self.covers_any(wanted) || self.types.iter().any(|out| wanted.iter().any(|pattern| glob(pattern, out)))
    }
}

impl CapacityMemory {
    pub const fn new(memory: Duration) -> Self {
        Self { shortages: Vec::new(), memory }
    }

    /// Records the outcome of an order. One that fell short tried every allowed type in each of its zones, whether EC2
    /// names that zone or not; otherwise only the types of the causes are out of capacity.
    pub fn note(&mut self, order: &LaunchOrder, launched: usize, causes: &[Cause], now: Timestamp) {
        self.shortages.retain(|shortage| shortage.until > now);
        let is_short = launched < order.requested as usize;
        let is_capacity = |cause: &Cause| cause.kind() == Kind::Capacity && !cause.concerns_subnet_only();
        let lacks_capacity = causes.is_empty() || causes.iter().any(is_capacity);
        let placeless: Vec<_> = causes.iter().filter(|cause| cause.is_placeless() && is_capacity(cause)).collect();
        for subnet in &order.subnets {
            let own = causes.iter().filter(|cause| cause.is_about(subnet));
            let (capacity, others): (Vec<_>, Vec<_>) = own.cloned().partition(is_capacity);
            for cause in others.iter().filter(|cause| cause.concerns_subnet_only()) {
                let (place, types) = (Place::Subnet(subnet.id.clone()), vec!["*".into()]);
                self.remember(place, order.usage_class, (0, 0), types, vec![cause.clone()], now);
            }
            let zone = || Place::Zone(subnet.zone.clone());
            let is_unnamed = capacity.is_empty() && others.is_empty();
            if is_short && (!capacity.is_empty() || (is_unnamed && lacks_capacity)) {
                let (size, types) = ((order.cpu, order.memory_mib), order.allowed_instance_types.clone());
                let causes = match placeless[..] {
                    _ if !is_unnamed => capacity,
                    [] => vec![Cause::no_capacity(subnet)],
                    _ => placeless.iter().map(|cause| cause.at(subnet)).collect(),
                };
                self.remember(zone(), order.usage_class, size, types, causes, now);
            } else {
                for cause in capacity.into_iter().filter(|cause| !cause.instance_type.is_empty()) {
                    let types = vec![cause.instance_type.clone()];
                    self.remember(zone(), order.usage_class, (0, 0), types, vec![cause], now);
                }
            }
        }
    }

    fn remember(
        &mut self,
        place: Place,
        usage_class: UsageClass,
        (cpu, memory_mib): (u32, u32),
        types: Vec<String>,
        causes: Vec<Cause>,
        now: Timestamp,
    ) {
        let (until, causes) = (now + self.memory, causes.into());
        let new = Shortage { place, usage_class, cpu, memory_mib, types, until, causes };
        self.shortages.retain(|old| {
            let size = (old.cpu, old.memory_mib) == (new.cpu, new.memory_mib);
            old.place != new.place || old.usage_class != new.usage_class || old.types != new.types || !size
        });
        self.shortages.push(new);
    }

    /// What to order for `needs`: skips zones without capacity, uses on-demand if `fallback` allows and spot has none
    /// anywhere, and waits while every zone is out.
    pub fn order(&self, needs: &Requirements, subnets: &[Subnet], fallback: bool, now: Timestamp) -> LaunchChoice {
        let fallback_class = (needs.usage_class == UsageClass::Spot && fallback).then_some(UsageClass::OnDemand);
        let (types, mut closed) = (&needs.allowed_instance_types, Vec::new());
        for usage_class in [Some(needs.usage_class), fallback_class].into_iter().flatten() {
            let applicable = |subnet| self.applicable(subnet, usage_class, needs, now);
            let (empty, open): (Vec<_>, Vec<_>) =
                subnets.iter().partition(|subnet| self.lacks_capacity(subnet, usage_class, needs, now));
            if !open.is_empty() {
                let shortages = |subnet| applicable(subnet).filter(|shortage| shortage.overlaps(types)).count();
                let subnets = zones::choose(open.into_iter(), shortages);
                return LaunchChoice::Ask { usage_class, subnets };
            }
            closed.extend(empty.into_iter().flat_map(applicable).filter(|shortage| shortage.covers_any(types)));
        }
        let until = closed.iter().map(|shortage| shortage.until).min().unwrap_or(now);
        let causes = closed.iter().flat_map(|shortage| shortage.causes.iter().cloned()).collect();
        LaunchChoice::Wait { until, causes }
    }

    fn lacks_capacity(&self, subnet: &Subnet, usage_class: UsageClass, needs: &Requirements, now: Timestamp) -> bool {
        let types = &needs.allowed_instance_types;
        let out = |wanted: &String| {
            self.applicable(subnet, usage_class, needs, now)
                .any(|shortage| shortage.covers_any(std::slice::from_ref(wanted)))
        };
        !types.is_empty() && types.iter().all(out)
    }

    /// Shortages that apply to machines of this size: where a smaller one is unavailable, so is a larger one.
    fn applicable<'a>(
        &'a self,
        subnet: &'a Subnet,
        usage_class: UsageClass,
        needs: &'a Requirements,
        now: Timestamp,
    ) -> impl Iterator<Item = &'a Shortage> {
        self.shortages.iter().filter(move |shortage| {
            shortage.until > now
                && match &shortage.place {
                    Place::Subnet(id) => *id == subnet.id,
                    Place::Zone(zone) => {
                        *zone == subnet.zone
                            && shortage.usage_class == usage_class
                            && shortage.cpu <= needs.cpu
                            && shortage.memory_mib <= needs.memory_mib
                    }
                }
        })
    }
}

#[cfg(test)]
#[path = "capacity_memory_tests.rs"]
mod tests;
