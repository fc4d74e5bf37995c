//! A release of the chart on a real node, and checks of its state.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{
    apps::v1::Deployment,
    coordination::v1::Lease,
    core::v1::{Node as KubeNode, Pod},
};
use kube::{Api, Resource, ResourceExt, api::ListParams, core::NamespaceResourceScope};
use paddock::api::{READY, RunnerClaim};
use paddock_bed::{
    image::operator_image,
    isolate::Isolated,
    kube::{ControlPlane, RELEASE, RELEASE_NAMESPACE, succeeded},
    node::Node,
    wait::Wait,
};
use paddock_effects::kube::leader::LEASE;
use serde_json::{Value, json};

/// The chart of this tree, and the one before it as Helm packaged it.
pub const CHART: &str = concat!(env!("PADDOCK_SOURCE"), "/charts/paddock");
pub const PREVIOUS_CHART: &str = concat!(env!("PADDOCK_SOURCE"), "/tests/install/fixtures/paddock-0.1.0.tgz");

/// Where pools and claims are.
pub const TEAM: &str = "team";

/// Far longer than any step takes, even on a busy machine.
const WAIT: Wait = Wait::at_most(Duration::from_secs(300)).every(Duration::from_millis(100)).retrying(|_| true);

/// Values of every release: no image is pulled, and the previous chart runs this tree's operator too.
const SETTINGS: [&str; 3] =
    ["clusterName=bed", "image.pullPolicy=Never", concat!("image.tag=", env!("CARGO_PKG_VERSION"))];

/// The label selector of the operator's pods.
const SELECTOR: &str = "app.kubernetes.io/name=paddock,app.kubernetes.io/instance=paddock";

/// The default pod security level of the release's namespace.
const RESTRICTED: &str = "restricted";

pub struct Bed {
    plane: ControlPlane,
    node: Node,
}

