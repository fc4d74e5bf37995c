//! Apps, their installations, tokens and hook deliveries; owners and repositories.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Path, Query, RawPathParams, State},
    http::{StatusCode, Uri},
    response::IntoResponse,
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Answer, At, Body, By, Refusal, created, linked, list, ok, page_url};
use crate::{
    auth::{Caller, suspended},
    clock::stamp,
    hooks::{Delivery, HookSource, headers},
    hub::Hub,
    model::{Installation, Scope, Token, TokenKind, same, signed},
    pages::Page,
    rate::Window,
    world::{World, secret},
};

/// Installation tokens expire after an hour.
const TOKEN_LIFE: Duration = Duration::from_secs(3600);

/// Such a token is `ghs_<app>_<JWT>` since 2026, about 520 characters long (github.blog/changelog, "Notice about upcoming new
/// format for GitHub App installation tokens").
fn installation_token(app: u64) -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let (head, claims) = (part(json!({"alg": "RS256", "typ": "JWT"})), part(json!({"jti": secret("")})));
    format!("ghs_{app}_{head}.{claims}.{}", secret(&"s".repeat(360)))
}

fn installation_of(world: &World, app: u64, id: u64) -> Result<&Installation, Refusal> {
    world.installation(id).filter(|installation| installation.app_id == app).ok_or_else(Refusal::not_found)
}

pub async fn app(State(hub): State<Arc<Hub>>, By(caller): By) -> Answer {
    let id = caller.app()?;
    hub.read(|world, _| {
        let app = world.apps.iter().find(|app| app.id == id).ok_or_else(Refusal::not_found)?;
        ok(world.app_json(app))
    })
}

pub async fn installations(State(hub): State<Arc<Hub>>, By(caller): By, Query(page): Query<Page>, uri: Uri) -> Answer {
    let app = caller.app()?;
    let all: Vec<Value> = hub.read(|world, _| {
        let of_app = world.installations.iter().filter(|installation| installation.app_id == app);
        of_app.map(|installation| world.installation_json(installation)).collect()
    });
    Ok(linked(Json(page.of(&all)).into_response(), page.link(&page_url(&hub, &uri), all.len())))
}

pub async fn installation(State(hub): State<Arc<Hub>>, By(caller): By, Path(id): Path<u64>) -> Answer {
    let app = caller.app()?;
    hub.read(|world, _| ok(world.installation_json(installation_of(world, app, id)?)))
}

/// By organisation, user or repository.
pub async fn owner_installation(State(hub): State<Arc<Hub>>, By(caller): By, path: RawPathParams) -> Answer {
    let app = caller.app()?;
    let part = |wanted: &str| path.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value);
    let number = part("repository_id").and_then(|id| id.parse::<u64>().ok());
    hub.read(|world, _| {
        let numbered = world.repositories.iter().find(|known| Some(known.id) == number);
        let owner = numbered.map(|known| known.owner.as_str()).or_else(|| path.iter().next().map(|(_, owner)| owner));
        let repository = numbered.map(|known| known.name.as_str()).or_else(|| part("repo"));
        let owner = owner.unwrap_or_default();
        let found = world.installations.iter().find(|installation| {
            installation.app_id == app
                && same(&installation.owner, owner)
                && repository.is_none_or(|name| {
                    world.repository(owner, name).is_some_and(|repository| {
                        installation.repositories.as_ref().is_none_or(|only| only.contains(&repository.id))
                    })
                })
        });
        ok(world.installation_json(found.ok_or_else(Refusal::not_found)?))
    })
}

#[derive(Deserialize)]
pub struct TokenRequest {
    repositories: Option<Vec<String>>,
    repository_ids: Option<Vec<u64>>,
}

