//! Runner groups of an organisation.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    http::{StatusCode, Uri},
    response::IntoResponse,
};
use serde::Deserialize;
use serde_json::Value;

use super::{Answer, At, Body, Refusal, created, list, ok};
use crate::{
    hub::Hub,
    model::{Group, same},
    pages::Page,
    world::World,
};

#[derive(Deserialize)]
pub struct GroupRequest {
    name: String,
    visibility: Option<String>,
    selected_repository_ids: Option<Vec<u64>>,
    allows_public_repositories: Option<bool>,
}

fn group_at<'a>(world: &'a World, at: &At) -> Result<&'a Group, Refusal> {
    world.group(at.owner(), at.id("runner_group_id")?).ok_or_else(Refusal::not_found)
}

fn conflict(name: &str) -> Refusal {
    Refusal::new(StatusCode::CONFLICT, &format!("Role with name '{name}' already exists."))
}

fn check(request: &GroupRequest) -> Result<(), Refusal> {
    let known = request.visibility.as_deref().is_none_or(|text| ["all", "private", "selected"].contains(&text));
    match known && !request.name.trim().is_empty() {
        true => Ok(()),
        false => Err(Refusal::invalid("Validation Failed: a name, and a visibility of selected, all or private")),
    }
}

pub async fn list_groups(State(hub): State<Arc<Hub>>, at: At, Query(page): Query<Page>, uri: Uri) -> Answer {
    let all: Vec<Value> = hub.read(|world, _| {
        let of_owner = world.groups.iter().filter(|group| same(&group.owner, at.owner()));
        of_owner.map(|group| world.group_json(group)).collect()
    });
    list(&hub, &uri, &page, "runner_groups", &all)
}

pub async fn create(State(hub): State<Arc<Hub>>, at: At, Body(request): Body<GroupRequest>) -> Answer {
    check(&request)?;
    hub.change(|world, _| {
        if world.groups.iter().any(|group| same(&group.owner, at.owner()) && same(&group.name, &request.name)) {
            return Err(conflict(&request.name));
        }
        let group = Group {
            id: world.id(),
            owner: at.owner().to_owned(),
            name: request.name,
            default: false,
            visibility: request.visibility.unwrap_or_else(|| "all".into()),
            selected_repositories: request.selected_repository_ids.unwrap_or_default(),
            allows_public_repositories: request.allows_public_repositories.unwrap_or(false),
        };
        world.groups.push(group.clone());
        created(world.group_json(&group))
    })
}

pub async fn show(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.read(|world, _| ok(world.group_json(group_at(world, &at)?)))
}

pub async fn update(State(hub): State<Arc<Hub>>, at: At, Body(request): Body<GroupRequest>) -> Answer {
    check(&request)?;
    hub.change(|world, _| {
        let id = group_at(world, &at)?.id;
        let others = |group: &&mut Group| same(&group.owner, at.owner());
        let mut group = None;
        for known in world.groups.iter_mut().filter(others) {
            if known.id == id {
                group = Some(known);
            } else if same(&known.name, &request.name) {
                return Err(conflict(&request.name));
            }
        }
        let group = group.ok_or_else(Refusal::not_found)?;
        group.name = request.name;
        group.visibility = request.visibility.unwrap_or_else(|| group.visibility.clone());
        group.allows_public_repositories =
            request.allows_public_repositories.unwrap_or(group.allows_public_repositories);
        let group = group.clone();
        ok(world.group_json(&group))
    })
}

/// The default group stays; runners of a deleted group move there.
pub async fn remove(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.change(|world, _| {
        let group = group_at(world, &at)?;
        if group.default {
            return Err(Refusal::invalid("The default runner group cannot be deleted."));
        }
        let id = group.id;
        world.groups.retain(|group| !(group.id == id && same(&group.owner, at.owner())));
        let members = world.runners.values_mut().filter(|runner| runner.group_id == id);
        members.for_each(|runner| runner.group_id = crate::model::DEFAULT_GROUP);
        Ok(StatusCode::NO_CONTENT.into_response())
    })
}

pub async fn runners(State(hub): State<Arc<Hub>>, at: At, Query(page): Query<Page>, uri: Uri) -> Answer {
    let all = hub.read(|world, now| {
        let group = group_at(world, &at)?.id;
        let members = world.runners_of(&at.scope).filter(|runner| runner.group_id == group);
        Ok(members.map(|runner| world.runner_json(runner, now)).collect::<Vec<_>>())
    })?;
    list(&hub, &uri, &page, "runners", &all)
}
