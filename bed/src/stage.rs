//! The full setup: a cluster, AWS with machines, GitHub, and the operator under the chart's service account.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use crate::{
    aws::{self, Aws, ServedFile, machines},
    github::{self, GitHub, runner::write_runner_dir},
    image::runner_image,
    isolate::Isolated,
    kube::{ControlPlane, succeeded},
    node::Node,
    operator::{self, Additions, Operator},
    process::free_port,
};

/// The tools that [`Stage::start`] starts.
pub const TOOLS: &[&str] = &[
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "helm",
    "dynamodb",
    "elasticmq",
    "moto",
];

/// The operator's cluster name.
pub const CLUSTER: &str = "bed";

/// The GitHub organisation and repository of the stage.
pub const ORGANIZATION: &str = "acme";
pub const REPOSITORY: &str = "rocket";

/// The webhook secret, which the operator reads from a file.
pub const WEBHOOK_SECRET: &str = "It's a PaddockCanary to Everybody";

/// The Secret with the GitHub App, in every namespace created by [`Stage::namespace`].
pub const CREDENTIALS: &str = "github-app";

/// The image with the stand-in of GitHub's runner, on nodes created by [`Stage::board_node`].
pub const RUNNER_IMAGE: &str = "paddock-bed/runner:1";

/// Far longer than any step takes, even on a busy machine.
const DEADLINE: Duration = Duration::from_secs(300);

pub struct Stage {
    pub kube: ControlPlane,
    pub aws: Aws,
    pub github: GitHub,
    pub machines: machines::Machines,
    app: github::App,
    agent: ServedFile,
    dir: PathBuf,
    operator_kubeconfig: PathBuf,
}

/// Options of a stage.
#[derive(Default)]
pub struct Options {
    /// Validates all requests and responses of the simulated GitHub against GitHub's schemas, from the tool
    /// `github-schemas`, and those of AWS against its service models, which come with moto.
    pub validate: bool,
    /// No process runs on instances.
    pub unmanned: bool,
    /// Ports of AWS and of GitHub; 0 picks free ones.
    pub aws_port: u16,
    pub github_port: u16,
}

impl Stage {
    /// Starts all parts; see [`Options::validate`].
    pub async fn start(isolated: &Isolated, validate: bool) -> Result<Self> {
        Self::start_with(isolated, Options { validate, ..Options::default() }).await
    }

    pub async fn start_with(isolated: &Isolated, options: Options) -> Result<Self> {
        let dir = isolated.dir.clone();
        let kube = async {
            let kube = ControlPlane::start(&dir, isolated.address).await?;
            let kubeconfig = kube.install_chart_rbac(&["devicePlugin.enabled=true"]).await?;
            anyhow::Ok((kube, kubeconfig))
        };
        let github_port = if options.github_port == 0 { free_port()? } else { options.github_port };
        let own_network = !isolated.address.is_loopback();
        let github = GitHub::start(github::Options {
            // Also on loopback, where a forwarder has the same port on the host, so that one URL works on both sides.
            listen: (if own_network { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST }, github_port).into(),
            url: Some(format!("http://{}:{github_port}", isolated.address)),
            validate: options.validate,
            // A runner on a busy machine polls slowly and must not count as offline.
            offline_after: Duration::from_secs(10),
            ..github::Options::default()
        });
        let aws_dir = dir.join("aws");
        let aws_options =
            aws::Options { port: options.aws_port, validate: options.validate, ..aws::Options::default() };
        let ((kube, operator_kubeconfig), aws, github) =
            tokio::try_join!(kube, Aws::start_with(&aws_dir, aws_options), github)?;

        let ami = dir.join("ami");
        let runner = binary("paddock-bed-runner")?;
        write_runner_dir(&ami.join("opt/actions-runner"), &[&runner.to_string_lossy()])?;
        let options = machines::Options { ami: Some(ami), unmanned: options.unmanned, ..machines::Options::default() };
        let machines = machines::Machines::start(&aws, options)?;
        let agent = aws.serve_file(&binary("paddock-agent")?)?;

        github.organization(ORGANIZATION);
        github.repository(ORGANIZATION, REPOSITORY, true)?;
        let app = github.app("paddock");
        github.install(app.id, ORGANIZATION)?;
        let stage = Self { kube, aws, github, machines, app, agent, dir, operator_kubeconfig };
        std::fs::write(stage.webhook_secrets(), format!("{WEBHOOK_SECRET}\n"))?;
        Ok(stage)
    }

    /// Where anything so far was not as GitHub or AWS have it; empty without [`Options::validate`].
    pub async fn violations(&self) -> Vec<String> {
        let (github, aws) = tokio::join!(self.github.violations(), self.aws.violations());
        let told = |who: &str, found: Vec<String>| found.into_iter().map(|text| format!("{who}: {text}")).collect();
        let told: [Vec<_>; 2] = [told("not as GitHub has it", github), told("not as AWS has it", aws)];
        told.concat()
    }

