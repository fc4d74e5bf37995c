//! What GitHub and the API server refuse, and objects that are not what they seem.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota, Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use paddock::api::{ClaimPhase, Failure, FailureReason, RunnerClaim, Worker, WorkerState};
use paddock_bed::github::{Conclusion, Effect, Fault};
use serde_json::{Value, json};

use crate::fixture::{
    board_pool::{BoardPool, late_runners, message},
    world::World,
};

const JIT: &str = "/orgs/{org}/actions/runners/generate-jitconfig";

fn failure(worker: Worker) -> Result<Failure> {
    worker.status.and_then(|status| status.failure).map(|failure| *failure).context("a failed worker says why")
}

async fn delete_claim(pool: &BoardPool<'_>, name: &str) -> Result<()> {
    pool.world.api::<RunnerClaim>(&pool.namespace).delete(name, &DeleteParams::default()).await?;
    Ok(())
}

/// Ends a pod as a kubelet does whose container exited with 0.
async fn end_pod_well(pool: &BoardPool<'_>, name: &str) -> Result<()> {
    let ended: Value = json!({ "status": { "phase": "Succeeded" } });
    let pods = pool.world.api::<Pod>(&pool.namespace);
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(ended)).await?;
    Ok(())
}

/// I8: a runner is not called gone because the App's installation is: its job goes on, and a new installation is found.
pub async fn i8_busy_runner_outlives_the_installation_of_the_app(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    let github = &world.stage.github;
    let job = pool.queue(None)?;
    let claim = pool.claim_for(&job).await?;
    let name = pool.until_running(&claim).await?;
    github.play_runner(&name)?;
    pool.annotate(&claim, "in_progress", Some(&name)).await?;
    github.uninstall(pool.installation);
    delete_claim(&pool, &claim).await?;
    pool.until_says(&claim, "the App is not installed").await?;
    let pod = world.api::<Pod>(&pool.namespace).get(&name).await?;
    ensure!(pod.metadata.deletion_timestamp.is_none(), "the pod of the busy runner is kept");
    github.install(world.stage.app_id(), &pool.login)?;
    pool.until_says(&claim, "busy").await?;
    github.finish_job(job.id, Conclusion::Success);
    world.until_gone::<RunnerClaim>(&pool.namespace, &claim).await?;
    let job = github.job(job.id).context("GitHub knows the job")?;
    ensure!(job.conclusion == Some(Conclusion::Success), "{job:?}");
    Ok(())
}

/// I11: an answer that GitHub does not document does not mean that the runner is busy. It is shown, and asked again.
pub async fn i11_unknown_answer_holds_up_no_deletion(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let odd = Effect::Status { status: 410, retry_after: None, reset_in: None };
    let route = format!("/orgs/{}/actions/runners/*", pool.login);
    world.stage.github.fault(Fault::new("DELETE", &route, odd).times(2));
    delete_claim(&pool, "build").await?;
    pool.until_says("build", "410").await?;
    world.until_gone::<RunnerClaim>(&pool.namespace, "build").await?;
    pool.until_no_runner(&name).await
}

/// A pod that ends well although its runner took no job is a failure: it backs off, and leaves no runner and no pod.
pub async fn pod_that_ends_well_without_a_job_is_a_failure(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    for with_job in [false, true] {
        let claim = if with_job { pool.claim_for(&pool.queue(None)?).await? } else { "by-hand".to_owned() };
        if !with_job {
            pool.claim(&claim).await?;
        }
        let name = pool.until_running(&claim).await?;
        end_pod_well(&pool, &name).await?;
        let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
        ensure!(failure.reason == FailureReason::RunnerWithoutJob, "{failure:?}");
        pool.until_says(&claim, "runner_without_job").await?;
        pool.until_no_runner(&name).await?;
        world.until_gone::<Pod>(&pool.namespace, &name).await?;
        delete_claim(&pool, &claim).await?;
        world.until_gone::<RunnerClaim>(&pool.namespace, &claim).await?;
    }
    Ok(())
}

