//! Workers that are being made or were a moment ago: they count before any cache shows them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kube::{Api, Client, ResourceExt, runtime::reflector::ObjectRef};
use paddock_core::api::Worker;
use paddock_effects::kube::{objects::KubeError, stores::Watched};

use super::lock;

/// A cache is seldom later than this; what it does not show by then is asked for.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a worker of which it is not known whether it was made.
const DOUBT: Duration = Duration::from_secs(1);

type Key = (String, String);

#[derive(Default)]
pub struct Reservations(Mutex<BTreeMap<Key, Reservation>>);

struct Reservation {
    worker: Arc<Worker>,
    since: Instant,
}

fn key(worker: &Worker) -> Key {
    (worker.namespace().unwrap_or_default(), worker.name_any())
}

impl Reservations {
    /// Also for a worker that was perhaps made: while nobody knows, its slot must not be given away twice.
    pub fn insert(&self, worker: Worker) {
        lock(&self.0).insert(key(&worker), Reservation { worker: Arc::new(worker), since: Instant::now() });
    }

    /// For a worker that was not made for sure.
    pub fn remove(&self, worker: &Worker) {
        lock(&self.0).remove(&key(worker));
    }

    /// Drops what the cache shows by now, and what turns out not to be.
    pub async fn settle(&self, client: &Client, workers: &Watched<Worker>) -> Result<(), KubeError> {
        let late: Vec<_> = {
            let mut reserved = lock(&self.0);
            reserved.retain(|_, reserved| workers.store.get(&ObjectRef::from_obj(&*reserved.worker)).is_none());
            let late = reserved.iter().filter(|(_, reserved)| {
                let patience = if reserved.worker.metadata.uid.is_some() { PATIENCE } else { DOUBT };
                reserved.since.elapsed() > patience
            });
            late.map(|(key, _)| key.clone()).collect()
        };
        for (namespace, name) in late {
            let api: Api<Worker> = Api::namespaced(client.clone(), &namespace);
            match api.get_opt(&name).await.map_err(KubeError::new(format!("cannot read Worker {name}")))? {
                Some(worker) => self.insert(worker),
                None => drop(lock(&self.0).remove(&(namespace, name))),
            }
        }
        Ok(())
    }

    /// Those that are not shown.
    pub fn beyond(&self, is_shown: impl Fn(&Worker) -> bool) -> Vec<Arc<Worker>> {
        let reserved = lock(&self.0);
        reserved.values().map(|reserved| &reserved.worker).filter(|worker| !is_shown(worker)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str) -> Worker {
        let json = serde_json::json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "Worker",
            "metadata": {"name": name, "namespace": "default"}, "spec": {"pool": "p"},
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_worker_counts_once_whoever_shows_it() {
        let reservations = Reservations::default();
        reservations.insert(worker("a"));
        reservations.insert(worker("b"));
        let shown = |worker: &Worker| ["a", "c"].contains(&worker.name_any().as_str());
        let names: Vec<_> = reservations.beyond(shown).iter().map(|worker| worker.name_any()).collect();
        assert_eq!(names, ["b"]);
        reservations.remove(&worker("b"));
        assert!(reservations.beyond(shown).is_empty());
    }
}
