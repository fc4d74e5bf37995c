//! Claims, pools and namespaces can be deleted at any time.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{Api, api::DeleteParams};
use paddock::api::{ClaimPhase, RunnerClaim, RunnerPool};
use paddock_bed::{
    github::{Conclusion, Effect, Fault, JobRequest, Status},
    stage::{CREDENTIALS, ORGANIZATION, REPOSITORY},
};
use paddock_record::State;
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, POOL, is_pooled, never_done, pool_why, why},
    world::{DEADLINE, World},
};

/// I2, I11: a claim can be deleted in every phase, and its machines end or return to the pool.
pub async fn i11_a_claim_can_be_deleted_in_every_phase(world: &World) -> Result<()> {
    let pending = async {
        let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
        pool.claim("first", "8739", json!({})).await?;
        pool.until_phase("first", ClaimPhase::Ready).await?;
        pool.claim("build", "8740", json!({})).await?;
        pool.until_claim("build", "waiting for room", |status| why(status).0 == "PoolFull").await?;
        pool.release("build").await?;
        pool.release("first").await?;
        pool.until_pooled(1).await?;
        pool.clean_up().await
    };
    let claiming = async {
        let settings = json!({ "minIdle": 1, "maxInstances": 1, "timeouts": { "registration": "10m" } });
        let pool = Ec2Pool::new(world, settings).await?;
        let id = pool.the(State::Idle).await?;
        world.stage.machines.freeze(&id)?;
        pool.claim("build", "8741", json!({})).await?;
        pool.until_record(&id, "claimed", |record| record.state == State::Claimed).await?;
        pool.release("build").await?;
        world.stage.machines.thaw(&id)?;
        pool.until_record(&id, "idle", is_pooled).await?;
        ensure!(pool.runners().is_empty(), "I2: {:?}", pool.runners());
        pool.clean_up().await
    };
    let creating = async {
        let pool = Ec2Pool::new(world, json!({ "preRunnerScript": never_done() })).await?;
        pool.claim("build", "8742", json!({ "count": 2 })).await?;
        pool.until_phase("build", ClaimPhase::Validating).await?;
        pool.release("build").await?;
        pool.until_running(&[]).await?;
        pool.clean_up().await
    };
    let at_once = async {
        let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 2 })).await?;
        for number in 0..5 {
            let name = format!("build-{number}");
            pool.claim(&name, &format!("875{number}"), json!({ "count": 2 })).await?;
            // At a different moment each time.
            tokio::time::sleep(std::time::Duration::from_millis(number * 150)).await;
            pool.delete_claim(&name).await?;
        }
        for number in 0..5 {
            world.until_gone::<RunnerClaim>(&pool.namespace, &format!("build-{number}")).await?;
        }
        let settled = async || {
            let records = pool.records().await?;
            let idle = records.values().all(is_pooled) && !records.is_empty();
            Ok(idle && pool.runners().is_empty() && pool.running().iter().eq(records.keys()))
        };
        world.until_true("every machine runs, is idle and has left GitHub", settled).await?;
        pool.clean_up().await
    };
    tokio::try_join!(pending, claiming, creating, at_once).map(drop)
}

/// I8, I11: a deleted pool waits for its claims and says so; their jobs continue.
pub async fn i11_a_deleted_pool_waits_for_its_claims(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    pool.claim("build", "8760", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let job = world.stage.github.queue_job(JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec!["8760".into()],
        ..JobRequest::default()
    })?;
    world.stage.github.until_job(job.id, DEADLINE, |job| job.status == Status::InProgress && job.heard).await?;
    world.api::<RunnerPool>(&pool.namespace).delete(POOL, &DeleteParams::default()).await?;
    pool.until_pool("waiting", |status| pool_why(status).1.contains("waiting for 1 claims")).await?;
    world.stage.github.finish_job(job.id, Conclusion::Success);
    world.stage.github.until_job(job.id, DEADLINE, |job| job.status == Status::Completed).await?;
    let job = world.stage.github.job(job.id).context("GitHub knows the job")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "I8: {job:?}");
    pool.release("build").await?;
    world.until_gone::<RunnerPool>(&pool.namespace, POOL).await?;
    pool.until_running(&[]).await?;
    pool.until_no_runners().await
}

/// I11: deleting a namespace deletes everything in it, in any order, and leaves nothing at AWS or GitHub.
pub async fn i11_namespace_with_pools_and_claims_can_be_deleted(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 3 })).await?;
    pool.claim("ready", "8770", json!({})).await?;
    pool.until_phase("ready", ClaimPhase::Ready).await?;
    pool.claim("coming", "8771", json!({})).await?;
    let namespaces: Api<Namespace> = Api::all(world.stage.kube.client());
    namespaces.delete(&pool.namespace, &DeleteParams::default()).await?;
    let gone = async || Ok(namespaces.get_opt(&pool.namespace).await?.is_none());
    world.until_true("the namespace is gone", gone).await?;
    // A machine that was being launched is found and terminated later.
    let none = async || {
        let records = pool.cloud.records(&pool.key()).await?;
        Ok(records.is_empty() && pool.running().is_empty() && pool.runners().is_empty())
    };
    world.until_true("no machine, no record and no runner is left", none).await
}

/// I11: a deleted claim whose machines cannot deregister waits, says why, and is gone once they can.
pub async fn i11_a_deleted_claim_waits_for_github_and_says_so(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    pool.claim("build", "8780", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let down = Effect::Status { status: 503, retry_after: None, reset_in: None };
    world.stage.github.fault(Fault::new("POST", "/orgs/*/actions/runners/remove-token", down));
    pool.delete_claim("build").await?;
    let waits = pool.until_claim("build", "waiting for GitHub", |status| why(status).0 == "GitHubUnavailable").await;
    world.stage.github.clear_faults();
    waits?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    pool.until_pooled(1).await?;
    pool.clean_up().await
}

/// I11: a claim can be deleted even if the credentials to deregister its runners are gone: its machines end.
pub async fn i11_claim_can_be_deleted_after_its_credentials(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    pool.claim("build", "8790", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    world.api::<Secret>(&pool.namespace).delete(CREDENTIALS, &DeleteParams::default()).await?;
    // The next operator has never read the Secret.
    world.kill_operator()?;
    world.start_operator().await?;
    pool.release("build").await?;
    pool.clean_up().await
}
