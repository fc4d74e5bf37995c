//! `make demo`: shows a claim going from Pending to Ready, on a bed that keeps running for exploration.

use std::{
    io::{IsTerminal, stdout},
    net::Ipv4Addr,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::{
    github::JobRequest,
    isolate::{self, Isolated, forward},
    kube::succeeded,
    operator::{Additions, Supervisor},
    process::{Signal, free_port, tool},
    stage::{ORGANIZATION, REPOSITORY, Stage, TOOLS},
    terminal,
};

const NAMESPACE: &str = "demo";
const RUN_ID: &str = "7001";
/// A slow machine takes a minute.
const DEADLINE: Duration = Duration::from_secs(180);

/// Runs the demo. Without a terminal it ends by itself, otherwise at Ctrl-C.
pub fn run() -> Result<()> {
    let stay = stdout().is_terminal() && std::env::var_os("CI").is_none_or(|ci| ci.is_empty());
    let isolated = isolate::enter(isolate::Options { tools: TOOLS, listen: 2 })?;
    if terminal::run(play(isolated, stay))? == Some(Signal::SIGINT) {
        print("\nended: everything is gone");
    }
    Ok(())
}

async fn play(isolated: Isolated, stay: bool) -> Result<()> {
    print("Paddock demo: a cluster, AWS and GitHub of its own, on this machine alone.\n");
    let stage = Arc::new(step("Kubernetes, DynamoDB, SQS, EC2 and GitHub", Stage::start(&isolated, false)).await?);
    let operator = Supervisor::new(stage.clone(), (Ipv4Addr::LOCALHOST, free_port()?).into());
    step("the operator, with the rights the chart gives it", operator.start(Additions::default())).await?;
    step("a pool that keeps one EC2 machine warm", warm_pool(&stage)).await?;
    show(&stage, "rpools,workers").await?;

    print(&format!("\nA workflow claims a runner for its run {RUN_ID}:\n"));
    let claim = stage.claim(NAMESPACE, "build", "linux", RUN_ID, 1);
    let (seen, applied) = tokio::join!(until_ready(&stage), async {
        // The watch starts first, so that it shows the first phase too.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let start = Instant::now();
        stage.kube.apply(&claim.to_string()).await.map(|()| start)
    });
    let start = applied?;
    let ready = seen?.duration_since(start);
    print(&format!("\nReady {:.1} s after `kubectl apply`.\n", ready.as_secs_f64()));
    show(&stage, "rclaims,workers").await?;
    step(&format!("a job with `runs-on: {RUN_ID}`"), job(&stage)).await?;

    if !stay {
        let delete = ["delete", "rclaim", "build", "-n", NAMESPACE];
        step("the claim is deleted, the machine goes back to the pool", async {
            let name = ["get", "rclaim", "build", "-n", NAMESPACE, "-o", "jsonpath={.status.workers[0].name}"];
            let worker = succeeded("kubectl get", stage.kube.kubectl(&name).await?)?;
            succeeded("kubectl delete", stage.kube.kubectl(&delete).await?)?;
            stage.until(NAMESPACE, &format!("worker/{worker}"), "{.status.state}=idle").await
        })
        .await?;
        show(&stage, "rpools,workers").await?;
        print("\nThe demo has passed.");
        return operator.stop().await;
    }
    look_around(isolated, &stage, &operator).await
}

async fn warm_pool(stage: &Stage) -> Result<()> {
    stage.namespace(NAMESPACE).await?;
    let pool = stage.ec2_pool(NAMESPACE, "linux", json!({ "minIdle": 1, "maxInstances": 4 }));
    stage.kube.apply(&pool.to_string()).await?;
    stage.until(NAMESPACE, "rpool/linux", "{.status.workers.idle}=1").await
}

/// Shows `kubectl get --watch` until the claim is Ready.
async fn until_ready(stage: &Stage) -> Result<Instant> {
    print("$ kubectl get rclaims --watch");
    let mut watch = tokio::process::Command::new(tool("kubectl")?)
        .args(["get", "rclaims", "-n", NAMESPACE, "--watch"])
        .env("KUBECONFIG", stage.kube.kubeconfig())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(watch.stdout.take().context("standard output is a pipe")?).lines();
    let follow = async {
        while let Some(line) = lines.next_line().await? {
            print(&line);
            if line.split_whitespace().nth(2) == Some("Ready") {
                return Ok(Instant::now());
            }
            if line.contains(" Failed ") {
                let described = stage.kube.kubectl(&["describe", "rclaims", "-n", NAMESPACE]).await?;
                bail!("the claim failed:\n{}", String::from_utf8_lossy(&described.stdout));
            }
        }
        bail!("kubectl stopped watching")
    };
    tokio::time::timeout(DEADLINE, follow).await.context("the claim did not become Ready")?
}

async fn job(stage: &Stage) -> Result<()> {
    let job = stage.github.queue_job(JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec![RUN_ID.into()],
        duration_ms: Some(300),
        ..Default::default()
    })?;
    let start = Instant::now();
    while stage.github.job(job.id).is_none_or(|job| job.conclusion.is_none()) {
        if start.elapsed() > DEADLINE {
            bail!("the job was not done");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Prints how to access the bed, and restarts the operator as a kubelet would.
async fn look_around(isolated: Isolated, stage: &Stage, operator: &Supervisor) -> Result<()> {
    let mut doors = isolated.listeners.into_iter();
    let (api, pages) = (doors.next().context("two doors")?, doors.next().context("two doors")?);
    let (api_port, page_port) = (api.local_addr()?.port(), pages.local_addr()?.port());
    let kubeconfig = isolated.shared.join("kubeconfig");
    stage.kube.kubeconfig_for_host(&kubeconfig, api_port)?;
    tokio::spawn(forward(api, (stage.kube.address(), stage.kube.port()).into()));
    tokio::spawn(forward(pages, operator.address()));

    let kubectl = tool("kubectl")?;
    print("\nLook around, from another terminal:\n");
    print(&format!("  export KUBECONFIG={}", kubeconfig.display()));
    print(&format!("  alias kubectl={}", kubectl.display()));
    print(&format!("  kubectl get rclaims,workers -n {NAMESPACE}"));
    print(&format!("  kubectl describe rclaim build -n {NAMESPACE}"));
    print(&format!("  kubectl delete rclaim build -n {NAMESPACE}      # the machine goes back to the pool"));
    print("  pkill -9 -f 'paddock run'                      # nothing is lost: it is started again");
    print(&format!("\n  dashboard: http://127.0.0.1:{page_port}/usage"));
    print("\nCtrl-C ends the demo and leaves nothing behind.");
    operator.watch(print).await
}

async fn show(stage: &Stage, what: &str) -> Result<()> {
    print(&format!("\n$ kubectl get {what}"));
    let output = stage.kube.kubectl(&["get", what, "-n", NAMESPACE]).await?;
    print(succeeded("kubectl get", output)?.trim_end());
    Ok(())
}

async fn step<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    terminal::step(stdout(), what, work).await
}

fn print(text: &str) {
    println!("{text}");
}