impl Bed {
    /// A node with the operator's image, and namespaces for the operator and for a team.
    pub async fn start(isolated: &Isolated) -> Result<Self> {
        let plane = ControlPlane::start(&isolated.dir, isolated.address).await?;
        let node = Node::start(&plane, "node-1", &[]).await?;
        let archive = isolated.dir.join("paddock.tar");
        let reference = concat!("paddock:", env!("CARGO_PKG_VERSION"));
        operator_image(reference, Path::new(env!("CARGO_BIN_EXE_paddock")))?.write(&archive)?;
        node.import_image(&archive).await?;
        fs::remove_file(archive)?;
        let bed = Self { plane, node };
        bed.apply(json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": TEAM } })).await?;
        bed.allow(RESTRICTED).await?;
        Ok(bed)
    }

    /// Sets the pod security level of the release's namespace.
    async fn allow(&self, level: &str) -> Result<()> {
        let labels = json!({ "pod-security.kubernetes.io/enforce": level });
        let metadata = json!({ "name": RELEASE_NAMESPACE, "labels": labels });
        self.apply(json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata })).await
    }

    /// Runs something while the namespace has the privileged level.
    pub async fn privileged(&self, what: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        self.allow("privileged").await?;
        let outcome = what().await;
        self.allow(RESTRICTED).await?;
        outcome
    }

    pub async fn kube_node(&self) -> Result<KubeNode> {
        Ok(Api::all(self.plane.client()).get(self.node.name()).await?)
    }

    /// Applies it, and retries if the API server is busy or does not serve its kind yet.
    pub async fn apply(&self, object: Value) -> Result<()> {
        let what = format!("{} {} is applied", object["kind"], object["metadata"]["name"]);
        self.until(&what, async || self.plane.apply(&object.to_string()).await.map(Some)).await
    }

    pub async fn apply_secret(&self, namespace: &str, name: &str, content: Value) -> Result<()> {
        let metadata = json!({ "name": name, "namespace": namespace });
        self.apply(json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": content })).await
    }

    pub fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.plane.client(), namespace)
    }

    pub async fn helm(&self, arguments: &[&str]) -> Result<String> {
        let output = self.plane.helm(&[&["--namespace", RELEASE_NAMESPACE], arguments].concat()).await?;
        succeeded(&format!("helm {}", arguments.join(" ")), output)
    }

    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        succeeded(&format!("kubectl {}", arguments.join(" ")), self.plane.kubectl(arguments).await?)
    }

    /// Installs or upgrades the release and returns its [`Self::replicas`]. An unchanged release is left as it is.
    pub async fn install(&self, chart: &str, settings: &[&str]) -> Result<[Pod; 2]> {
        let mut arguments = vec!["upgrade", "--install", "--reset-values", RELEASE, chart];
        arguments.extend(SETTINGS.iter().chain(settings).flat_map(|setting| ["--set", setting]));
        self.helm(&arguments).await?;
        self.replicas().await
    }

    /// The leader and the follower, once both are ready and no other pod is left.
    pub async fn replicas(&self) -> Result<[Pod; 2]> {
        self.until("two ready replicas of which one leads", async || {
            let deployment = self.api::<Deployment>(RELEASE_NAMESPACE).get(RELEASE).await?;
            let (holder, mut pods) = (self.holder().await?, self.pods().await?);
            pods.sort_by_key(|pod| pod.name_any() != holder);
            let settled = is_rolled_out(&deployment) && pods.first().is_some_and(|pod| pod.name_any() == holder);
            Ok(<[Pod; 2]>::try_from(pods).ok().filter(|_| settled))
        })
        .await
    }

    /// The pod that holds the lease; empty if there is none.
    pub async fn holder(&self) -> Result<String> {
        Ok(pod_of(&self.identity().await?).to_owned())
    }

    /// The holder of the lease: the pod, and which of its successive processes; empty if there is none.
    pub async fn identity(&self) -> Result<String> {
        let lease = self.api::<Lease>(RELEASE_NAMESPACE).get_opt(LEASE).await?;
        Ok(lease.and_then(|lease| lease.spec?.holder_identity).unwrap_or_default())
    }

    /// Includes pods that are being deleted.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        let ours = ListParams::default().labels(SELECTOR);
        Ok(self.api::<Pod>(RELEASE_NAMESPACE).list(&ours).await?.items)
    }

    /// Waits until the claim's Ready condition says `message`.
    pub async fn until_claim_says(&self, name: &str, message: &str) -> Result<RunnerClaim> {
        self.until(&format!("claim {name} says: {message}"), async || {
            let claim = self.api::<RunnerClaim>(TEAM).get(name).await?;
            let mut conditions = claim.status.iter().flat_map(|status| &status.conditions);
            let says = conditions.any(|condition| condition.type_ == READY && condition.message == message);
            Ok(says.then_some(claim))
        })
        .await
    }

    /// Waits until the check finds something and retries all errors; the final error shows the state of the release.
    pub async fn until<T>(&self, what: &str, check: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
        match WAIT.until(what, check).await {
            Err(error) => bail!("{error:#}\n{}", self.report().await),
            found => found,
        }
    }

    async fn report(&self) -> String {
        let mut report = String::new();
        for arguments in [
            &["describe", "deployments,replicasets,daemonsets,pods"][..],
            &["logs", "--prefix", "--tail=40", "--selector", SELECTOR],
            &["get", "leases", "--output=yaml"],
            &["describe", "rpools,rclaims", "--namespace", TEAM],
        ] {
            let output = self.kubectl(&[&["--namespace", RELEASE_NAMESPACE], arguments].concat()).await;
            let text = output.unwrap_or_else(|error| format!("{error:#}"));
            report.push_str(&format!("--- kubectl {}\n{text}\n", arguments.join(" ")));
        }
        report
    }
}

fn is_rolled_out(deployment: &Deployment) -> bool {
    let status = deployment.status.clone().unwrap_or_default();
    status.observed_generation == deployment.metadata.generation
        && [status.replicas, status.updated_replicas, status.ready_replicas] == [Some(2); 3]
}

/// The pod name of a lease holder.
pub fn pod_of(identity: &str) -> &str {
    identity.split('_').next().unwrap_or_default()
}

/// The operator's process in a pod, from the host's `/proc`: the image has no shell.
pub fn process_of(pod: &Pod) -> Result<PathBuf> {
    let host = format!("HOSTNAME={}", pod.name_any());
    let is_operator = |process: &PathBuf| {
        fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim() == "paddock")
            && words(&process.join("environ")).is_ok_and(|variables| variables.contains(&host))
    };
    let mut processes = fs::read_dir("/proc")?.filter_map(|entry| Some(entry.ok()?.path()));
    processes.find(is_operator).with_context(|| format!("no process of pod {} runs", pod.name_any()))
}

/// The content of the file that `flag` names for the operator in a pod.
pub fn file_of(pod: &Pod, flag: &str) -> Result<String> {
    let process = process_of(pod)?;
    let arguments = words(&process.join("cmdline"))?;
    let path = arguments.iter().find_map(|argument| argument.strip_prefix(flag)?.strip_prefix("=/"));
    let path = path.with_context(|| format!("{flag} is not among {arguments:?}"))?;
    fs::read_to_string(process.join("root").join(path)).with_context(|| format!("{path} in the pod"))
}

/// Splits NUL-separated text.
pub fn words(file: &Path) -> Result<Vec<String>> {
    let text = fs::read(file)?;
    Ok(text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}
