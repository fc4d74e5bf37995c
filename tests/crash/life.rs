//! A life: some objects from their application to their deletion, in a namespace with an operator of its own, which may
//! be killed right after one of its writes; and the sweep, which plays the same life once for each write.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::LocalBoxFuture, stream};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Resource,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use paddock::leader::LEASE as LEASE_NAME;
use paddock_bed::{
    process::Process,
    stage::{Stage, binary},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::gate::{API, Fatal, Gate, Upstream, Write};

/// Longer than anything takes on a busy machine: an orphan is swept after a minute, with as long for the sweep to come.
const DEADLINE: Duration = Duration::from_secs(600);

/// The chart's own: a shorter one is lost again and again where many operators share two cores.
const LEASE: &str = "15s";
/// After this time nothing that a killed operator sent is still on its way, and its lease is taken away: the next one need
/// not wait until it has run out.
const AFTERMATH: Duration = Duration::from_secs(1);

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
/// write of each stage, until there is a life that no stage of which has so many.
pub async fn sweep(stage: &Stage, tale: &Tale) -> Result<()> {
    let began = Instant::now();
    let life = live(stage, tale, 0, Fatal::Never).await.context("a life without a crash")?;
    println!("{}: {} writes and {} s without a crash", tale.name, life.gate.writes().len(), began.elapsed().as_secs());
    // What every life does, and after what an operator was killed.
    let (mut certain, mut met) = (kinds(life.gate.writes()), BTreeSet::new());
    let (mut kills, mut failures, mut all_the_way) = (0, Vec::new(), false);
    let longest = life.gate.longest_stage();
    let mut lives: Vec<_> = (1..=longest).map(|number| (number, Fatal::Nth(number))).collect();
    while let Some(&(number, _)) = lives.last() {
        let outcomes = std::mem::take(&mut lives).into_iter().map(|(number, fatal)| live(stage, tale, number, fatal));
        let mut outcomes = stream::iter(outcomes).buffer_unordered(tale.at_once);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(life) => {
                    let last = life.gate.last_writes();
                    kills += last.len();
                    all_the_way |= last.is_empty();
                    certain = &certain & &kinds(life.gate.writes());
                    met.append(&mut kinds(last));
                }
                Err(failure) => {
                    println!("{} went wrong: {failure:#}", tale.name);
                    failures.push(format!("{failure:?}"));
                }
            }
        }
        if !failures.is_empty() {
            break;
        }
        // Writes that come side by side can dodge the count: what all lives do and none was killed after has one of its own.
        let missed: BTreeSet<_> = &certain - &met;
        if !all_the_way {
            lives.push((number + 1, Fatal::Nth(number + 1)));
        } else if !missed.is_empty() {
            lives.push((number + 1, Fatal::First(missed)));
        }
    }
    println!("{}: {kills} kills after {} kinds of writes, {} s", tale.name, met.len(), began.elapsed().as_secs());
    ensure!(failures.is_empty(), "{} lives went wrong:\n{}", failures.len(), failures.join("\n\n"));
    let violations = stage.github.violations().await;
    ensure!(violations.is_empty(), "not as GitHub has it: {violations:#?}");
    Ok(())
}

async fn live<'a>(stage: &'a Stage, tale: &Tale, number: usize, fatal: Fatal) -> Result<Life<'a>> {
    let began = Instant::now();
    let life = Life::new(stage, tale, number, fatal.clone()).await?;
    life.play(tale).await.with_context(|| format!("killed {fatal:?}, after {}", list(&life.gate.last_writes())))?;
    let (last, seconds) = (list(&life.gate.last_writes()), began.elapsed().as_secs());
    println!("{} {number}: {seconds} s, killed after {last}", tale.name);
    Ok(life)
}

fn kinds(writes: Vec<Write>) -> BTreeSet<Write> {
    writes.into_iter().collect()
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
    async fn new(stage: &'a Stage, tale: &Tale, number: usize, fatal: Fatal) -> Result<Self> {
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
                .args(["--listen", "127.0.0.1:0", "--github-api-url", &self.github_url, "--lease-duration", LEASE])
                .env("KUBECONFIG", &self.kubeconfig)
                .env("HOSTNAME", &self.namespace)
                .envs(self.stage.aws.env())
                .env("AWS_ENDPOINT_URL", &self.aws_url);
            let mut operator = Process::spawn(&self.namespace, command, &self.stage.dir().join("operators"))?;
            loop {
                tokio::select! {
                    () = self.gate.killed.notified() => {
                        operator.kill()?;
                        tokio::time::sleep(AFTERMATH).await;
                        self.until(async || delete(&self.api::<Lease>(), LEASE_NAME).await).await?;
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
        // A busy API server is asked again.
        self.until(async || {
            self.api::<K>().patch(&name, &params, &Patch::Apply(&object)).await?;
            Ok(())
        })
        .await
    }

    pub async fn delete<K>(&self, name: &str) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        self.until(async || delete(&self.api::<K>(), name).await).await
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

/// Deletes by name; what is gone is deleted, perhaps by a request whose answer was lost.
async fn delete<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        outcome => Ok(outcome.map(drop)?),
    }
}
