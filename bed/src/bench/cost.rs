//! What one machine calls at AWS in a day, idle and busy, and how soon it notices that it is claimed. The machine is a real
//! one: it runs the user data and the agent.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use paddock_record::{HEARTBEAT, POLL};
use serde_json::json;

use super::{Spread, Table};
use crate::{
    aws::{Calls, Service},
    github::{JobRequest, Status},
    isolate::Isolated,
    stage::{ORGANIZATION, Options, REPOSITORY, Stage},
    wait::Wait,
};

const NAMESPACE: &str = "cost";
const POOL: &str = "linux";
/// How long each state is observed: several of the longest periods of an agent.
const PERIOD: Duration = Duration::from_secs(120);
/// How many claims are measured.
const CLAIMS: u32 = 20;
const DEADLINE: Duration = Duration::from_secs(120);
/// The resolution of the measurement.
const RESOLUTION: Duration = Duration::from_millis(2);
const DAY: f64 = 86_400.0;

type Rates = BTreeMap<(Service, String), f64>;

pub async fn run(isolated: &Isolated) -> Result<()> {
    eprintln!("starting the bed …");
    let stage = Stage::start_with(isolated, Options::default()).await?;
    let _operator = stage.operator("operator", &["--lease-duration", "15s"]).await?;
    stage.namespace(NAMESPACE).await?;
    let pool = stage.ec2_pool(NAMESPACE, POOL, json!({ "minIdle": 1, "maxInstances": 1 }));
    stage.kube.apply(&pool.to_string()).await?;
    stage.until(NAMESPACE, &format!("rpool/{POOL}"), "{.status.workers.idle}=1").await?;
    let id = stage.aws.instances().first().context("a machine was launched")?.id.clone();
    Wait::at_most(DEADLINE)
        .until("the machine waits for messages", async || {
            Ok((calls(&stage.aws.calls_of(&id), Service::Sqs, "ReceiveMessage") > 0).then_some(()))
        })
        .await?;

    eprintln!("an idle machine, for {} s …", PERIOD.as_secs());
    let idle = rates(&stage, &id).await;

    eprintln!("{CLAIMS} claims …");
    let mut noticed = Vec::new();
    for number in 0..CLAIMS {
        let name = format!("claim-{number}");
        noticed.push(notice(&stage, &id, &name, 5000 + number).await?);
        release(&stage, &name).await?;
    }

    eprintln!("a busy machine, for {} s …", PERIOD.as_secs());
    let run = "6000";
    stage.kube.apply(&stage.claim(NAMESPACE, "busy", POOL, run, 1).to_string()).await?;
    stage.until(NAMESPACE, "rclaim/busy", "{.status.phase}=Ready").await?;
    let job = stage.github.queue_job(JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec![run.into()],
        duration_ms: Some((PERIOD + DEADLINE).as_millis() as u64),
        ..JobRequest::default()
    })?;
    stage.github.until_job(job.id, DEADLINE, |job| job.status == Status::InProgress).await?;
    let busy = rates(&stage, &id).await;

    let polling = DAY / POLL.as_secs_f64() + DAY / HEARTBEAT.as_secs_f64();
    print(&idle, &busy, polling);
    let noticed = Spread::of(noticed);
    println!(
        "A claim is noticed after {:.0} ms at the median, {:.0} ms on average, {:.0} ms at most ({CLAIMS} claims; by polling \
         alone: {} ms on average).",
        noticed.percentile(50),
        noticed.0.iter().sum::<f64>() / noticed.0.len() as f64,
        noticed.percentile(100),
        (POLL / 2).as_millis(),
    );
    Ok(())
}

fn calls(calls: &Calls, service: Service, action: &str) -> u64 {
    calls.get(&service).and_then(|actions| actions.get(action)).copied().unwrap_or(0)
}

/// The machine's calls in a day, at the rate of the next [`PERIOD`].
async fn rates(stage: &Stage, id: &str) -> Rates {
    let (before, began) = (stage.aws.calls_of(id), Instant::now());
    tokio::time::sleep(PERIOD).await;
    let (after, days) = (stage.aws.calls_of(id), began.elapsed().as_secs_f64() / DAY);
    let all = after.into_iter().flat_map(|(service, actions)| actions.into_iter().map(move |it| (service, it)));
    let rate = all.map(|(service, (action, count))| {
        let made = count - calls(&before, service, &action);
        ((service, action), made as f64 / days)
    });
    rate.filter(|(_, rate)| *rate > 0.0).collect()
}

/// The time from the write of the claim into the machine's record until the agent reads it.
async fn notice(stage: &Stage, id: &str, name: &str, run: u32) -> Result<Duration> {
    // Away from the agent's own periods.
    tokio::time::sleep(Duration::from_millis(u64::from(run) * 37 % 1000)).await;
    let mut records = stage.aws.watch_records();
    stage.kube.apply(&stage.claim(NAMESPACE, name, POOL, &run.to_string(), 1).to_string()).await?;
    let written = tokio::time::timeout(DEADLINE, records.recv()).await.context("the record is not written")?;
    ensure!(written.as_deref() == Some(id), "{written:?} was written, not {id}");
    let reads = || calls(&stage.aws.calls_of(id), Service::DynamoDb, "GetItem");
    let (before, began) = (reads(), Instant::now());
    while reads() == before {
        ensure!(began.elapsed() < DEADLINE, "the agent does not read its record");
        tokio::time::sleep(RESOLUTION).await;
    }
    let noticed = began.elapsed();
    stage.until(NAMESPACE, &format!("rclaim/{name}"), "{.status.phase}=Ready").await?;
    Ok(noticed)
}

async fn release(stage: &Stage, name: &str) -> Result<()> {
    stage.kube.kubectl(&["delete", "rclaim", name, "-n", NAMESPACE, "--wait=true"]).await?;
    stage.until(NAMESPACE, &format!("rpool/{POOL}"), "{.status.workers.idle}=1").await
}

fn print(idle: &Rates, busy: &Rates, polling: f64) {
    let mut table = Table::new(["requests of one machine in a day", "idle", "busy"]);
    let round = |rate: f64| format!("{:.0}", rate);
    let actions: std::collections::BTreeSet<_> = idle.keys().chain(busy.keys()).collect();
    for key in actions {
        let of = |rates: &Rates| round(rates.get(key).copied().unwrap_or(0.0));
        table.row([format!("{} {}", key.0.name(), key.1), of(idle), of(busy)]);
    }
    let sum = |rates: &Rates| rates.values().sum::<f64>();
    table.row(["all".into(), round(sum(idle)), round(sum(busy))]);
    let part = |rates: &Rates| format!("{:.0} %", 100.0 * sum(rates) / polling);
    table.row([format!("of {} by polling alone", round(polling)), part(idle), part(busy)]);
    println!("{table}");
}
