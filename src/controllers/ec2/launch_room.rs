//! Machines being launched, so that `maxInstances` holds while several claims create machines at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use paddock_core::names::PoolKey;
use paddock_effects::lock;

#[derive(Default)]
pub struct LaunchRoom {
    pending: Mutex<HashMap<PoolKey, u32>>,
    /// The client token of each pool's last completed order: a cached pool that still has the order is stale.
    carried_out: Mutex<HashMap<PoolKey, String>>,
}

/// Capacity for machines that are being launched. It is released on drop, when their records count instead.
pub struct Reservation {
    launches: Arc<LaunchRoom>,
    pool: PoolKey,
    count: u32,
}

impl LaunchRoom {
    /// Reserves up to `wanted` machines beside those `live` or being launched; `None` if fewer than `least` fit.
    pub fn reserve(
        self: &Arc<Self>,
        pool: &PoolKey,
        live: u32,
        least: u32,
        wanted: u32,
        max: u32,
    ) -> Option<Reservation> {
        let mut pending = self.pending();
        let under_way = pending.entry(pool.clone()).or_default();
        let count = wanted.min(max.saturating_sub(live.saturating_add(*under_way)));
        if count == 0 || count < least {
            return None;
        }
        *under_way += count;
        Some(Reservation { launches: self.clone(), pool: pool.clone(), count })
    }

    /// Machines of the pool that are being launched.
    pub fn under_way(&self, pool: &PoolKey) -> u32 {
        self.pending().get(pool).copied().unwrap_or_default()
    }

    pub fn note_carried_out(&self, pool: &PoolKey, token: &str) {
        lock(&self.carried_out).insert(pool.clone(), token.to_owned());
    }

    pub fn was_carried_out(&self, pool: &PoolKey, token: &str) -> bool {
        lock(&self.carried_out).get(pool).is_some_and(|last| last == token)
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<PoolKey, u32>> {
        lock(&self.pending)
    }
}

impl Reservation {
    pub const fn count(&self) -> u32 {
        self.count
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(under_way) = self.launches.pending().get_mut(&self.pool) {
            *under_way -= self.count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_under_way_count_until_they_are_over() {
        let (launches, linux) = (Arc::new(LaunchRoom::default()), PoolKey::new("ci", "linux"));
        let first = launches.reserve(&linux, 1, 2, 2, 4).unwrap();
        assert!(launches.reserve(&linux, 1, 2, 2, 4).is_none(), "there is room for one, not for two");
        assert_eq!(launches.reserve(&linux, 1, 1, 2, 4).unwrap().count(), 1, "where one is better than none");
        assert!(launches.reserve(&PoolKey::new("ci", "arm"), 0, 4, 4, 4).is_some(), "another pool has its own room");
        drop(first);
        assert!(launches.reserve(&linux, 1, 3, 3, 4).is_some());
    }
}
