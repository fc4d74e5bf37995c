//! A life: some objects from their application to their deletion, in a namespace with an operator of its own, which may
//! be killed right after one of its writes; and the sweep, which plays the same life once for each write.

use std::{
    fs,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::LocalBoxFuture, stream};
use kube::{
    Api, Resource,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use paddock_bed::{
    process::Process,
    stage::{Stage, binary},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::gate::{API, Gate, Upstream, Write};

/// Longer than anything takes on a slow machine: an orphan is swept after a minute, with as long for the sweep to come.
const DEADLINE: Duration = Duration::from_secs(240);

const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A life that is lived again and again. It has stages, each of which ends when everything has settled, so that a crash in
/// one leaves the next as it is.
pub struct Tale {
    pub name: &'static str,
    /// As many lives at a time as a small machine bears.
    pub at_once: usize,
    pub lead: for<'a> fn(&'a Life<'a>) -> LocalBoxFuture<'a, Result<()>>,
}

/// Plays a tale without a crash, then again and again, with the operator killed in the n-th life right after the n-th
/// write of each stage: once after every write of the first life.
pub async fn sweep(stage: &Stage, tale: &Tale) -> Result<()> {
    let began = Instant::now();
    let life = Life::new(stage, tale, 0, vec![]).await?;
    life.play(tale).await.context("a life without a crash")?;
    let points = life.gate.writes();
    let lives = plan(&points);
    println!("{}: {} s without a crash", tale.name, began.elapsed().as_secs());
    println!("{}: {} writes, in {} lives each is the operator's last", tale.name, points.len(), lives.len());
    let outcomes = stream::iter(lives.iter().enumerate()).map(|(index, fatal)| async move {
        let began = Instant::now();
        let life = Life::new(stage, tale, index + 1, fatal.clone()).await?;
        life.play(tale).await.with_context(|| format!("killed after {}", list(fatal)))?;
        let writes = life.gate.writes();
        let (killed, missed): (Vec<_>, Vec<_>) = fatal.iter().cloned().partition(|point| writes.contains(point));
        let seconds = began.elapsed().as_secs();
        println!("{} {}: killed after {}, {seconds} s", tale.name, index + 1, list(&killed));
        if !missed.is_empty() {
            println!("{} {}: never came to {}", tale.name, index + 1, list(&missed));
        }
        anyhow::Ok(killed.len())
    });
    let (mut kills, mut failures) = (0, Vec::new());
    let mut outcomes = outcomes.buffer_unordered(tale.at_once);
    while let Some(outcome) = outcomes.next().await {
        match outcome {
            Ok(killed) => kills += killed,
            Err(failure) => {
                println!("{} went wrong: {failure:#}", tale.name);
                failures.push(format!("{failure:?}"));
            }
        }
    }
    println!("{}: {kills} kills at {} points, {} s in all", tale.name, points.len(), began.elapsed().as_secs());
    ensure!(failures.is_empty(), "{} of {} lives went wrong:\n{}", failures.len(), lives.len(), failures.join("\n\n"));
    // How often a status is written, and which records are moved in one write, is a matter of time: a life may have
    // fewer points than the first. Nearly all of them were met.
    ensure!(kills * 10 >= points.len() * 9, "only {kills} of {} points were met", points.len());
    let violations = stage.github.violations().await;
    ensure!(violations.is_empty(), "not as GitHub has it: {violations:#?}");
    Ok(())
}

/// The writes of each life after which the operator dies: one of each stage.
fn plan(points: &[Write]) -> Vec<Vec<Write>> {
    let mut lives: Vec<Vec<Write>> = Vec::new();
    for point in points {
        match lives.iter_mut().find(|life| life.iter().all(|other| other.stage != point.stage)) {
            Some(life) => life.push(point.clone()),
            None => lives.push(vec![point.clone()]),
        }
    }
    lives
}

fn list(writes: &[Write]) -> String {
    writes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

pub struct Life<'a> {
    pub stage: &'a Stage,
    /// Also the name of the cluster, so that records, queues and machines are this life's own.
    pub namespace: String,
    gate: Arc<Gate>,
    kubeconfig: PathBuf,
    github_url: String,
    aws_url: String,
}

impl<'a> Life<'a> {
    async fn new(stage: &'a Stage, tale: &Tale, number: usize, fatal: Vec<Write>) -> Result<Self> {
        let namespace = format!("{}-{number}", tale.name);
        stage.namespace(&namespace).await?;
        let gate = Gate::new(fatal);
        let kubernetes = gate.serve(Upstream::Kubernetes(stage.kube.client())).await?;
        let http = reqwest::Client::new();
        let github = gate.serve(Upstream::GitHub(http.clone(), stage.github.html_url())).await?;
        let aws_url = gate.serve(Upstream::Aws(http, stage.aws.endpoint().to_owned())).await?;
        let kubeconfig = stage.dir().join(format!("{namespace}.kubeconfig"));
        let cluster = json!({"name": "gate", "cluster": {"server": kubernetes}});
        let context = json!({"name": "gate", "context": {"cluster": "gate", "user": "gate", "namespace": namespace}});
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "gate",
            "clusters": [cluster], "contexts": [context], "users": [{"name": "gate", "user": {}}],
        });
        fs::write(&kubeconfig, config.to_string())?;
        Ok(Self { stage, namespace, gate, kubeconfig, github_url: format!("{github}{API}"), aws_url })
    }

    async fn play(&'a self, tale: &Tale) -> Result<()> {
        let outcome = tokio::select! {
            outcome = (tale.lead)(self) => outcome,
            outcome = self.keep_an_operator() => outcome.map(|never| match never {}),
        };
        outcome.with_context(|| format!("in {}, after the writes {}", self.namespace, list(&self.gate.writes())))
    }

    /// Starts the operator, and starts it again when the gate has killed it.
    async fn keep_an_operator(&self) -> Result<std::convert::Infallible> {
        loop {
            let mut command = Command::new(binary("paddock")?);
            command
                .args(["run", "--cluster-name", &self.namespace, "--namespace", &self.namespace])
                .args(["--listen", "127.0.0.1:0", "--github-api-url", &self.github_url, "--lease-duration", "3s"])
                .env("KUBECONFIG", &self.kubeconfig)
                .env("HOSTNAME", &self.namespace)
                .envs(self.stage.aws.env())
                .env("AWS_ENDPOINT_URL", &self.aws_url);
            let mut operator = Process::spawn(&self.namespace, command, &self.stage.dir().join("operators"))?;
            loop {
                tokio::select! {
                    () = self.gate.killed.notified() => {
                        operator.kill()?;
                        break;
                    }
                    () = tokio::time::sleep(Duration::from_millis(200)) => {}
                }
                if let Some(status) = operator.exited() {
                    // On a busy machine a short lease can be lost; then it starts again, as its kubelet would have it.
                    let log = operator.log_tail(30);
                    ensure!(log.contains("the lease was lost"), "the operator ended by itself ({status}):\n{log}");
                    break;
                }
            }
        }
    }

    /// What was is settled; what comes now is another stage.
    pub fn begin(&self, stage: &'static str) {
        self.gate.begin(stage);
    }

    pub fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.stage.kube.client(), &self.namespace)
    }

    pub async fn apply<K>(&self, object: Value) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Serialize,
        K: std::fmt::Debug,
    {
        let name = object["metadata"]["name"].as_str().context("an object has a name")?.to_owned();
        let params = PatchParams::apply("test").force();
        self.api::<K>().patch(&name, &params, &Patch::Apply(&object)).await?;
        Ok(())
    }

    pub async fn delete<K>(&self, name: &str) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        self.api::<K>().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Looks again and again until nothing is missed; the last complaint is the error.
    pub async fn until<T>(&self, mut look: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            match look().await {
                Ok(found) => return Ok(found),
                Err(missed) if start.elapsed() > DEADLINE => return Err(missed),
                Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    pub async fn until_none<K>(&self, what: &str, counts: impl Fn(&K) -> bool) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        self.until(async || {
            let left = self.api::<K>().list(&ListParams::default()).await?.items;
            let left: Vec<_> = left.iter().filter(|object| counts(object)).collect();
            ensure!(left.is_empty(), "there are still {what}: {left:#?}");
            Ok(())
        })
        .await
    }
}
