//! The service behind the runner's stand-in. GitHub's protocol is not public, so this is our own: register, open a
//! session, wait for a job, watch for its cancellation, finish it, close the session.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{FromRequestParts, Path, Query, State},
    http::{StatusCode, request::Parts},
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};

use crate::{
    gate,
    hub::Hub,
    model::*,
    runner::files::{self, Files},
    world::{World, same_scope},
};

/// A long poll without a result ends after this time; the runner polls again.
const LONG_POLL: Duration = Duration::from_secs(50);

#[derive(Debug, Serialize, Deserialize)]
pub struct Registration {
    /// `owner` or `owner/repository`.
    pub path: String,
    pub token: String,
    pub name: String,
    pub labels: Vec<String>,
    pub default_labels: Vec<String>,
    pub group: Option<String>,
    pub replace: bool,
    pub ephemeral: bool,
    pub work_folder: String,
}

/// A job as the runner gets it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Assignment {
    pub id: u64,
    pub run_id: u64,
    pub name: String,
    pub repository: String,
    pub duration_ms: Option<u64>,
    pub script: Option<String>,
}

/// The end of a job, as reported by or to a runner.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ending {
    pub conclusion: Conclusion,
}

pub fn router(hub: &Arc<Hub>) -> Router<Arc<Hub>> {
    Router::new()
        .route("/_runner/register", post(register))
        .route("/_runner/remove", post(remove))
        .route("/_runner/session", post(open).delete(close))
        .route("/_runner/message", get(message))
        .route("/_runner/jobs/{job}/order", get(order))
        .route("/_runner/jobs/{job}/finish", post(finish))
        .layer(from_fn_with_state(Arc::clone(hub), gate::faults))
}

type Reply = Result<Response, (StatusCode, String)>;

fn scope_of(path: &str) -> Scope {
    match path.split_once('/') {
        Some((owner, name)) => Scope::Repository(owner.to_owned(), name.to_owned()),
        None => Scope::Organization(path.to_owned()),
    }
}

fn token_fits(world: &World, token: &str, kind: RunnerTokenKind, scope: &Scope, now: jiff::Timestamp) -> bool {
    let known = world.runner_tokens.get(token);
    known.is_some_and(|known| known.kind == kind && same_scope(&known.scope, scope) && known.expires_at > now)
}

