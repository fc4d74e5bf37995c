//! Which idle machines this leader has offered: a message that nobody needs any more can stand in a queue's size for one
//! that was never sent, so the size alone proves nothing.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Ids by pool. All of it is lost with the lease: the next leader offers every idle machine once more, which does no harm.
#[derive(Default)]
pub struct Offers(Mutex<HashMap<String, HashSet<String>>>);

impl Offers {
    fn known(&self) -> MutexGuard<'_, HashMap<String, HashSet<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, pool: &str, id: &str) {
        self.known().entry(pool.to_owned()).or_default().insert(id.to_owned());
    }

    pub fn forget(&self, pool: &str, id: &str) {
        if let Some(ids) = self.known().get_mut(pool) {
            ids.remove(id);
        }
    }

    /// Forgets all but the `free` ones, and gives those among them that were not offered yet.
    pub fn missing(&self, pool: &str, free: &HashSet<&str>) -> HashSet<String> {
        let mut known = self.known();
        let offered = known.entry(pool.to_owned()).or_default();
        offered.retain(|id| free.contains(id.as_str()));
        free.iter().filter(|id| !offered.contains(**id)).map(|id| (*id).to_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_missing_until_it_is_offered_and_again_after_it_was_taken() {
        let offers = Offers::default();
        let free = HashSet::from(["i-1", "i-2"]);
        offers.note("ci/linux", "i-1");
        assert_eq!(offers.missing("ci/linux", &free), HashSet::from(["i-2".to_owned()]));
        offers.note("ci/linux", "i-2");
        assert!(offers.missing("ci/linux", &free).is_empty());
        assert!(offers.missing("ci/linux", &HashSet::from(["i-2"])).is_empty(), "i-1 is claimed");
        assert_eq!(offers.missing("ci/linux", &free), HashSet::from(["i-1".to_owned()]), "and free again");
        offers.forget("ci/linux", "i-2");
        assert_eq!(offers.missing("ci/linux", &free).len(), 2);
    }
}
