//! What is wrong with a pool, from one look to the next: one in between must not hide it.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{lock, pool::Trouble};

/// How long a launch that failed speaks for the next one, unless the pool is edited or another launch goes well.
const LAUNCH_MEMORY: Duration = Duration::from_secs(300);

#[derive(Default)]
pub struct Troubles {
    /// What the last reading of all records ended with, which is every pool's trouble.
    reading: Mutex<Option<Trouble>>,
    /// What the last sweep ended with.
    sweeps: Mutex<HashMap<String, Trouble>>,
    /// What the last launch ended with, under which generation of the pool, and when.
    launches: Mutex<HashMap<String, Launch>>,
}

type Launch = (Trouble, Option<i64>, Instant);

impl Troubles {
    pub fn swept(&self, pool: &str, trouble: Option<Trouble>) {
        match trouble {
            Some(trouble) => drop(lock(&self.sweeps).insert(pool.to_owned(), trouble)),
            None => drop(lock(&self.sweeps).remove(pool)),
        }
    }

    pub fn read(&self, trouble: Option<Trouble>) {
        *lock(&self.reading) = trouble;
    }

    /// What a pool's upkeep suffers from: records that cannot be read, or a sweep that failed.
    pub fn of_upkeep(&self, pool: &str) -> Option<Trouble> {
        lock(&self.reading).clone().or_else(|| lock(&self.sweeps).get(pool).cloned())
    }

    pub fn launched(&self, pool: &str, generation: Option<i64>, trouble: Option<Trouble>) {
        match trouble {
            Some(trouble) => {
                drop(lock(&self.launches).insert(pool.to_owned(), (trouble, generation, Instant::now())));
            }
            None => drop(lock(&self.launches).remove(pool)),
        }
    }

    /// Why machines cannot be had, and for how long that has been known.
    pub fn of_launch(&self, pool: &str, generation: Option<i64>) -> Option<(Trouble, Duration)> {
        let mut launches = lock(&self.launches);
        launches.retain(|_, (_, _, since)| since.elapsed() < LAUNCH_MEMORY);
        let (trouble, then, since) = launches.get(pool)?;
        (*then == generation).then(|| (trouble.clone(), since.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::PoolReason;

    #[test]
    fn a_failed_launch_speaks_until_one_goes_well_or_the_pool_is_edited() {
        let troubles = Troubles::default();
        let bad = || Some((PoolReason::InvalidSpec, "no such subnet".to_owned()));
        troubles.launched("ci/linux", Some(1), bad());
        assert_eq!(troubles.of_launch("ci/linux", Some(1)).map(|(trouble, _)| trouble), bad());
        assert_eq!(troubles.of_launch("ci/linux", Some(2)), None);
        assert_eq!(troubles.of_launch("ci/arm", Some(1)), None);
        troubles.launched("ci/linux", Some(1), None);
        assert_eq!(troubles.of_launch("ci/linux", Some(1)), None);
    }
}
