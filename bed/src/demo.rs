//! `make demo`: a claim goes from Pending to Ready before your eyes, on a bed that then stays for you to look around.

use std::{
    io::{IsTerminal, Write, stdout},
    net::SocketAddr,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    signal::unix::{SignalKind, signal},
};

use crate::{
    github::JobRequest,
    isolate::{self, Isolated, forward},
    kube::succeeded,
    process::tool,
    stage::{ORGANIZATION, Operator, REPOSITORY, Stage, TOOLS},
};

const NAMESPACE: &str = "demo";
const RUN_ID: &str = "7001";
/// A slow machine takes a minute; one that takes this long is stuck.
const DEADLINE: Duration = Duration::from_secs(180);

/// Runs the demo to its end: at once where nobody watches, otherwise at Ctrl-C.
pub fn run() -> Result<()> {
    let stay = stdout().is_terminal() && std::env::var_os("CI").is_none_or(|ci| ci.is_empty());
    let isolated = isolate::enter(isolate::Options { tools: TOOLS, listen: 2 })?;
    tokio::runtime::Runtime::new()?.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            outcome = play(isolated, stay) => outcome,
            _ = interrupt.recv() => { say("\nended: everything is gone"); Ok(()) }
            _ = terminate.recv() => Ok(()),
        }
    })
}

async fn play(isolated: Isolated, stay: bool) -> Result<()> {
    say("Paddock demo: a cluster, AWS and GitHub of its own, on this machine alone.\n");
    let stage = step("Kubernetes, DynamoDB, SQS, EC2 and GitHub", Stage::start(&isolated, false)).await?;
    let operator = step("the operator, with the rights the chart gives it", stage.operator("operator", &[])).await?;
    step("a pool that keeps one EC2 machine warm", warm_pool(&stage)).await?;
    show(&stage, "rpools,workers").await?;

    say(&format!("\nA workflow claims a runner for its run {RUN_ID}:\n"));
    let claim = stage.claim(NAMESPACE, "build", "linux", RUN_ID, 1);
    let (seen, applied) = tokio::join!(until_ready(&stage), async {
        // The watch first, so that it shows the first phase too.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let start = Instant::now();
        stage.kube.apply(&claim.to_string()).await.map(|()| start)
    });
    let start = applied?;
    let ready = seen?.duration_since(start);
    say(&format!("\nReady {:.1} s after `kubectl apply`.\n", ready.as_secs_f64()));
    show(&stage, "rclaims,workers").await?;
    step(&format!("a job with `runs-on: {RUN_ID}`"), job(&stage)).await?;

    if !stay {
        let delete = ["delete", "rclaim", "build", "-n", NAMESPACE];
        step("the claim is deleted, the machine goes back to the pool", async {
            let name = ["get", "rclaim", "build", "-n", NAMESPACE, "-o", "jsonpath={.status.workers[0].name}"];
            let worker = succeeded("kubectl get", stage.kube.kubectl(&name).await?)?;
            succeeded("kubectl delete", stage.kube.kubectl(&delete).await?)?;
            until(&stage, &format!("worker/{worker}"), "{.status.state}=idle").await
        })
        .await?;
        show(&stage, "rpools,workers").await?;
        say("\nThe demo has passed.");
        return operator.stop().await;
    }
    look_around(isolated, stage, operator).await
}

async fn warm_pool(stage: &Stage) -> Result<()> {
    stage.namespace(NAMESPACE).await?;
    let pool = stage.ec2_pool(NAMESPACE, "linux", json!({ "minIdle": 1, "maxInstances": 4 }));
    stage.kube.apply(&pool.to_string()).await?;
    until(stage, "rpool/linux", "{.status.workers.idle}=1").await
}

async fn until(stage: &Stage, object: &str, condition: &str) -> Result<()> {
    let condition = format!("--for=jsonpath={condition}");
    let wait = ["wait", object, "-n", NAMESPACE, &condition, "--timeout=120s"];
    succeeded("kubectl wait", stage.kube.kubectl(&wait).await?).map(drop)
}

/// Shows `kubectl get --watch` until the claim is Ready.
async fn until_ready(stage: &Stage) -> Result<Instant> {
    say("$ kubectl get rclaims --watch");
    let mut watch = tokio::process::Command::new(tool("kubectl")?)
        .args(["get", "rclaims", "-n", NAMESPACE, "--watch"])
        .env("KUBECONFIG", stage.kube.kubeconfig())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(watch.stdout.take().context("standard output is a pipe")?).lines();
    let follow = async {
        while let Some(line) = lines.next_line().await? {
            say(&line);
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

/// Lets the user in, and keeps the operator alive as a kubelet would.
async fn look_around(isolated: Isolated, stage: Stage, mut operator: Operator) -> Result<()> {
    let mut doors = isolated.listeners.into_iter();
    let (api, pages) = (doors.next().context("two doors")?, doors.next().context("two doors")?);
    let (api_port, page_port) = (api.local_addr()?.port(), pages.local_addr()?.port());
    let kubeconfig = isolated.shared.join("kubeconfig");
    stage.kube.kubeconfig_for_host(&kubeconfig, api_port)?;
    let dashboard: SocketAddr = operator.address();
    tokio::spawn(forward(api, (stage.kube.address(), stage.kube.port()).into()));
    tokio::spawn(forward(pages, dashboard));

    let kubectl = tool("kubectl")?;
    say("\nLook around, from another terminal:\n");
    say(&format!("  export KUBECONFIG={}", kubeconfig.display()));
    say(&format!("  alias kubectl={}", kubectl.display()));
    say(&format!("  kubectl get rclaims,workers -n {NAMESPACE}"));
    say(&format!("  kubectl describe rclaim build -n {NAMESPACE}"));
    say(&format!("  kubectl delete rclaim build -n {NAMESPACE}      # the machine goes back to the pool"));
    say("  pkill -9 -f 'paddock run'                      # nothing is lost: it is started again");
    say(&format!("\n  dashboard: http://127.0.0.1:{page_port}/usage"));
    say("\nCtrl-C ends the demo and leaves nothing behind.");
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        if operator.exited() {
            say("the operator was killed; starting it again");
            operator = stage.operator_at("operator", dashboard, &[]).await?;
        }
    }
}

async fn show(stage: &Stage, what: &str) -> Result<()> {
    say(&format!("\n$ kubectl get {what}"));
    let output = stage.kube.kubectl(&["get", what, "-n", NAMESPACE]).await?;
    say(succeeded("kubectl get", output)?.trim_end());
    Ok(())
}

/// Names what is being done, and tells how long it took.
async fn step<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let start = Instant::now();
    let live = stdout().is_terminal();
    let mut work = std::pin::pin!(work);
    let outcome = loop {
        if live {
            print!("\r\x1b[K  … {what} ({} s)", start.elapsed().as_secs());
            let _ = stdout().flush();
        }
        tokio::select! {
            outcome = &mut work => break outcome,
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    };
    if live {
        print!("\r\x1b[K");
    }
    match &outcome {
        Ok(_) => say(&format!("  ✓ {what} ({:.1} s)", start.elapsed().as_secs_f64())),
        Err(_) => say(&format!("  ✗ {what}")),
    }
    outcome
}

fn say(text: &str) {
    println!("{text}");
}
