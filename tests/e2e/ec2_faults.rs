//! What becomes of claims when machines, EC2, SQS or DynamoDB do not do as they should.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use paddock::api::{ClaimPhase, FailureReason, HeartbeatState, RunnerClaimStatus, Worker};
use paddock_bed::aws::{
    InstanceState, Limit, Service,
    faults::{Effect, Rule},
};
use paddock_record::{Signal, State};
use serde_json::json;

use crate::{
    linux::{Linux, is_pooled, never_done, pool_why, why},
    support::World,
};

/// A failed claim says why, and holds nothing.
async fn fails(linux: &Linux<'_>, reason: &str) -> Result<RunnerClaimStatus> {
    let failed = linux.until_phase("build", ClaimPhase::Failed).await?;
    ensure!(why(&failed).0 == reason, "{failed:?}");
    ensure!(failed.workers.is_empty(), "I4: it holds nothing: {failed:?}");
    Ok(failed)
}

/// A new machine whose script fails fails the claim that it was made for, and ends.
pub async fn i4_a_failed_pre_runner_script_fails_the_claim(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "preRunnerScript": "echo no good; exit 3" })).await?;
    linux.claim("build", "8600", json!({ "count": 2 })).await?;
    let failed = fails(&linux, "ValidationFailed").await?;
    ensure!(why(&failed).1.contains("pre-runner script"), "{failed:?}");
    linux.until_running(&[]).await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// A new machine that does not come up in time fails the claim; the idle one that was to serve beside it is pooled again.
pub async fn i4_a_machine_that_never_comes_up_fails_the_claim(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let warm = linux.the(State::Idle).await?;
    // The warm one has had its time to come up.
    let timeouts = json!({ "validation": "6s" });
    linux.set(json!({ "maxInstances": 2, "preRunnerScript": never_done(), "timeouts": timeouts })).await?;
    linux.until_pool("edited", |status| status.launch_template.as_ref().is_some_and(|t| t.version > 1)).await?;
    linux.claim("build", "8610", json!({ "count": 2 })).await?;
    let failed = fails(&linux, "ValidationFailed").await?;
    ensure!(why(&failed).1.contains("within 6s"), "{failed:?}");
    linux.until_running(std::slice::from_ref(&warm)).await?;
    linux.until_record(&warm, "idle", is_pooled).await?;
    let queue = linux.queue().await?;
    world.until_true("it is offered", async || Ok(linux.cloud.offers(&queue).await?.contains(&warm))).await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// An idle machine that does not answer its claim is ended, what it may have said for another run counts for nothing, and
/// the claim gets another machine.
pub async fn a_machine_that_registers_for_another_run_or_not_at_all_is_replaced(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "timeouts": { "registration": "4s" } })).await?;
    let silent = linux.the(State::Idle).await?;
    linux.set(json!({ "timeouts": { "registration": "4s" } })).await?;
    world.stage.machines.freeze(&silent)?;
    linux.cloud.forge_signal(&silent, Signal::Registered, "1").await?;
    linux.claim("build", "8620", json!({})).await?;
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers.len() == 1 && ready.workers[0].name != silent, "{ready:?}");
    linux.until_ended(&silent, FailureReason::RegistrationTimeout).await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// I8: a machine in service whose heartbeat stops is shown as stale and left alone: it may be in the middle of a job.
pub async fn i8_a_silent_machine_in_service_is_shown_and_left_alone(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "timeouts": { "heartbeat": "20s" } })).await?;
    linux.claim("build", "8630", json!({})).await?;
    let id = linux.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let heart = |worker: &Worker| Some(worker.status.as_ref()?.heartbeat.as_ref()?.state);
    world.stage.machines.freeze(&id)?;
    let stale = |worker: &Worker| heart(worker) == Some(HeartbeatState::Stale);
    world.until::<Worker>(&linux.namespace, &id, "stale", stale).await?;
    ensure!(linux.cloud.record(&id).await?.is_some_and(|record| record.state == State::Running), "it still serves");
    world.stage.machines.thaw(&id)?;
    let fresh = |worker: &Worker| heart(worker) == Some(HeartbeatState::Fresh);
    world.until::<Worker>(&linux.namespace, &id, "fresh again", fresh).await?;
    linux.release("build").await?;
    linux.until_pooled(1).await?;
    linux.clean_up().await
}

