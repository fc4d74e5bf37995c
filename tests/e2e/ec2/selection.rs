//! Which machine a claim gets: idle ones first, each for one claim alone, whatever the queue contains.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use paddock::api::{ClaimPhase, RunnerClaimStatus, WorkerSource};
use paddock_bed::aws::{
    Service,
    faults::{Effect, Rule},
};
use paddock_record::{IdleMessage, State, stamp};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, steps},
    world::World,
};

/// Deletions of messages are gathered for a second before they are sent.
const DELETIONS_SENT: Duration = Duration::from_secs(3);

fn names(status: &RunnerClaimStatus) -> BTreeSet<String> {
    status.workers.iter().map(|worker| worker.name.clone()).collect()
}

fn from(status: &RunnerClaimStatus, source: WorkerSource) -> usize {
    status.workers.iter().filter(|worker| worker.source == source).count()
}

/// A claim takes the idle machines and launches the rest; all serve its run, and all return to the pool.
pub async fn claim_of_ten_takes_four_idle_machines_and_six_new_ones(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 4, "maxInstances": 10 })).await?;
    pool.set(json!({ "maxInstances": 10 })).await?;
    let idle: BTreeSet<_> = pool.ids(State::Idle).await?.into_iter().collect();
    pool.claim("build", "8100", json!({ "count": 10 })).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.progress == "10/10", "{ready:?}");
    ensure!((from(&ready, WorkerSource::Pool), from(&ready, WorkerSource::Created)) == (4, 6), "{ready:?}");
    ensure!(names(&ready).is_superset(&idle), "{idle:?} were idle: {ready:?}");
    let runners = pool.runners();
    ensure!(runners.len() == 10 && runners.values().all(|labels| labels == &["8100"]), "{runners:?}");
    ensure!(pool.instances().len() == 10, "no machine too many was launched");

    pool.release("build").await?;
    pool.until_pooled(10).await?;
    pool.clean_up().await
}

/// I1: claims that arrive together share the idle machines: none gets another's machine, and none is launched.
pub async fn i1_ten_claims_of_ten_race_for_a_hundred_idle_machines(world: &World) -> Result<()> {
    // A hundred agents and runners are slow on two cores.
    let settings = json!({
        "minIdle": 100, "maxInstances": 100,
        "timeouts": { "registration": "20m", "validation": "20m", "deregistration": "20m" },
        "lifetimes": { "created": "30m", "claimed": "30m", "idle": "30m" },
    });
    let pool = Ec2Pool::new(world, settings).await?;
    let claims: Vec<_> = (0..10).map(|number| (format!("build-{number}"), format!("820{number}"))).collect();
    try_join_all(claims.iter().map(|(name, run)| pool.claim(name, run, json!({ "count": 10 })))).await?;
    for step in steps(100) {
        let more = async || Ok(pool.runners().len() >= step);
        world.until_true(&format!("{step} runners are registered"), more).await?;
    }
    let mut owned = BTreeSet::new();
    for (name, run) in &claims {
        let ready = pool.until_phase(name, ClaimPhase::Ready).await?;
        ensure!(from(&ready, WorkerSource::Pool) == 10, "all are from the pool: {ready:?}");
        let runners = pool.runners();
        for id in names(&ready) {
            ensure!(runners.get(&id) == Some(&vec![run.clone()]), "{id} serves {run} alone: {runners:?}");
            ensure!(owned.insert(id), "I1: a machine has two claims: {ready:?}");
        }
    }
    ensure!(pool.instances().len() == 100, "none was launched");
    try_join_all(claims.iter().map(|(name, _)| pool.release(name))).await?;
    pool.until_pooled(100).await?;
    pool.clean_up().await
}

/// I1: two claims of one run have different machines, and one is released without the other.
pub async fn i1_two_claims_of_one_run_share_no_machine(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    pool.claim("a", "8300", json!({})).await?;
    pool.claim("b", "8300", json!({})).await?;
    let (a, b) = (pool.until_phase("a", ClaimPhase::Ready).await?, pool.until_phase("b", ClaimPhase::Ready).await?);
    ensure!((a.workers.len(), b.workers.len()) == (1, 1) && names(&a).is_disjoint(&names(&b)), "{a:?} {b:?}");
    pool.release("a").await?;
    let runners = pool.runners();
    let rest: BTreeSet<_> = names(&b);
    ensure!(rest.iter().all(|id| runners.get(id) == Some(&vec!["8300".into()])), "b keeps its runner: {runners:?}");
    pool.release("b").await?;
    pool.clean_up().await
}

/// I3: a claim that no idle machine fits launches one; the idle machine stays claimable.
pub async fn i3_idle_machine_that_does_not_fit_stays_claimable(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let small = pool.the(State::Idle).await?;
    pool.claim("big", "8400", json!({ "cpu": 8 })).await?;
    let ready = pool.until_phase("big", ClaimPhase::Ready).await?;
    ensure!(from(&ready, WorkerSource::Created) == 1 && !names(&ready).contains(&small), "{ready:?}");
    pool.claim("fitting", "8401", json!({})).await?;
    let ready = pool.until_phase("fitting", ClaimPhase::Ready).await?;
    ensure!(names(&ready) == BTreeSet::from([small]), "it gets the idle machine: {ready:?}");
    pool.release("big").await?;
    pool.release("fitting").await?;
    pool.clean_up().await
}

