//! The EC2 path, with the real user data and the real agent on every machine.

use anyhow::{Context, Result, ensure};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams},
};
use paddock::api::{ClaimPhase, RunnerClaim, RunnerPool, Worker, WorkerSource, WorkerState};
use paddock_bed::{
    aws::{Instance, InstanceState},
    stage::{ORGANIZATION, REPOSITORY},
};
use serde_json::json;

use crate::{linux::patient, support::World};

pub fn is_ready(claim: &RunnerClaim) -> bool {
    claim.status.as_ref().and_then(|status| status.phase) == Some(ClaimPhase::Ready)
}

fn state(worker: &Worker) -> Option<WorkerState> {
    worker.status.as_ref()?.state
}

/// Waits for the one idle Worker, which follows behind its machine, and whose machine can be claimed by its key.
async fn the_worker(world: &World, namespace: &str) -> Result<Worker> {
    let workers = world.api::<Worker>(namespace);
    let known = |worker: &Worker| worker.status.as_ref().is_some_and(|status| status.heartbeat.is_some());
    let mut only = None;
    let one = async || {
        let mut there = workers.list(&ListParams::default()).await?.items;
        let last = there.pop().filter(|_| there.is_empty());
        only = last.filter(|worker| state(worker) == Some(WorkerState::Idle) && known(worker));
        Ok(only.is_some())
    };
    world.until_true("there is one worker, and it is idle", one).await?;
    only.context("one worker")
}

fn queue_job(world: &World, run_id: &str) -> Result<u64> {
    let request = paddock_bed::github::JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec![run_id.into()],
        duration_ms: Some(100),
        ..Default::default()
    };
    Ok(world.stage.github.queue_job(request)?.id)
}

/// An idle machine is claimed, serves a job of its run alone, and goes back to the pool when the claim is deleted; the
/// second claim gets the same machine.
pub async fn claim_from_the_warm_pool_and_back(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    let pool = world.stage.ec2_pool(&namespace, "linux", patient(json!({ "minIdle": 1, "maxInstances": 1 })));
    world.stage.kube.apply(&pool.to_string()).await?;
    world
        .until::<RunnerPool>(&namespace, "linux", "warm", |pool| {
            pool.status.as_ref().is_some_and(|status| status.workers.idle == 1)
        })
        .await?;
    let id = the_worker(world, &namespace).await?.name_any();

    for run_id in ["7001", "7002"] {
        let claim = format!("build-{run_id}");
        world.stage.kube.apply(&world.stage.claim(&namespace, &claim, "linux", run_id, 1).to_string()).await?;
        let ready = world.until::<RunnerClaim>(&namespace, &claim, "Ready", is_ready).await?;
        let status = ready.status.context("a ready claim has a status")?;
        ensure!(status.progress == "1/1", "progress {}", status.progress);
        ensure!(status.workers[0].name == id, "the machine is reused");
        ensure!(status.workers[0].source == WorkerSource::Pool, "it came from the pool");
        let wait = ["wait", "-n", &namespace, "--for=condition=Ready", "--timeout=60s", "rclaim", &claim];
        ensure!(world.stage.kube.kubectl(&wait).await?.status.success(), "kubectl wait works");
        world.until::<Worker>(&namespace, &id, "running", |worker| state(worker) == Some(WorkerState::Running)).await?;

        let runners = world.stage.github.runners();
        let runner = runners.iter().find(|runner| runner.name == id).context("GitHub knows the runner")?;
        ensure!(runner.labels == [run_id], "the run id is the only label, not {:?}", runner.labels);
        let job = queue_job(world, run_id)?;
        world
            .until_true("the job was done on this runner", async || {
                let job = world.stage.github.job(job).context("the job exists")?;
                Ok(job.taken_by.as_ref().is_some_and(|runner| runner.runner_name == id) && job.conclusion.is_some())
            })
            .await?;

        world.api::<RunnerClaim>(&namespace).delete(&claim, &DeleteParams::default()).await?;
        world.until_gone::<RunnerClaim>(&namespace, &claim).await?;
        world.until::<Worker>(&namespace, &id, "idle", |worker| state(worker) == Some(WorkerState::Idle)).await?;
        world
            .until_true("the runner is deregistered", async || {
                Ok(world.stage.github.runners().iter().all(|runner| runner.name != id))
            })
            .await?;
    }
    clean_up(world, &namespace, "linux").await
}

/// With nothing in the pool a machine is created, and it joins the pool when it is released.
pub async fn claim_from_an_empty_pool(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    world.stage.kube.apply(&world.stage.ec2_pool(&namespace, "linux", patient(json!({}))).to_string()).await?;
    world.stage.kube.apply(&world.stage.claim(&namespace, "build", "linux", "7100", 2).to_string()).await?;
    let ready = world.until::<RunnerClaim>(&namespace, "build", "Ready", is_ready).await?;
    let status = ready.status.context("a ready claim has a status")?;
    ensure!(status.progress == "2/2" && status.workers.len() == 2, "{status:?}");
    ensure!(status.workers.iter().all(|worker| worker.source == WorkerSource::Created), "{status:?}");
    world.api::<RunnerClaim>(&namespace).delete("build", &DeleteParams::default()).await?;
    world
        .until::<RunnerPool>(&namespace, "linux", "full of idle machines", |pool| {
            pool.status.as_ref().is_some_and(|status| status.workers.idle == 2)
        })
        .await?;
    clean_up(world, &namespace, "linux").await
}

/// Deleting a pool ends its machines: nothing is left at AWS.
pub async fn clean_up(world: &World, namespace: &str, pool: &str) -> Result<()> {
    world.api::<RunnerPool>(namespace).delete(pool, &DeleteParams::default()).await?;
    world.until_gone::<RunnerPool>(namespace, pool).await?;
    let key = format!("{namespace}/{pool}");
    world
        .until_true("the pool's machines are gone", async || {
            let instances = world.stage.aws.instances();
            let ours = |instance: &&Instance| instance.tags.get("paddock:pool") == Some(&key);
            Ok(instances.iter().filter(ours).all(|instance| instance.state != InstanceState::Running))
        })
        .await
}
