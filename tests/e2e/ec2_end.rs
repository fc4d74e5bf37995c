//! How machines, claims and pools end: by time, by deletion, together with their namespace.

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{Api, api::DeleteParams};
use paddock::api::{ClaimPhase, FailureReason, RunnerClaim, RunnerPool};
use paddock_bed::{
    aws::{
        Service,
        faults::{Effect, Rule},
    },
    github::{Conclusion, Effect as FaultAtGitHub, Fault, JobRequest, Status},
    stage::{CREDENTIALS, ORGANIZATION, REPOSITORY},
};
use paddock_record::{EXPIRY_SLACK, State};
use serde_json::json;

use crate::{
    linux::{Linux, POOL, is_pooled, never_done, pool_why, why},
    support::{DEADLINE, World},
};

/// A machine that is never done with its start is ended by the operator, and its claim fails.
pub async fn i2_the_operator_ends_a_machine_whose_time_to_start_is_up(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "preRunnerScript": never_done(), "lifetimes": { "created": "5s" } })).await?;
    linux.claim("build", "8700", json!({})).await?;
    let failed = linux.until_phase("build", ClaimPhase::Failed).await?;
    ensure!(failed.workers.is_empty(), "I4: {failed:?}");
    let id = linux.instances().first().context("one was launched")?.id.clone();
    linux.until_ended(&id, FailureReason::ThresholdPassed).await?;
    linux.release("build").await?;
    linux.clean_up().await
}

/// A claimed machine that stays silent longer than it may is ended, and the claim gets another.
pub async fn i2_the_operator_ends_a_claimed_machine_whose_time_is_up(world: &World) -> Result<()> {
    let settings = json!({ "minIdle": 1, "lifetimes": { "claimed": "4s" }, "timeouts": { "registration": "10m" } });
    let linux = Linux::new(world, settings.clone()).await?;
    let id = linux.the(State::Idle).await?;
    let mut no_more = settings;
    no_more["minIdle"] = json!(0);
    linux.set(no_more).await?;
    world.stage.machines.freeze(&id)?;
    linux.claim("build", "8710", json!({})).await?;
    linux.until_ended(&id, FailureReason::ThresholdPassed).await?;
    let ready = linux.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers[0].name != id, "{ready:?}");
    linux.release("build").await?;
    linux.clean_up().await
}

/// A machine serves no longer than `maxRuntime`, and waits no longer than its idle time.
pub async fn i2_the_operator_ends_machines_in_service_and_idle_ones_whose_time_is_up(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "lifetimes": { "idle": "5s" } })).await?;
    // Long enough for the claim to be Ready before its machine ends: otherwise it has failed.
    linux.claim("short", "8720", json!({ "maxRuntime": "10s" })).await?;
    linux.claim("long", "8721", json!({})).await?;
    let (short, long) =
        (linux.until_phase("short", ClaimPhase::Completed), linux.until_phase("long", ClaimPhase::Ready));
    let (short, long) = tokio::try_join!(short, long)?;
    ensure!(short.workers.is_empty() && why(&short).0 == "MaxRuntimeReached", "{short:?}");
    let idle = long.workers[0].name.clone();
    for id in linux.instances().into_iter().map(|instance| instance.id).filter(|id| *id != idle) {
        linux.until_ended(&id, FailureReason::ThresholdPassed).await?;
    }
    linux.release("short").await?;
    linux.release("long").await?;
    linux.until_ended(&idle, FailureReason::ThresholdPassed).await?;
    linux.clean_up().await
}

