//! What a job can do with the role of its machine: it writes that machine's items, and harms nothing else.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use paddock::api::{ClaimPhase, FailureReason};
use paddock_bed::{
    cloud::{Cloud, machine_arns},
    stage::CLUSTER,
};
use paddock_record::{Heartbeat, KeyPair, SealError, Signal, State, WorkerSignal, attribute};
use serde_json::json;
use tokio::task::AbortHandle;

use crate::fixture::{
    ec2_pool::{Ec2Pool, is_pooled},
    world::World,
};

/// Close to the 400 KB that DynamoDB takes for an item.
const FLOOD: usize = 390_000;

/// The pause between two writes of a hostile job: shorter than that between two heartbeats of an agent, which is 5 s. The
/// test that floods the table shares DynamoDB Local with others.
const HOSTILE_PAUSE: Duration = Duration::from_millis(500);

/// A job that writes with its machine's credentials, until it is dropped.
struct HostileJob(AbortHandle);

impl HostileJob {
    fn start<W: Future<Output = Result<()>> + Send>(
        world: &World,
        id: &str,
        write: impl Fn(Cloud, String) -> W + Send + Sync + 'static,
    ) -> Self {
        let (aws, id) = (world.stage.clone(), id.to_owned());
        let task = tokio::spawn(async move {
            loop {
                // It may be throttled; it goes on.
                let _ = write(Cloud::of_machine(&aws.aws, CLUSTER, &id), id.clone()).await;
                tokio::time::sleep(HOSTILE_PAUSE).await;
            }
        });
        Self(task.abort_handle())
    }
}

impl Drop for HostileJob {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The largest items that DynamoDB takes, in the name of the machine.
async fn flood(cloud: Cloud, id: String) -> Result<()> {
    let detail = "x".repeat(FLOOD);
    let signal =
        WorkerSignal { detail: detail.clone(), ..WorkerSignal::new(&id, Signal::Registered, "1", 1, Timestamp::now()) };
    cloud.forge(&signal).await?;
    let beat = Heartbeat::new(&id, None, Timestamp::now());
    let mut item = beat.to_item(&machine_arns());
    item.insert(attribute::PUBLIC_KEY.into(), aws_sdk_dynamodb::types::AttributeValue::S(detail));
    cloud.put(item).await
}

/// A job that writes as much as DynamoDB takes, under the keys that it may write, harms its own machine alone: claims of
/// another pool are served meanwhile, and the machine ends after its claim. Under other keys it can write nothing.
pub async fn machine_that_floods_the_table_stops_no_other(world: &World) -> Result<()> {
    let hostile = Ec2Pool::new(world, json!({ "timeouts": { "deregistration": "5s" } })).await?;
    hostile.claim("bad", "9800", json!({ "count": 2 })).await?;
    let ready = hostile.until_phase("bad", ClaimPhase::Ready).await?;
    let ids: Vec<_> = ready.workers.iter().map(|worker| worker.name.clone()).collect();
    let jobs: Vec<_> = ids.iter().map(|id| HostileJob::start(world, id, flood)).collect();
    for id in &ids {
        let line = |line: &&str| line.contains("machine wrote more than an agent does") && line.contains(id.as_str());
        let noted = async || Ok(world.operator_log().lines().filter(line).count() == 1);
        world.until_true(&format!("the operator has noted {id}"), noted).await?;
    }

    let other = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let victim = other.the(State::Idle).await?;
    other.claim("build", "9801", json!({ "count": 2 })).await?;
    other.until_phase("build", ClaimPhase::Ready).await?;
    let job = Cloud::of_machine(&world.stage.aws, CLUSTER, &ids[0]);
    for id in [victim.as_str(), "i-00000000000000bad"] {
        let refusal = job.forge_signal(id, Signal::RegistrationFailed, "9801").await.err().context("it is refused")?;
        ensure!(format!("{refusal:?}").contains("AccessDeniedException"), "{refusal:?}");
    }
    other.release("build").await?;
    other.until_pooled(2).await?;

    hostile.release("bad").await?;
    for id in &ids {
        hostile.until_ended(id, FailureReason::DeregistrationTimeout).await?;
        let line = |line: &&str| line.contains("machine wrote more than an agent does") && line.contains(id.as_str());
        ensure!(world.operator_log().lines().filter(line).count() == 1, "it is logged once");
    }
    drop(jobs);
    other.clean_up().await?;
    hostile.clean_up().await
}

/// A token is sealed to the first key of its machine, whatever key heartbeats have later, also by the next leader.
pub async fn token_goes_to_the_first_key_of_its_machine(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = pool.the(State::Idle).await?;
    let forged = KeyPair::from_bytes([9; 32]);
    let key = forged.public();
    let job = HostileJob::start(world, &id, move |cloud, id| {
        let beat = Heartbeat::new(&id, Some(key.clone()), Timestamp::now());
        async move { cloud.put(beat.to_item(&machine_arns())).await }
    });
    let key = forged.public();
    let published =
        async || Ok(pool.cloud.heartbeat(&id).await?.is_some_and(|beat| beat.public_key == Some(key.clone())));
    world.until_true("the heartbeat has another key", published).await?;
    world.kill_operator()?;
    world.start_operator().await?;

    // Frozen, the machine leaves the token in its record.
    world.stage.machines.freeze(&id)?;
    pool.claim("build", "9810", json!({})).await?;
    pool.until_record(&id, "claimed", |record| record.state == State::Claimed).await?;
    let sealed = pool.cloud.attribute(&id, attribute::SEALED).await?.context("the record has a token")?;
    ensure!(forged.open(&sealed) == Err(SealError::NotForUs), "the token is sealed to {key}");
    drop(job);
    world.stage.machines.thaw(&id)?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers[0].name == id, "{ready:?}");
    pool.release("build").await?;
    pool.until_record(&id, "pooled", is_pooled).await?;
    pool.clean_up().await
}
