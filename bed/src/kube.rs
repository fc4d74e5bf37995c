//! A real Kubernetes control plane: etcd, API server with RBAC, controller manager and scheduler.

mod chart;
mod pki;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Node, ServiceAccount},
};
use kube::{
    Api, Client, Config, ResourceExt,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, sync::Mutex};

use crate::{
    isolate::{SERVICE_ADDRESS, SERVICE_RANGE},
    process::{Process, free_port, tool},
    wait::{Wait, request_failed},
};
pub use pki::{Certificate, Identity, Pki};

/// The tools that [`ControlPlane::start`] and its helpers need, for `isolate::Options`.
pub const TOOLS: [&str; 6] = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "helm"];

/// The chart's release and service account in the bed.
pub const RELEASE: &str = "paddock";
pub const RELEASE_NAMESPACE: &str = "paddock-system";

/// Generous, because machines that run tests are busy.
const DEADLINE: Duration = Duration::from_secs(120);
const WAIT: Wait = Wait::at_most(DEADLINE).retrying(request_failed);

/// The lifetime of a service account token: longer than any bed runs.
const TOKEN_SECONDS: i64 = 24 * 3600;

pub struct ControlPlane {
    dir: PathBuf,
    address: Ipv4Addr,
    /// The API server's URL for all processes of the bed.
    url: String,
    pki: Pki,
    client: Client,
    etcd_port: u16,
    port: u16,
    apiserver: Mutex<Option<Process>>,
    _others: Vec<Process>,
}

impl ControlPlane {
    /// Starts all components with their files below `dir` and returns when the first namespace is ready for pods.
    ///
    /// With `Isolated::address` the API server also answers at the ClusterIP of its service; on loopback it uses a free
    /// port and has no service.
    pub async fn start(dir: &Path, address: Ipv4Addr) -> Result<Self> {
        let dir = dir.join("kube");
        let port = if address.is_loopback() { free_port()? } else { 443 };
        let url = format!("https://{address}:{port}");
        let pki = Pki::create(&dir.join("pki"))?;
        let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"];
        let addresses: [IpAddr; 3] = [address.into(), Ipv4Addr::LOCALHOST.into(), SERVICE_ADDRESS.into()];
        pki.server("kube-apiserver", &names, &addresses)?;
        pki.client("apiserver-kubelet-client", &["system:masters"])?;
        for (user, groups) in [
            ("admin", &["system:masters"][..]),
            ("system:kube-controller-manager", &[]),
            ("system:kube-scheduler", &[]),
        ] {
            let identity = pki.client(user, groups)?;
            pki.kubeconfig(&config_path(&dir, user), &url, "default", Identity::Certificate(&identity))?;
        }
        let client = client_from(&config_path(&dir, "admin")).await?;
        let etcd_port = free_port()?;
        let etcd = start_etcd(&dir, etcd_port)?;
        let mut plane =
            Self { dir, address, url, pki, client, etcd_port, port, apiserver: Mutex::new(None), _others: vec![etcd] };
        plane.start_apiserver().await?;
        let mut manager = plane.spawn("kube-controller-manager", |command| {
            command
                .args(["--leader-elect=false", "--secure-port=0", "--use-service-account-credentials=true"])
                .arg(flag("--root-ca-file", plane.pki.authority_file()))
                .arg(flag("--service-account-private-key-file", plane.pki.service_account_key()))
                .arg(flag("--kubeconfig", config_path(&plane.dir, "system:kube-controller-manager")));
        })?;
        plane._others.push(plane.spawn("kube-scheduler", |command| {
            command
                .args(["--leader-elect=false", "--secure-port=0"])
                .arg(flag("--kubeconfig", config_path(&plane.dir, "system:kube-scheduler")));
        })?);
        let accounts: Api<ServiceAccount> = Api::default_namespaced(plane.client());
        manager.until_ready(DEADLINE, async || accounts.get("default").await.is_ok()).await?;
        plane._others.push(manager);
        Ok(plane)
    }

