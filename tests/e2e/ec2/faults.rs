//! AWS refuses, throttles or loses what the operator relies on.

use anyhow::{Context, Result, bail, ensure};
use kube::api::{DeleteParams, Patch, PatchParams};
use paddock::api::{ClaimPhase, FailureReason, RunnerClaimStatus, RunnerPool, RunnerPoolStatus};
use paddock_bed::{
    aws::{
        InstanceState, Service,
        faults::{Effect, Rule},
    },
    stage::ORGANIZATION,
};
use paddock_record::{State, attribute};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, is_pooled, pool_why, why},
    world::World,
};

/// I2: a termination that EC2 denies is shown in the pool's condition and retried until it succeeds.
pub async fn i2_denied_termination_is_shown_and_retried(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = pool.the(State::Idle).await?;
    let denied = Effect::error("UnauthorizedOperation");
    let denied = pool.fault(Rule::on(Service::Ec2, "TerminateInstances", denied).containing(&id));
    // Frozen, the machine cannot shut itself down either.
    world.stage.machines.freeze(&id)?;
    pool.set(json!({ "maxInstances": 1, "lifetimes": { "maxRuntime": "1s" }, "timeouts": { "registration": "1s" } }))
        .await?;
    pool.claim("build", "8680", json!({})).await?;
    let shown = |status: &RunnerPoolStatus| {
        let (reason, message) = pool_why(status);
        reason == "AwsDenied" && message.contains("TerminateInstances")
    };
    pool.until_pool("denied", shown).await?;
    world.until_true("the termination was retried", async || Ok(denied.hits() > 1)).await?;
    let runs = pool.instances().iter().any(|i| i.id == id && i.state == InstanceState::Running);
    ensure!(runs, "the machine still runs");
    drop(denied);
    pool.until_gone_at_ec2(&id).await?;
    pool.until_pool("Ready", |status| pool_why(status).0 == "Ready").await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// I12: a table that throttles every request delays a claim, no more.
pub async fn i12_a_throttled_table_slows_a_claim_and_breaks_nothing(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
    let throttled = pool.fault(Rule::all(Service::DynamoDb, Effect::Throttle));
    pool.claim("build", "8690", json!({ "count": 2 })).await?;
    let told = |status: &RunnerClaimStatus| why(status).1.contains("throttles");
    pool.until_claim("build", "delayed by throttling", told).await?;
    drop(throttled);
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers.len() == 2 && pool.instances().len() == 2, "{ready:?}");
    pool.release("build").await?;
    pool.until_pooled(2).await?;
    pool.clean_up().await
}

/// I2: a deleted table is created again. Machines without a record are terminated and replaced.
pub async fn i2_deleted_table_is_recreated(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 3 })).await?;
    let unknown = pool.the(State::Idle).await?;
    pool.cloud.delete_table().await?;
    pool.until_pool_said("the table was deleted").await?;
    pool.until_gone_at_ec2(&unknown).await?;
    let replaced = async || {
        // The table may not exist yet.
        let idle = pool.ids(State::Idle).await.unwrap_or_default();
        Ok(idle.iter().any(|id| *id != unknown))
    };
    world.until_true("another machine is warm", replaced).await?;
    pool.claim("build", "8696", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// What was removed at AWS is created again: queue, launch template, the record of an idle machine.
pub async fn drift_at_aws_is_repaired(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 3 })).await?;
    let status = pool.pool_status().await?;
    let (queue, template) = (pool.queue().await?, status.launch_template.context("a pool has a template")?.id);
    let idle = pool.the(State::Idle).await?;
    pool.cloud.delete_queue(&queue).await?;
    pool.cloud.delete_template(&template).await?;
    // One sweep finds that the queue is missing, a later one that the machine's message is.
    world.until_true("the queue exists again", async || pool.cloud.has_queue(&queue).await).await?;
    let queued = async || Ok(pool.cloud.queued_ids(&queue).await?.contains(&idle));
    world.until_true("the queue has a message for the machine again", queued).await?;
    let another = |status: &RunnerPoolStatus| {
        status.launch_template.as_ref().is_some_and(|now| now.id != template) && pool_why(status).0 == "Ready"
    };
    pool.until_pool("with another template", another).await?;

    let launched = pool.instances().len();
    pool.cloud.delete_record(&idle).await?;
    pool.until_gone_at_ec2(&idle).await?;
    world.until_true("another machine is launched", async || Ok(pool.instances().len() > launched)).await?;
    let replaced = async || Ok(pool.ids(State::Idle).await?.iter().any(|id| *id != idle));
    world.until_true("another machine is warm", replaced).await?;
    pool.claim("build", "8695", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// I2: a machine that cannot be terminated keeps nothing else from being noticed and ended.
pub async fn i2_stuck_machine_stops_no_sweep(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 2, "maxInstances": 3, "lifetimes": { "idle": "30s" } })).await?;
    let [stuck, lost] = &pool.ids(State::Idle).await?[..] else { bail!("two machines are idle") };
    let denied = Rule::on(Service::Ec2, "TerminateInstances", Effect::error("OperationNotPermitted"));
    let denied = pool.fault(denied.containing(stuck));
    // Frozen, it cannot shut itself down either.
    world.stage.machines.freeze(stuck)?;
    pool.cloud.edit_record(stuck, &[(attribute::STATE, State::Terminated.as_str())], &[]).await?;
    world.until_true("it is to be terminated", async || Ok(denied.hits() > 0)).await?;
    world.stage.aws.terminate(lost).await?;
    pool.until_ended(lost, FailureReason::InstanceGone).await?;
    drop(denied);
    pool.until_gone_at_ec2(stuck).await?;
    pool.clean_up().await
}

