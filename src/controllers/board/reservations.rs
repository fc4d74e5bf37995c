//! Workers that were made a moment ago: they count before any cache shows them.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use kube::{Api, Client, ResourceExt};

use crate::{api::Worker, stores::Watched};

/// A cache is seldom later than this; what it does not show by then is asked for.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Reservations(BTreeMap<(String, String), Reservation>);

struct Reservation {
    worker: Arc<Worker>,
    since: Instant,
}

fn key(worker: &Worker) -> (String, String) {
    (worker.namespace().unwrap_or_default(), worker.name_any())
}

impl Reservations {
    /// Also for a worker that was perhaps made: the answer was lost, and the slot must not be given away twice.
    pub fn insert(&mut self, worker: Worker) {
        self.0.insert(key(&worker), Reservation { worker: Arc::new(worker), since: Instant::now() });
    }

    /// Drops what the cache shows by now, and what turns out not to be.
    pub async fn settle(&mut self, client: &Client, workers: &Watched<Worker>) -> Result<()> {
        self.0.retain(|_, reserved| {
            workers.store.get(&kube::runtime::reflector::ObjectRef::from_obj(&*reserved.worker)).is_none()
        });
        let late: Vec<_> = self
            .0
            .iter()
            .filter(|(_, reserved)| reserved.since.elapsed() > PATIENCE)
            .map(|(key, _)| key.clone())
            .collect();
        for (namespace, name) in late {
            let api: Api<Worker> = Api::namespaced(client.clone(), &namespace);
            match api.get_opt(&name).await? {
                Some(worker) => self.insert(worker),
                None => drop(self.0.remove(&(namespace, name))),
            }
        }
        Ok(())
    }

    /// Those that are not among `shown`.
    pub fn beyond(&self, shown: &[Arc<Worker>]) -> Vec<Arc<Worker>> {
        let hidden = |reserved: &&Reservation| !shown.iter().any(|worker| key(worker) == key(&reserved.worker));
        self.0.values().filter(hidden).map(|reserved| reserved.worker.clone()).collect()
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
        let mut reservations = Reservations::default();
        reservations.insert(worker("a"));
        reservations.insert(worker("b"));
        let shown = [Arc::new(worker("a")), Arc::new(worker("c"))];
        let names: Vec<_> = reservations.beyond(&shown).iter().map(|worker| worker.name_any()).collect();
        assert_eq!(names, ["b"]);
    }
}
