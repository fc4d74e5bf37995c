//! A machine is told of changes of its record by its queue, so that it costs little while it waits.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use paddock::api::ClaimPhase;
use paddock_bed::{
    aws::{
        Calls, Service,
        faults::{Effect, Rule},
    },
    stage::CLUSTER,
};
use paddock_record::{HEARTBEAT, POLL, State, wake_queue};
use serde_json::json;

use crate::fixture::{ec2_pool::Ec2Pool, world::World};

/// How long an idle machine is observed: several of the longest periods of an agent.
const OBSERVED: Duration = Duration::from_secs(60);

fn count(calls: &Calls, action: &str) -> u64 {
    calls.get(&Service::Sqs).and_then(|actions| actions.get(action)).copied().unwrap_or(0)
}

/// Waits until the machine has a queue and waits for its messages.
async fn until_it_listens(world: &World, id: &str) -> Result<()> {
    let listens = async || Ok(count(&world.stage.aws.calls_of(id), "ReceiveMessage") > 0);
    world.until_true(&format!("{id} waits for messages"), listens).await
}

/// An idle machine calls AWS at most a tenth as often as by polling, and a message tells it of its claim and of its release.
/// Its queue goes with it.
pub async fn idle_machine_costs_a_tenth_and_is_woken_for_a_claim(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = pool.the(State::Idle).await?;
    until_it_listens(world, &id).await?;
    let total = || world.stage.aws.calls_of(&id).values().flat_map(|actions| actions.values()).sum::<u64>();
    let (before, began) = (total(), Instant::now());
    tokio::time::sleep(OBSERVED).await;
    let (made, seconds) = (total() - before, began.elapsed().as_secs_f64());
    let polling = seconds / POLL.as_secs_f64() + seconds / HEARTBEAT.as_secs_f64();
    let calls = world.stage.aws.calls_of(&id);
    ensure!(made as f64 <= polling / 10.0, "{made} calls in {seconds:.0} s, {polling:.0} by polling: {calls:?}");

    let told = || count(&world.stage.aws.calls_of(&id), "DeleteMessageBatch");
    let before = told();
    pool.claim("build", "8700", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(told() > before, "no message has told the machine of its claim");
    let before = told();
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    ensure!(told() > before, "no message has told the machine of its release");
    pool.clean_up().await?;
    let queue = wake_queue(CLUSTER, &id);
    let gone = async || Ok(!pool.cloud.has_queue(&queue).await?);
    world.until_true(&format!("queue {queue} is gone"), gone).await
}

/// Messages that are lost delay a claim, and no more: the agent reads its record by itself.
pub async fn machine_that_is_not_woken_serves_its_claim_all_the_same(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = pool.the(State::Idle).await?;
    until_it_listens(world, &id).await?;
    let lost = pool.fault(Rule::on(Service::Sqs, "SendMessage", Effect::error("ServiceUnavailable")).containing(&id));
    pool.claim("build", "8701", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers[0].name == id && lost.hits() > 0, "{ready:?}, {} hits", lost.hits());
    drop(lost);
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    pool.clean_up().await
}
