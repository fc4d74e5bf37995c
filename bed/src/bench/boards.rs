//! Boards: the time from a job's webhook to its pod on one of 300 simulated nodes, for single jobs and bursts; the
//! calls to GitHub; and the operator's own resource use.

mod webhooks;

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::{
    Spread,
    board_report::{Delayed, Report},
    since, writes,
};
use crate::{
    boards::Boards,
    github::{self, Conclusion, Effect, Fault, GitHub, HookSource, JobRequest, Status},
    isolate::Isolated,
    kube::ControlPlane,
    kwok::SimulatedNodes,
    operator::{self, Operator},
    process::free_port,
};

const NAMESPACE: &str = "bench";
const BOARD: &str = "bench-board";
const LABEL: &str = "riscv";
const NODES: usize = 300;
const ORGANIZATIONS: usize = 20;
const SINGLES: usize = 20;
/// The webhook secret.
const SECRET: &str = "bench";
/// Number of finished jobs, to measure the memory of their objects.
const FINISHED_JOBS: usize = 10_000;
/// Far longer than any step takes, even on a slow machine.
const DEADLINE: Duration = Duration::from_secs(300);
/// How often conditions are checked; measured times come from the watch.
const POLL_PAUSE: Duration = Duration::from_millis(5);
/// Without a write for so long, nothing is left to do: the longest planned delay of a status is 3 s.
const SETTLED_PERIOD: Duration = Duration::from_secs(4);
const MINUTE: Duration = Duration::from_secs(60);
const IDLE_PERIOD: Duration = Duration::from_secs(30);

pub async fn run(isolated: &Isolated) -> Result<()> {
    let began = Instant::now();
    let progress = |what: &str| eprintln!("{:4.0} s  {what}", began.elapsed().as_secs_f64());
    progress("starting the bed with 300 boards …");
    let mut bench = Bench::start(isolated).await?;
    let mut report = Report::default();
    let outcome = bench.measure(&mut report, progress).await;
    // Printed even after a failure, with the results so far.
    println!("{report}");
    outcome
}

/// Field order is drop order: watchers are dropped before what they watch.
struct Bench {
    boards: Boards,
    kube: ControlPlane,
    github: GitHub,
    _nodes: SimulatedNodes,
    app: u64,
    operator: Option<Operator>,
    /// The operator's command and its listen address.
    start: Box<dyn Fn() -> Result<(Command, SocketAddr)>>,
}

/// Several jobs at once.
struct Burst {
    jobs: Vec<u64>,
    /// From the first webhook to the last pod.
    last: Duration,
}

