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

use crate::{github::Control, kwok::SimulatedNodes};

const LABEL_BOARD: &str = "riseproject.dev/board";
/// How often the played runners are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Until a busy API server is asked again.
const RETRY: Duration = Duration::from_secs(1);
/// How long after its runner has left a pod that still runs is told again to end.
const AGAIN: Duration = Duration::from_secs(3);

pub struct Boards {
    pods: Arc<Mutex<HashMap<String, Seen>>>,
    task: AbortHandle,
}

/// A runner pod, by its name, as it was last seen.
#[derive(Clone)]
pub struct Seen {
    pub pod: Arc<Pod>,
    pub first: Instant,
    /// It has ended, whatever KWOK, still busy with its start, has written over that.
    ended: bool,
    runner: Runner,
}

/// What of a pod's runner was played.
#[derive(Clone, Copy, PartialEq)]
enum Runner {
    NotYet,
    Online,
    /// And its pod was told to end then.
    Left(Instant),
}

impl Seen {
    pub fn node(&self) -> Option<&str> {
        self.pod.spec.as_ref()?.node_name.as_deref()
    }

    /// The claim that it was made for.
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
    /// Adds nodes called after the board, with one slot of `resource` each and the label of the board.
    pub async fn add(nodes: &SimulatedNodes, board: &str, count: usize, resource: &str) -> Result<()> {
        nodes.add(board, count, &[(LABEL_BOARD, board)], &[(resource, "1")]).await
    }

    /// Plays the runners of the pods on nodes that [`Self::add`] made for this board.
    pub fn play(client: Client, github: Control, board: &str) -> Self {
        let pods: Arc<Mutex<HashMap<String, Seen>>> = Arc::default();
        let task = tokio::spawn(play(client, github, pods.clone(), board.to_owned())).abort_handle();
        Self { pods, task }
    }

    /// The runner pods of this board, by their names.
    pub fn pods<R>(&self, look: impl FnOnce(&HashMap<String, Seen>) -> R) -> R {
        look(&self.pods.lock().expect("nobody panics while it is held"))
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
                for pod in step(&pods, &github, &board) {
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
    let known = pods.get(&name).filter(|seen| seen.pod.metadata.uid == pod.metadata.uid);
    let mut seen = match known {
        Some(known) => Seen { pod, ..known.clone() },
        None => Seen { pod, first: Instant::now(), ended: false, runner: Runner::NotYet },
    };
    seen.ended |= matches!(seen.phase(), "Succeeded" | "Failed");
    pods.insert(name, seen);
}

/// Plays the runners of pods that have started, and gives the pods whose runner has left.
fn step(pods: &Mutex<HashMap<String, Seen>>, github: &Control, board: &str) -> Vec<Arc<Pod>> {
    // On a real node of the same board the runner is real.
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
                let _ = github.play_runner(name); // one that was removed meanwhile has left
                seen.runner = Runner::Online;
            }
            Runner::Online if !here.contains(name) => {
                seen.runner = Runner::Left(Instant::now());
                left.push(seen.pod.clone());
            }
            // KWOK, still busy with the start of a pod that ended at once, may have written over it.
            Runner::Left(told) if told.elapsed() > AGAIN => {
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
            Err(error) => eprintln!("pod {} cannot end: {error}", pod.name_any()),
        }
        tokio::time::sleep(RETRY).await;
    }
}