async fn register(State(hub): State<Arc<Hub>>, Json(asked): Json<Registration>) -> Reply {
    let scope = scope_of(&asked.path);
    hub.change(|world, now| {
        if !token_fits(world, &asked.token, RunnerTokenKind::Registration, &scope, now) {
            return Err((StatusCode::NOT_FOUND, "Not Found".into()));
        }
        let wanted = asked.group.as_deref().unwrap_or("Default");
        let in_scope = |group: &&Group| same(&group.owner, scope.owner()) && same(&group.name, wanted);
        let group = match (&scope, world.groups.iter().find(in_scope)) {
            (Scope::Repository(..), _) => DEFAULT_GROUP,
            (_, Some(group)) => group.id,
            (_, None) => {
                let message = format!("Could not find any self-hosted runner group named \"{wanted}\".");
                return Err((StatusCode::BAD_REQUEST, message));
            }
        };
        let known = world.runners_of(&scope).find(|runner| same(&runner.name, &asked.name));
        match known.map(|runner| (runner.id, runner.job)) {
            Some((id, None)) if asked.replace => drop(world.runners.remove(&id)),
            Some(_) => {
                return Err((StatusCode::CONFLICT, format!("A runner exists with the same name {}.", asked.name)));
            }
            None => {}
        }
        let mut runner = world.add_runner(scope, &asked.name, group, asked.ephemeral, now);
        runner.default_labels = asked.default_labels.len();
        runner.labels = asked.default_labels;
        runner.os = "Linux";
        for label in asked.labels {
            if !runner.labels.iter().any(|known| same(known, &label)) {
                runner.labels.push(label);
            }
        }
        world.runners.insert(runner.id, runner.clone());
        let (group, admin_flow) = (world.group_name(&runner), world.admin_flow);
        let files: Files = files::of(&world.html, &runner, &group, &asked.work_folder, admin_flow);
        Ok(Json(files).into_response())
    })
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Removal {
    pub runner: u64,
    pub token: String,
}

async fn remove(State(hub): State<Arc<Hub>>, Json(asked): Json<Removal>) -> Reply {
    hub.change(|world, now| {
        let runner = world.runners.get(&asked.runner);
        let scope = runner.map(|runner| runner.scope.clone());
        match (runner, scope) {
            (Some(runner), Some(scope)) if token_fits(world, &asked.token, RunnerTokenKind::Removal, &scope, now) => {
                if runner.job.is_some() {
                    let message = format!("Runner \"{}\" is still running a job", runner.name);
                    return Err((StatusCode::UNPROCESSABLE_ENTITY, message));
                }
                world.runners.remove(&asked.runner);
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            (None, _) => Err((StatusCode::GONE, "{\"message\":\"Not Found\"}".into())),
            // What GitHub answers to a token that it does not know was not measured.
            _ => Err((StatusCode::UNAUTHORIZED, "{\"message\":\"Bad credentials\"}".into())),
        }
    })
}

/// The runner that the request's secret belongs to.
struct Me(u64);

impl FromRequestParts<Arc<Hub>> for Me {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, hub: &Arc<Hub>) -> Result<Self, Self::Rejection> {
        let header = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
        let secret = header.and_then(|header| header.strip_prefix("Bearer ")).unwrap_or_default();
        let found = hub.read(|world, _| world.runners.values().find(|runner| runner.secret == secret).map(|r| r.id));
        found.map(Me).ok_or((StatusCode::GONE, "The runner registration has been deleted from the server"))
    }
}

async fn open(State(hub): State<Arc<Hub>>, Me(me): Me) -> Reply {
    hub.change(|world, now| {
        let offline_after = world.timeouts.offline_after;
        let runner = world.runners.get_mut(&me).ok_or((StatusCode::GONE, String::new()))?;
        if runner.online(now, offline_after) {
            return Err((StatusCode::CONFLICT, "A session for this runner already exists.".into()));
        }
        (runner.session, runner.os) = (Some(Session::Connected { polls: 0, last_seen: now }), "Linux");
        Ok(StatusCode::NO_CONTENT.into_response())
    })
}

/// Closes the session: the runner is offline at once. An assigned job that it has not received is requeued; one that it
/// has received fails after a while.
async fn close(State(hub): State<Arc<Hub>>, Me(me): Me) -> Reply {
    hub.change(|world, now| {
        let runner = world.runners.get_mut(&me).ok_or((StatusCode::GONE, String::new()))?;
        let heard = runner.job.is_some_and(|job| world.jobs[&job].heard);
        runner.session = heard.then_some(Session::Connected { polls: 0, last_seen: now });
        if let Some(job) = runner.job.take_if(|_| !heard) {
            world.requeue(job);
        }
        Ok(StatusCode::NO_CONTENT.into_response())
    })
}

/// Keeps a runner online while it has an open long poll.
struct Presence {
    hub: Arc<Hub>,
    runner: u64,
}

impl Presence {
    fn new(hub: &Arc<Hub>, runner: u64) -> Self {
        let presence = Self { hub: Arc::clone(hub), runner };
        presence.add(1);
        presence
    }

    fn add(&self, by: i32) {
        self.hub.change(|world, now| {
            let session = world.runners.get_mut(&self.runner).and_then(|runner| runner.session.as_mut());
            if let Some(Session::Connected { polls, last_seen }) = session {
                *polls = polls.saturating_add_signed(by);
                *last_seen = now;
            }
        });
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.add(-1);
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Poll {
    runner_version: Option<String>,
}

async fn message(State(hub): State<Arc<Hub>>, Me(me): Me, Query(poll): Query<Poll>) -> Reply {
    let version = poll.runner_version.unwrap_or_default();
    if hub.read(|world, _| world.refused_versions.contains(&version)) {
        return Err((
            StatusCode::FORBIDDEN,
            format!("Runner version v{version} is deprecated and cannot receive messages."),
        ));
    }
    let _presence = Presence::new(&hub, me);
    let assigned = hub.until(|world, _| match world.runners.get(&me) {
        None => Some(Err((StatusCode::GONE, "The runner registration has been deleted from the server".to_owned()))),
        Some(runner) if runner.session.is_none() => Some(Err((StatusCode::CONFLICT, "There is no session".into()))),
        Some(runner) => runner.job.map(Ok),
    });
    let Ok(assigned) = tokio::time::timeout(LONG_POLL, assigned).await else {
        return Ok(StatusCode::NO_CONTENT.into_response());
    };
    let job = assigned?;
    hub.read(|world, _| {
        let job = &world.jobs[&job];
        let (id, run_id, name) = (job.id, job.run_id, job.name.clone());
        let (duration_ms, script) = (job.duration.map(|duration| duration.as_millis() as u64), job.script.clone());
        let repository = world.repository_by_id(world.runs[&run_id].repository);
        let repository = format!("{}/{}", repository.owner, repository.name);
        Ok(Json(Assignment { id, run_id, name, repository, duration_ms, script }).into_response())
    })
}

/// Polled by a runner during a job; answers when the job is to be stopped early.
async fn order(State(hub): State<Arc<Hub>>, Me(me): Me, Path(job): Path<u64>) -> Reply {
    hub.change(|world, _| {
        let mine = world.runners.get(&me).is_some_and(|runner| runner.job == Some(job));
        world.jobs.get_mut(&job).filter(|_| mine).map(|job| job.heard = true)
    });
    let _presence = Presence::new(&hub, me);
    let order = hub.until(|world, _| {
        let job = world.jobs.get(&job)?;
        job.order.or(job.conclusion)
    });
    match tokio::time::timeout(LONG_POLL, order).await {
        Ok(conclusion) => Ok(Json(Ending { conclusion }).into_response()),
        Err(_) => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}

async fn finish(State(hub): State<Arc<Hub>>, Me(me): Me, Path(job): Path<u64>, Json(end): Json<Ending>) -> Reply {
    hub.change(|world, now| {
        if world.runners.get(&me).is_some_and(|runner| runner.job == Some(job)) {
            world.finish_job(job, end.conclusion, now);
        }
    });
    Ok(StatusCode::NO_CONTENT.into_response())
}