pub async fn access_token(
    State(hub): State<Arc<Hub>>,
    By(caller): By,
    Path(id): Path<u64>,
    Body(request): Body<TokenRequest>,
) -> Answer {
    let app = caller.app()?;
    hub.note(|world, now| {
        let installation = installation_of(world, app, id)?;
        if installation.suspended_at.is_some() {
            return Err(suspended());
        }
        let seen = |repository: Option<u64>| {
            repository.filter(|id| installation.repositories.as_ref().is_none_or(|only| only.contains(id)))
        };
        let by_name = |name: &String| seen(world.repository(&installation.owner, name).map(|found| found.id));
        let by_id = |id: &u64| {
            let found = world.repositories.iter().find(|found| found.id == *id && same(&found.owner, &installation.owner));
            seen(found.map(|found| found.id))
        };
        let asked: Option<Vec<Option<u64>>> = match (&request.repositories, &request.repository_ids) {
            (None, None) => None,
            (names, ids) => {
                let names = names.iter().flatten().map(by_name);
                Some(names.chain(ids.iter().flatten().map(by_id)).collect())
            }
        };
        let repositories = asked.map(|asked| asked.into_iter().collect::<Option<Vec<u64>>>());
        let repositories = match repositories {
            Some(None) => return Err(Refusal::invalid("There is at least one repository that does not exist or is not accessible to the parent installation.")),
            Some(some) => some,
            None => None,
        };
        let selection = if repositories.is_some() || installation.repositories.is_some() { "selected" } else { "all" };
        let permissions = installation.permissions.clone();
        let (token, expiry) = (installation_token(app), now + signed(TOKEN_LIFE));
        let kind = TokenKind::Installation { id, repositories };
        world.tokens.insert(token.clone(), Token { kind, expires_at: Some(expiry) });
        created(json!({
            "token": token,
            "expires_at": stamp(expiry),
            "permissions": permissions,
            "repository_selection": selection,
        }))
    })
}

pub async fn repositories(State(hub): State<Arc<Hub>>, By(caller): By, Query(page): Query<Page>, uri: Uri) -> Answer {
    let Caller::Installation { owner, repositories, .. } = caller else {
        return Err(Refusal::new(
            StatusCode::FORBIDDEN,
            "You must authenticate with an installation access token in order to list repositories for an installation.",
        ));
    };
    let all: Vec<Value> = hub.read(|world, _| {
        let seen = world.repositories.iter().filter(|repository| {
            same(&repository.owner, &owner) && repositories.as_ref().is_none_or(|only| only.contains(&repository.id))
        });
        seen.map(|repository| world.repository_json(repository)).collect()
    });
    list(&hub, &uri, &page, "repositories", &all)
}

pub async fn organization(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    hub.read(|world, _| ok(world.full_organization_json(world.owner(at.owner()).ok_or_else(Refusal::not_found)?)))
}

pub async fn repository(State(hub): State<Arc<Hub>>, at: At) -> Answer {
    let Scope::Repository(owner, name) = &at.scope else { return Err(Refusal::not_found()) };
    hub.read(|world, _| ok(world.repository_json(world.repository(owner, name).ok_or_else(Refusal::not_found)?)))
}

pub async fn rate_limit(State(hub): State<Arc<Hub>>, By(caller): By) -> Answer {
    let limit = hub.options.hourly_limit;
    let window = hub.read(|world, now| {
        world
            .windows
            .get(&caller.account())
            .filter(|window| window.reset > now)
            .cloned()
            .unwrap_or_else(|| Window::new(now))
    });
    let left = limit.saturating_sub(window.used);
    let core = json!({"limit": limit, "used": window.used, "remaining": left, "reset": window.reset.as_second()});
    ok(json!({"resources": {"core": core, "search": core}, "rate": core}))
}

pub async fn hook_config(State(hub): State<Arc<Hub>>, By(caller): By) -> Answer {
    let source = HookSource::App(caller.app()?);
    hub.read(|world, _| {
        let hook = world.hooks.iter().find(|hook| hook.source == source).ok_or_else(Refusal::not_found)?;
        ok(json!({"content_type": "json", "insecure_ssl": "0", "secret": "********", "url": hook.url}))
    })
}

#[derive(Deserialize)]
pub struct HookConfig {
    url: Option<String>,
    secret: Option<String>,
}

pub async fn set_hook_config(hub: State<Arc<Hub>>, By(caller): By, Body(config): Body<HookConfig>) -> Answer {
    let source = HookSource::App(caller.app()?);
    hub.note(|world, _| {
        let hook = world.hooks.iter_mut().find(|hook| hook.source == source).ok_or_else(Refusal::not_found)?;
        hook.url = config.url.unwrap_or_else(|| hook.url.clone());
        hook.secret = config.secret.unwrap_or_else(|| hook.secret.clone());
        Ok(())
    })?;
    hook_config(hub, By(caller)).await
}

#[derive(Deserialize)]
pub struct Cursor {
    per_page: Option<usize>,
    cursor: Option<String>,
    status: Option<String>,
}