    /// An admin client for the test itself, never for the operator.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The kubeconfig of [`Self::client`].
    pub fn kubeconfig(&self) -> PathBuf {
        config_path(&self.dir, "admin")
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address that the bed's servers listen on.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// Writes an admin's kubeconfig for a user on the host, where the API server is at `port` of loopback.
    pub fn kubeconfig_for_host(&self, path: &Path, port: u16) -> Result<()> {
        let admin = self.pki.client("admin", &["system:masters"])?;
        self.pki.kubeconfig(path, &format!("https://127.0.0.1:{port}"), "default", Identity::Certificate(&admin))
    }

    /// A kubeconfig for a service account, with its own token.
    pub async fn kubeconfig_for_service_account(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        self.kubeconfig_with_token(namespace, name, None).await
    }

    /// The same with a token that is bound to the node, like that of a pod there.
    pub async fn kubeconfig_of_pod(&self, namespace: &str, name: &str, node: &str) -> Result<PathBuf> {
        let node = Api::<Node>::all(self.client()).get(node).await?;
        let bound = BoundObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            uid: node.uid(),
            name: node.metadata.name,
        };
        self.kubeconfig_with_token(namespace, name, Some(bound)).await
    }

    async fn kubeconfig_with_token(
        &self,
        namespace: &str,
        name: &str,
        bound: Option<BoundObjectReference>,
    ) -> Result<PathBuf> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), namespace);
        let bearer =
            bound.as_ref().and_then(|bound| bound.name.clone()).map_or(String::new(), |node| format!("-{node}"));
        let spec = TokenRequestSpec {
            expiration_seconds: Some(TOKEN_SECONDS),
            bound_object_ref: bound,
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let answer = accounts.create_token_request(name, &PostParams::default(), &request).await;
        let answer = answer.with_context(|| format!("no token for the service account {namespace}/{name}"))?;
        let token = answer.status.context("the token request was answered without a token")?.token;
        let path = config_path(&self.dir, &format!("{namespace}-{name}{bearer}"));
        self.pki.kubeconfig(&path, &self.url, namespace, Identity::Token(&token))?;
        Ok(path)
    }

    /// Waits until pods can be created in a new namespace: without its default service account they are refused.
    pub async fn until_namespace_is_ready(&self, name: &str) -> Result<()> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), name);
        let what = format!("namespace {name} has a default service account");
        WAIT.until(&what, async || Ok(accounts.get_opt("default").await?)).await.map(drop)
    }

    /// Starts the API server if it is not running, and waits until it is ready.
    pub async fn start_apiserver(&self) -> Result<()> {
        let mut running = self.apiserver.lock().await;
        if running.is_some() {
            return Ok(());
        }
        let pki = &self.pki;
        let serving = self.dir.join("pki/kube-apiserver");
        let kubelet_client = self.dir.join("pki/apiserver-kubelet-client");
        let policy = self.dir.join("audit-policy.json");
        fs::write(&policy, audit_policy().to_string())?;
        let mut process = self.spawn("kube-apiserver", |command| {
            command
                .args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"])
                .args(["--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP"])
                .args(["--service-account-issuer=https://kubernetes.default.svc", "--profiling=false"])
                .arg(format!("--service-cluster-ip-range={SERVICE_RANGE}"))
                .arg(format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port))
                .arg(format!("--secure-port={}", self.port))
                .arg(format!("--advertise-address={}", self.address))
                .arg(flag("--tls-cert-file", serving.with_extension("crt")))
                .arg(flag("--tls-private-key-file", serving.with_extension("key")))
                .arg(flag("--client-ca-file", pki.authority_file()))
                .arg(flag("--service-account-key-file", pki.service_account_key().with_extension("pub")))
                .arg(flag("--service-account-signing-key-file", pki.service_account_key()))
                .arg(flag("--kubelet-client-certificate", kubelet_client.with_extension("crt")))
                .arg(flag("--kubelet-client-key", kubelet_client.with_extension("key")))
                .arg(flag("--audit-policy-file", policy))
                .arg(flag("--audit-log-path", self.audit_log()))
                .args(["--audit-log-mode=batch", "--audit-log-batch-max-wait=1s"])
                // Garbage collection dominates a small API server's CPU time, and there is enough memory.
                .env("GOGC", "400");
            if self.address.is_loopback() {
                // Loopback is not a valid service endpoint, so the service gets none.
                command.args(["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]);
            }
        })?;
        process.until_ready(DEADLINE, async || self.is_ready().await).await?;
        *running = Some(process);
        Ok(())
    }

    /// The audit log of the operator's writes, without Secrets; about a second behind.
    pub fn audit_log(&self) -> PathBuf {
        self.dir.join("log/audit.log")
    }

    /// Kills the API server, like a crash.
    pub async fn stop_apiserver(&self) {
        drop(self.apiserver.lock().await.take());
    }

    pub async fn restart_apiserver(&self) -> Result<()> {
        self.stop_apiserver().await;
        self.start_apiserver().await
    }

    async fn is_ready(&self) -> bool {
        let request = axum::http::Request::get("/readyz").body(Vec::new()).expect("a constant request");
        let answer = self.client.request_text(request);
        matches!(tokio::time::timeout(Duration::from_secs(5), answer).await, Ok(Ok(text)) if text == "ok")
    }

    /// Runs kubectl as admin.
    pub async fn kubectl(&self, args: &[&str]) -> Result<Output> {
        self.run("kubectl", args, "").await
    }

    /// Applies manifests as admin.
    pub async fn apply(&self, yaml: &str) -> Result<()> {
        let output = self.run("kubectl", &["apply", "--server-side", "-f", "-"], yaml).await?;
        succeeded("kubectl apply", output).map(drop)
    }

    /// Runs helm as admin.
    pub async fn helm(&self, args: &[&str]) -> Result<Output> {
        self.run("helm", args, "").await
    }

    async fn run(&self, name: &str, args: &[&str], input: &str) -> Result<Output> {
        let home = self.dir.join("home");
        fs::create_dir_all(&home)?;
        let mut child = tokio::process::Command::new(tool(name)?)
            .args(args)
            .env("KUBECONFIG", self.kubeconfig())
            .env("HOME", home) // caches and helm's own files
            .env_remove("XDG_CACHE_HOME")
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_DATA_HOME")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let mut stdin = child.stdin.take().context("standard input is a pipe")?;
        let input = input.to_owned();
        tokio::spawn(async move { stdin.write_all(input.as_bytes()).await });
        Ok(child.wait_with_output().await?)
    }

    fn spawn(&self, name: &str, arguments: impl FnOnce(&mut Command)) -> Result<Process> {
        let mut command = Command::new(tool(name)?);
        arguments(&mut command);
        Process::spawn(name, command, &self.dir.join("log"))
    }
}

