//! One watch and one cache per kind, shared by every controller and page.

use std::{
    collections::{HashMap, hash_map::RandomState},
    fmt::Debug,
    hash::BuildHasher,
    mem::take,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Container, Node, NodeStatus, Pod, PodSpec, PodStatus};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::NamespaceResourceScope,
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{
        broadcast::{self, error::RecvError},
        watch,
    },
    time::Instant,
};

use crate::api::{APP, ClaimPhase, LABEL_APP, RunnerClaim, RunnerPool, Worker, WorkerState};

/// Objects in one answer when everything is read: a larger one takes memory that is not given back.
const PAGE: u32 = 100;
/// How fast a subscriber is told of what is over and was there before: nobody waits for that, and all at once it would take
/// memory that is never given back.
const OLD_AT_ONCE: usize = 100;
const OLD_PAUSE: Duration = Duration::from_millis(10);

/// Changes a slow subscriber may fall behind by before it is shown everything anew. Each is kept in memory until as many
/// came after it.
const BACKLOG: usize = 256;

/// A kind that is watched: its cache, and the stream of its changes.
pub struct Watched<K: Resource<DynamicType = ()> + Clone + 'static> {
    pub store: Store<K>,
    groups: Arc<Groups<K>>,
    changes: broadcast::Sender<Arc<K>>,
    is_over: fn(&K) -> bool,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Clone for Watched<K> {
    fn clone(&self) -> Self {
        let (store, groups, changes) = (self.store.clone(), self.groups.clone(), self.changes.clone());
        Self { store, groups, changes, is_over: self.is_over }
    }
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// Starts watching; the watch ends with the runtime. `trim` drops what nobody here reads; what `is_over` has nothing left
    /// to be done; `owner` is by what else than its name an object is found.
    fn start(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        is_over: fn(&K) -> bool,
        owner: fn(&K) -> Option<&str>,
    ) -> Self {
        let (store, mut writer) = reflector::store();
        let changes = broadcast::Sender::new(BACKLOG);
        let groups = Arc::new(Groups::new(owner));
        let (sender, shown, grouped) = (changes.clone(), store.clone(), groups.clone());
        let trim_all = move |object: &mut K| {
            object.meta_mut().managed_fields = None;
            trim(object);
        };
        let events = watcher(api, config).default_backoff().modify(trim_all);
        tokio::spawn(events.for_each(move |event| {
            match event {
                Ok(event) => {
                    for object in grouped.apply(event, &mut writer, &shown) {
                        // No subscriber is no error: a follower has none.
                        let _ = sender.send(object);
                    }
                }
                Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "the watch was interrupted"),
            }
            std::future::ready(())
        }));
        Self { store, groups, changes, is_over }
    }

    /// The objects of this owner, at least as far as the stream has told.
    pub fn of(&self, owner: &str) -> Vec<Arc<K>> {
        self.groups.of(owner)
    }

    /// Every object there is, those that are over bit by bit, and each one that changes or goes. The cache always shows at
    /// least what the stream has told. A subscriber that fell behind is told of every object again.
    pub fn stream(&self) -> impl Stream<Item = Arc<K>> + Send + use<K> {
        let changes = self.changes.subscribe();
        let (old, open) = self.split();
        let start = (changes, old, Instant::now(), self.clone());
        let told = stream::unfold(start, |(mut changes, mut old, mut next, all)| async move {
            let batch = tokio::select! {
                biased;
                change = changes.recv() => match change {
                    Ok(object) => vec![object],
                    Err(RecvError::Lagged(_)) => {
                        let (again, open) = all.split();
                        old = again;
                        open
                    }
                    Err(RecvError::Closed) => return None,
                },
                () = tokio::time::sleep_until(next), if !old.is_empty() => {
                    next = Instant::now() + OLD_PAUSE;
                    old.split_off(old.len().saturating_sub(OLD_AT_ONCE))
                }
            };
            Some((stream::iter(batch), (changes, old, next, all)))
        });
        stream::iter(open).chain(told.flatten())
    }

    /// What is over, and what is not.
    fn split(&self) -> (Vec<Arc<K>>, Vec<Arc<K>>) {
        self.store.state().into_iter().partition(|object| (self.is_over)(object))
    }
}

/// Objects by their owner.
struct Groups<K> {
    owner: fn(&K) -> Option<&str>,
    hasher: RandomState,
    /// By a hash: the owners' names would take more memory than all the rest.
    members: RwLock<HashMap<u64, Vec<Arc<K>>>>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Groups<K> {
    fn new(owner: fn(&K) -> Option<&str>) -> Self {
        Self { owner, hasher: RandomState::new(), members: RwLock::default() }
    }

    fn of(&self, owner: &str) -> Vec<Arc<K>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let here = members.get(&self.hasher.hash_one(owner)).into_iter().flatten();
        here.filter(|object| (self.owner)(object) == Some(owner)).cloned().collect()
    }

