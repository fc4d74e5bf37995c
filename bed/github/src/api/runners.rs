//! Self-hosted runners of an organisation or a repository; both have the same routes.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Query, State},
    http::{StatusCode, Uri},
    response::IntoResponse,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Answer, At, Body, Refusal, created, list, ok};
use crate::{
    clock::stamp,
    hub::Hub,
    model::{DEFAULT_GROUP, RunnerToken, RunnerTokenKind, Scope, same, signed},
    pages::Page,
    runner::files::{self, Files},
    world::secret,
};

/// Registration and remove tokens expire after an hour.
const TOKEN_LIFE: Duration = Duration::from_secs(3600);

#[derive(Deserialize)]
pub struct Filter {
    name: Option<String>,
}

pub async fn list_runners(
    State(hub): State<Arc<Hub>>,
    at: At,
    Query(page): Query<Page>,
    Query(filter): Query<Filter>,
    uri: Uri,
) -> Answer {
    let all: Vec<Value> = hub.read(|world, now| {
        let wanted = |name: &str| filter.name.as_ref().is_none_or(|wanted| same(wanted, name));
        let found = world.runners_of(&at.scope).filter(|runner| wanted(&runner.name));
        found.map(|runner| world.runner_json(runner, now)).collect()
    });
    list(&hub, &uri, &page, "runners", &all)
}

pub async fn show(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    let id = at.id("runner_id")?;
    hub.read(|world, now| {
        let runner = world.runner_in(&at.scope, id).ok_or_else(Refusal::not_found)?;
        ok(world.runner_json(runner, now))
    })
}

pub async fn remove(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    let id = at.id("runner_id")?;
    hub.change(|world, _| {
        let runner = world.runner_in(&at.scope, id).ok_or_else(Refusal::not_found)?;
        if runner.job.is_some() {
            let message = format!("Bad request - Runner \"{}\" is still running a job\"", runner.name);
            return Err(Refusal::invalid(&message));
        }
        world.runners.remove(&id);
        Ok(StatusCode::NO_CONTENT.into_response())
    })
}

#[derive(Deserialize)]
pub struct JitRequest {
    name: String,
    runner_group_id: u64,
    labels: Vec<String>,
    work_folder: Option<String>,
}

pub async fn jit_config(State(hub): State<Arc<Hub>>, at: At, Body(request): Body<JitRequest>) -> Answer {
    if request.name.is_empty() || request.name.len() > 64 || !(1..=100).contains(&request.labels.len()) {
        return Err(Refusal::invalid("Invalid request: a name of 1 to 64 characters and 1 to 100 labels are needed."));
    }
    hub.change(|world, now| {
        let group = request.runner_group_id;
        let known = match &at.scope {
            Scope::Organization(owner) => world.group(owner, group).is_some(),
            Scope::Repository(..) => group == DEFAULT_GROUP,
        };
        if !known {
            return Err(Refusal::not_found());
        }
        if world.runners_of(&at.scope).any(|runner| same(&runner.name, &request.name)) {
            let message = format!("Already exists - A runner with the name '{}' already exists.", request.name);
            return Err(Refusal::new(StatusCode::CONFLICT, &message));
        }
        let mut runner = world.add_runner(at.scope.clone(), &request.name, group, true, now);
        runner.labels = request.labels;
        world.runners.insert(runner.id, runner.clone());
        let work_folder = request.work_folder.as_deref().unwrap_or("_work");
        let files: Files = files::of(&world.html, &runner, &world.group_name(&runner), work_folder, world.admin_flow);
        let config = STANDARD.encode(json!(files::encoded(&files)).to_string());
        created(json!({"runner": world.runner_json(&runner, now), "encoded_jit_config": config}))
    })
}

pub async fn registration_token(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    token(&hub, at, RunnerTokenKind::Registration)
}

pub async fn remove_token(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    token(&hub, at, RunnerTokenKind::Removal)
}

/// 29 capitals and digits.
fn runner_token() -> String {
    secret("A").to_uppercase().chars().take(29).collect()
}

fn token(hub: &Hub, at: At, kind: RunnerTokenKind) -> Answer {
    hub.note(|world, now| {
        let (token, expires_at) = (runner_token(), now + signed(TOKEN_LIFE));
        world.runner_tokens.insert(token.clone(), RunnerToken { kind, scope: at.scope, expires_at });
        created(json!({"token": token, "expires_at": stamp(expires_at)}))
    })
}
