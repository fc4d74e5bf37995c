//! Workers that were created recently or are being created: they count before the cache shows them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kube::{Api, Client, ResourceExt, runtime::reflector::ObjectRef};
use paddock_core::api::Worker;
use paddock_effects::kube::{objects::KubeError, stores::Watched};

use super::lock;

/// The usual maximum lag of the cache. A worker that is still missing then is read from the API server.
const CACHE_LAG_MAX: Duration = Duration::from_secs(10);
/// The same for a worker whose creation was not confirmed.
const UNCONFIRMED_LAG_MAX: Duration = Duration::from_secs(1);

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
    /// Also for a worker whose creation is not confirmed: its slot must not be given away twice.
    pub fn insert(&self, worker: Worker) {
        lock(&self.0).insert(key(&worker), Reservation { worker: Arc::new(worker), since: Instant::now() });
    }

    /// For a worker that certainly was not created.
    pub fn remove(&self, worker: &Worker) {
        lock(&self.0).remove(&key(worker));
    }

    /// Drops the workers that the cache shows now, and those that do not exist.
    pub async fn settle(&self, client: &Client, workers: &Watched<Worker>) -> Result<(), KubeError> {
        let late: Vec<_> = {
            let mut reserved = lock(&self.0);
            reserved.retain(|_, reserved| workers.store.get(&ObjectRef::from_obj(&*reserved.worker)).is_none());
            let late = reserved.iter().filter(|(_, reserved)| {
                let lag_max = if reserved.worker.metadata.uid.is_some() { CACHE_LAG_MAX } else { UNCONFIRMED_LAG_MAX };
                reserved.since.elapsed() > lag_max
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

    /// The reserved workers that are not excluded.
    pub fn except(&self, is_excluded: impl Fn(&Worker) -> bool) -> Vec<Arc<Worker>> {
        let reserved = lock(&self.0);
        reserved.values().map(|reserved| &reserved.worker).filter(|worker| !is_excluded(worker)).cloned().collect()
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
    fn a_cached_worker_is_not_counted_again() {
        let reservations = Reservations::default();
        reservations.insert(worker("a"));
        reservations.insert(worker("b"));
        let cached = |worker: &Worker| ["a", "c"].contains(&worker.name_any().as_str());
        let names: Vec<_> = reservations.except(cached).iter().map(|worker| worker.name_any()).collect();
        assert_eq!(names, ["b"]);
        reservations.remove(&worker("b"));
        assert!(reservations.except(cached).is_empty());
    }
}
