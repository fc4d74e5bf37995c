//! EC2 takes spot machines back: what claims say, and what becomes of the jobs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::api::{Patch, PatchParams};
use paddock::api::{
    ANNOTATION_RUN_STATE, ClaimPhase, ClaimReason, FailureReason, RerunOutcome, RunnerClaim, RunnerClaimStatus, Worker,
};
use paddock_bed::{
    github::{Conclusion, Job, JobRequest, Status},
    stage::{ORGANIZATION, REPOSITORY},
};
use paddock_record::State;
use serde_json::{Value, json};

use crate::fixture::{
    ec2_pool::{Ec2Pool, why},
    world::World,
};

/// EC2's notice.
const NOTICE: Duration = Duration::from_mins(2);

/// A claim with one machine, and a job that runs on it.
async fn running_job(pool: &Ec2Pool<'_>, run: u64) -> Result<(u64, String)> {
    let github = &pool.world.stage.github;
    let repository = format!("{ORGANIZATION}/{REPOSITORY}");
    pool.claim("build", &run.to_string(), json!({ "repository": repository })).await?;
    let machine = pool.until_phase("build", ClaimPhase::Ready).await?.workers[0].name.clone();
    let request = JobRequest {
        owner: ORGANIZATION.into(),
        repo: REPOSITORY.into(),
        labels: vec![run.to_string()],
        run_id: Some(run),
        ..JobRequest::default()
    };
    let job = github.queue_job(request)?.id;
    pool.world.until_true("the job runs", async || Ok(github.job(job).is_some_and(|job| job.heard))).await?;
    Ok((job, machine))
}

/// EC2 takes the machine, and GitHub gives its job up, so that the run has completed.
async fn take_back(pool: &Ec2Pool<'_>, machine: &str, job: u64) -> Result<()> {
    pool.world.stage.machines.interrupt_spot(machine, Duration::ZERO)?;
    let lost = pool.until_phase("build", ClaimPhase::Failed).await?;
    let (reason, message) = why(&lost);
    ensure!(reason == ClaimReason::WorkerLost.as_str() && message.contains("spot_reclaimed"), "{message}");
    ensure!(lost.interruptions.len() == 1 && lost.interruptions[0].worker == *machine, "{lost:?}");
    pool.until_ended(machine, FailureReason::SpotReclaimed).await?;
    pool.world.stage.github.give_up_job(job);
    let completed = json!({ "metadata": { "annotations": { ANNOTATION_RUN_STATE: "completed" } } });
    let claims = pool.world.api::<RunnerClaim>(&pool.namespace);
    claims.patch("build", &PatchParams::default(), &Patch::Merge(completed)).await?;
    Ok(())
}

fn jobs_of(pool: &Ec2Pool<'_>, run: u64) -> Vec<Job> {
    let jobs = pool.world.stage.github.jobs().into_iter();
    jobs.filter(|job| job.run_id == run).collect()
}

fn spot(more: Value) -> Value {
    let mut settings = json!({ "defaults": { "usageClass": "spot" }, "maxInstances": 2 });
    if let (Value::Object(settings), Value::Object(more)) = (&mut settings, more) {
        settings.extend(more);
    }
    settings
}