/// I2: where the operator cannot move a record any more, the machine ends itself a minute after its time, in whatever
/// state it is.
pub async fn i2_machines_end_themselves_in_every_state_when_the_operator_does_not(world: &World) -> Result<()> {
    // One machine for each state; the operator's hand is cut off from each record once it is in that state, and before its
    // time there is up.
    let created = async {
        let settings = json!({ "preRunnerScript": never_done(), "lifetimes": { "created": "20s" } });
        let linux = Linux::new(world, settings).await?;
        linux.claim("build", "8730", json!({})).await?;
        let id = linux.the(State::Created).await?;
        alone(linux, id).await
    };
    let claimed = async {
        let settings = json!({
            "minIdle": 1, "maxInstances": 1, "lifetimes": { "claimed": "20s" }, "timeouts": { "registration": "10m" },
        });
        let linux = Linux::new(world, settings).await?;
        let id = linux.the(State::Idle).await?;
        world.stage.machines.freeze(&id)?;
        linux.claim("build", "8731", json!({})).await?;
        linux.until_record(&id, "claimed", |record| record.state == State::Claimed).await?;
        let cut = cut_off(&linux, &id);
        world.stage.machines.thaw(&id)?;
        ended(linux, id, cut).await
    };
    let idle = async {
        let linux =
            Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1, "lifetimes": { "idle": "30s" } })).await?;
        let id = linux.the(State::Idle).await?;
        alone(linux, id).await
    };
    let running = async {
        let linux = Linux::new(world, json!({})).await?;
        linux.claim("build", "8732", json!({ "maxRuntime": "20s" })).await?;
        let id = linux.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
        alone(linux, id).await
    };
    tokio::try_join!(created, claimed, idle, running).map(drop)
}

fn cut_off<'a>(linux: &Linux<'a>, id: &str) -> [crate::linux::Faulty<'a>; 2] {
    let denied = |service, action| Rule::on(service, action, Effect::error("AccessDeniedException")).containing(id);
    [linux.fault(denied(Service::DynamoDb, "UpdateItem")), linux.fault(denied(Service::Ec2, "TerminateInstances"))]
}

async fn alone(linux: Linux<'_>, id: String) -> Result<()> {
    let cut = cut_off(&linux, &id);
    ended(linux, id, cut).await
}

async fn ended(linux: Linux<'_>, id: String, cut: [crate::linux::Faulty<'_>; 2]) -> Result<()> {
    let record = linux.cloud.record(&id).await?.context("its record is there")?;
    let last = record.threshold.context("its time is limited")? + EXPIRY_SLACK;
    linux.world.until_true("the machine's time is up", async || Ok(Timestamp::now() > last)).await?;
    linux.until_gone_at_ec2(&id).await?;
    let record = linux.cloud.record(&id).await?.context("its record is there")?;
    ensure!(record.state != State::Terminated, "nobody but the machine itself ended it: {record:?}");
    drop(cut);
    linux.set(json!({})).await?;
    let claims: Api<RunnerClaim> = linux.world.api(&linux.namespace);
    if claims.get_opt("build").await?.is_some() {
        linux.release("build").await?;
    }
    linux.clean_up().await
}

/// I2, I11: a claim can be deleted at any time; it goes, and what it had is ended or pooled again.
pub async fn i11_a_claim_can_be_deleted_in_every_phase(world: &World) -> Result<()> {
    let pending = async {
        let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
        linux.claim("build", "8740", json!({ "count": 2 })).await?;
        linux.until_claim("build", "waiting for room", |status| why(status).0 == "PoolFull").await?;
        linux.release("build").await?;
        linux.until_pooled(1).await?;
        linux.clean_up().await
    };
    let claiming = async {
        let settings = json!({ "minIdle": 1, "maxInstances": 1, "timeouts": { "registration": "10m" } });
        let linux = Linux::new(world, settings).await?;
        let id = linux.the(State::Idle).await?;
        world.stage.machines.freeze(&id)?;
        linux.claim("build", "8741", json!({})).await?;
        linux.until_record(&id, "claimed", |record| record.state == State::Claimed).await?;
        linux.release("build").await?;
        world.stage.machines.thaw(&id)?;
        linux.until_record(&id, "idle", is_pooled).await?;
        ensure!(linux.runners().is_empty(), "I2: {:?}", linux.runners());
        linux.clean_up().await
    };
    let creating = async {
        let linux = Linux::new(world, json!({ "preRunnerScript": never_done() })).await?;
        linux.claim("build", "8742", json!({ "count": 2 })).await?;
        linux.until_phase("build", ClaimPhase::Validating).await?;
        linux.release("build").await?;
        linux.until_running(&[]).await?;
        linux.clean_up().await
    };
    let at_once = async {
        let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
        for number in 0..5 {
            let name = format!("build-{number}");
            linux.claim(&name, &format!("875{number}"), json!({ "count": 2 })).await?;
            // At a different moment each time.
            tokio::time::sleep(std::time::Duration::from_millis(number * 150)).await;
            linux.delete_claim(&name).await?;
        }
        for number in 0..5 {
            world.until_gone::<RunnerClaim>(&linux.namespace, &format!("build-{number}")).await?;
        }
        let settled = async || {
            let records = linux.records().await?;
            let idle = records.values().all(is_pooled) && !records.is_empty();
            Ok(idle && linux.runners().is_empty() && linux.running().iter().eq(records.keys()))
        };
        world.until_true("whatever there is, is idle and runs", settled).await?;
        linux.clean_up().await
    };
    tokio::try_join!(pending, claiming, creating, at_once).map(drop)
}

