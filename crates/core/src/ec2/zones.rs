//! The subnets of a pool, by zone.

use std::{cmp::Reverse, collections::BTreeMap};

use crate::api::OrderSubnet;

/// EC2 takes at most four requirements in one fleet request, and an order has its own for each zone (seen by users of
/// osbuild-composer, issue 3946; in no AWS page).
pub const ZONES_PER_ORDER: usize = 4;

/// A subnet as EC2 describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subnet {
    pub id: String,
    pub zone: String,
    pub free_addresses: u32,
}

impl From<&Subnet> for OrderSubnet {
    fn from(subnet: &Subnet) -> Self {
        Self { id: subnet.id.clone(), zone: subnet.zone.clone() }
    }
}

impl From<&OrderSubnet> for Subnet {
    fn from(OrderSubnet { id, zone }: &OrderSubnet) -> Self {
        Self { id: id.clone(), zone: zone.clone(), free_addresses: 0 }
    }
}

/// One subnet for each zone, the one with most free addresses: EC2 refuses a fleet with two subnets of one zone ("An EC2
/// Fleet request can't span different subnets from the same Availability Zone"). Zones with fewer known `shortages`
/// come first, then those with more free addresses.
pub fn choose<'a>(
    subnets: impl Iterator<Item = &'a Subnet>,
    shortages: impl Fn(&'a Subnet) -> usize,
) -> Vec<OrderSubnet> {
    let mut best: BTreeMap<&str, &Subnet> = BTreeMap::new();
    for subnet in subnets {
        let known = best.entry(&subnet.zone).or_insert(subnet);
        if subnet.free_addresses > known.free_addresses {
            *known = subnet;
        }
    }
    let mut chosen: Vec<_> = best.into_values().collect();
    chosen.sort_by_key(|&subnet| (shortages(subnet), Reverse(subnet.free_addresses)));
    chosen.into_iter().take(ZONES_PER_ORDER).map(OrderSubnet::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(id: &str, zone: &str, free_addresses: u32) -> Subnet {
        Subnet { id: id.into(), zone: zone.into(), free_addresses }
    }

    fn chosen(subnets: &[Subnet], short: &str) -> Vec<String> {
        let chosen = choose(subnets.iter(), |subnet| usize::from(subnet.zone == short));
        chosen.into_iter().map(|subnet| format!("{} {}", subnet.zone, subnet.id)).collect()
    }

    #[test]
    fn an_order_has_one_subnet_of_each_zone_the_one_with_most_free_addresses() {
        let subnets = [subnet("1", "a", 5), subnet("2", "b", 9), subnet("3", "a", 250), subnet("4", "a", 250)];
        assert_eq!(chosen(&subnets, ""), ["a 3", "b 2"]);
    }

    #[test]
    fn an_order_has_four_zones_those_without_shortages_and_with_most_addresses_first() {
        let subnets = ["a", "b", "c", "d", "e", "f"].map(|zone| subnet(zone, zone, 10));
        assert_eq!(chosen(&subnets, ""), ["a a", "b b", "c c", "d d"]);
        assert_eq!(chosen(&subnets, "b"), ["a a", "c c", "d d", "e e"]);
        let more = [&subnets[..], &[subnet("g", "e", 11)]].concat();
        assert_eq!(chosen(&more, "a"), ["e g", "b b", "c c", "d d"]);
        assert_eq!(chosen(&subnets[..2], "a"), ["b b", "a a"]);
    }
}