/// The claim and the Worker say so as soon as EC2 has announced it; the job that failed by it runs again once, on
/// machines of a claim for it.
pub async fn interrupted_job_is_announced_and_run_again_once(world: &World) -> Result<()> {
    let (run, github) = (8650, &world.stage.github);
    let pool = Ec2Pool::new(world, spot(json!({ "rerunInterrupted": true }))).await?;
    let (job, machine) = running_job(&pool, run).await?;

    world.stage.machines.interrupt_spot(&machine, NOTICE)?;
    let announced = |status: &RunnerClaimStatus| why(status).0 == ClaimReason::SpotInterruption.as_str();
    let status = pool.until_claim("build", "announced to be interrupted", announced).await?;
    ensure!(why(&status).1.contains(&machine) && status.phase == Some(ClaimPhase::Ready), "{status:?}");
    pool.until_event("build", ClaimReason::SpotInterruption.as_str()).await?;
    let reclaimed = |worker: &Worker| worker.status.as_ref().is_some_and(|status| status.reclaimed);
    world.until::<Worker>(&pool.namespace, &machine, "about to be reclaimed", reclaimed).await?;
    ensure!(github.job(job).is_some_and(|job| job.status == Status::InProgress), "the job goes on");

    take_back(&pool, &machine, job).await?;
    let over = |status: &RunnerClaimStatus| status.rerun.as_ref().is_some_and(|rerun| rerun.outcome.is_some());
    let rerun = pool.until_claim("build", "done with its jobs", over).await?.rerun.context("just seen")?;
    ensure!(rerun.outcome == Some(RerunOutcome::Done) && rerun.attempt == Some(1), "{rerun:?}");
    pool.until_event("build", "Rerun").await?;
    let again = jobs_of(&pool, run);
    ensure!(again.len() == 2 && again[1].attempt == 2, "{again:?}");

    let next = rerun.claim.context("the jobs have machines")?;
    let worker = pool.until_phase(&next, ClaimPhase::Ready).await?.workers[0].name.clone();
    let runs = async || {
        let job = github.job(again[1].id).context("the job exists")?;
        Ok(job.heard && job.taken_by.is_some_and(|runner| runner.runner_name == worker))
    };
    world.until_true("the job runs again", runs).await?;
    github.finish_job(again[1].id, Conclusion::Failure);
    let done = async || Ok(github.job(again[1].id).is_some_and(|job| job.status == Status::Completed));
    world.until_true("it has failed by itself", done).await?;
    ensure!(jobs_of(&pool, run).len() == 2, "no third time: {:?}", jobs_of(&pool, run));
    pool.release(&next).await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// No claim gets an idle machine that EC2 has announced to take: it ends at once, and another one is kept warm.
pub async fn idle_machine_that_ec2_takes_back_is_replaced(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, spot(json!({ "minIdle": 1 }))).await?;
    let noticed = pool.the(State::Idle).await?;
    world.stage.machines.interrupt_spot(&noticed, Duration::from_hours(1))?;
    pool.until_ended(&noticed, FailureReason::SpotReclaimed).await?;
    let other = async || Ok(pool.ids(State::Idle).await?.pop().filter(|id| *id != noticed));
    let other = world.until_found("another machine is idle", other).await?;
    pool.claim("build", "8653", json!({})).await?;
    let ready = pool.until_phase("build", ClaimPhase::Ready).await?;
    ensure!(ready.workers[0].name == other, "{ready:?}");
    pool.release("build").await?;
    pool.clean_up().await
}

/// Without the pool's or GitHub's permission nothing is run again, and an Event says why.
pub async fn interrupted_job_that_is_not_run_again_is_explained(world: &World) -> Result<()> {
    let unwanted = Ec2Pool::new(world, spot(json!({}))).await?;
    explained(&unwanted, 8651, "rerunInterrupted").await?;

    let github = &world.stage.github;
    let app = github.app("read-only");
    let installation = github.install(app.id, ORGANIZATION)?;
    let permissions = json!({ "actions": "read", "metadata": "read", "organization_self_hosted_runners": "write" });
    github.restrict(installation, permissions.as_object().cloned(), None);
    let denied = Ec2Pool::in_namespace(world, world.namespace().await?);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "read-only", "namespace": denied.namespace },
        "stringData": { "github_app_id": app.id.to_string(), "github_app_private_key": app.private_key },
    });
    world.stage.kube.apply(&secret.to_string()).await?;
    let github = json!({ "owner": ORGANIZATION, "credentialsRef": { "name": "read-only" } });
    denied.set(spot(json!({ "rerunInterrupted": true, "github": github }))).await?;
    explained(&denied, 8652, "Actions: read and write").await
}

async fn explained(pool: &Ec2Pool<'_>, run: u64, words: &str) -> Result<()> {
    let (job, machine) = running_job(pool, run).await?;
    take_back(pool, &machine, job).await?;
    let over = |status: &RunnerClaimStatus| status.rerun.as_ref().is_some_and(|rerun| rerun.outcome.is_some());
    let rerun = pool.until_claim("build", "done with its jobs", over).await?.rerun.context("just seen")?;
    ensure!(rerun.outcome == Some(RerunOutcome::Skipped) && rerun.message.contains(words), "{rerun:?}");
    pool.until_event("build", "NotRerun").await?;
    ensure!(jobs_of(pool, run).len() == 1, "{:?}", jobs_of(pool, run));
    pool.release("build").await?;
    pool.clean_up().await
}