/// A Worker that is made again under the name of one whose pod still ends does not take that pod for its own.
pub async fn worker_made_again_does_not_take_its_predecessors_pod(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let (pods, workers) = (world.api::<Pod>(&pool.namespace), world.api::<Worker>(&pool.namespace));
    let held = |finalizers: Value| Patch::Merge(json!({ "metadata": { "finalizers": finalizers } }));
    pods.patch(&name, &PatchParams::default(), &held(json!(["paddock.test/held"]))).await?;
    let (first, dying) = (workers.get(&name).await?.uid(), pods.get(&name).await?.uid());
    workers.delete(&name, &DeleteParams::default()).await?;
    world.until_gone::<Worker>(&pool.namespace, &name).await?;
    // The dying pod holds its slot.
    pool.add_node("other").await?;
    let again = |worker: &Worker| {
        let conditions = worker.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        worker.uid() != first && conditions.iter().any(|condition| condition.message.contains("earlier worker"))
    };
    world.until::<Worker>(&pool.namespace, &name, "made again, and waiting", again).await?;
    ensure!(world.stage.github.runner(&name).is_none(), "no runner is registered meanwhile");
    pods.patch(&name, &PatchParams::default(), &held(Value::Null)).await?;
    pool.until_worker(&name, WorkerState::Running).await?;
    let pod = pods.get(&name).await?;
    ensure!(pod.uid() != dying && pod.owner_references().iter().all(|owner| Some(&owner.uid) != first.as_ref()));
    Ok(())
}

/// A worker whose node was deleted fails with that reason, and another one takes over.
pub async fn deleted_node_fails_its_worker(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 2, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let worker = pool.until_worker(&name, WorkerState::Running).await?;
    let node = worker.status.and_then(|status| status.location).context("a running worker has a location")?;
    let nodes: Api<Node> = Api::all(world.stage.kube.client());
    nodes.delete(&node, &DeleteParams::default()).await?;
    let failure = failure(pool.until_worker(&name, WorkerState::Failed).await?)?;
    ensure!(failure.reason == FailureReason::NodeDeleted && failure.message.contains(&node), "{failure:?}");
    pool.until_no_runner(&name).await?;
    let other = pool.until_running("build").await?;
    ensure!(other != name, "another worker runs on the other node");
    Ok(())
}

/// What the API server refuses is shown in the claim, is tried again later, and leaves no runner at GitHub.
pub async fn refused_secret_is_shown_and_leaves_no_runner(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    let quotas = world.api::<ResourceQuota>(&pool.namespace);
    let none = json!({ "metadata": { "name": "none" }, "spec": { "hard": { "secrets": "0" } } });
    quotas.create(&PostParams::default(), &serde_json::from_value(none)?).await?;
    let counted = |quota: &ResourceQuota| quota.status.as_ref().is_some_and(|status| status.used.is_some());
    world.until::<ResourceQuota>(&pool.namespace, "none", "counted", counted).await?;
    pool.claim("build").await?;
    let claim = pool.until_says("build", "exceeded quota").await?;
    ensure!(message(&claim).contains("the next one is created at"), "it backs off: {}", message(&claim));
    let registered = || world.stage.github.runners().into_iter().any(|runner| runner.labels.contains(&pool.label));
    world.until_true("no runner is left", async || Ok(!registered())).await?;
    let (asked, made) = (pool.asked("POST", JIT), pool.workers().await?.len());
    ensure!(asked <= made as u64, "{asked} runners for {made} workers");
    let secrets = world.api::<Secret>(&pool.namespace).list(&ListParams::default()).await?.items;
    ensure!(secrets.iter().all(|secret| secret.type_.as_deref() != Some("paddock.dev/jit-config")));
    quotas.delete("none", &DeleteParams::default()).await?;
    pool.until_running("build").await.map(drop)
}

/// I2: a stray runner is also removed where no worker is active.
pub async fn i2_stray_runner_is_removed_where_no_worker_is_active(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.claim("build").await?;
    let name = pool.until_running("build").await?;
    let github = &world.stage.github;
    let like = github.runner(&name).context("the runner is registered")?;
    let job = pool.job(None)?;
    github.play_runner(&name)?;
    github.finish_job(job, Conclusion::Success);
    end_pod_well(&pool, &name).await?;
    pool.until_claim("build", ClaimPhase::Completed).await?;
    let prefix: String = name.split_inclusive('-').take(2).collect();
    let stray = format!("{prefix}stray-{}", pool.namespace);
    github.add_runner(&like, &stray);
    world.kill_operator()?;
    world.start_operator().await?;
    pool.until_no_runner(&stray).await
}
