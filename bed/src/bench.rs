//! `make bench`: how long a warm claim takes, and how much of that is the operator's.
//!
//! The baseline is measured in the same run on the same parts: the same machine is claimed by hand, with nothing but
//! the one conditional write and a look at the agent's signal every 10 ms. What a claim takes beyond that is Paddock's.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aws_sdk_dynamodb::{Client, config::Credentials, types::AttributeValue};
use futures::{StreamExt, TryStreamExt};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use paddock_record::{
    Heartbeat, Instance, Signal, State, WorkerSignal, attribute as a, entity, key, stamp, table_name,
};
use serde_json::{Value, json};

use crate::{
    isolate::{self, Options},
    stage::{CLUSTER, ORGANIZATION, Stage, TOOLS},
};

const NAMESPACE: &str = "bench";
const ROUNDS: usize = 15;
const DEADLINE: Duration = Duration::from_secs(60);
/// How often the baseline looks for the agent's signal.
const LOOK: Duration = Duration::from_millis(10);

pub fn run() -> Result<()> {
    let isolated = isolate::enter(Options { tools: TOOLS, listen: 0 })?;
    tokio::runtime::Runtime::new()?.block_on(async {
        eprintln!("starting the bed …");
        let stage = Stage::start(&isolated, false).await?;
        let operator = stage.operator("operator", &[]).await?;
        stage.namespace(NAMESPACE).await?;
        let pool = stage.ec2_pool(
            NAMESPACE,
            "linux",
            json!({ "minIdle": 1, "maxInstances": 1, "lifetimes": { "idle": "1h", "maxRuntime": "1h", "claimed": "1h" } }),
        );
        stage.kube.apply(&pool.to_string()).await?;
        let wait = ["wait", "rpool", "linux", "-n", NAMESPACE, "--for=jsonpath={.status.workers.idle}=1", "--timeout=120s"];
        ensure!(stage.kube.kubectl(&wait).await?.status.success(), "the pool did not become warm");

        eprintln!("{ROUNDS} warm claims …");
        let mut claims = Vec::new();
        for round in 0..ROUNDS {
            claims.push(claim(&stage, round).await?);
        }
        ensure!(operator.stop().await?.success(), "the operator did not end in order");
        eprintln!("{ROUNDS} claims by hand …");
        let hand = Hand::new(&stage).await?;
        let mut bare = Vec::new();
        for round in 0..ROUNDS {
            bare.push(hand.claim(&stage, round).await?);
        }
        let (claims, bare) = (Spread::of(claims), Spread::of(bare));
        println!("warm claim of 1, from create to Ready:   {claims}");
        println!("the same by hand (write, agent, signal): {bare}");
        println!("ratio of the medians:                    {:.2}", claims.median / bare.median);
        Ok(())
    })
}

fn api(stage: &Stage) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("paddock.dev", "v1alpha1", "RunnerClaim"));
    Api::namespaced_with(stage.kube.client(), NAMESPACE, &kind)
}

