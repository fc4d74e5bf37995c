//! What tests have in common.

use std::{
    fmt::Debug,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use kube::{Api, Resource, core::NamespaceResourceScope};
use paddock_bed::stage::{Operator, Stage};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{runtime::Runtime, sync::RwLock};

use crate::canary;

/// Longer than anything takes on a machine with busy cores; a test that waits this long has failed.
pub const DEADLINE: Duration = Duration::from_secs(300);

pub type Test = for<'a> fn(&'a World) -> Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

pub struct World {
    pub stage: Stage,
    /// Whether a real kubelet can run here, or why not.
    pub node_possible: Result<(), String>,
    /// Where the operator listens, also after it was started anew.
    address: SocketAddr,
    operator: Mutex<Option<Operator>>,
    starting: tokio::sync::Mutex<()>,
    /// Tests that do something to the operator or the API server hold it alone.
    quiet: RwLock<()>,
    namespaces: AtomicU32,
    // Last, so that what was started on it is dropped first.
    runtime: Runtime,
}

impl World {
    pub fn new(runtime: Runtime, stage: Stage, operator: Operator, node_possible: Result<(), String>) -> Self {
        let (address, operator) = (operator.address(), Mutex::new(Some(operator)));
        Self {
            stage,
            node_possible,
            address,
            operator,
            starting: tokio::sync::Mutex::default(),
            quiet: RwLock::default(),
            namespaces: AtomicU32::new(0),
            runtime,
        }
    }

    /// Runs a test beside others.
    pub fn play(self: Arc<Self>, test: Test) -> Result<()> {
        self.runtime.block_on(async {
            let _quiet = self.quiet.read().await;
            test(&self).await
        })
    }

    /// Runs a test while no other runs.
    pub fn play_alone(self: Arc<Self>, test: Test) -> Result<()> {
        self.runtime.block_on(async {
            let _quiet = self.quiet.write().await;
            test(&self).await
        })
    }

    /// The operator that serves everyone; `None` where a test has ended it.
    pub fn operator(&self) -> MutexGuard<'_, Option<Operator>> {
        self.operator.lock().expect("no test panics while it holds the operator")
    }

    /// Where the operator's pages are.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends the operator with `kill -9`.
    pub fn kill_operator(&self) -> Result<()> {
        let operator = self.operator().take().context("an operator runs")?;
        operator.kill()
    }

    pub async fn start_operator(&self) -> Result<()> {
        self.start_operator_with(&[]).await
    }

    pub async fn start_operator_with(&self, arguments: &[&str]) -> Result<()> {
        let operator = self.stage.operator_at("operator", self.address, arguments).await?;
        *self.operator() = Some(operator);
        Ok(())
    }

    /// Starts an operator that ended by itself again, as a kubelet would.
    pub async fn keep_operator_alive(&self) -> Result<()> {
        // Tests run side by side, and whoever comes first starts it for all.
        let _starting = self.starting.lock().await;
        let ended = self.operator().as_mut().is_some_and(Operator::exited);
        if ended { self.start_operator().await } else { Ok(()) }
    }

    pub fn operator_log(&self) -> String {
        self.operator().as_ref().map(Operator::log).unwrap_or_default()
    }

    /// What passed through GitHub's simulator and is not as GitHub's own schemas have it.
    pub fn violations(&self) -> Vec<String> {
        self.runtime.block_on(self.stage.github.violations())
    }

    /// Where secrets were found that should not be there; searching itself must not fail.
    pub fn leaks(&self) -> Vec<String> {
        let search = async {
            self.keep_operator_alive().await?;
            canary::leaks(self).await
        };
        self.runtime.block_on(search).unwrap_or_else(|error| vec![format!("unknown places: {error:#}")])
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
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned + Serialize,
    {
        let api = self.api::<K>(namespace);
        let mut last = None;
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            self.keep_operator_alive().await?;
            // An API server that is being restarted answers again in a moment.
            match api.get_opt(name).await {
                Ok(Some(object)) if wanted(&object) => return Ok(object),
                Ok(other) => last = other,
                Err(error) => eprintln!("reading {name}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let last =
            last.map_or("not there".to_owned(), |object| serde_json::to_string_pretty(&object).unwrap_or_default());
        bail!("{name} did not become {what} within {DEADLINE:?}; it is {last}")
    }

    /// Waits until something is true of the world. Servers that are being restarted are asked again.
    pub async fn until_true(&self, what: &str, mut wanted: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        let mut last = None;
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            self.keep_operator_alive().await?;
            match wanted().await {
                Ok(true) => return Ok(()),
                Ok(false) => last = None,
                Err(error) if is_transient(&error) => last = Some(error),
                Err(error) => return Err(error.context(what.to_owned())),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let why = last.map(|error| format!(" ({error:#})")).unwrap_or_default();
        bail!("not within {DEADLINE:?}: {what}{why}")
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

/// Whether a server could not be asked, rather than that its answer was wrong.
fn is_transient(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<kube::Error>() || cause.is::<reqwest::Error>())
}