    /// Takes an event into the cache and the groups, and gives what there is to tell. Whoever has seen an object in the
    /// cache finds it in its group, too: until both have it, nobody looks into the groups.
    fn apply(&self, event: watcher::Event<K>, cache: &mut Writer<K>, shown: &Store<K>) -> Vec<Arc<K>> {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        cache.apply_watcher_event(&event);
        match event {
            watcher::Event::Apply(object) => {
                let shared = shown.get(&ObjectRef::from_obj(&object)).unwrap_or_else(|| Arc::new(object));
                self.put(&mut members, &shared);
                vec![shared]
            }
            watcher::Event::Delete(object) => {
                self.remove(&mut members, &object);
                vec![Arc::new(object)]
            }
            // A list shows in the cache when it is complete, not before.
            watcher::Event::Init | watcher::Event::InitApply(_) => vec![],
            watcher::Event::InitDone => {
                let all = shown.state();
                members.clear();
                all.iter().for_each(|object| self.put(&mut members, object));
                all
            }
        }
    }

    /// In the place of the one before.
    fn put(&self, members: &mut HashMap<u64, Vec<Arc<K>>>, object: &Arc<K>) {
        let Some(owner) = (self.owner)(object) else { return };
        let here = members.entry(self.hasher.hash_one(owner)).or_insert_with(|| Vec::with_capacity(1));
        match here.iter_mut().find(|other| is_same(&***other, &**object)) {
            Some(before) => *before = object.clone(),
            None => here.push(object.clone()),
        }
    }

    fn remove(&self, members: &mut HashMap<u64, Vec<Arc<K>>>, object: &K) {
        let Some(owner) = (self.owner)(object) else { return };
        let hash = self.hasher.hash_one(owner);
        if let Some(here) = members.get_mut(&hash) {
            here.retain(|other| !is_same(&**other, object));
            if here.is_empty() {
                members.remove(&hash);
            }
        }
    }
}

fn is_same<K: Resource>(one: &K, other: &K) -> bool {
    let (one, other) = (one.meta(), other.meta());
    (&one.namespace, &one.name) == (&other.namespace, &other.name)
}

/// Everything the operator reads from Kubernetes.
#[derive(Clone)]
pub struct Stores {
    pub pools: Watched<RunnerPool>,
    pub claims: Watched<RunnerClaim>,
    pub workers: Watched<Worker>,
    /// Runner pods only.
    pub pods: Watched<Pod>,
    pub nodes: Watched<Node>,
    filled: watch::Receiver<bool>,
}

impl Stores {
    pub fn start(client: &Client, namespace: Option<&str>) -> Self {
        let all = || watcher::Config::default().page_size(PAGE);
        let (pools, claims, workers) = (
            Watched::<RunnerPool>::start(scoped(client, namespace), all(), forget_applied, |_| false, |_| None),
            Watched::<RunnerClaim>::start(scoped(client, namespace), all(), trim_claim, is_claim_over, |_| None),
            Watched::<Worker>::start(scoped(client, namespace), all(), trim_worker, is_worker_over, Worker::claim_uid),
        );
        let runners = all().labels(&format!("{LABEL_APP}={APP}"));
        let pods = Watched::<Pod>::start(scoped(client, namespace), runners, trim_pod, |_| false, |_| None);
        let nodes = Watched::<Node>::start(Api::all(client.clone()), all(), trim_node, |_| false, |_| None);
        // One task waits for all: a store wakes only the last one who waits for it.
        let (filling, filled) = watch::channel(false);
        let stores = Self { pools, claims, workers, pods, nodes, filled };
        let (pools, claims, workers, pods, nodes) = (
            stores.pools.store.clone(),
            stores.claims.store.clone(),
            stores.workers.store.clone(),
            stores.pods.store.clone(),
            stores.nodes.store.clone(),
        );
        tokio::spawn(async move {
            let waits = tokio::try_join!(
                pools.wait_until_ready(),
                claims.wait_until_ready(),
                workers.wait_until_ready(),
                pods.wait_until_ready(),
                nodes.wait_until_ready(),
            );
            // A dropped writer means that the runtime is shutting down.
            filling.send_replace(waits.is_ok());
        });
        stores
    }

