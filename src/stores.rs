//! One watch and one cache per kind, shared by every controller and page.

use std::{fmt::Debug, sync::Arc};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::NamespaceResourceScope,
    runtime::{
        WatchStreamExt,
        reflector::{self, Store},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::{
    broadcast::{self, error::RecvError},
    watch,
};

use crate::api::{APP, LABEL_APP, RunnerClaim, RunnerPool, Worker};

/// Changes a slow subscriber may fall behind by before it is shown everything anew.
const BACKLOG: usize = 1024;

/// A kind that is watched: its cache, and the stream of its changes.
pub struct Watched<K: Resource<DynamicType = ()> + Clone + 'static> {
    pub store: Store<K>,
    changes: broadcast::Sender<Arc<K>>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Clone for Watched<K> {
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), changes: self.changes.clone() }
    }
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// Starts watching; the watch ends with the runtime.
    fn start(api: Api<K>, config: watcher::Config) -> Self {
        let (store, writer) = reflector::store();
        let changes = broadcast::Sender::new(BACKLOG);
        let (sender, shown) = (changes.clone(), store.clone());
        let events =
            watcher(api, config).default_backoff().modify(|object| object.managed_fields_mut().clear()).reflect(writer);
        tokio::spawn(events.for_each(move |event| {
            match event {
                // No subscriber is no error: a follower has none.
                Ok(watcher::Event::Apply(object) | watcher::Event::Delete(object)) => {
                    let _ = sender.send(Arc::new(object));
                }
                // A list shows in the cache when it is complete, not before.
                Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => {}
                Ok(watcher::Event::InitDone) => {
                    for object in shown.state() {
                        let _ = sender.send(object);
                    }
                }
                Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "the watch was interrupted"),
            }
            std::future::ready(())
        }));
        Self { store, changes }
    }

    /// Every object there is, then each one that changes or goes. The cache always shows at least what the stream
    /// has told. A subscriber that fell behind is told of every object again.
    pub fn stream(&self) -> impl Stream<Item = Arc<K>> + Send + use<K> {
        let store = self.store.clone();
        let changes = self.changes.subscribe();
        let first = stream::iter(store.state());
        let then = stream::unfold((changes, store), |(mut changes, store)| async move {
            let batch = match changes.recv().await {
                Ok(object) => vec![object],
                Err(RecvError::Lagged(_)) => store.state(),
                Err(RecvError::Closed) => return None,
            };
            Some((stream::iter(batch), (changes, store)))
        });
        first.chain(then.flatten())
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
        let all = watcher::Config::default;
        let (pools, claims, workers) = (
            Watched::<RunnerPool>::start(scoped(client, namespace), all()),
            Watched::<RunnerClaim>::start(scoped(client, namespace), all()),
            Watched::<Worker>::start(scoped(client, namespace), all()),
        );
        let pods = Watched::<Pod>::start(scoped(client, namespace), all().labels(&format!("{LABEL_APP}={APP}")));
        let nodes = Watched::<Node>::start(Api::all(client.clone()), all());
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
