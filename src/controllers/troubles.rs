//! What is wrong with a pool's machines, from one sweep to the next: a look in between must not hide it.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use super::pool::Trouble;

#[derive(Default)]
pub struct Troubles(Mutex<HashMap<String, Trouble>>);

impl Troubles {
    /// What the last sweep of a pool ended with.
    pub fn note(&self, pool: &str, trouble: Option<Trouble>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match trouble {
            Some(trouble) => drop(known.insert(pool.to_owned(), trouble)),
            None => drop(known.remove(pool)),
        }
    }

    pub fn of(&self, pool: &str) -> Option<Trouble> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(pool).cloned()
    }
}