/// I4: EC2 gives fewer machines than asked: the claim holds none, those that came are ended, the pooled one goes back.
pub async fn i4_partial_capacity_fails_the_claim_and_keeps_nothing(world: &World) -> Result<()> {
    // A type of this test's own, so that its limit is nobody else's.
    let types = json!({ "allowedInstanceTypes": ["m5a.large"] });
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 9, "defaults": types })).await?;
    linux.set(json!({ "maxInstances": 9, "defaults": types })).await?;
    let warm = linux.the(State::Idle).await?;
    world.stage.aws.set_capacity(limit("m5a.large", 1));
    linux.claim("build", "8640", json!({ "count": 4 })).await?;
    let told = |status: &RunnerClaimStatus| why(status).0 == "InsufficientCapacity" && status.workers.is_empty();
    let told = linux.until_claim("build", "without capacity", told).await?;
    ensure!(why(&told).1.contains("insufficient capacity in zones") && why(&told).1.contains("us-east-1"), "{told:?}");
    linux.until_running(std::slice::from_ref(&warm)).await?;
    linux.until_record(&warm, "idle", is_pooled).await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// With no capacity anywhere the claim says so, zone by zone, and keeps nothing.
pub async fn total_capacity_loss_is_told_by_zone(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "defaults": { "allowedInstanceTypes": ["m5ad.large"] } })).await?;
    world.stage.aws.set_capacity(limit("m5ad.large", 0));
    linux.claim("build", "8650", json!({})).await?;
    let told = |status: &RunnerClaimStatus| why(status).0 == "InsufficientCapacity";
    let told = linux.until_claim("build", "without capacity", told).await?;
    let zones = world.stage.aws.subnets();
    ensure!(zones.iter().all(|(_, zone)| why(&told).1.contains(zone.as_str())), "{told:?}");
    ensure!(linux.instances().is_empty(), "nothing was launched");
    linux.release("build").await?;
    linux.clean_up().await
}

fn limit(instance_type: &str, available: u32) -> Limit {
    Limit { zone: "*".into(), instance_type: instance_type.into(), usage: None, available }
}

/// I2: a fleet whose answer is lost is asked for again, and is the same fleet.
pub async fn i2_a_lost_create_fleet_answer_makes_no_second_fleet(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({})).await?;
    let lost = Rule::on(Service::Ec2, "CreateFleet", Effect::LostResponse).containing(&linux.key()).times(2);
    let lost = linux.fault(lost);
    linux.claim("build", "8660", json!({ "count": 2 })).await?;
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(lost.hits() == 2, "two answers were lost, not {}", lost.hits());
    ensure!(ready.workers.len() == 2 && linux.instances().len() == 2, "{ready:?} {:?}", linux.instances());
    linux.release("build").await?;
    linux.clean_up().await
}

/// A machine that EC2 does not list at first is young, not gone.
pub async fn a_machine_that_ec2_does_not_list_yet_is_not_given_up(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({})).await?;
    let hidden = Duration::from_secs(35); // longer than the time between two sweeps
    let unlisted = Effect::Invisible { ms: hidden.as_millis() as u64 };
    let _unlisted = linux.fault(Rule::on(Service::Ec2, "CreateFleet", unlisted).containing(&linux.key()));
    let swept =
        linux.fault(Rule::on(Service::Ec2, "DescribeInstances", Effect::Delay { ms: 1 }).containing(&linux.key()));
    linux.claim("build", "8670", json!({})).await?;
    let id = linux.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let before = swept.hits();
    world.until_true("it was swept while hidden", async || Ok(swept.hits() > before)).await?;
    let record = linux.cloud.record(&id).await?.context("it has a record")?;
    ensure!(record.state == State::Running, "{record:?}");
    linux.release("build").await?;
    linux.until_record(&id, "idle", is_pooled).await?;
    linux.clean_up().await
}