/// I8, I11: a deleted pool waits for its claims and says so; their jobs run on.
pub async fn i11_a_deleted_pool_waits_for_its_claims(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    linux.claim("build", "8760", json!({})).await?;
    linux.until_phase("build", ClaimPhase::Ready).await?;
    let job = world.stage.github.queue_job(JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec!["8760".into()],
        ..JobRequest::default()
    })?;
    world.stage.github.until_job(job.id, DEADLINE, |job| job.status == Status::InProgress && job.heard).await?;
    world.api::<RunnerPool>(&linux.namespace).delete(POOL, &DeleteParams::default()).await?;
    linux.until_pool("waiting", |status| pool_why(status).1.contains("waiting for 1 claims")).await?;
    world.stage.github.finish_job(job.id, Conclusion::Success);
    world.stage.github.until_job(job.id, DEADLINE, |job| job.status == Status::Completed).await?;
    let job = world.stage.github.job(job.id).context("the job is known")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "I8: {job:?}");
    linux.release("build").await?;
    world.until_gone::<RunnerPool>(&linux.namespace, POOL).await?;
    linux.until_running(&[]).await?;
    linux.until_no_runners().await
}

/// I11: a namespace goes with everything in it, whatever goes first, and leaves nothing at AWS or GitHub.
pub async fn i11_a_namespace_goes_with_pools_and_claims_in_it(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 3 })).await?;
    linux.claim("ready", "8770", json!({})).await?;
    linux.until_phase("ready", ClaimPhase::Ready).await?;
    linux.claim("coming", "8771", json!({})).await?;
    let namespaces: Api<Namespace> = Api::all(world.stage.kube.client());
    namespaces.delete(&linux.namespace, &DeleteParams::default()).await?;
    let gone = async || Ok(namespaces.get_opt(&linux.namespace).await?.is_none());
    world.until_true("the namespace is gone", gone).await?;
    // A machine that was being launched is found and ended later.
    let none = async || {
        let records = linux.cloud.records(&linux.key()).await?;
        Ok(records.is_empty() && linux.running().is_empty() && linux.runners().is_empty())
    };
    world.until_true("no machine, no record and no runner is left", none).await
}

/// I11: a claim whose machines cannot leave GitHub waits, says why, and goes when they can.
pub async fn i11_a_deleted_claim_waits_for_github_and_says_so(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    linux.claim("build", "8780", json!({})).await?;
    linux.until_phase("build", ClaimPhase::Ready).await?;
    let down = FaultAtGitHub::Status { status: 503, retry_after: None, reset_in: None };
    world.stage.github.fault(Fault::new("POST", "/orgs/*/actions/runners/remove-token", down));
    linux.delete_claim("build").await?;
    let told = linux.until_claim("build", "waiting for GitHub", |status| why(status).0 == "GitHubUnavailable").await;
    world.stage.github.clear_faults();
    told?;
    world.until_gone::<RunnerClaim>(&linux.namespace, "build").await?;
    linux.until_pooled(1).await?;
    linux.clean_up().await
}

/// I11: a claim goes even if nobody has the credentials any more to take its runners from GitHub: its machines end.
pub async fn i11_a_claim_goes_without_its_credentials(world: &World) -> Result<()> {
    let linux = Linux::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    linux.claim("build", "8790", json!({})).await?;
    linux.until_phase("build", ClaimPhase::Ready).await?;
    world.api::<Secret>(&linux.namespace).delete(CREDENTIALS, &DeleteParams::default()).await?;
    // One that has never read the Secret.
    world.kill_operator()?;
    world.start_operator().await?;
    linux.release("build").await?;
    linux.clean_up().await
}
