//! All parts together: a cluster, AWS with machines, GitHub, and the operator under the chart's own service account.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use crate::{
    aws::{Aws, ServedFile, machines},
    github::{self, GitHub, runner::write_runner_dir},
    isolate::Isolated,
    kube::ControlPlane,
    process::{Process, Signal, free_port},
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

/// Longer than a start takes on a slow machine.
const DEADLINE: Duration = Duration::from_secs(180);

/// The name of the cluster, as the operator is told it.
pub const CLUSTER: &str = "bed";

/// The GitHub organisation and repository that everything belongs to.
pub const ORGANIZATION: &str = "acme";
pub const REPOSITORY: &str = "rocket";

/// The secret of webhooks, as the operator has it in a file.
pub const WEBHOOK_SECRET: &str = "It's a PaddockCanary to Everybody";

/// The Secret with the GitHub App, in every namespace made by [`Stage::namespace`].
pub const CREDENTIALS: &str = "github-app";

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

impl Stage {
    /// Starts all parts. With `validate` GitHub's simulator holds everything it is asked and answers against GitHub's
    /// own schemas, which the tool `github-schemas` brings.
    pub async fn start(isolated: &Isolated, validate: bool) -> Result<Self> {
        Self::start_with(isolated, validate, machines::Options::default()).await
    }

    /// Starts all parts, with instances on which nothing runs.
    pub async fn start_unmanned(isolated: &Isolated) -> Result<Self> {
        Self::start_with(isolated, false, machines::Options { unmanned: true, ..Default::default() }).await
    }

    async fn start_with(isolated: &Isolated, validate: bool, options: machines::Options) -> Result<Self> {
        let dir = isolated.dir.clone();
        let kube = async {
            let kube = ControlPlane::start(&dir, isolated.address).await?;
            let kubeconfig = kube.install_chart_rbac(&["devicePlugin.enabled=true"]).await?;
            anyhow::Ok((kube, kubeconfig))
        };
        let github = GitHub::start(github::Options {
            listen: (isolated.address, 0).into(),
            validate,
            // A runner on busy cores is slow to ask for its next job, and not offline.
            offline_after: Duration::from_secs(10),
            ..github::Options::default()
        });
        let aws_dir = dir.join("aws");
        let ((kube, operator_kubeconfig), aws, github) = tokio::try_join!(kube, Aws::start(&aws_dir), github)?;

        let ami = dir.join("ami");
        let runner = binary("paddock-bed-runner")?;
        write_runner_dir(&ami.join("opt/actions-runner"), &[&runner.to_string_lossy()])?;
        let machines = machines::Machines::start(&aws, machines::Options { ami: Some(ami), ..options })?;
        let agent = aws.serve_file(&binary("paddock-agent")?)?;

        github.organization(ORGANIZATION);
        github.repository(ORGANIZATION, REPOSITORY, true)?;
        let app = github.app("paddock");
        github.install(app.id, ORGANIZATION)?;
        let stage = Self { kube, aws, github, machines, app, agent, dir, operator_kubeconfig };
        std::fs::write(stage.webhook_secrets(), format!("{WEBHOOK_SECRET}\n"))?;
        Ok(stage)
    }

