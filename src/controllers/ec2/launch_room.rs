//! The room for new machines under `maxInstances`, which holds while several claims create machines at once.
//!
//! Machines that are being launched have no records yet. Their orders count instead: those that this leader has
//! reserved room for, and those in the statuses of claims and pools, which an earlier leader may have written and not
//! carried out.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

use paddock_core::names::PoolKey;
use paddock_effects::lock;

/// Orders by client token, with the number of machines.
pub type Orders = HashMap<String, u32>;

#[derive(Default)]
pub struct LaunchRoom(Mutex<HashMap<PoolKey, PoolOrders>>);

#[derive(Default)]
struct PoolOrders {
    reserved: Orders,
    /// Orders whose machines have records, though a cached status may still show them as open.
    settled: HashSet<String>,
}

/// What limits the machines of a pool.
pub struct Limits {
    pub max: u32,
    /// Machines with records.
    pub live: u32,
    /// Open orders in statuses.
    pub open: Orders,
}

/// Room for the machines of one order. It is released on drop, when their records count instead.
pub struct Reservation {
    room: Arc<LaunchRoom>,
    pool: PoolKey,
    token: String,
    count: u32,
}

impl LaunchRoom {
    /// Reserves room for up to `wanted` machines beside all others; `None` if fewer than `least` fit.
    pub fn reserve(
        self: &Arc<Self>,
        pool: &PoolKey,
        token: &str,
        limits: &Limits,
        least: u32,
        wanted: u32,
    ) -> Option<Reservation> {
        let mut pools = self.pools();
        let orders = pools.entry(pool.clone()).or_default();
        let count = wanted.min(limits.max.saturating_sub(orders.used(token, limits)));
        if count == 0 || count < least {
            return None;
        }
        orders.reserved.insert(token.to_owned(), count);
        Some(Reservation { room: self.clone(), pool: pool.clone(), token: token.to_owned(), count })
    }

    /// Machines that exist or are being launched, without those of the order `token`. Leaves nothing behind for a pool
    /// that was deleted.
    pub fn used(&self, pool: &PoolKey, token: &str, limits: &Limits) -> u32 {
        let mut pools = self.pools();
        pools.get_mut(pool).unwrap_or(&mut PoolOrders::default()).used(token, limits)
    }

    /// The machines of an order have records.
    pub fn settle(&self, pool: &PoolKey, token: &str) {
        self.pools().entry(pool.clone()).or_default().settled.insert(token.to_owned());
    }

    /// Whether an order that a cached status shows as open has been carried out.
    pub fn is_settled(&self, pool: &PoolKey, token: &str) -> bool {
        self.pools().get(pool).is_some_and(|orders| orders.settled.contains(token))
    }

    /// For a deleted pool.
    pub fn forget(&self, pool: &PoolKey) {
        self.pools().remove(pool);
    }

    fn pools(&self) -> MutexGuard<'_, HashMap<PoolKey, PoolOrders>> {
        lock(&self.0)
    }
}

impl PoolOrders {
    fn used(&mut self, token: &str, limits: &Limits) -> u32 {
        self.settled.retain(|settled| limits.open.contains_key(settled));
        let unsettled = limits.open.iter().filter(|(open, _)| !self.settled.contains(*open));
        let mut orders: HashMap<_, _> = unsettled.collect();
        orders.extend(&self.reserved);
        orders
            .iter()
            .filter(|(other, _)| *other != &token)
            .fold(limits.live, |sum, (_, count)| sum.saturating_add(**count))
    }
}

impl Reservation {
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Another order of the same size replaces this one.
    pub fn pass_to(&mut self, token: &str) {
        if let Some(orders) = self.room.pools().get_mut(&self.pool) {
            orders.reserved.remove(&self.token);
            orders.reserved.insert(token.to_owned(), self.count);
        }
        self.token = token.to_owned();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(orders) = self.room.pools().get_mut(&self.pool) {
            orders.reserved.remove(&self.token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deleted_pool_leaves_nothing_behind() {
        let room = Arc::new(LaunchRoom::default());
        room.settle(&linux(), "a");
        room.forget(&linux());
        assert_eq!(room.used(&linux(), "b", &limits(1, &[("a", 2)])), 3);
        assert!(room.pools().is_empty());
    }

    fn limits(live: u32, open: &[(&str, u32)]) -> Limits {
        Limits { max: 4, live, open: open.iter().map(|(token, count)| ((*token).to_owned(), *count)).collect() }
    }

    fn linux() -> PoolKey {
        PoolKey::new("ci", "linux")
    }

    #[test]
    fn launches_under_way_count_until_they_are_over() {
        let room = Arc::new(LaunchRoom::default());
        let reserve = |pool: &PoolKey, token, least, wanted| room.reserve(pool, token, &limits(1, &[]), least, wanted);
        let first = reserve(&linux(), "a", 2, 2).unwrap();
        assert!(reserve(&linux(), "b", 2, 2).is_none(), "there is room for one, not for two");
        assert_eq!(reserve(&linux(), "b", 1, 2).unwrap().count(), 1, "where one is better than none");
        assert!(reserve(&PoolKey::new("ci", "arm"), "b", 3, 3).is_some(), "another pool has its own room");
        drop(first);
        assert!(reserve(&linux(), "b", 3, 3).is_some());
    }

    #[test]
    fn an_open_order_of_an_earlier_leader_counts_once_and_until_it_is_settled() {
        let room = Arc::new(LaunchRoom::default());
        let open = limits(0, &[("a", 3)]);
        assert!(room.reserve(&linux(), "b", &open, 2, 2).is_none());
        let resumed = room.reserve(&linux(), "a", &open, 3, 3).expect("its own order does not count");
        assert_eq!(room.used(&linux(), "b", &open), 3, "reserved and open: the same order");
        room.settle(&linux(), "a");
        drop(resumed);
        let recorded = limits(3, &[("a", 3)]);
        assert_eq!(room.used(&linux(), "b", &recorded), 3, "the cached status is older than the records");
        assert!(room.is_settled(&linux(), "a"));
        assert_eq!(room.used(&linux(), "b", &limits(3, &[])), 3);
        assert!(!room.is_settled(&linux(), "a"), "forgotten once no status shows it");
    }
}