/// Creates a claim, watches until it is Ready, releases it, and gives the first part's time.
async fn claim(stage: &Stage, round: usize) -> Result<Duration> {
    let claims = api(stage);
    let name = format!("bench-{round}");
    let object: DynamicObject =
        serde_json::from_value(stage.claim(NAMESPACE, &name, "linux", &format!("90{round:02}"), 1))?;
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut changes = watcher(claims.clone(), config).applied_objects().boxed();
    let start = Instant::now();
    claims.create(&PostParams::default(), &object).await?;
    let ready = async {
        while let Some(claim) = changes.try_next().await? {
            match claim.data.pointer("/status/phase").and_then(Value::as_str) {
                Some("Ready") => return Ok(start.elapsed()),
                Some("Failed") => bail!("the claim failed: {}", claim.data),
                _ => {}
            }
        }
        bail!("the watch ended")
    };
    let took = tokio::time::timeout(DEADLINE, ready).await.context("a claim did not become Ready")??;
    claims.delete(&name, &DeleteParams::default()).await?;
    let pooled = Instant::now();
    let wait = ["wait", "rpool", "linux", "-n", NAMESPACE, "--for=jsonpath={.status.workers.idle}=1", "--timeout=60s"];
    loop {
        let gone = claims.get_opt(&name).await?.is_none();
        if gone && stage.kube.kubectl(&wait).await?.status.success() {
            return Ok(took);
        }
        ensure!(pooled.elapsed() < DEADLINE, "the machine did not go back to the pool");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A claimer without an operator.
struct Hand {
    client: Client,
    table: String,
    token: String,
}

impl Hand {
    async fn new(stage: &Stage) -> Result<Self> {
        let config = aws_sdk_dynamodb::Config::builder()
            .behavior_version(aws_sdk_dynamodb::config::BehaviorVersion::latest())
            .region(aws_sdk_dynamodb::config::Region::new("us-east-1"))
            .endpoint_url(stage.aws.endpoint())
            .credentials_provider(Credentials::new("bench", "bench", None, None, "bench"))
            .build();
        let token = stage.github.personal_token(&[ORGANIZATION]);
        Ok(Self { client: Client::from_conf(config), table: table_name(CLUSTER), token })
    }

    async fn claim(&self, stage: &Stage, round: usize) -> Result<Duration> {
        let run_id = format!("91{round:02}");
        let (instance, heartbeat) = self.idle().await?;
        let public = heartbeat.public_key.context("the agent has told its key")?;
        let register = public.seal(&self.github(stage, "registration-token").await?);
        let remove = public.seal(&self.github(stage, "remove-token").await?);

        let start = Instant::now();
        let claimed = Instance { state: State::Claimed, run_id: run_id.clone(), sealed: register, ..instance.clone() };
        self.put(&claimed).await?;
        self.until(&instance.instance_id, Signal::Registered, &run_id).await?;
        let took = start.elapsed();

        self.put(&Instance { sealed: remove, leaving: run_id.clone(), ..instance.clone() }).await?;
        self.until(&instance.instance_id, Signal::Deregistered, &run_id).await?;
        self.put(&instance).await?;
        Ok(took)
    }

    async fn idle(&self) -> Result<(Instance, Heartbeat)> {
        let query = self.client.query().table_name(&self.table).key_condition_expression("PK = :pk");
        let query = query.expression_attribute_values(":pk", AttributeValue::S(format!("TYPE#{}", entity::INSTANCE)));
        let items = query.send().await?.items.unwrap_or_default();
        let instance = items.iter().filter_map(|item| Instance::from_item(item).ok()).find(|i| i.state == State::Idle);
        let instance = instance.context("an idle machine is left")?;
        let get = self.client.get_item().table_name(&self.table);
        let beat = get.set_key(Some(key(entity::HEARTBEAT, &instance.instance_id))).send().await?;
        let beat = Heartbeat::from_item(&beat.item.context("the agent beats")?)?;
        Ok((instance, beat))
    }

    async fn put(&self, instance: &Instance) -> Result<()> {
        let instance = Instance { updated_at: jiff::Timestamp::now(), ..instance.clone() };
        let put = self.client.put_item().table_name(&self.table).set_item(Some(instance.to_item()));
        let put = put.condition_expression("#threshold > :now").expression_attribute_names("#threshold", a::THRESHOLD);
        let now = AttributeValue::S(stamp(jiff::Timestamp::now()));
        put.expression_attribute_values(":now", now).send().await?;
        Ok(())
    }

    async fn until(&self, id: &str, signal: Signal, run_id: &str) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            let get = self.client.get_item().table_name(&self.table).set_key(Some(key(entity::SIGNAL, id)));
            let said =
                get.consistent_read(true).send().await?.item.map(|item| WorkerSignal::from_item(&item)).transpose()?;
            if said.is_some_and(|said| said.signal == signal && said.run_id == run_id) {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        bail!("the agent of {id} did not say {signal} for run {run_id}")
    }

    async fn github(&self, stage: &Stage, what: &str) -> Result<String> {
        let url = format!("{}/orgs/{ORGANIZATION}/actions/runners/{what}", stage.github.api_url());
        let answer = reqwest::Client::new().post(url).bearer_auth(&self.token).header("user-agent", "bench").send();
        let answer: Value = answer.await?.error_for_status()?.json().await?;
        answer["token"].as_str().map(str::to_owned).context("GitHub gave a token")
    }
}

/// Milliseconds, sorted.
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort();
        let ms = |index: usize| times[index].as_secs_f64() * 1000.0;
        Self { median: ms(times.len() / 2), least: ms(0), most: ms(times.len() - 1) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "median {:.0} ms, least {:.0} ms, most {:.0} ms", self.median, self.least, self.most)
    }
}
