//! Boards by the hundred: simulated nodes with slots, and what would run in the pods on them.
//!
//! A pod that KWOK calls Running has its runner online at the simulated GitHub. The runner takes a job, leaves when it is
//! done, as JIT runners do, and the pod has succeeded.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Result;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    runtime::watcher,
};
use serde_json::json;
use tokio::task::AbortHandle;

use crate::{github::Control, kube::ControlPlane, kwok::SimulatedNodes};

/// The label that every runner pod has.
const RUNNER_PODS: &str = "app=rise-riscv-runner";
/// How often the played runners are looked at.
const LOOK: Duration = Duration::from_millis(50);

pub struct Boards {
    pods: Arc<Mutex<HashMap<String, Seen>>>,
    task: AbortHandle,
    _nodes: SimulatedNodes,
}

/// A runner pod, by its name, as it was last seen.
#[derive(Clone)]
pub struct Seen {
    pub pod: Arc<Pod>,
    pub first: Instant,
    /// Its runner was played.
    played: bool,
}

impl Seen {
    pub fn phase(&self) -> &str {
        self.pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
    }

    /// Whether it holds a slot, or is about to.
    pub fn is_active(&self) -> bool {
        !matches!(self.phase(), "Succeeded" | "Failed")
    }
}

impl Boards {
    /// Starts `nodes` nodes with one slot of `resource` each and this label, and plays the runners of the pods there.
    pub async fn start(
        plane: &ControlPlane,
        github: Control,
        nodes: usize,
        label: (&str, &str),
        resource: &str,
    ) -> Result<Self> {
        let simulated = SimulatedNodes::start(plane).await?;
        let prefix = format!("{}-", label.1);
        simulated.add(label.1, nodes, &[label], &[(resource, "1")]).await?;
        let pods: Arc<Mutex<HashMap<String, Seen>>> = Arc::default();
        let task = tokio::spawn(play(plane.client(), github, pods.clone(), prefix)).abort_handle();
        Ok(Self { pods, task, _nodes: simulated })
    }

    /// Every runner pod that there is, and when it was first seen.
    pub fn pods<R>(&self, look: impl FnOnce(&HashMap<String, Seen>) -> R) -> R {
        look(&self.pods.lock().expect("nobody panics while it is held"))
    }
}

impl Drop for Boards {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn play(client: Client, github: Control, pods: Arc<Mutex<HashMap<String, Seen>>>, prefix: String) {
    let all: Api<Pod> = Api::all(client.clone());
    let mut events = watcher(all, watcher::Config::default().labels(RUNNER_PODS)).boxed();
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) => see(&pods, pod),
                Some(Ok(watcher::Event::Delete(pod))) => drop(lock(&pods).remove(&pod.name_any())),
                Some(Ok(watcher::Event::Init | watcher::Event::InitDone)) => {}
                Some(Err(error)) => eprintln!("the watch of pods was interrupted: {error}"),
                None => return,
            },
            _ = look.tick() => {
                for pod in step(&pods, &github, &prefix) {
                    tokio::spawn(succeed(client.clone(), pod));
                }
            }
        }
    }
}

fn lock(pods: &Mutex<HashMap<String, Seen>>) -> std::sync::MutexGuard<'_, HashMap<String, Seen>> {
    pods.lock().expect("nobody panics while it is held")
}

fn see(pods: &Mutex<HashMap<String, Seen>>, pod: Pod) {
    let (name, pod) = (pod.name_any(), Arc::new(pod));
    let mut pods = lock(pods);
    let (first, played) = pods.get(&name).map_or((Instant::now(), false), |seen| (seen.first, seen.played));
    pods.insert(name, Seen { pod, first, played });
}

/// Plays the runners of pods that have started, and gives the pods whose runner has left.
fn step(pods: &Mutex<HashMap<String, Seen>>, github: &Control, prefix: &str) -> Vec<Arc<Pod>> {
    let here: HashSet<String> = github.runners().into_iter().map(|runner| runner.name.to_lowercase()).collect();
    let mut left = Vec::new();
    for (name, seen) in lock(pods).iter_mut().filter(|(_, seen)| seen.phase() == "Running") {
        let node = seen.pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        if !node.starts_with(prefix) {
            continue;
        }
        if !seen.played {
            // One whose runner was removed meanwhile ends like one that has left.
            seen.played = github.play_runner(name).is_ok() || !here.contains(name);
        } else if !here.contains(name) {
            left.push(seen.pod.clone());
        }
    }
    left
}

async fn succeed(client: Client, pod: Arc<Pod>) {
    let api: Api<Pod> = Api::namespaced(client, &pod.namespace().unwrap_or_default());
    let status = json!({ "status": { "phase": "Succeeded" } });
    // One that is gone needs nothing; what failed is tried at the next look.
    let _ = api.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(status)).await;
}