/// EC2 may launch a machine that is larger than its class. A claim that needs its size gets it, and none is launched.
pub async fn machine_larger_than_its_class_serves_a_claim_that_needs_its_size(world: &World) -> Result<()> {
    let types = json!({ "allowedInstanceTypes": ["m6a.2xlarge"] });
    let pool = Ec2Pool::new(world, json!({ "maxInstances": 2, "defaults": types })).await?;
    pool.claim("small", "8410", json!({})).await?;
    let small = names(&pool.until_phase("small", ClaimPhase::Ready).await?);
    let records = pool.records().await?;
    let sizes: Vec<_> =
        records.values().map(|record| (record.resource_class.as_str(), record.cpu, record.mem)).collect();
    ensure!(sizes == [("medium", 8, 32768)], "{sizes:?}");
    pool.release("small").await?;
    pool.until_pooled(1).await?;
    pool.claim("big", "8411", json!({ "cpu": 8, "memoryMiB": 16384 })).await?;
    let big = names(&pool.until_phase("big", ClaimPhase::Ready).await?);
    ensure!(big == small && pool.instances().len() == 1, "{big:?} {:?}", pool.instances());
    pool.release("big").await?;
    pool.clean_up().await
}

/// A machine whose size EC2 does not tell counts as large as it was ordered.
pub async fn machine_of_unknown_size_counts_as_its_class(world: &World) -> Result<()> {
    // Only this test uses the instance type, so the operator has not asked for its size before.
    let types = json!({ "allowedInstanceTypes": ["m6a.4xlarge"] });
    let denied = Rule::on(Service::Ec2, "DescribeInstanceTypes", Effect::error("UnauthorizedOperation"));
    let pool = Ec2Pool::new(world, json!({ "defaults": types })).await?;
    let denied = pool.fault(denied.containing("m6a.4xlarge"));
    pool.claim("build", "8412", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let sizes: Vec<_> = pool.records().await?.values().map(|record| (record.cpu, record.mem)).collect();
    ensure!(sizes == [(2, 4096)] && denied.hits() == 1, "{sizes:?}, {} hits", denied.hits());
    pool.release("build").await?;
    pool.clean_up().await
}

/// Messages that are malformed, expired, repeated or about machines that are gone are dropped; the claim gets the one
/// idle machine, once.
pub async fn poisoned_messages_are_dropped_and_the_next_one_tried(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let (id, queue) = (pool.the(State::Idle).await?, pool.queue().await?);
    let record = pool.cloud.record(&id).await?.context("the machine has a record")?;
    let honest = IdleMessage {
        instance_id: id.clone(),
        usage_class: record.usage_class,
        instance_type: record.instance_type,
        cpu: record.cpu,
        mem: record.mem,
        resource_class: record.resource_class,
        scope: record.scope,
        threshold: record.threshold.map(stamp).unwrap_or_default(),
    };
    let poison = [
        "{".to_owned(),
        "[]".to_owned(),
        "'; rm -rf / #\n$(reboot) \u{1F4A3}".to_owned(),
        json!({ "instanceId": id }).to_string(),
        IdleMessage { instance_id: "i-0123456789abcdef0".into(), ..honest.clone() }.write(),
        IdleMessage { threshold: "2020-01-01T00:00:00Z".into(), ..honest.clone() }.write(),
        honest.write(),
    ];
    let _twice = pool.fault(Rule::on(Service::Sqs, "ReceiveMessage", Effect::Duplicate).containing(&id).times(2));
    let _ghost = pool.fault(Rule::on(Service::Sqs, "DeleteMessage", Effect::AfterDeletion).containing(&id).once());
    for body in &poison {
        pool.cloud.send(&queue, body).await?;
    }
    pool.claim("build", "8500", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(names(&ready) == BTreeSet::from([id.clone()]), "{ready:?}");
    // Claims that find no idle machine read what is left. A message may be hidden from one of them, because it was
    // received a moment ago; then the next one reads it.
    pool.set(json!({ "maxInstances": 20 })).await?;
    let mut late = Vec::new();
    while pool.cloud.queue_size(&queue).await? > 0 {
        ensure!(late.len() < 15, "{} claims have not emptied the queue", late.len());
        let name = format!("late-{}", late.len());
        pool.claim(&name, "8501", json!({})).await?;
        pool.until_phase(&name, ClaimPhase::Ready).await?;
        late.push(name);
        tokio::time::sleep(DELETIONS_SENT).await;
    }
    let owners = pool.records().await?;
    ensure!(owners[&id].run_id == "8500", "I1: it still serves its first run: {owners:?}");
    for name in late {
        pool.release(&name).await?;
    }
    pool.release("build").await?;
    pool.clean_up().await
}