/// I2, I3: without SQS released machines wait for their message, and lost ones are still noticed.
pub async fn i2_lost_machine_is_noticed_without_sqs(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 2, "maxInstances": 2 })).await?;
    pool.claim("build", "9300", json!({})).await?;
    let served = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let lost = pool.the(State::Idle).await?;
    let down = pool.fault(Rule::all(Service::Sqs, Effect::error("ServiceUnavailable")).containing(&pool.namespace));
    pool.release("build").await?;
    world.until_true("SQS was asked", async || Ok(down.hits() > 1)).await?;
    world.stage.aws.terminate(&lost).await?;
    pool.until_ended(&lost, FailureReason::InstanceGone).await?;
    drop(down);
    pool.until_record(&served, "pooled", is_pooled).await?;
    pool.clean_up().await
}

/// I2: a machine whose pool and record are gone is terminated.
pub async fn i2_machine_of_no_pool_is_terminated(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let stray = pool.the(State::Idle).await?;
    // Frozen, it cannot notice that its record is gone.
    world.stage.machines.freeze(&stray)?;
    let pools = world.api::<RunnerPool>(&pool.namespace);
    let removed = json!({ "metadata": { "finalizers": null } });
    pools.delete(POOL, &DeleteParams::default()).await?;
    pools.patch(POOL, &PatchParams::default(), &Patch::Merge(removed)).await?;
    world.until_gone::<RunnerPool>(&pool.namespace, POOL).await?;
    pool.cloud.delete_record(&stray).await?;
    pool.until_running(&[]).await
}

/// A pool whose Secret is missing or refused by GitHub is not Ready, and says what to do.
pub async fn pool_says_that_its_credentials_are_missing_or_refused(world: &World) -> Result<()> {
    let github = json!({ "owner": ORGANIZATION, "credentialsRef": { "name": "other" } });
    let pool = Ec2Pool::unready(world, json!({ "github": github })).await?;
    pool.until_pool("without credentials", |status| pool_why(status).0 == "CredentialsMissing").await?;
    let secret = |token: &str| {
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "other", "namespace": pool.namespace },
            "stringData": { "github_token": token },
        })
        .to_string()
    };
    world.stage.kube.apply(&secret("mistyped")).await?;
    pool.until_pool("refused by GitHub", |status| pool_why(status).0 == "CredentialsRefused").await?;
    pool.until_event(POOL, "CredentialsRefused").await?;
    let token = world.stage.github.personal_token(&[ORGANIZATION]);
    world.stage.kube.apply(&secret(&token)).await?;
    pool.until_pool("Ready", |status| pool_why(status).0 == "Ready").await?;
    pool.clean_up().await
}

/// Seed 003's dump: a claim that AWS keeps refusing fails after five tries; its machines end, and their records go.
pub async fn i4_claim_that_aws_keeps_refusing_is_dumped(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = pool.the(State::Idle).await?;
    // The first write with the run claims the machine; those that start it follow. The one that terminates it has no run.
    let refused = Rule::on(Service::DynamoDb, "UpdateItem", Effect::error("ValidationException"));
    let refused = pool.fault(refused.containing("\":runId\":{\"S\":\"9500\"}").skip(1));
    pool.claim("build", "9500", json!({})).await?;
    let retries = |status: &RunnerClaimStatus| why(status).1.contains("(try 1 of 5)") && status.retry_at.is_some();
    pool.until_claim("build", "retrying", retries).await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    let (reason, message) = why(&failed);
    ensure!(reason == "InternalError" && message.contains("ValidationException"), "{reason}: {message}");
    ensure!(refused.hits() >= 5 && failed.workers.is_empty(), "{} tries: {failed:?}", refused.hits());
    world.until_true("its record is gone", async || Ok(pool.cloud.record(&id).await?.is_none())).await?;
    ensure!(!pool.running().contains(&id), "it still runs");
    ensure!(!pool.runners().contains_key(&id), "its runner is removed: {:?}", pool.runners());
    pool.release("build").await?;
    pool.clean_up().await
}