/// The fields that the list and the single delivery share.
fn delivery_json(delivery: &Delivery) -> Map<String, Value> {
    let outcome = delivery.outcome.as_ref();
    let value = json!({
        "id": delivery.id,
        "guid": delivery.guid,
        "delivered_at": stamp(delivery.delivered_at),
        "redelivery": delivery.redelivery,
        "duration": outcome.map_or(0.0, |outcome| outcome.seconds),
        "status": outcome.map_or("pending", |outcome| &outcome.status),
        "status_code": outcome.map_or(0, |outcome| outcome.status_code),
        "event": delivery.event,
        "action": delivery.action,
        "installation_id": delivery.installation_id,
        "repository_id": delivery.repository_id,
        "throttled_at": null,
    });
    value.as_object().cloned().unwrap_or_default()
}

/// Newest first; the cursor is the last delivery of the previous page.
pub async fn deliveries(State(hub): State<Arc<Hub>>, By(caller): By, Query(at): Query<Cursor>, uri: Uri) -> Answer {
    let source = HookSource::App(caller.app()?);
    let after = at.cursor.as_ref().map(|cursor| cursor.strip_prefix("v1_").and_then(|id| id.parse::<u64>().ok()));
    if after == Some(None) {
        return Err(Refusal::invalid("The provided cursor is invalid."));
    }
    let after = after.flatten();
    let wanted = |delivery: &&Delivery| match (at.status.as_deref(), &delivery.outcome) {
        (None, _) => true,
        (Some(status), Some(outcome)) => (status == "success") == (200..300).contains(&outcome.status_code),
        (Some(_), None) => false,
    };
    let size = at.per_page.unwrap_or(30).clamp(1, 100);
    let mut found: Vec<(u64, Map<String, Value>)> = hub.read(|world, _| {
        let hook = world.hooks.iter().find(|hook| hook.source == source).map(|hook| hook.id);
        let of_app = world.deliveries.iter().rev().filter(|delivery| Some(delivery.hook) == hook && !delivery.held);
        let rest = of_app.filter(|delivery| after.is_none_or(|after| delivery.id < after)).filter(wanted);
        rest.take(size + 1).map(|delivery| (delivery.id, delivery_json(delivery))).collect()
    });
    let more = found.len() > size;
    found.truncate(size);
    let url = page_url(&hub, &uri);
    let separator = if url.contains('?') { '&' } else { '?' };
    let next = found.last().filter(|_| more);
    let link = next.map(|(id, _)| format!("<{url}{separator}per_page={size}&cursor=v1_{id}>; rel=\"next\""));
    let page: Vec<_> = found.into_iter().map(|(_, delivery)| delivery).collect();
    Ok(linked(Json(page).into_response(), link))
}

/// The App's delivery with this id.
fn delivery_of(world: &World, app: u64, id: u64) -> Result<&Delivery, Refusal> {
    let hook = world.hooks.iter().find(|hook| hook.source == HookSource::App(app));
    let delivery = world.deliveries.iter().find(|delivery| delivery.id == id && !delivery.held);
    delivery.filter(|delivery| hook.is_some_and(|hook| hook.id == delivery.hook)).ok_or_else(Refusal::not_found)
}

pub async fn delivery(State(hub): State<Arc<Hub>>, By(caller): By, Path(id): Path<u64>) -> Answer {
    let app = caller.app()?;
    hub.read(|world, _| {
        let delivery = delivery_of(world, app, id)?;
        let hook = world.hooks.iter().find(|hook| hook.id == delivery.hook).ok_or_else(Refusal::not_found)?;
        let sent: Map<String, Value> =
            headers(hook, delivery).into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
        let payload: Value = serde_json::from_str(&delivery.body).unwrap_or_default();
        let mut whole = delivery_json(delivery);
        whole.insert("url".into(), json!(hook.url));
        whole.insert("request".into(), json!({"headers": sent, "payload": payload}));
        let response = delivery.outcome.as_ref().map_or("", |outcome| &outcome.response);
        whole.insert("response".into(), json!({"headers": {}, "payload": response}));
        ok(whole.into())
    })
}

pub async fn redeliver(State(hub): State<Arc<Hub>>, By(caller): By, Path(id): Path<u64>) -> Answer {
    let app = caller.app()?;
    let delivery = hub.note(|world, now| {
        delivery_of(world, app, id)?;
        world.redeliver(id, now).ok_or_else(Refusal::not_found)
    })?;
    hub.send([delivery]);
    Ok((StatusCode::ACCEPTED, Json(json!({}))).into_response())
}