    /// The GitHub App that the operator acts as.
    pub fn app_id(&self) -> u64 {
        self.app.id
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file with the webhook secrets, as an operator is given it.
    pub fn webhook_secrets(&self) -> PathBuf {
        self.dir.join("webhook-secrets")
    }

    /// The GitHub App's key.
    pub fn private_key(&self) -> &str {
        &self.app.private_key
    }

    /// Makes a namespace with the GitHub App's credentials in it.
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

    /// Lets GitHub tell the operator of all that happens in the organisation. An operator that is started anew at another
    /// address must be told of again.
    pub fn send_webhooks_to(&self, operator: &Operator) {
        let url = format!("{}/webhook", operator.url());
        self.github.hook(github::HookSource::App(self.app.id), &url, WEBHOOK_SECRET);
    }

    /// An EC2 pool that fits this stage; `changes` are merged into `spec.ec2`.
    pub fn ec2_pool(&self, namespace: &str, name: &str, changes: Value) -> Value {
        let subnets: Vec<_> = self.aws.subnets().into_iter().map(|(subnet, _)| subnet).collect();
        let mut ec2 = json!({
            "amiId": self.aws.ami_id(),
            "instanceProfile": "paddock-runner",
            "securityGroupIds": [self.aws.security_group_id()],
            "subnetIds": subnets,
            "runnerVersion": "2.330.0",
            "agent": { "url": self.agent.url, "sha256": self.agent.sha256 },
            "resourceClasses": [{ "name": "medium", "cpu": 2, "memoryMiB": 4096 }],
            "github": { "owner": ORGANIZATION, "credentialsRef": { "name": CREDENTIALS } },
        });
        if let (Value::Object(ec2), Value::Object(changes)) = (&mut ec2, changes) {
            ec2.extend(changes);
        }
        json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
            "metadata": { "name": name, "namespace": namespace },
            "spec": { "ec2": ec2 },
        })
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
        let mut command = Command::new(binary("paddock")?);
        command
            .args(["run", "--cluster-name", CLUSTER, "--github-api-url", &self.github.api_url()])
            .args(["--listen", &address.to_string()])
            .args(arguments)
            .env("KUBECONFIG", &self.operator_kubeconfig)
            .env("HOSTNAME", name)
            // Not arguments, so that an argument may say otherwise.
            // Short, so that a killed leader is replaced soon; long enough for an API server on busy cores.
            .env("PADDOCK_LEASE_DURATION", "10s")
            .env("PADDOCK_CAPACITY_MEMORY", "20s")
            .env("PADDOCK_WEBHOOK_SECRET_FILE", self.webhook_secrets())
            .envs(self.aws.env());
        Operator::start(name, command, &self.dir.join("operator"), address).await
    }
}

/// How the chart has the operator's memory kept.
pub const MEMORY: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "1"), ("MALLOC_MMAP_THRESHOLD_", "131072"), ("MALLOC_TRIM_THRESHOLD_", "1048576")];

/// A running `paddock run`; killed when dropped.
pub struct Operator {
    process: Process,
    address: SocketAddr,
}

impl Operator {
    /// Starts `paddock run`, told to listen at `address`, and waits until it answers.
    pub async fn start(name: &str, mut command: Command, log_dir: &Path, address: SocketAddr) -> Result<Self> {
        command.envs(MEMORY);
        let mut operator = Self { process: Process::spawn(name, command, log_dir)?, address };
        let url = format!("{}/readyz", operator.url());
        let ready = async || reqwest::get(&url).await.is_ok_and(|answer| answer.status().is_success());
        operator.process.until_ready(DEADLINE, ready).await?;
        Ok(operator)
    }

    /// The memory that it holds, in KiB: all of it, and what is not mapped from its program file.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid()))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            kib.with_context(|| format!("no {name} among\n{status}"))
        };
        Ok((field("VmRSS:")?, field("RssAnon:")?))
    }

    /// The time that it has had a core for.
    pub fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.pid()))?;
        // After the name, which may hold anything, in hundredths of a second: of the program, and of the kernel for it.
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
        let ticks = fields.map(str::parse::<u64>).sum::<Result<u64, _>>()?;
        Ok(Duration::from_millis(10 * ticks))
    }

    /// Where its pages are.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn exited(&mut self) -> bool {
        self.process.exited().is_some()
    }

    pub fn log(&self) -> String {
        self.process.log_tail(usize::MAX)
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// `kill -9`.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill().map(drop)
    }

    /// Asks it to end, which it must do in order.
    pub async fn stop(self) -> Result<()> {
        let log = self.process.log().to_owned();
        let status = self.process.stop().await?;
        ensure!(status.success(), "the operator ended with {status}; its log is\n{}", std::fs::read_to_string(log)?);
        Ok(())
    }
}

/// A program of this workspace, built beside the one that runs.
pub fn binary(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let directory = program.parent().context("a program lies in a directory")?;
    // Test binaries lie one level deeper.
    let directory = if directory.ends_with("deps") { directory.parent().unwrap_or(directory) } else { directory };
    let path = directory.join(name);
    ensure!(path.exists(), "{} is not built: run `cargo build --workspace --bins` first", path.display());
    Ok(path)
}
