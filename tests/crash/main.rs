//! I5: the operator is killed right after each single write that a board claim's life takes, one by one, and the next
//! one brings the claim to the same end.

mod gate;

use std::{
    fs,
    path::PathBuf,
    process::{Command, ExitCode},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod, Secret};
use kube::{
    Api, Resource,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use libtest_mimic::{Arguments, Trial};
use paddock::api::{ClaimPhase, LABEL_BOARD, RunnerClaim, RunnerPool, Worker, WorkerState};
use paddock_bed::{
    github::{self, Conclusion, GitHub, JobRequest},
    image::runner_image,
    isolate::{self, Isolated, Options},
    kube::{ControlPlane, TOOLS},
    node::{self, Node},
    process::Process,
    stage::binary,
};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::gate::{Gate, Upstream, Write};

/// Longer than anything takes on a slow machine, a lost lease included.
const DEADLINE: Duration = Duration::from_secs(120);
const BOARD: &str = "test-board";
const IMAGE: &str = "paddock-bed/runner:1";
/// As many lives at a time as a small machine bears.
const AT_ONCE: usize = 4;

struct Bed {
    plane: ControlPlane,
    node: Node,
    github: GitHub,
    app: github::App,
    dir: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let name = "i5_each_write_of_a_board_claims_life_can_be_the_operators_last";
    if arguments.list {
        return libtest_mimic::run(&arguments, vec![Trial::test(name, || Ok(()))]).exit_code();
    }
    let tools = [&TOOLS[..], &node::TOOLS, &["github-schemas"]].concat();
    let isolated = isolate::enter(Options { tools: &tools, listen: 0 }).expect("a bed of its own");
    if let Err(why) = &isolated.node_possible {
        println!("skipped: {why}");
        return libtest_mimic::run(&arguments, vec![Trial::test(name, || Ok(())).with_ignored_flag(true)]).exit_code();
    }
    let test = move || {
        let runtime = tokio::runtime::Runtime::new()?;
        runtime.block_on(sweep(&isolated)).map_err(|error| format!("{error:?}").into())
    };
    libtest_mimic::run(&arguments, vec![Trial::test(name, test)]).exit_code()
}

async fn start(isolated: &Isolated) -> Result<Bed> {
    let options =
        github::Options { listen: (isolated.address, 0).into(), validate: true, ..github::Options::default() };
    let (plane, github) =
        tokio::try_join!(ControlPlane::start(&isolated.dir, isolated.address), GitHub::start(options))?;
    plane.install_chart_rbac(&[]).await?;
    let node = Node::start(&plane, "board-1", &[(LABEL_BOARD, BOARD)]).await?;
    let archive = isolated.dir.join("runner.tar");
    runner_image(IMAGE, &binary("paddock-bed-runner")?, &["jit"])?.write(&archive)?;
    node.import_image(&archive).await?;
    github.organization("acme");
    github.repository("acme", "rocket", true)?;
    let app = github.app("paddock");
    github.install(app.id, "acme")?;
    Ok(Bed { plane, node, github, app, dir: isolated.dir.clone() })
}

async fn sweep(isolated: &Isolated) -> Result<()> {
    let bed = start(isolated).await?;
    let writes = Life::new(&bed, None).await?.play().await.context("a life without a crash")?;
    println!("a life takes {} writes", writes.len());
    ensure!(writes.len() > 10, "too few writes to be a life: {writes:?}");
    let outcomes = stream::iter(writes.iter().enumerate()).map(|(index, fatal)| {
        let bed = &bed;
        async move {
            let life = Life::new(bed, Some((index + 1, fatal.clone()))).await?;
            let lived = life.play().await.with_context(|| format!("killed after {fatal:?}"))?;
            let killed = lived.contains(fatal);
            println!("{} {} {}", if killed { "killed after" } else { "never came to" }, fatal.what, fatal.number);
            // How often a status is written is a matter of time; that each thing is written is not.
            ensure!(killed || fatal.number > 1, "this life had no {}", fatal.what);
            Ok(())
        }
    });
    let mut failures = Vec::new();
    let mut outcomes = outcomes.buffer_unordered(AT_ONCE);
    while let Some(outcome) = outcomes.next().await {
        failures.extend(outcome.err().map(|error: anyhow::Error| format!("{error:?}")));
    }
    ensure!(failures.is_empty(), "{} of {} lives went wrong:\n{}", failures.len(), writes.len(), failures.join("\n\n"));
    let violations = bed.github.violations().await;
    ensure!(violations.is_empty(), "not as GitHub has it: {violations:#?}");
    Ok(())
}

/// One claim from its application to its deletion, in a namespace with an operator of its own.
struct Life<'a> {
    bed: &'a Bed,
    gate: Arc<Gate>,
    namespace: String,
    label: String,
    kubeconfig: PathBuf,
    github_url: String,
}