impl Bench {
    async fn start(isolated: &Isolated) -> Result<Self> {
        let dir = isolated.dir.join("boards");
        fs::create_dir_all(&dir)?;
        let kube = ControlPlane::start(&dir, isolated.address).await?;
        let kubeconfig = kube.install_chart_rbac(&[]).await?;
        let options = github::Options { listen: (isolated.address, 0).into(), ..github::Options::default() };
        let github = GitHub::start(options).await?;
        let app = github.app("paddock");
        for number in 0..ORGANIZATIONS {
            github.organization(&organization(number));
            github.repository(&organization(number), "rocket", true)?;
            github.install(app.id, &organization(number))?;
        }
        kube.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } }).to_string())
            .await?;
        kube.apply(
            &json!({
                "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "github", "namespace": NAMESPACE },
                "stringData": { "github_app_id": app.id.to_string(), "github_app_private_key": app.private_key },
            })
            .to_string(),
        )
        .await?;
        let nodes = SimulatedNodes::start(&kube).await?;
        Boards::add(&nodes, BOARD, NODES, "riseproject.com/runner").await?;
        let boards = Boards::play(kube.client(), github.control(), BOARD);
        let secrets = dir.join("webhook-secrets");
        fs::write(&secrets, SECRET)?;
        let url = github.api_url();
        let start = move || {
            let address = (Ipv4Addr::LOCALHOST, free_port()?).into();
            let mut command = operator::command()?;
            command
                .args(["--cluster-name", "bench", "--github-api-url", &url, "--listen", &format!("{address}")])
                // All processes share the machine: a busy API server must not cost the operator its lease.
                .args(["--lease-duration", "60s"])
                .arg("--webhook-secret-file")
                .arg(&secrets)
                .env("KUBECONFIG", &kubeconfig)
                // There is no AWS here.
                .env("AWS_REGION", "us-east-1")
                .env("AWS_EC2_METADATA_DISABLED", "true");
            Ok((command, address))
        };
        let mut bench =
            Self { kube, github, boards, _nodes: nodes, app: app.id, operator: None, start: Box::new(start) };
        bench.start_operator().await?;
        let pool = json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool",
            "metadata": { "name": "riscv", "namespace": NAMESPACE },
            "spec": { "board": {
                "board": BOARD, "labels": [[LABEL]], "image": "runner",
                "github": { "credentialsRef": { "name": "github" }, "runnerGroup": "Boards" },
            } },
        });
        bench.kube.apply(&pool.to_string()).await?;
        let free = format!("--for=jsonpath={{.status.slots.free}}={NODES}");
        let wait = ["wait", "rpool", "riscv", "-n", NAMESPACE, &free, "--timeout=120s"];
        let waited = bench.kube.kubectl(&wait).await?;
        ensure!(waited.status.success(), "the slots are not free: {}", String::from_utf8_lossy(&waited.stderr));
        // Tokens and runner groups exist before the measurement, as in a running system.
        let warm = bench.burst(2 * ORGANIZATIONS).await?;
        bench.finish(&warm.jobs).await?;
        Ok(bench)
    }

    async fn measure(&mut self, report: &mut Report, progress: impl Fn(&str)) -> Result<()> {
        for delay in [0, 100] {
            self.github.clear_faults();
            if delay > 0 {
                let slow = Effect::DelayMs(delay);
                self.github.fault(Fault { method: None, path: "*".into(), skip: 0, times: None, effect: slow });
            }
            let mut found = Delayed { delay, ..Delayed::default() };
            self.until_settled().await?;
            progress(&format!("GitHub answers after {delay} ms: one job at a time …"));
            found.single = self.singles().await?;
            progress("100 jobs, and one more at a time …");
            let active = self.burst(100).await?;
            self.until_taken(&active.jobs).await?;
            self.until_settled().await?;
            found.single_among_100 = self.singles().await?;
            if delay == 0 {
                progress("a minute of 100 healthy jobs …");
                self.github.reset_calls();
                let before = writes(&self.kube).await?;
                tokio::time::sleep(MINUTE).await;
                report.calls_a_minute = self.calls();
                report.writes_a_minute = since(&before, writes(&self.kube).await?);
            }
            self.finish(&active.jobs).await?;
            self.until_settled().await?;
            progress("a burst of 100 …");
            let hundred = self.burst(100).await?;
            found.burst_100 = hundred.last;
            self.finish(&hundred.jobs).await?;
            self.until_settled().await?;
            progress("a burst of 300 …");
            self.github.reset_calls();
            let before = writes(&self.kube).await?;
            let all = self.burst(NODES).await?;
            found.burst_300 = all.last;
            self.until_taken(&all.jobs).await?;
            if delay == 0 {
                report.memory_300 = self.operator()?.memory()?;
            }
            self.finish(&all.jobs).await?;
            self.until_settled().await?;
            found.calls = self.calls();
            found.writes = since(&before, writes(&self.kube).await?);
            report.delayed.push(found);
        }
        self.github.clear_faults();
        progress("10,000 finished claims and workers …");
        self.grow_old(report).await?;
        report.memory_10_000 = self.operator()?.memory()?;
        progress("at rest …");
        let before = writes(&self.kube).await?;
        tokio::time::sleep(IDLE_PERIOD).await;
        report.rest = since(&before, writes(&self.kube).await?);
        progress("webhooks as fast as they are answered …");
        self.webhooks(report).await?;
        progress("done");
        Ok(())
    }

    async fn start_operator(&mut self) -> Result<()> {
        let (command, address) = (self.start)()?;
        let operator = Operator::start("operator", command, &self.kube.dir().join("log"), address).await?;
        self.github.hook(HookSource::App(self.app), &format!("{}/webhook", operator.url()), SECRET);
        self.operator = Some(operator);
        Ok(())
    }

    fn operator(&self) -> Result<&Operator> {
        self.operator.as_ref().context("the operator runs")
    }

    fn queue(&self, organization_number: usize, duration: Option<Duration>) -> Result<u64> {
        let request = JobRequest {
            owner: organization(organization_number % ORGANIZATIONS),
            repo: "rocket".into(),
            labels: vec![LABEL.into()],
            duration_ms: duration.map(|duration| duration.as_millis() as u64),
            ..JobRequest::default()
        };
        Ok(self.github.queue_job(request)?.id)
    }

    /// When the pods of these jobs' claims were first seen. GitHub chooses the runner of a job: a claim whose job was
    /// taken by another claim's runner before its own pod was created has none, and the other has two.
    fn pods(&self, jobs: &[u64]) -> Vec<Instant> {
        let claims: HashSet<String> = jobs.iter().map(|job| format!("job-{job}")).collect();
        self.boards.pods(|pods| pods.values().filter(|seen| claims.contains(seen.claim())).map(|s| s.first).collect())
    }

    /// Jobs of one organisation, one after the other.
    async fn singles(&self) -> Result<Spread> {
        let mut times = Vec::new();
        for _ in 0..SINGLES {
            let start = Instant::now();
            let job = [self.queue(0, Some(Duration::from_millis(1)))?];
            self.until("the job has a pod", || !self.pods(&job).is_empty()).await?;
            times.extend(self.pods(&job).into_iter().min().map(|seen| seen.duration_since(start)));
            self.until_done(&job).await?;
        }
        Ok(Spread::of(times))
    }

    async fn burst(&self, count: usize) -> Result<Burst> {
        let start = Instant::now();
        let jobs: Vec<u64> = (0..count).map(|number| self.queue(number, None)).collect::<Result<_>>()?;
        // A job taken by an idle runner needs no pod.
        self.until("every job has a pod", || self.pods(&jobs).len() >= count || self.are_taken(&jobs)).await?;
        let last = self.pods(&jobs).into_iter().map(|seen| seen.duration_since(start)).max().unwrap_or_default();
        Ok(Burst { jobs, last })
    }

    async fn until_taken(&self, jobs: &[u64]) -> Result<()> {
        self.until("every job is taken", || self.are_taken(jobs)).await
    }

    fn are_taken(&self, jobs: &[u64]) -> bool {
        jobs.iter().all(|job| self.github.job(*job).is_some_and(|job| job.status == Status::InProgress))
    }

    /// Finishes the jobs and waits until their boards are free.
    async fn finish(&self, jobs: &[u64]) -> Result<()> {
        self.until_taken(jobs).await?;
        for job in jobs {
            self.github.finish_job(*job, Conclusion::Success);
        }
        self.until_done(jobs).await
    }

    /// Waits until the jobs' claims are completed and their pods have ended.
    async fn until_done(&self, jobs: &[u64]) -> Result<()> {
        let claims: HashSet<String> = jobs.iter().map(|job| format!("job-{job}")).collect();
        self.until("the pods have ended", || {
            self.boards.pods(|pods| !pods.values().any(|seen| seen.is_active() && claims.contains(seen.claim())))
        })
        .await
    }

    /// Waits until nothing is written any more: what follows is measured alone, not beside the end of what came before.
    async fn until_settled(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            let before = writes(&self.kube).await?;
            tokio::time::sleep(SETTLED_PERIOD).await;
            if since(&before, writes(&self.kube).await?).is_empty() {
                return Ok(());
            }
            ensure!(start.elapsed() < DEADLINE, "the API server is written to without end");
        }
    }

    /// Calls to GitHub since the last reset, by route; webhooks are not included.
    fn calls(&self) -> BTreeMap<String, u64> {
        let mut calls = BTreeMap::new();
        for call in self.github.calls() {
            *calls.entry(format!("{} {}", call.method, call.route)).or_default() += call.count;
        }
        calls
    }

    /// Creates finished claims and as many workers, and restarts the operator so that it reads them.
    async fn grow_old(&mut self, report: &mut Report) -> Result<()> {
        let operator = self.operator.take().context("the operator runs")?;
        operator.stop().await?;
        let kind = |kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk("paddock.dev", "v1alpha1", kind));
        let (start, mut made) = (Instant::now(), 0);
        for name in ["RunnerClaim", "Worker"] {
            let api: Api<DynamicObject> = Api::namespaced_with(self.kube.client(), NAMESPACE, &kind(name));
            let all = api.list(&ListParams::default()).await?.items;
            let served = |object: &&DynamicObject| {
                let status = &object.data["status"];
                status["phase"] == "Completed" && status["workers"][0].is_object() || status["state"] == "completed"
            };
            let finished = all.iter().find(served).with_context(|| format!("a {name} that has served"))?;
            let copies = stream::iter(all.len()..FINISHED_JOBS).map(|number| copy(&api, finished, number));
            copies.buffer_unordered(64).try_for_each(async |()| Ok(())).await?;
            made += FINISHED_JOBS - all.len();
        }
        // Each object needs two writes.
        report.writes_a_second = 2.0 * made as f64 / start.elapsed().as_secs_f64();
        self.start_operator().await?;
        let mut before = writes(&self.kube).await?;
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            let now = writes(&self.kube).await?;
            if since(&before, now.clone()).is_empty() {
                return Ok(());
            }
            before = now;
        }
    }

    async fn until(&self, what: &str, mut true_: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        while !true_() {
            if start.elapsed() > DEADLINE {
                let log = self.operator.as_ref().map(Operator::log).unwrap_or_default();
                let tail: Vec<_> = log.lines().rev().take(30).collect();
                bail!("not within {DEADLINE:?}: {what}; the operator logged last:\n{}", tail.join("\n"));
            }
            tokio::time::sleep(POLL_PAUSE).await;
        }
        Ok(())
    }
}

/// Creates a copy of this object, including its status.
async fn copy(api: &Api<DynamicObject>, like: &DynamicObject, number: usize) -> Result<()> {
    let mut object = like.clone();
    let name = format!("old-{number}");
    object.metadata = ObjectMeta {
        name: Some(name.clone()),
        labels: like.metadata.labels.clone(),
        annotations: like.metadata.annotations.clone(),
        ..ObjectMeta::default()
    };
    api.create(&PostParams::default(), &object).await?;
    let status = json!({ "status": like.data["status"] });
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

fn organization(number: usize) -> String {
    format!("org-{number}")
}
