//! What tests have in common.

use std::{
    fmt::Debug,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use kube::{Api, Resource, core::NamespaceResourceScope};
use paddock_bed::stage::{Operator, Stage};
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;

/// Longer than anything takes on a slow machine; a test that waits this long has failed.
const DEADLINE: Duration = Duration::from_secs(120);

pub type Test = fn(&World) -> Pin<Box<dyn Future<Output = Result<()>> + '_>>;

pub struct World {
    pub stage: Stage,
    operator: Operator,
    namespaces: AtomicU32,
    // Last, so that what was started on it is dropped first.
    runtime: Runtime,
}

impl World {
    pub fn new(runtime: Runtime, stage: Stage, operator: Operator) -> Self {
        Self { stage, operator, namespaces: AtomicU32::new(0), runtime }
    }

    pub fn play(self: Arc<Self>, test: Test) -> Result<()> {
        self.runtime.block_on(test(&self))
    }

    pub fn operator(&self) -> &Operator {
        &self.operator
    }

    pub fn operator_log(&self) -> String {
        self.operator.log()
    }

    /// A new namespace with GitHub credentials.
    pub async fn namespace(&self) -> Result<String> {
        let name = format!("test-{}", self.namespaces.fetch_add(1, Ordering::Relaxed));
        self.stage.namespace(&name).await?;
        Ok(name)
    }

    pub fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.stage.kube.client(), namespace)
    }

    /// Waits until an object is as `wanted`; the error shows what it was last.
    pub async fn until<K>(&self, namespace: &str, name: &str, what: &str, wanted: impl Fn(&K) -> bool) -> Result<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + serde::Serialize,
    {
        let api = self.api::<K>(namespace);
        let mut last = None;
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            match api.get_opt(name).await.with_context(|| format!("reading {name}"))? {
                Some(object) if wanted(&object) => return Ok(object),
                other => last = other,
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let last =
            last.map_or("not there".to_owned(), |object| serde_json::to_string_pretty(&object).unwrap_or_default());
        bail!("{name} did not become {what} within {DEADLINE:?}; it is {last}")
    }

    /// Waits until something is true of the world.
    pub async fn until_true(&self, what: &str, mut wanted: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if wanted().await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bail!("not within {DEADLINE:?}: {what}")
    }

    /// Waits until an object is gone.
    pub async fn until_gone<K>(&self, namespace: &str, name: &str) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
    {
        let api = self.api::<K>(namespace);
        self.until_true(&format!("{name} is gone"), async || Ok(api.get_opt(name).await?.is_none())).await
    }
}
