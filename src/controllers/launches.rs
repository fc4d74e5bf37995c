//! Launches under way, so that `maxInstances` holds while several claims create machines at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use super::lock;

#[derive(Default)]
pub struct Launches {
    pending: Mutex<HashMap<String, u32>>,
    /// The token of the last order of each pool that was carried out: a view of the pool that still has it is stale.
    carried_out: Mutex<HashMap<String, String>>,
}

/// Room for machines that are being launched; given back when dropped, when their records count instead.
pub struct Reservation {
    launches: Arc<Launches>,
    pool: String,
    count: u32,
}

impl Launches {
    /// Room for up to `wanted` more beside the `live` ones and those under way; less than `least` is none.
    pub fn reserve(self: &Arc<Self>, pool: &str, live: u32, least: u32, wanted: u32, max: u32) -> Option<Reservation> {
        let mut pending = self.pending();
        let under_way = pending.entry(pool.to_owned()).or_default();
        let count = wanted.min(max.saturating_sub(live.saturating_add(*under_way)));
        if count == 0 || count < least {
            return None;
        }
        *under_way += count;
        Some(Reservation { launches: self.clone(), pool: pool.to_owned(), count })
    }

    pub fn note_carried_out(&self, pool: &str, token: &str) {
        lock(&self.carried_out).insert(pool.to_owned(), token.to_owned());
    }

    pub fn was_carried_out(&self, pool: &str, token: &str) -> bool {
        lock(&self.carried_out).get(pool).is_some_and(|last| last == token)
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<String, u32>> {
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
        let launches = Arc::new(Launches::default());
        let first = launches.reserve("ci/linux", 1, 2, 2, 4).unwrap();
        assert!(launches.reserve("ci/linux", 1, 2, 2, 4).is_none(), "there is room for one, not for two");
        assert_eq!(launches.reserve("ci/linux", 1, 1, 2, 4).unwrap().count(), 1, "where one is better than none");
        assert!(launches.reserve("ci/arm", 0, 4, 4, 4).is_some(), "another pool has its own room");
        drop(first);
        assert!(launches.reserve("ci/linux", 1, 3, 3, 4).is_some());
    }
}
