//! The warm pool: claims of 1 to 1,000 runners, their release, and an idle system.

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use kube::api::{DeleteParams, DynamicObject, PostParams};
use paddock_record::table_name;
use serde_json::{Value, json};

use super::{
    Spread,
    agents::{Agent, Agents},
    claims::Claims,
    hand::{Hand, dynamodb},
    report::{Report, Rest},
    since, writes,
};
use crate::{
    aws::{Calls, Service},
    isolate::Isolated,
    stage::{CLUSTER, Options, Stage},
};

const NAMESPACE: &str = "bench";
/// A small pool with machines of two kinds, and a large one.
const SMALL: &str = "small";
const LARGE: &str = "large";
const LARGE_SIZE: usize = 1000;
/// Far longer than any step takes, even on a slow machine.
const DEADLINE: Duration = Duration::from_secs(120);
/// How long a settled system is observed.
pub const IDLE_PERIOD: Duration = Duration::from_secs(30);
/// How often progress is printed.
const PROGRESS_PERIOD: Duration = Duration::from_secs(10);
/// How many log lines are shown after a failure.
const LOG_LINES: usize = 12;
/// How often conditions are checked.
const POLL_PAUSE: Duration = Duration::from_millis(2);

/// Runs the benchmark and prints the report, even if it is incomplete.
pub async fn run(isolated: &Isolated) -> Result<()> {
    let mut report = Report::default();
    let outcome = measure(isolated, &mut report).await;
    println!("{report}");
    if outcome.is_err() {
        for log in ["operator/operator.log", "kube/log/kube-apiserver.log", "kube/log/etcd.log"] {
            let text = std::fs::read_to_string(isolated.dir.join(log)).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            eprintln!("the end of {log}:\n{}\n", lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"));
        }
    }
    outcome
}

async fn measure(isolated: &Isolated, report: &mut Report) -> Result<()> {
    let began = Instant::now();
    let progress = |what: &str| eprintln!("{:4.0} s  {what}", began.elapsed().as_secs_f64());
    progress("starting the bed …");
    let stage = Stage::start_with(isolated, Options { unmanned: true, ..Options::default() }).await?;
    let table = table_name(CLUSTER);
    let agents = Agents::start(&stage.aws, dynamodb(stage.aws.dynamodb_url()), table.clone());
    let operator = stage.operator("operator", &["--lease-duration", "15s"]).await?;
    stage.namespace(NAMESPACE).await?;
    let bench = Bench { claims: Claims::watch(&stage, NAMESPACE), stage, agents };

    progress("creating 2 × 50 machines, and releasing them …");
    bench.pool(SMALL, json!({ "maxInstances": 300 })).await?;
    for kind in ["c*", "m*"] {
        let round = bench.round(vec![bench.claim(SMALL, 50, Some(kind))]).await?;
        ensure!(round.created == 50, "{} machines of {kind} were created, not 50", round.created);
        let release = bench.release(&round).await?;
        report.creations.push((round, release));
    }
    let small = bench.free();
    ensure!(small.len() == 100, "{} machines are in the pool, not 100", small.len());
    for (size, rounds) in [(1, 25), (10, 10), (100, 5)] {
        progress(&format!("{rounds} warm claims of {size} …"));
        let mut all = Vec::new();
        for round in 0..rounds {
            // Workers are written later: those of a hundred machines would delay the next round.
            if round == 0 || size == 100 {
                bench.settle().await?;
            }
            all.push(bench.round_and_back(vec![bench.claim(SMALL, size, None)]).await?);
        }
        report.warm.push((size, all));
    }
    bench.settle().await?;
    progress("10 claims of 10 race for 100 …");
    let ten = (0..10).map(|_| bench.claim(SMALL, 10, None)).collect();
    let (round, release) = bench.round_and_back(ten).await?;
    report.races.push(("10 claims of 10 race for 100", round, Some(release)));
    bench.settle().await?;
    progress("two kinds of claims share a queue …");
    let kinds = (0..20).map(|n| bench.claim(SMALL, 5, Some(if n % 2 == 0 { "c*" } else { "m*" }))).collect();
    let (round, release) = bench.round_and_back(kinds).await?;
    report.races.push(("20 claims of 5, of two kinds, for 100", round, Some(release)));

    progress(&format!("a pool that keeps {LARGE_SIZE} machines warm …"));
    let warming = Instant::now();
    bench.pool(LARGE, json!({ "minIdle": LARGE_SIZE, "maxInstances": LARGE_SIZE })).await?;
    let mut last_progress = Instant::now();
    let warm = || {
        let free = bench.free().len() - small.len();
        if last_progress.elapsed() > PROGRESS_PERIOD {
            last_progress = Instant::now();
            progress(&format!("{free} are warm, AWS was called for {:?}", bench.stage.aws.calls()));
        }
        free == LARGE_SIZE
    };
    bench.stage.aws.reset_calls();
    bench.until("the large pool is warm", warm).await?;
    progress(&format!("warm after {:.0} s; now it settles …", warming.elapsed().as_secs_f64()));
    report.rest = bench.rest().await?;
    // Listing a thousand machines costs the emulated EC2 seconds of CPU time, so the measurement starts right after
    // both pools were compared with EC2.
    progress("the next comparison with EC2 …");
    bench.until("EC2 was asked for both pools", || bench.listed() >= 2).await?;
    bench.settle().await?;
    bench.until("EC2 has answered", || !bench.stage.aws.is_ec2_busy()).await?;
    progress("100 claims of 10 …");
    let hundred = (0..100).map(|_| bench.claim(LARGE, 10, None)).collect();
    let thousand = bench.round(hundred).await?;
    let large: Vec<_> = thousand.served.iter().flat_map(|(_, ids)| ids.clone()).collect();
    report.races.push(("100 claims of 10 from 1,000", thousand, None));

    progress("the same by hand, without the operator …");
    operator.stop().await?;
    let hand = Hand { client: dynamodb(bench.stage.aws.endpoint()), table };
    for (size, rounds) in [(1, 25), (10, 10), (100, 5), (1000, 1)] {
        let mut times = Vec::new();
        for round in 0..rounds {
            let ids = if size > small.len() { &large[..] } else { &small[..size] };
            times.push(hand.claim(&bench.agents, ids, &format!("hand-{size}-{round}")).await?);
        }
        report.hand.insert(size, Spread::of(times).percentile(50));
    }
    progress("done");
    Ok(())
}

/// Field order is drop order: watchers are dropped before what they watch.
struct Bench {
    claims: Claims,
    agents: Agents,
    stage: Stage,
}

/// One or more concurrent claims, from creation until all are Ready.
pub struct Round {
    names: Vec<String>,
    /// Each claim's time to Ready, and its machines.
    pub served: Vec<(Duration, Vec<String>)>,
    pub whole: Duration,
    /// The share of each claim's time spent waiting for its agents.
    pub waited: Vec<f64>,
    /// Each claim's time to Ready after the last signal of its agents.
    pub after_signal: Vec<Duration>,
    pub calls: Calls,
    /// Writes to the API server until all were Ready.
    pub writes: u64,
    pub created: usize,
    /// Machines held by more than one claim.
    pub twice: usize,
}

/// From the deletion of all claims of a round until their machines can be claimed again.
pub struct Release {
    pub whole: Duration,
    pub after_signal: Duration,
    pub calls: Calls,
}

impl Bench {
    async fn pool(&self, name: &str, changes: Value) -> Result<()> {
        // On a slow machine the bed may exceed the default registration timeout.
        let mut ec2 = json!({ "lifetimes": { "idle": "2h", "maxRuntime": "2h" }, "timeouts": { "registration": "60s", "heartbeat": "60s" } });
        if let (Value::Object(ec2), Value::Object(changes)) = (&mut ec2, changes) {
            ec2.extend(changes);
        }
        let pool = self.stage.ec2_pool(NAMESPACE, name, ec2);
        self.stage.kube.apply(&pool.to_string()).await?;
        let wait = ["wait", "rpool", name, "-n", NAMESPACE, "--for=condition=Ready", "--timeout=60s"];
        ensure!(self.stage.kube.kubectl(&wait).await?.status.success(), "pool {name} did not become Ready");
        Ok(())
    }

    /// A claim with a unique name and run.
    fn claim(&self, pool: &str, count: usize, types: Option<&str>) -> Value {
        let number = self.claims.number();
        let run = (900_000 + number).to_string();
        let mut claim = self.stage.claim(NAMESPACE, &format!("bench-{number}"), pool, &run, count as u32);
        if let Some(types) = types {
            claim["spec"]["allowedInstanceTypes"] = json!([types]);
        }
        claim
    }

    /// The claimable machines.
    fn free(&self) -> Vec<String> {
        self.agents.read(|agents| agents.iter().filter(|(_, a)| a.is_free()).map(|(id, _)| id.clone()).collect())
    }

    async fn round(&self, claims: Vec<Value>) -> Result<Round> {
        let machines = self.stage.aws.instances().len();
        let objects = claims.into_iter().map(serde_json::from_value::<DynamicObject>).collect::<Result<Vec<_>, _>>()?;
        let names: Vec<_> = objects.iter().map(|claim| claim.metadata.name.clone().unwrap_or_default()).collect();
        self.stage.aws.reset_calls();
        let before = writes(&self.stage.kube).await?;
        let start = Instant::now();
        let creates = objects.iter().map(async |claim| {
            let start = Instant::now();
            self.claims.api.create(&PostParams::default(), claim).await.map(|_| start)
        });
        let starts = try_join_all(creates).await?;
        self.until("all claims are Ready", || names.iter().all(|name| self.claims.ready(name).is_some())).await?;
        let calls = self.stage.aws.calls();
        let writes = since(&before, writes(&self.stage.kube).await?);
        let mut round = Round {
            served: Vec::new(),
            whole: Duration::ZERO,
            waited: Vec::new(),
            after_signal: Vec::new(),
            calls,
            writes: writes.values().sum(),
            created: self.stage.aws.instances().len() - machines,
            twice: 0,
            names,
        };
        let mut seen = HashSet::new();
        for (name, started) in round.names.iter().zip(starts) {
            let (ready, ids) = self.claims.ready(name).context("it is Ready")?;
            round.whole = round.whole.max(ready.duration_since(start));
            round.twice += ids.iter().filter(|id| !seen.insert((*id).clone())).count();
            let of = |time: fn(&Agent) -> Option<Instant>| {
                self.agents.read(|agents| ids.iter().filter_map(|id| time(agents.get(id)?)).max())
            };
            let asked = of(|agent| Some(agent.sent.as_ref()?.asked)).context("its agents were asked")?;
            let answered = of(|agent| Some(agent.sent.as_ref()?.at)).context("its agents have answered")?;
            let took = ready.duration_since(started);
            round.waited.push(answered.saturating_duration_since(asked).as_secs_f64() / took.as_secs_f64());
            round.after_signal.push(ready.saturating_duration_since(answered));
            round.served.push((took, ids));
        }
        Ok(round)
    }

    async fn release(&self, round: &Round) -> Result<Release> {
        self.stage.aws.reset_calls();
        let start = Instant::now();
        let how = DeleteParams::default();
        try_join_all(round.names.iter().map(|name| self.claims.api.delete(name, &how))).await?;
        let ids: HashSet<_> = round.served.iter().flat_map(|(_, ids)| ids).collect();
        let all = |what: fn(&Agent) -> bool| {
            self.agents.read(|agents| ids.iter().all(|id| agents.get(*id).is_some_and(what)))
        };
        self.until("the machines are back in the pool", || all(Agent::is_free)).await?;
        let last = |time: fn(&Agent) -> Option<Instant>| {
            self.agents.read(|agents| ids.iter().filter_map(|id| time(agents.get(*id)?)).max().unwrap_or(start))
        };
        let (pooled, answered) = (last(|agent| Some(agent.written)), last(|agent| Some(agent.sent.as_ref()?.at)));
        let calls = self.stage.aws.calls();
        self.until("the claims are gone", || round.names.iter().all(|name| self.claims.gone(name))).await?;
        let after_signal = pooled.saturating_duration_since(answered);
        Ok(Release { whole: pooled.saturating_duration_since(start), after_signal, calls })
    }

    async fn round_and_back(&self, claims: Vec<Value>) -> Result<(Round, Release)> {
        let round = self.round(claims).await?;
        let release = self.release(&round).await?;
        Ok((round, release))
    }

    /// How often machines were listed since the last reset.
    fn listed(&self) -> u64 {
        let calls = self.stage.aws.calls();
        calls.get(&Service::Ec2).and_then(|calls| calls.get("DescribeInstances")).copied().unwrap_or(0)
    }

    /// Waits until nothing is written any more: Workers are updated after their machines.
    async fn settle(&self) -> Result<Duration> {
        let start = Instant::now();
        let (mut before, mut quiet) = (writes(&self.stage.kube).await?, 0);
        while quiet < 2 {
            ensure!(start.elapsed() < DEADLINE, "the system does not settle");
            tokio::time::sleep(Duration::from_millis(1200)).await;
            let now = writes(&self.stage.kube).await?;
            quiet = if now == before { quiet + 1 } else { 0 };
            before = now;
        }
        Ok(start.elapsed())
    }

    /// Measures the writes and calls of an idle system.
    async fn rest(&self) -> Result<Rest> {
        let settled = self.settle().await?;
        let before = writes(&self.stage.kube).await?;
        self.stage.aws.reset_calls();
        tokio::time::sleep(IDLE_PERIOD).await;
        let calls = self.stage.aws.calls();
        self.stage.aws.reset_calls();
        let writes = since(&before, writes(&self.stage.kube).await?);
        Ok(Rest { settled, writes, calls })
    }

    async fn until(&self, what: &str, mut true_: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        while !true_() {
            if start.elapsed() > DEADLINE {
                let states = self.agents.read(|agents| {
                    let mut states: BTreeMap<String, usize> = BTreeMap::new();
                    for agent in agents.values() {
                        let state = |r: &paddock_record::Instance| format!("{} {}", r.state, r.leaving.is_empty());
                        *states.entry(agent.record.as_ref().map_or("unknown".into(), state)).or_default() += 1;
                    }
                    states
                });
                bail!("not within {DEADLINE:?}: {what}; machines: {states:?}; claims: {}", self.claims.show());
            }
            tokio::time::sleep(POLL_PAUSE).await;
        }
        Ok(())
    }
}