    /// Waits until every cache has been filled once.
    pub async fn ready(&self) {
        let _ = self.filled.clone().wait_for(|filled| *filled).await;
    }

    pub fn is_ready(&self) -> bool {
        *self.filled.borrow()
    }
}

/// What `kubectl apply` leaves of the object it applied, as text.
fn forget_applied<K: Resource>(object: &mut K) {
    object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
}

/// Labels are for those who look for claims; plans go by the spec.
fn trim_claim(claim: &mut RunnerClaim) {
    forget_applied(claim);
    claim.metadata.labels = None;
}

/// The same; those of machines are compared with what they should be. Of a mere record, what pages show and claims count:
/// nobody writes its status again.
fn trim_worker(worker: &mut Worker) {
    if worker.spec.board.is_none() {
        return;
    }
    worker.metadata.labels = None;
    let is_record = is_worker_over(worker);
    if let Some(status) = worker.status.as_mut().filter(|_| is_record) {
        (status.pod, status.runner, status.conditions) = (None, None, Vec::new());
    }
}

fn is_claim_over(claim: &RunnerClaim) -> bool {
    let phase = claim.status.as_ref().and_then(|status| status.phase);
    phase.is_some_and(ClaimPhase::is_over) && claim.metadata.deletion_timestamp.is_none()
}

/// A worker with a finalizer may still have a runner.
fn is_worker_over(worker: &Worker) -> bool {
    let state = worker.status.as_ref().and_then(|status| status.state);
    state.is_some_and(WorkerState::is_over) && worker.finalizers().is_empty()
}

/// Of a pod, who and where it is, what it asks for and how it fares; of one that ended well, hardly anything.
fn trim_pod(pod: &mut Pod) {
    if let Some(status) = pod.status.as_mut().filter(|status| status.phase.as_deref() == Some("Succeeded")) {
        let (phase, start_time) = (take(&mut status.phase), take(&mut status.start_time));
        *status = PodStatus { phase, start_time, ..PodStatus::default() };
        pod.spec.iter_mut().for_each(|spec| spec.containers.clear());
    }
    if let Some(spec) = &mut pod.spec {
        let trim = |container: Container| Container {
            name: container.name,
            resources: container.resources,
            ..Container::default()
        };
        *spec = PodSpec {
            node_name: take(&mut spec.node_name),
            active_deadline_seconds: spec.active_deadline_seconds,
            containers: take(&mut spec.containers).into_iter().map(trim).collect(),
            ..PodSpec::default()
        };
    }
}

/// Of a node, what pods can get there and whether any should go there; not the images, addresses and volumes.
fn trim_node(node: &mut Node) {
    node.annotations_mut().clear();
    if let Some(status) = &mut node.status {
        let (allocatable, conditions) = (take(&mut status.allocatable), take(&mut status.conditions));
        let ready = conditions.map(|all| all.into_iter().filter(|condition| condition.type_ == "Ready").collect());
        *status = NodeStatus { allocatable, conditions: ready, ..NodeStatus::default() };
    }
}

fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use kube::api::ObjectMeta;
    use serde_json::json;

    use super::*;
    use crate::plan::samples;

    #[tokio::test]
    async fn what_is_over_is_told_bit_by_bit_and_holds_nothing_up() {
        let (store, mut writer) = reflector::store();
        let node = |name: &str| Node {
            metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
            ..Node::default()
        };
        writer.apply_watcher_event(&watcher::Event::Init);
        let old: Vec<_> = (0..3 * OLD_AT_ONCE).map(|number| node(&format!("old-{number}"))).collect();
        for node in old.iter().cloned().chain([node("open")]) {
            writer.apply_watcher_event(&watcher::Event::InitApply(node));
        }
        writer.apply_watcher_event(&watcher::Event::InitDone);
        let is_over = |node: &Node| node.name_any().starts_with("old");
        let groups = Arc::new(Groups::new(|_| None));
        let nodes = Watched { store, groups, changes: broadcast::Sender::new(BACKLOG), is_over };
        let told = nodes.stream();
        nodes.changes.send(Arc::new(node("changed"))).unwrap();
        let told: Vec<_> = told.take(old.len() + 2).map(|node| node.name_any()).collect().await;
        assert_eq!(told[..2], ["open", "changed"]);
        let told: HashSet<_> = told.into_iter().collect();
        assert!(old.iter().all(|node| told.contains(&node.name_any())));
    }

    #[test]
    fn workers_are_found_by_their_claim() {
        let (store, mut writer) = reflector::store();
        let groups = Groups::new(Worker::claim_uid);
        let worker = |name: &str, claim: &str, version: &str| {
            let mut worker = samples::board_worker(name, "p", claim);
            worker.metadata.resource_version = Some(version.into());
            worker
        };
        let mut apply = |event| groups.apply(event, &mut writer, &store).len();
        let list = |workers: Vec<Worker>| {
            let listed = workers.into_iter().map(watcher::Event::InitApply);
            [watcher::Event::Init].into_iter().chain(listed).chain([watcher::Event::InitDone])
        };
        let found = |claim: &str| {
            let own = groups.of(&format!("uid-{claim}"));
            own.iter().map(|worker| (worker.name_any(), worker.resource_version().unwrap())).collect::<Vec<_>>()
        };
        let told: usize = list(vec![worker("a", "1", "1"), worker("c", "2", "1")]).map(&mut apply).sum();
        assert_eq!((told, found("1")), (2, vec![("a".into(), "1".into())]));
        apply(watcher::Event::Apply(worker("b", "1", "1")));
        apply(watcher::Event::Apply(worker("a", "1", "2")));
        assert_eq!(found("1"), [("a".into(), "2".into()), ("b".into(), "1".into())], "each in its place");
        apply(watcher::Event::Delete(worker("a", "1", "3")));
        assert_eq!(found("1"), [("b".into(), "1".into())]);
        assert_eq!(list(vec![worker("d", "1", "4")]).map(&mut apply).sum::<usize>(), 1);
        assert_eq!(
            (found("1"), found("2")),
            (vec![("d".into(), "4".into())], vec![]),
            "what a new list does not have is gone"
        );
    }

    #[test]
    fn a_trimmed_pod_keeps_what_plans_read() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "a", "annotations": { "a": "b" } },
            "spec": {
                "nodeName": "n", "activeDeadlineSeconds": 1, "volumes": [{ "name": "v" }],
                "containers": [{ "name": "c", "image": "i", "resources": { "limits": { "x/y": "1" } } }],
            },
            "status": { "phase": "Running", "reason": "r" },
        }))
        .unwrap();
        let whole = pod.clone();
        trim_pod(&mut pod);
        let expected = json!({
            "nodeName": "n", "activeDeadlineSeconds": 1,
            "containers": [{ "name": "c", "resources": { "limits": { "x/y": "1" } } }],
        });
        assert_eq!(json!(pod.spec), expected);
        assert_eq!((&pod.metadata, &pod.status), (&whole.metadata, &whole.status));
        pod.status.as_mut().unwrap().phase = Some("Succeeded".into());
        trim_pod(&mut pod);
        assert_eq!(
            json!([pod.spec, pod.status]),
            json!([
                { "nodeName": "n", "activeDeadlineSeconds": 1, "containers": [] }, { "phase": "Succeeded" },
            ])
        );
    }

    #[test]
    fn a_trimmed_worker_keeps_what_plans_read() {
        let mut worker = samples::board_worker("w", "p", "c");
        let (running, over) = (
            json!({ "state": "running", "claimsServed": 0, "pod": { "name": "w" }, "runner": { "name": "w" } }),
            json!({ "state": "completed", "claimsServed": 0 }),
        );
        worker.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        worker.status = serde_json::from_value(running.clone()).unwrap();
        trim_worker(&mut worker);
        assert_eq!((&worker.metadata.labels, json!(worker.status)), (&None, running));
        worker.status.as_mut().unwrap().state = Some(WorkerState::Completed);
        let spec = worker.spec.clone();
        trim_worker(&mut worker);
        assert!(json!(worker.status)["pod"].is_object(), "its runner may still be there");
        worker.metadata.finalizers = None;
        trim_worker(&mut worker);
        assert_eq!((worker.spec, json!(worker.status)), (spec, over));
    }

    #[test]
    fn a_trimmed_node_keeps_what_plans_read() {
        let mut node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n", "labels": { "l": "v" }, "annotations": { "a": "b" } },
            "spec": { "unschedulable": true, "taints": [{ "key": "k", "effect": "NoSchedule" }] },
            "status": {
                "allocatable": { "x/y": "1" }, "capacity": { "x/y": "1" }, "images": [{ "names": ["i"] }],
                "conditions": [{ "type": "Ready", "status": "True" }, { "type": "DiskPressure", "status": "False" }],
            },
        }))
        .unwrap();
        let whole = node.clone();
        trim_node(&mut node);
        let expected = json!({ "allocatable": { "x/y": "1" }, "conditions": [{ "type": "Ready", "status": "True" }] });
        assert_eq!(json!(node.status), expected);
        assert_eq!((&node.spec, &node.metadata.labels), (&whole.spec, &whole.metadata.labels));
    }
}
