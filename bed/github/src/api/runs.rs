//! Workflow runs and their jobs.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State},
    http::{StatusCode, Uri},
    response::IntoResponse,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Answer, At, Refusal, created, list, ok};
use crate::{
    hub::Hub,
    model::{Conclusion, Job, Run, Scope, Status},
    pages::Page,
    world::World,
};

fn repository_id(world: &World, at: &At) -> Result<u64, Refusal> {
    match &at.scope {
        Scope::Repository(owner, name) => world.repository(owner, name).map(|found| found.id),
        Scope::Organization(_) => None,
    }
    .ok_or_else(Refusal::not_found)
}

fn run_at<'a>(world: &'a World, at: &At) -> Result<&'a Run, Refusal> {
    let repository = repository_id(world, at)?;
    let run = world.runs.get(&at.id("run_id")?);
    run.filter(|run| run.repository == repository).ok_or_else(Refusal::not_found)
}

fn job_at<'a>(world: &'a World, at: &At) -> Result<&'a Job, Refusal> {
    let repository = repository_id(world, at)?;
    let job = world.jobs.get(&at.id("job_id")?);
    job.filter(|job| world.runs[&job.run_id].repository == repository).ok_or_else(Refusal::not_found)
}

pub async fn job(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.read(|world, _| ok(world.job_json(job_at(world, &at)?)))
}

#[derive(Deserialize)]
pub struct Filter {
    /// A status or a conclusion.
    status: Option<String>,
}

/// Newest first.
pub async fn list_runs(
    State(hub): State<Arc<Hub>>,
    at: At,
    Query(page): Query<Page>,
    Query(filter): Query<Filter>,
    uri: Uri,
) -> Answer {
    let all: Vec<Value> = hub.read(|world, _| {
        let repository = repository_id(world, &at)?;
        let wanted = |run: &&Run| match &filter.status {
            None => true,
            Some(status) => json!(run.status) == json!(status) || json!(run.conclusion) == json!(status),
        };
        let of_repository = world.runs.values().rev().filter(|run| run.repository == repository);
        Ok(of_repository.filter(wanted).map(|run| world.run_json(run)).collect())
    })?;
    list(&hub, &uri, &page, "workflow_runs", &all)
}

pub async fn run(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.read(|world, _| ok(world.run_json(run_at(world, &at)?)))
}

#[derive(Deserialize)]
pub struct Attempts {
    /// `latest` or `all`.
    filter: Option<String>,
}

pub async fn jobs(
    State(hub): State<Arc<Hub>>,
    at: At,
    Query(page): Query<Page>,
    Query(attempts): Query<Attempts>,
    uri: Uri,
) -> Answer {
    let every = attempts.filter.as_deref() == Some("all");
    let all: Vec<Value> = hub.read(|world, _| {
        let run = run_at(world, &at)?.id;
        let of_run = |job: &&Job| job.run_id == run && (every || !job.superseded);
        Ok(world.jobs.values().filter(of_run).map(|job| world.job_json(job)).collect())
    })?;
    list(&hub, &uri, &page, "jobs", &all)
}

/// Runs the failed jobs again. GitHub's refusals: https://github.com/metabase/metabase/pull/70916
pub async fn rerun_failed(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.change(|world, now| {
        let run = run_at(world, &at)?;
        if run.status != Status::Completed {
            return Err(Refusal::new(StatusCode::FORBIDDEN, "This workflow is already running"));
        }
        let id = run.id;
        let failed = |job: &&Job| {
            let bad = [Some(Conclusion::Failure), Some(Conclusion::Cancelled), Some(Conclusion::TimedOut)];
            job.run_id == id && !job.superseded && bad.contains(&job.conclusion)
        };
        let jobs: Vec<u64> = world.jobs.values().filter(failed).map(|job| job.id).collect();
        if jobs.is_empty() {
            return Err(Refusal::new(StatusCode::FORBIDDEN, "This workflow run cannot be retried"));
        }
        world.rerun(id, &jobs, now);
        created(json!({}))
    })
}

/// Runs one job again. GitHub's refusal: https://github.com/NVIDIA-NeMo/RL/pull/1193
pub async fn rerun_job(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.change(|world, now| {
        let (id, run) = job_at(world, &at).map(|job| (job.id, job.run_id))?;
        if world.runs[&run].status != Status::Completed {
            let message = "The workflow run containing this job is already running";
            return Err(Refusal::new(StatusCode::FORBIDDEN, message));
        }
        world.rerun(run, &[id], now);
        created(json!({}))
    })
}

pub async fn cancel(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    stop(&hub, &at, World::stop_job)
}

pub async fn force_cancel(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    stop(&hub, &at, World::finish_job)
}

fn stop(hub: &Arc<Hub>, at: &At, stop: impl Fn(&mut World, u64, Conclusion, jiff::Timestamp)) -> Answer {
    hub.change(|world, now| {
        let run = run_at(world, at)?;
        if run.status == Status::Completed {
            return Err(Refusal::new(StatusCode::CONFLICT, "Cannot cancel a workflow run that is completed."));
        }
        for job in world.jobs_of_run(run.id) {
            stop(world, job, Conclusion::Cancelled, now);
        }
        Ok((StatusCode::ACCEPTED, Json(json!({}))).into_response())
    })
}