impl<'a> Life<'a> {
    async fn new(bed: &'a Bed, fatal: Option<(usize, Write)>) -> Result<Self> {
        let namespace = format!("life-{}", fatal.as_ref().map_or(0, |(number, _)| *number));
        let gate = Gate::new(fatal.map(|(_, write)| write));
        let kubernetes = gate.serve(Upstream::Kubernetes(bed.plane.client())).await?;
        let simulator = Upstream::GitHub(reqwest::Client::new(), bed.github.html_url());
        let github_url = format!("{}/api/v3", gate.serve(simulator).await?);
        let kubeconfig = bed.dir.join(format!("{namespace}.kubeconfig"));
        let cluster = json!({"name": "gate", "cluster": {"server": kubernetes}});
        let context = json!({"name": "gate", "context": {"cluster": "gate", "user": "gate", "namespace": namespace}});
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "gate",
            "clusters": [cluster], "contexts": [context], "users": [{"name": "gate", "user": {}}],
        });
        fs::write(&kubeconfig, config.to_string())?;
        let label = format!("rv-{namespace}");
        Ok(Self { bed, gate, namespace, label, kubeconfig, github_url })
    }

    /// Says which writes it took.
    async fn play(&self) -> Result<Vec<Write>> {
        self.prepare().await?;
        let operator = self.keep_an_operator();
        let outcome = tokio::select! {
            outcome = self.lead() => outcome,
            outcome = operator => outcome.map(|never| match never {}),
        };
        outcome.with_context(|| format!("in {}, after the writes {:?}", self.namespace, self.gate.writes()))?;
        Ok(self.gate.writes())
    }

    async fn prepare(&self) -> Result<()> {
        let (namespace, label) = (&self.namespace, &self.label);
        let resource = format!("paddock.test/{namespace}");
        let capacity = json!({ "status": { "capacity": { &resource: "1" } } });
        let nodes: Api<KubeNode> = Api::all(self.bed.plane.client());
        nodes.patch_status(self.bed.node.name(), &PatchParams::default(), &Patch::Merge(capacity)).await?;
        let owner = self.bed.github.organization("acme");
        let objects = [
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
            json!({
                "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "github-app", "namespace": namespace},
                "stringData": {
                    "github_app_id": self.bed.app.id.to_string(), "github_app_private_key": self.bed.app.private_key,
                },
            }),
            json!({
                "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
                "metadata": {"name": "riscv", "namespace": namespace},
                "spec": {"board": {
                    "board": BOARD, "labels": [[label]], "image": IMAGE, "resourceName": resource,
                    "github": {"credentialsRef": {"name": "github-app"}, "runnerGroup": namespace},
                }},
            }),
            json!({
                "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim",
                "metadata": {"name": "build", "namespace": namespace},
                "spec": {
                    "runId": "1", "labels": [label],
                    "owner": {"id": owner.id, "login": owner.login, "type": "Organization"},
                },
            }),
        ];
        for object in objects {
            self.bed.plane.apply(&object.to_string()).await?;
        }
        Ok(())
    }

    /// Starts the operator, and starts it again when the gate has killed it.
    async fn keep_an_operator(&self) -> Result<std::convert::Infallible> {
        loop {
            let mut command = Command::new(binary("paddock")?);
            command
                .args(["run", "--cluster-name", "crash", "--namespace", &self.namespace, "--lease-duration", "3s"])
                .args(["--listen", "127.0.0.1:0", "--github-api-url", &self.github_url])
                .env("KUBECONFIG", &self.kubeconfig)
                .env("HOSTNAME", &self.namespace)
                .envs([("AWS_REGION", "us-east-1"), ("AWS_ENDPOINT_URL", "http://127.0.0.1:1")])
                .envs([("AWS_ACCESS_KEY_ID", "none"), ("AWS_SECRET_ACCESS_KEY", "none")]);
            let mut operator = Process::spawn(&self.namespace, command, &self.bed.dir.join("operators"))?;
            loop {
                tokio::select! {
                    () = self.gate.killed.notified() => {
                        operator.kill()?;
                        break;
                    }
                    () = tokio::time::sleep(Duration::from_millis(200)) => {}
                }
                if let Some(status) = operator.exited() {
                    bail!("the operator ended by itself ({status}):\n{}", operator.log_tail(30));
                }
            }
        }
    }

    async fn lead(&self) -> Result<()> {
        let github = &self.bed.github;
        let job = JobRequest {
            owner: "acme".into(),
            repo: "rocket".into(),
            labels: vec![self.label.clone()],
            duration_ms: Some(100),
            ..JobRequest::default()
        };
        let job = github.queue_job(job)?.id;
        let claim = self.until::<RunnerClaim>("build", |claim| {
            claim.status.as_ref().and_then(|status| status.phase) == Some(ClaimPhase::Completed)
        });
        claim.await.context("the claim is not Completed")?;
        let job = github.job(job).context("the job is known")?;
        ensure!(job.conclusion == Some(Conclusion::Success), "the job did not succeed: {job:?}");

        let workers = self.api::<Worker>().list(&ListParams::default()).await?.items;
        ensure!(workers.len() == 1, "I1: one worker for one claim, not {workers:#?}");
        let state = workers[0].status.as_ref().and_then(|status| status.state);
        ensure!(state == Some(WorkerState::Completed), "the worker is {state:?}");
        let pods = self.api::<Pod>().list(&ListParams::default()).await?.items;
        ensure!(pods.len() == 1 && pods[0].metadata.name == workers[0].metadata.name, "I1: its pod alone");

        self.api::<RunnerClaim>().delete("build", &DeleteParams::default()).await?;
        self.api::<RunnerPool>().delete("riscv", &DeleteParams::default()).await?;
        self.until_none::<RunnerClaim>("claims", |_| true).await?;
        self.until_none::<RunnerPool>("pools", |_| true).await?;
        self.until_none::<Worker>("workers with a finalizer", |worker| worker.metadata.finalizers.is_some()).await?;
        let config = |secret: &Secret| secret.type_.as_deref() == Some("paddock.dev/jit-config");
        self.until_none::<Secret>("JIT configs", config).await?;
        let left: Vec<_> = github.runners().into_iter().filter(|runner| runner.labels.contains(&self.label)).collect();
        ensure!(left.is_empty(), "I2: runners are left: {left:?}");
        Ok(())
    }

    fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.bed.plane.client(), &self.namespace)
    }

    async fn until<K>(&self, name: &str, wanted: impl Fn(&K) -> bool) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let start = Instant::now();
        loop {
            let object = self.api::<K>().get(name).await?;
            if wanted(&object) {
                return Ok(());
            }
            ensure!(start.elapsed() < DEADLINE, "it is still {object:#?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn until_none<K>(&self, what: &str, counts: impl Fn(&K) -> bool) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let start = Instant::now();
        loop {
            let left = self.api::<K>().list(&ListParams::default()).await?.items;
            let left: Vec<_> = left.iter().filter(|object| counts(object)).collect();
            if left.is_empty() {
                return Ok(());
            }
            ensure!(start.elapsed() < DEADLINE, "there are still {what}: {left:#?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
