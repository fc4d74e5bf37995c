//! A life is one run of a scenario, from the creation of its objects to their deletion, in a namespace with its own
//! operator, which may be killed right after one of its writes. The sweep repeats a scenario once for each write.

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
use paddock_bed::{
    process::Process,
    stage::{Stage, binary},
    wait::Wait,
};
use paddock_effects::kube::leader::LEASE as LEASE_NAME;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::gate::{API, Fatal, Gate, Upstream, Write};

/// Far longer than any step takes, even on a busy machine: an orphan is swept after one to two minutes.
const WAIT: Wait = Wait::at_most(Duration::from_secs(600)).every(Duration::from_millis(200));

/// The chart's own: many operators on two cores lose a shorter lease again and again.
const LEASE: &str = "15s";
/// After this time no request of a killed operator is in flight. Then its lease is deleted, so that the next one need
/// not wait for its expiry.
const IN_FLIGHT_GRACE: Duration = Duration::from_secs(1);

/// So many lives are added, side by side, while one stage has more writes than there were lives.
const MORE: usize = 3;

/// What is repeated. It has stages, each of which ends when everything has settled, so that a crash in one does not
/// affect the next.
pub struct Scenario {
    pub name: &'static str,
    /// How many lives a small machine can run in parallel.
    pub parallel: usize,
    /// About how many writes its longest stage has: so many lives are played at least.
    pub writes: usize,
    pub play: for<'a> fn(&'a Life<'a>) -> LocalBoxFuture<'a, Result<()>>,
}

/// Plays a scenario again and again: once without a crash, and in the n-th life the operator is killed right after the
/// n-th write of each stage, until no stage has so many writes.
pub async fn sweep(stage: &Stage, scenario: &Scenario) -> Result<()> {
    let began = Instant::now();
    // The kinds of writes of every life, and those after which an operator was killed.
    let (mut certain, mut met) = (None::<BTreeSet<_>>, BTreeSet::new());
    let (mut kills, mut failures, mut all_the_way) = (0, Vec::new(), false);
    let mut lives = vec![(0, Fatal::Never)];
    lives.extend((1..=scenario.writes).map(|number| (number, Fatal::Nth(number))));
    while let Some(&(number, _)) = lives.last() {
        let outcomes =
            std::mem::take(&mut lives).into_iter().map(|(number, fatal)| live(stage, scenario, number, fatal));
        let mut outcomes = stream::iter(outcomes).buffer_unordered(scenario.parallel);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(life) => {
                    let last = life.gate.last_writes();
                    kills += last.len();
                    all_the_way |= last.is_empty() && life.crashes();
                    let all = kinds(life.gate.writes());
                    certain = Some(certain.map_or_else(|| all.clone(), |certain| &certain & &all));
                    met.append(&mut kinds(last));
                }
                Err(failure) => {
                    println!("{} failed: {failure:#}", scenario.name);
                    failures.push(format!("{failure:?}"));
                }
            }
        }
        if !failures.is_empty() {
            break;
        }
        // Parallel writes come in a different order each time: kinds that all lives have and none was killed after get
        // a life of their own.
        let missed = &certain.clone().unwrap_or_default() - &met;
        if !all_the_way {
            let more = number + 1..=number + MORE;
            lives.extend(more.map(|number| (number, Fatal::Nth(number))));
        } else if !missed.is_empty() {
            lives.push((number + 1, Fatal::First(missed)));
        }
    }
    println!("{}: {kills} kills after {} kinds of writes, {} s", scenario.name, met.len(), began.elapsed().as_secs());
    ensure!(failures.is_empty(), "{} lives failed:\n{}", failures.len(), failures.join("\n\n"));
    let violations = stage.violations().await;
    ensure!(violations.is_empty(), "{violations:#?}");
    Ok(())
}

async fn live<'a>(stage: &'a Stage, scenario: &Scenario, number: usize, fatal: Fatal) -> Result<Life<'a>> {
    let began = Instant::now();
    let life = Life::new(stage, scenario, number, fatal.clone()).await?;
    life.play(scenario).await.with_context(|| format!("killed {fatal:?}, after {}", list(&life.gate.last_writes())))?;
    let (last, seconds) = (list(&life.gate.last_writes()), began.elapsed().as_secs());
    println!("{} {number}: {seconds} s, killed after {last}", scenario.name);
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
    pub number: usize,
    gate: Arc<Gate>,
    kubeconfig: PathBuf,
    github_url: String,
    aws_url: String,
}

impl<'a> Life<'a> {
    async fn new(stage: &'a Stage, scenario: &Scenario, number: usize, fatal: Fatal) -> Result<Self> {
        let namespace = format!("{}-{number}", scenario.name);
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
        Ok(Self { stage, namespace, number, gate, kubeconfig, github_url: format!("{github}{API}"), aws_url })
    }

    async fn play(&'a self, scenario: &Scenario) -> Result<()> {
        let outcome = tokio::select! {
            outcome = (scenario.play)(self) => outcome,
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
                        tokio::time::sleep(IN_FLIGHT_GRACE).await;
                        self.until("the lease is deleted", async || delete(&self.api::<Lease>(), LEASE_NAME).await).await?;
                        break;
                    }
                    () = tokio::time::sleep(Duration::from_millis(200)) => {}
                }
                if let Some(status) = operator.exited() {
                    // On a busy machine the lease can be lost; then the operator is restarted, as a kubelet would.
                    let log = operator.log_tail(30);
                    ensure!(log.contains("the lease was lost"), "the operator exited by itself ({status}):\n{log}");
                    break;
                }
            }
        }
    }

    fn crashes(&self) -> bool {
        self.number > 0
    }

    /// Begins the next stage; the one before has settled.
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
        // A busy API server may refuse at first.
        self.until(&format!("{name} is applied"), async || {
            self.api::<K>().patch(&name, &params, &Patch::Apply(&object)).await?;
            Ok(())
        })
        .await
    }

    pub async fn delete<K>(&self, name: &str) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        self.until(&format!("{name} is deleted"), async || delete(&self.api::<K>(), name).await).await
    }

    /// Waits until a check succeeds; its errors say what is still missing.
    pub async fn until<T>(&self, what: &str, look: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        WAIT.until_ok(what, look).await
    }

    pub async fn until_none<K>(&self, what: &str, counts: impl Fn(&K) -> bool) -> Result<()>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        self.until(&format!("there are no {what}"), async || {
            let left = self.api::<K>().list(&ListParams::default()).await?.items;
            let left: Vec<_> = left.iter().filter(|object| counts(object)).collect();
            ensure!(left.is_empty(), "{left:#?}");
            Ok(())
        })
        .await
    }
}

/// Deletes by name. An object that is gone counts as deleted: an answer may have been lost.
async fn delete<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        outcome => Ok(outcome.map(drop)?),
    }
}
