//! One watch and one cache per kind, shared by every controller and page.

mod owner_index;
mod trim;

use std::{fmt::Debug, sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Resource,
    core::NamespaceResourceScope,
    runtime::{
        WatchStreamExt,
        reflector::{self, Store},
        watcher,
    },
};
use paddock_core::api::{APP, LABEL_APP, RunnerClaim, RunnerPool, Worker};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{
        broadcast::{self, error::RecvError},
        watch,
    },
    time::Instant,
};

use self::{
    owner_index::Groups,
    trim::{forget_applied, is_claim_over, is_worker_over, trim_claim, trim_node, trim_pod, trim_worker},
};

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

    use kube::{ResourceExt, api::ObjectMeta};

    use super::*;

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
}
