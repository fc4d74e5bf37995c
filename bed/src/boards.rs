//! Hundreds of simulated boards: nodes with slots, and the runners in their pods.
//!
//! Once KWOK sets a pod to Running, its runner is online at the simulated GitHub. Like a JIT runner it takes one job
//! and exits, and the pod succeeds.

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

use crate::{github::Control, kwok::SimulatedNodes};

const LABEL_BOARD: &str = "riseproject.dev/board";
/// How often the simulated runners are checked.
const RUNNER_POLL: Duration = Duration::from_millis(50);
/// Pause before a failed status update is retried.
const STATUS_RETRY: Duration = Duration::from_secs(1);
/// How long after its runner has left a pod may stay Running before its status is set again.
const SUCCEED_AGAIN_AFTER: Duration = Duration::from_secs(3);

pub struct Boards {
    pods: Arc<Mutex<HashMap<String, Seen>>>,
    task: AbortHandle,
}

/// A runner pod as last seen.
#[derive(Clone)]
pub struct Seen {
    pub pod: Arc<Pod>,
    pub first: Instant,
    /// It has ended, even if KWOK, still starting it, has overwritten that.
    ended: bool,
    runner: Runner,
}

/// The state of a pod's simulated runner.
#[derive(Clone, Copy, PartialEq)]
enum Runner {
    NotYet,
    Online,
    /// The time is when the pod's status was last set to Succeeded.
    Left(Instant),
}

impl Seen {
    pub fn node(&self) -> Option<&str> {
        self.pod.spec.as_ref()?.node_name.as_deref()
    }

    /// The claim that it was created for.
    pub fn claim(&self) -> &str {
        self.pod.labels().get("paddock.dev/claim").map_or("", String::as_str)
    }

    pub fn phase(&self) -> &str {
        self.pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
    }

    /// Whether it holds a slot, or is about to.
    pub fn is_active(&self) -> bool {
        !self.ended
    }
}

impl Boards {
    /// Adds nodes named after the board, each with one slot of `resource` and the board's label.
    pub async fn add(nodes: &SimulatedNodes, board: &str, count: usize, resource: &str) -> Result<()> {
        nodes.add(board, count, &[(LABEL_BOARD, board)], &[(resource, "1")]).await
    }

    /// Simulates the runners of the pods on nodes that [`Self::add`] created for this board.
    pub fn play(client: Client, github: Control, board: &str) -> Self {
        let pods: Arc<Mutex<HashMap<String, Seen>>> = Arc::default();
        let task = tokio::spawn(play(client, github, pods.clone(), board.to_owned())).abort_handle();
        Self { pods, task }
    }

    /// The runner pods of this board, by their names.
    pub fn pods<R>(&self, read: impl FnOnce(&HashMap<String, Seen>) -> R) -> R {
        read(&self.pods.lock().expect("no panic while held"))
    }
}

impl Drop for Boards {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn play(client: Client, github: Control, pods: Arc<Mutex<HashMap<String, Seen>>>, board: String) {
    let all: Api<Pod> = Api::all(client.clone());
    let ours = watcher::Config::default().labels(&format!("{LABEL_BOARD}={board}"));
    let mut events = watcher(all, ours).boxed();
    let mut ticks = tokio::time::interval(RUNNER_POLL);
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) => see(&pods, pod),
                Some(Ok(watcher::Event::Delete(pod))) => drop(lock(&pods).remove(&pod.name_any())),
                Some(Ok(watcher::Event::Init | watcher::Event::InitDone)) => {}
                Some(Err(error)) => eprintln!("pod watch interrupted: {error}"),
                None => return,
            },
            _ = ticks.tick() => {
                for pod in step(&pods, &github, &board) {
                    tokio::spawn(succeed(client.clone(), pod));
                }
            }
        }
    }
}

fn lock(pods: &Mutex<HashMap<String, Seen>>) -> std::sync::MutexGuard<'_, HashMap<String, Seen>> {
    pods.lock().expect("no panic while held")
}

fn see(pods: &Mutex<HashMap<String, Seen>>, pod: Pod) {
    let (name, pod) = (pod.name_any(), Arc::new(pod));
    let mut pods = lock(pods);
    let known = pods.get(&name).filter(|seen| seen.pod.metadata.uid == pod.metadata.uid);
    let mut seen = match known {
        Some(known) => Seen { pod, ..known.clone() },
        None => Seen { pod, first: Instant::now(), ended: false, runner: Runner::NotYet },
    };
    seen.ended |= matches!(seen.phase(), "Succeeded" | "Failed");
    pods.insert(name, seen);
}

/// Simulates the runners of started pods, and returns the pods whose runner has left.
fn step(pods: &Mutex<HashMap<String, Seen>>, github: &Control, board: &str) -> Vec<Arc<Pod>> {
    // Runners on a real node of the same board are real.
    let is_simulated = |node: &str| node.strip_prefix(board).is_some_and(|rest| rest.starts_with('-'));
    let here: HashSet<String> = github.runners().into_iter().map(|runner| runner.name.to_lowercase()).collect();
    let mut left = Vec::new();
    let mut pods = lock(pods);
    for (name, seen) in pods.iter_mut().filter(|(_, seen)| seen.phase() == "Running") {
        if !seen.node().is_some_and(is_simulated) {
            continue;
        }
        match seen.runner {
            Runner::NotYet => {
                let _ = github.play_runner(name); // fails if the runner was removed meanwhile
                seen.runner = Runner::Online;
            }
            Runner::Online if !here.contains(name) => {
                seen.runner = Runner::Left(Instant::now());
                left.push(seen.pod.clone());
            }
            // KWOK, still starting a pod that ended at once, may have overwritten the status.
            Runner::Left(since) if since.elapsed() > SUCCEED_AGAIN_AFTER => {
                seen.runner = Runner::Left(Instant::now());
                left.push(seen.pod.clone());
            }
            Runner::Online | Runner::Left(_) => {}
        }
    }
    left
}

async fn succeed(client: Client, pod: Arc<Pod>) {
    let api: Api<Pod> = Api::namespaced(client, &pod.namespace().unwrap_or_default());
    let status = Patch::Merge(json!({ "status": { "phase": "Succeeded" } }));
    loop {
        match api.patch_status(&pod.name_any(), &PatchParams::default(), &status).await {
            Ok(_) => return,
            Err(kube::Error::Api(answer)) if answer.is_not_found() => return,
            Err(error) => eprintln!("cannot set pod {} to Succeeded: {error}", pod.name_any()),
        }
        tokio::time::sleep(STATUS_RETRY).await;
    }
}