fn audit_policy() -> Value {
    let secret = [
        json!({ "group": "", "resources": ["secrets", "serviceaccounts/token"] }),
        json!({ "group": "coordination.k8s.io", "resources": ["leases"] }),
    ];
    let operator = format!("system:serviceaccount:{RELEASE_NAMESPACE}:{RELEASE}");
    json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "None", "resources": secret },
            { "level": "Request", "users": [operator], "verbs": ["create", "update", "patch"] },
            { "level": "None" },
        ],
    })
}

/// A command's standard output, or an error with its standard error.
pub fn succeeded(what: &str, output: Output) -> Result<String> {
    if !output.status.success() {
        bail!("{what} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// A client for a kubeconfig file.
pub async fn client_from(kubeconfig: &Path) -> Result<Client> {
    let config = Kubeconfig::read_from(kubeconfig)?;
    client_with(Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?)
}

pub fn client_with(config: Config) -> Result<Client> {
    use_one_crypto_provider();
    Ok(Client::try_from(config)?)
}

/// rustls needs a crypto provider that is installed for the process.
fn use_one_crypto_provider() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default(); // fails only if there is one already
}

fn start_etcd(dir: &Path, port: u16) -> Result<Process> {
    let client = format!("http://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{}", free_port()?);
    let mut command = Command::new(tool("etcd")?);
    command
        .arg(flag("--data-dir", dir.join("etcd")))
        .args(["--unsafe-no-fsync", "--name=bed", "--logger=zap", "--log-level=warn"])
        .args([format!("--listen-client-urls={client}"), format!("--advertise-client-urls={client}")])
        .args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")])
        .arg(format!("--initial-cluster=bed={peer}"));
    Process::spawn("etcd", command, &dir.join("log"))
}

fn config_path(dir: &Path, user: &str) -> PathBuf {
    dir.join(format!("{}.kubeconfig", user.replace(':', "-")))
}

fn flag(name: &str, path: PathBuf) -> String {
    format!("{name}={}", path.display())
}