    /// The GitHub App that the operator acts as.
    pub fn app_id(&self) -> u64 {
        self.app.id
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The operator's file of webhook secrets.
    pub fn webhook_secrets(&self) -> PathBuf {
        self.dir.join("webhook-secrets")
    }

    /// The GitHub App's key.
    pub fn private_key(&self) -> &str {
        &self.app.private_key
    }

    /// Creates a namespace with the GitHub App's credentials.
    pub async fn namespace(&self, name: &str) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.kube.client());
        let namespace = serde_json::from_value(json!({ "metadata": { "name": name } }))?;
        namespaces.create(&PostParams::default(), &namespace).await?;
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": { "name": CREDENTIALS, "namespace": name },
            "stringData": {
                "github_app_id": self.app.id.to_string(),
                "github_app_private_key": self.app.private_key,
            },
        });
        self.kube.apply(&secret.to_string()).await?;
        self.kube.until_namespace_is_ready(name).await
    }

    /// Sends the organisation's webhooks to the operator at this address.
    pub fn send_webhooks_to(&self, operator: SocketAddr) {
        let url = format!("http://{operator}/webhook");
        self.github.hook(github::HookSource::App(self.app.id), &url, WEBHOOK_SECRET);
    }

    /// An EC2 pool for this stage; `changes` are merged into `spec.ec2`.
    pub fn ec2_pool(&self, namespace: &str, name: &str, changes: Value) -> Value {
        let subnets: Vec<_> = self.aws.subnets().into_iter().map(|(subnet, _)| subnet).collect();
        let mut ec2 = json!({
            "ami": { "id": self.aws.ami_id() },
            "instanceProfile": "paddock-runner",
            "securityGroupIds": [self.aws.security_group_id()],
            "subnetIds": subnets,
            "agent": { "url": self.agent.url, "sha256": self.agent.sha256 },
            "resourceClasses": [{ "name": "medium", "cpu": 2, "memoryMiB": 4096 }],
            "github": { "owner": ORGANIZATION, "credentialsRef": { "name": CREDENTIALS } },
        });
        merge(&mut ec2, changes);
        pool(namespace, name, json!({ "ec2": ec2 }))
    }

    /// A pool on nodes with this board; nodes from [`Self::board_node`] have its image. `changes` are merged into
    /// `spec.board`.
    pub fn board_pool(&self, namespace: &str, name: &str, board: &str, label: &str, changes: Value) -> Value {
        let mut spec = json!({
            "board": board, "labels": [[label]], "image": RUNNER_IMAGE,
            "github": { "credentialsRef": { "name": CREDENTIALS }, "runnerGroup": "Boards" },
        });
        merge(&mut spec, changes);
        pool(namespace, name, json!({ "board": spec }))
    }

    /// Starts the real node, with the image of the runner's stand-in. Requires `Isolated::node_possible`.
    pub async fn board_node(&self, name: &str) -> Result<Node> {
        let node = Node::start(&self.kube, name, &[]).await?;
        let archive = self.dir.join("runner.tar");
        runner_image(RUNNER_IMAGE, &binary("paddock-bed-runner")?, &["jit"])?.write(&archive)?;
        node.import_image(&archive).await?;
        Ok(node)
    }

    /// Waits until a field of an object has a value: `{.status.workers.idle}=1`.
    pub async fn until(&self, namespace: &str, object: &str, condition: &str) -> Result<()> {
        let (condition, timeout) =
            (format!("--for=jsonpath={condition}"), format!("--timeout={}s", DEADLINE.as_secs()));
        let wait = ["wait", object, "-n", namespace, &condition, &timeout];
        succeeded("kubectl wait", self.kube.kubectl(&wait).await?).map(drop)
    }

    /// A claim on a pool.
    pub fn claim(&self, namespace: &str, name: &str, pool: &str, run_id: &str, count: u32) -> Value {
        json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim",
            "metadata": { "name": name, "namespace": namespace },
            "spec": { "pool": pool, "runId": run_id, "count": count },
        })
    }

    /// Starts an operator as the chart would, on a free port, and waits until it answers.
    pub async fn operator(&self, name: &str, arguments: &[&str]) -> Result<Operator> {
        self.operator_at(name, (Ipv4Addr::LOCALHOST, free_port()?).into(), arguments).await
    }

    pub async fn operator_at(&self, name: &str, address: SocketAddr, arguments: &[&str]) -> Result<Operator> {
        let mut operator = self.spawn_operator(name, address, &arguments.into())?;
        operator.until_ready().await?;
        Ok(operator)
    }

    /// The same without waiting for it.
    pub fn spawn_operator(&self, name: &str, address: SocketAddr, additions: &Additions) -> Result<Operator> {
        let mut command = operator::command()?;
        command
            .args(["--listen", &address.to_string()])
            .args(&additions.args)
            .env("KUBECONFIG", &self.operator_kubeconfig)
            .env("HOSTNAME", name)
            .env("NO_COLOR", "1")
            // Not arguments, so that an argument can override them.
            .env("PADDOCK_CLUSTER_NAME", CLUSTER)
            .env("PADDOCK_GITHUB_API_URL", self.github.api_url())
            // Short, so that a killed leader is replaced soon; long enough for a busy API server.
            .env("PADDOCK_LEASE_DURATION", "10s")
            .env("PADDOCK_CAPACITY_MEMORY", "20s")
            .env("PADDOCK_WEBHOOK_SECRET_FILE", self.webhook_secrets())
            .envs(self.aws.env())
            .envs(&additions.env);
        Operator::spawn(name, command, &self.operator_logs(), address)
    }

    pub fn operator_logs(&self) -> PathBuf {
        self.dir.join("operator")
    }
}

fn pool(namespace: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
        "metadata": { "name": name, "namespace": namespace },
        "spec": spec,
    })
}

fn merge(object: &mut Value, changes: Value) {
    if let (Value::Object(object), Value::Object(changes)) = (object, changes) {
        object.extend(changes);
    }
}

/// A program of this workspace, in the build directory of the running one.
pub fn binary(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let directory = program.parent().context("a program lies in a directory")?;
    // Test binaries are one level deeper.
    let directory = if directory.ends_with("deps") { directory.parent().unwrap_or(directory) } else { directory };
    let path = directory.join(name);
    ensure!(path.exists(), "{} is not built: run `cargo build --workspace --bins` first", path.display());
    Ok(path)
}