/// I2: a termination that EC2 denies is shown in the pool, tried again, and done when it may be.
pub async fn i2_a_denied_termination_is_shown_and_tried_again(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = linux.the(State::Idle).await?;
    let denied = Effect::error("UnauthorizedOperation");
    let denied = linux.fault(Rule::on(Service::Ec2, "TerminateInstances", denied).containing(&id));
    // Frozen, it cannot end itself either.
    world.stage.machines.freeze(&id)?;
    linux
        .set(json!({ "maxInstances": 1, "lifetimes": { "maxRuntime": "1s" }, "timeouts": { "registration": "1s" } }))
        .await?;
    linux.claim("build", "8680", json!({})).await?;
    let shown = |status: &paddock::api::RunnerPoolStatus| {
        let (reason, message) = pool_why(status);
        reason == "AwsDenied" && message.contains("TerminateInstances")
    };
    linux.until_pool("denied", shown).await?;
    world.until_true("its end was tried again", async || Ok(denied.hits() > 1)).await?;
    let runs = linux.instances().iter().any(|i| i.id == id && i.state == InstanceState::Running);
    ensure!(runs, "it still runs");
    drop(denied);
    linux.until_gone_at_ec2(&id).await?;
    linux.until_pool("Ready", |status| pool_why(status).0 == "Ready").await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// I12: a table that throttles everybody slows a claim, no more.
pub async fn i12_a_throttled_table_slows_a_claim_and_breaks_nothing(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let throttled = linux.fault(Rule::all(Service::DynamoDb, Effect::Throttle));
    linux.claim("build", "8690", json!({ "count": 2 })).await?;
    let told = |status: &RunnerClaimStatus| why(status).1.contains("throttles");
    linux.until_claim("build", "slowed", told).await?;
    drop(throttled);
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers.len() == 2 && linux.instances().len() == 2, "{ready:?}");
    linux.release("build").await?;
    linux.until_pooled(2).await?;
    linux.clean_up().await
}

/// A table that somebody deleted is made anew. Machines that nothing is known of end, and others take their place.
pub async fn i2_a_deleted_table_is_made_anew(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 3 })).await?;
    let forgotten = linux.the(State::Idle).await?;
    linux.cloud.delete_table().await?;
    linux.until_pool_said("the table was deleted").await?;
    linux.until_gone_at_ec2(&forgotten).await?;
    let replaced = async || {
        // There may be no table to ask.
        let idle = linux.ids(State::Idle).await.unwrap_or_default();
        Ok(idle.iter().any(|id| *id != forgotten))
    };
    world.until_true("another machine is warm", replaced).await?;
    linux.claim("build", "8696", json!({})).await?;
    linux.until_phase("build", ClaimPhase::Ready).await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// What somebody removed at AWS is made again: queue, launch template, the record of an idle machine.
pub async fn drift_at_aws_is_repaired(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 3 })).await?;
    let status = linux.pool_status().await?;
    let (queue, template) = (linux.queue().await?, status.launch_template.context("a pool has a template")?.id);
    let idle = linux.the(State::Idle).await?;
    linux.cloud.delete_queue(&queue).await?;
    linux.cloud.delete_template(&template).await?;
    // One sweep finds that the queue is gone, and a later one that the offer is.
    world.until_true("the queue is there again", async || linux.cloud.has_queue(&queue).await).await?;
    let offered = async || Ok(linux.cloud.offers(&queue).await?.contains(&idle));
    world.until_true("the machine is offered again", offered).await?;
    let another = |status: &paddock::api::RunnerPoolStatus| {
        status.launch_template.as_ref().is_some_and(|now| now.id != template) && pool_why(status).0 == "Ready"
    };
    linux.until_pool("with another template", another).await?;

    let launched = linux.instances().len();
    linux.cloud.delete_record(&idle).await?;
    linux.until_gone_at_ec2(&idle).await?;
    world.until_true("another machine is launched", async || Ok(linux.instances().len() > launched)).await?;
    let replaced = async || Ok(linux.ids(State::Idle).await?.iter().any(|id| *id != idle));
    world.until_true("another machine is warm", replaced).await?;
    linux.claim("build", "8695", json!({})).await?;
    linux.until_phase("build", ClaimPhase::Ready).await?;
    linux.release("build").await?;
    linux.clean_up().await
}
