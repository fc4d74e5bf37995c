//! One watch and one cache per kind, shared by all controllers and pages.

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
    owner_index::OwnerIndex,
    trim::{drop_last_applied, is_claim_over, is_worker_over, trim_claim, trim_node, trim_pod, trim_worker},
};

/// Page size of lists. The memory of larger responses is not returned to the system.
const LIST_PAGE_SIZE: u32 = 100;
/// Existing finished objects are sent to a subscriber in batches at this interval. They are not urgent, and the memory
/// to send them all at once would not be returned to the system.
const FINISHED_BATCH_SIZE: usize = 100;
const FINISHED_BATCH_INTERVAL: Duration = Duration::from_millis(10);

/// How many changes a subscriber may lag behind before all objects are sent again. So many changes are always kept in
/// memory.
const CHANGE_BACKLOG: usize = 256;

/// A watched kind: its cache and the stream of its changes.
pub struct Watched<K: Resource<DynamicType = ()> + Clone + 'static> {
    pub store: Store<K>,
    owner_index: Arc<OwnerIndex<K>>,
    changes: broadcast::Sender<Arc<K>>,
    is_over: fn(&K) -> bool,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Clone for Watched<K> {
    fn clone(&self) -> Self {
        let (store, owner_index, changes) = (self.store.clone(), self.owner_index.clone(), self.changes.clone());
        Self { store, owner_index, changes, is_over: self.is_over }
    }
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// Starts a watch that ends with the runtime. `trim` drops fields that are not read; `is_over` is true for finished
    /// objects; `owner` is the key of the owner index.
    fn start(
        api: Api<K>,
        config: watcher::Config,
        trim: fn(&mut K),
        is_over: fn(&K) -> bool,
        owner: fn(&K) -> Option<&str>,
    ) -> Self {
        let (store, mut writer) = reflector::store();
        let changes = broadcast::Sender::new(CHANGE_BACKLOG);
        let owner_index = Arc::new(OwnerIndex::new(owner));
        let (sender, cache, index) = (changes.clone(), store.clone(), owner_index.clone());
        let trim_all = move |object: &mut K| {
            object.meta_mut().managed_fields = None;
            trim(object);
        };
        let events = watcher(api, config).default_backoff().modify(trim_all);
        tokio::spawn(events.for_each(move |event| {
            match event {
                Ok(event) => {
                    for object in index.apply(event, &mut writer, &cache) {
                        // Fails without subscribers; a follower has none.
                        let _ = sender.send(object);
                    }
                }
                Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch failed"),
            }
            std::future::ready(())
        }));
        Self { store, owner_index, changes, is_over }
    }

    /// The objects of an owner, at least as recent as the stream.
    pub fn of(&self, owner: &str) -> Vec<Arc<K>> {
        self.owner_index.of(owner)
    }

    /// All existing objects, finished ones in batches, then every changed or deleted one. The cache is always at least
    /// as recent as the stream. A subscriber that lags behind gets all objects again.
    pub fn stream(&self) -> impl Stream<Item = Arc<K>> + Send + use<K> {
        let changes = self.changes.subscribe();
        let (old, open) = self.split();
        let start = (changes, old, Instant::now(), self.clone());
        let rest = stream::unfold(start, |(mut changes, mut old, mut next, all)| async move {
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
                    next = Instant::now() + FINISHED_BATCH_INTERVAL;
                    old.split_off(old.len().saturating_sub(FINISHED_BATCH_SIZE))
                }
            };
            Some((stream::iter(batch), (changes, old, next, all)))
        });
        stream::iter(open).chain(rest.flatten())
    }

    /// The finished objects and the others.
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
        let all = || watcher::Config::default().page_size(LIST_PAGE_SIZE);
        let (pools, claims, workers) = (
            Watched::<RunnerPool>::start(scoped(client, namespace), all(), drop_last_applied, |_| false, |_| None),
            Watched::<RunnerClaim>::start(scoped(client, namespace), all(), trim_claim, is_claim_over, |_| None),
            Watched::<Worker>::start(scoped(client, namespace), all(), trim_worker, is_worker_over, Worker::claim_uid),
        );
        let runners = all().labels(&format!("{LABEL_APP}={APP}"));
        let pods = Watched::<Pod>::start(scoped(client, namespace), runners, trim_pod, |_| false, |_| None);
        let nodes = Watched::<Node>::start(Api::all(client.clone()), all(), trim_node, |_| false, |_| None);
        // A single task waits for all stores: a store wakes only its last waiter.
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
    async fn finished_objects_are_sent_in_batches_and_block_nothing() {
        let (store, mut writer) = reflector::store();
        let node = |name: &str| Node {
            metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
            ..Node::default()
        };
        writer.apply_watcher_event(&watcher::Event::Init);
        let old: Vec<_> = (0..3 * FINISHED_BATCH_SIZE).map(|number| node(&format!("old-{number}"))).collect();
        for node in old.iter().cloned().chain([node("open")]) {
            writer.apply_watcher_event(&watcher::Event::InitApply(node));
        }
        writer.apply_watcher_event(&watcher::Event::InitDone);
        let is_over = |node: &Node| node.name_any().starts_with("old");
        let owner_index = Arc::new(OwnerIndex::new(|_| None));
        let nodes = Watched { store, owner_index, changes: broadcast::Sender::new(CHANGE_BACKLOG), is_over };
        let received = nodes.stream();
        nodes.changes.send(Arc::new(node("changed"))).unwrap();
        let received: Vec<_> = received.take(old.len() + 2).map(|node| node.name_any()).collect().await;
        assert_eq!(received[..2], ["open", "changed"]);
        let received: HashSet<_> = received.into_iter().collect();
        assert!(old.iter().all(|node| received.contains(&node.name_any())));
    }
}
