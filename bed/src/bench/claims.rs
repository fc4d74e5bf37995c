//! Watches RunnerClaims.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use futures::StreamExt;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::Value;
use tokio::task::AbortHandle;

use crate::stage::Stage;

pub struct Claims {
    pub api: Api<DynamicObject>,
    seen: Arc<Mutex<HashMap<String, Seen>>>,
    numbers: AtomicUsize,
    task: AbortHandle,
}

/// A claim as it was last seen, and when it was first seen Ready.
struct Seen {
    status: Value,
    ready: Option<Instant>,
}

impl Claims {
    /// Watches every claim of a namespace.
    pub fn watch(stage: &Stage, namespace: &str) -> Self {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("paddock.dev", "v1alpha1", "RunnerClaim"));
        let api: Api<DynamicObject> = Api::namespaced_with(stage.kube.client(), namespace, &kind);
        let seen: Arc<Mutex<HashMap<String, Seen>>> = Arc::default();
        let (events, shared) = (watcher(api.clone(), watcher::Config::default()).default_backoff(), seen.clone());
        let task = tokio::spawn(events.for_each(move |event| {
            let mut seen = shared.lock().expect("no panic while held");
            match event {
                Ok(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim)) => {
                    let name = claim.metadata.name.clone().unwrap_or_default();
                    let status = claim.data["status"].clone();
                    let ready = seen.get(&name).and_then(|seen| seen.ready);
                    let ready = ready.or_else(|| (status["phase"] == "Ready").then(Instant::now));
                    seen.insert(name, Seen { status, ready });
                }
                Ok(watcher::Event::Delete(claim)) => {
                    drop(seen.remove(claim.metadata.name.as_deref().unwrap_or_default()))
                }
                Ok(watcher::Event::Init | watcher::Event::InitDone) => {}
                Err(error) => eprintln!("claim watch interrupted: {error}"),
            }
            std::future::ready(())
        }));
        Self { api, seen, numbers: AtomicUsize::default(), task: task.abort_handle() }
    }

    /// An unused claim number.
    pub fn number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// When a claim was first seen Ready, and its machines.
    pub fn ready(&self, name: &str) -> Option<(Instant, Vec<String>)> {
        let seen = self.seen.lock().expect("no panic while held");
        let seen = seen.get(name)?;
        let workers = seen.status["workers"].as_array().into_iter().flatten();
        Some((seen.ready?, workers.filter_map(|worker| worker["name"].as_str().map(str::to_owned)).collect()))
    }

    pub fn gone(&self, name: &str) -> bool {
        !self.seen.lock().expect("no panic while held").contains_key(name)
    }

    /// The claims that are not Ready, for error messages.
    pub fn show(&self) -> String {
        let seen = self.seen.lock().expect("no panic while held");
        let open = seen.iter().filter(|(_, seen)| seen.ready.is_none());
        open.take(3).map(|(name, seen)| format!("{name}: {}", seen.status)).collect::<Vec<_>>().join("; ")
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.task.abort();
    }
}
