//! A claim on an EC2 pool from its creation to its release.

use anyhow::{Context, Result, ensure};
use paddock::api::{ClaimPhase, Worker, WorkerSource, WorkerState};
use paddock_bed::{
    github::{JobRequest, Scope},
    stage::{ORGANIZATION, REPOSITORY},
};
use paddock_record::State;
use serde_json::json;

use crate::fixture::{ec2_pool::Ec2Pool, world::World};

/// An idle machine is claimed, runs a job of this run alone, and returns to the pool when the claim is deleted; the
/// next claim gets the same machine.
pub async fn claim_takes_warm_machine_and_returns_it(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let id = pool.the(State::Idle).await?;
    let github = &world.stage.github;

    for run_id in ["7001", "7002"] {
        let claim = format!("build-{run_id}");
        pool.claim(&claim, run_id, json!({})).await?;
        let status = pool.until_phase(&claim, ClaimPhase::Ready).await?;
        ensure!(status.progress == "1/1", "progress {}", status.progress);
        ensure!(status.workers[0].name == id, "the machine is reused: {status:?}");
        ensure!(status.workers[0].source == WorkerSource::Pool, "it came from the pool: {status:?}");
        let wait = ["wait", "-n", &pool.namespace, "--for=condition=Ready", "--timeout=60s", "rclaim", &claim];
        ensure!(world.stage.kube.kubectl(&wait).await?.status.success(), "kubectl wait works");
        until_worker(&pool, &id, WorkerState::Running).await?;

        let runner = github.runner(&id).context("GitHub knows the runner")?;
        ensure!(runner.labels == [run_id], "the run id is the only label, not {:?}", runner.labels);
        let request = JobRequest {
            owner: ORGANIZATION.into(),
            repo: REPOSITORY.into(),
            labels: vec![run_id.into()],
            duration_ms: Some(100),
            ..JobRequest::default()
        };
        let job = github.queue_job(request)?.id;
        let done = async || {
            let job = github.job(job).context("the job exists")?;
            Ok(job.taken_by.as_ref().is_some_and(|runner| runner.runner_name == id) && job.conclusion.is_some())
        };
        world.until_true("the job has run on this machine", done).await?;

        pool.release(&claim).await?;
        until_worker(&pool, &id, WorkerState::Idle).await?;
        let deregistered = async || Ok(github.runners().iter().all(|runner| runner.name != id));
        world.until_true("the runner is deregistered", deregistered).await?;
    }
    pool.clean_up().await
}

async fn until_worker(pool: &Ec2Pool<'_>, id: &str, state: WorkerState) -> Result<()> {
    let is = |worker: &Worker| worker.status.as_ref().and_then(|status| status.state) == Some(state);
    pool.world.until::<Worker>(&pool.namespace, id, state.as_str(), is).await.map(drop)
}

/// Machines are launched for a claim on an empty pool, even one that is not ready yet, and join the pool when they are
/// released.
pub async fn claim_on_empty_pool_launches_machines(world: &World) -> Result<()> {
    let pool = Ec2Pool::in_namespace(world, world.namespace().await?);
    pool.apply(json!({})).await?;
    pool.claim("build", "7100", json!({ "count": 2 })).await?;
    let status = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(status.progress == "2/2" && status.workers.len() == 2, "{status:?}");
    ensure!(status.workers.iter().all(|worker| worker.source == WorkerSource::Created), "{status:?}");
    pool.delete_claim("build").await?;
    pool.until_pool("full of idle machines", |status| status.workers.idle == 2).await?;
    pool.clean_up().await
}

/// A pool may use a personal token instead of an App, and register runners in a repository instead of an organisation.
pub async fn pool_with_personal_token_registers_runners_in_repository(world: &World) -> Result<()> {
    let pool = Ec2Pool::unready(world, json!({})).await?;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "token", "namespace": pool.namespace },
        "stringData": { "github_token": world.stage.github.personal_token(&[ORGANIZATION]) },
    });
    world.stage.kube.apply(&secret.to_string()).await?;
    let github = json!({ "owner": ORGANIZATION, "repository": REPOSITORY, "credentialsRef": { "name": "token" } });
    pool.set(json!({ "github": github })).await?;
    pool.claim("build", "8450", json!({})).await?;
    let id = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let runner = world.stage.github.runner(&id).context("GitHub knows the runner")?;
    ensure!(runner.scope == Scope::Repository(ORGANIZATION.into(), REPOSITORY.into()), "{runner:?}");
    pool.release("build").await?;
    pool.until_pooled(1).await?;
    pool.clean_up().await
}
