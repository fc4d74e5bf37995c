//! The subset of GitHub's REST API that the operator, its agents and their users need.

mod apps;
mod downloads;
mod groups;
mod runners;
mod runs;

use std::{collections::HashMap, sync::Arc};

use axum::{
    Json, Router,
    extract::{FromRequest, FromRequestParts, RawPathParams, Request, State},
    http::{HeaderValue, Method, StatusCode, Uri, request::Parts},
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::{
    auth::Caller,
    gate,
    hub::Hub,
    model::{OwnerKind, Scope},
    pages::Page,
};

pub const DOCS: &str = "https://docs.github.com/rest";

pub type Answer = Result<Response, Refusal>;

/// A refused request, with GitHub's own message.
#[derive(Debug)]
pub struct Refusal {
    status: StatusCode,
    message: String,
}

impl Refusal {
    pub fn new(status: StatusCode, message: &str) -> Self {
        Self { status, message: message.to_owned() }
    }

    pub fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not Found")
    }

    pub fn invalid(message: &str) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = self.status.as_u16().to_string();
        (self.status, Json(json!({"message": self.message, "documentation_url": DOCS, "status": status})))
            .into_response()
    }
}

pub fn ok(body: Value) -> Answer {
    Ok(Json(body).into_response())
}

pub fn created(body: Value) -> Answer {
    Ok((StatusCode::CREATED, Json(body)).into_response())
}

/// One page of a list, wrapped with its total the way GitHub does: `{"total_count": 2, "<name>": [...]}`.
pub fn list(hub: &Hub, uri: &Uri, page: &Page, name: &str, all: &[Value]) -> Answer {
    let mut body = Map::from_iter([("total_count".to_owned(), json!(all.len()))]);
    body.insert(name.to_owned(), json!(page.of(all)));
    Ok(linked(Json(body).into_response(), page.link(&page_url(hub, uri), all.len())))
}

pub fn linked(mut answer: Response, link: Option<String>) -> Response {
    if let Some(link) = link.and_then(|link| HeaderValue::from_str(&link).ok()) {
        answer.headers_mut().insert("link", link);
    }
    answer
}

/// The URL of a list without its page parameters.
pub fn page_url(hub: &Hub, uri: &Uri) -> String {
    let path = uri.path().strip_prefix(gate::PREFIX).unwrap_or(uri.path());
    let place = ["page=", "per_page=", "cursor="];
    let query = uri.query().unwrap_or_default().split('&');
    let query: Vec<_> =
        query.filter(|part| !part.is_empty() && !place.iter().any(|key| part.starts_with(key))).collect();
    let base = format!("{}{path}", hub.read(|world, _| world.api.clone()));
    if query.is_empty() { base } else { format!("{base}?{}", query.join("&")) }
}

/// A JSON body; invalid ones are refused with GitHub's own message.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<Hub>> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, hub: &Arc<Hub>) -> Result<Self, Refusal> {
        let bytes = axum::body::Bytes::from_request(request, hub).await;
        let bytes = bytes.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, &error.to_string()))?;
        let text = if bytes.is_empty() { b"{}" } else { &bytes[..] };
        let value: Value =
            serde_json::from_slice(text).map_err(|_| Refusal::new(StatusCode::BAD_REQUEST, "Problems parsing JSON"))?;
        let body = serde_json::from_value(value);
        body.map(Body).map_err(|error| Refusal::invalid(&format!("Invalid request.\n\n{error}")))
    }
}

/// The authenticated caller.
pub struct By(pub Caller);

impl FromRequestParts<Arc<Hub>> for By {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Hub>) -> Result<Self, Refusal> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.map(By).ok_or_else(|| Refusal::new(StatusCode::UNAUTHORIZED, "Requires authentication"))
    }
}

/// The organisation or repository in the path, which exists and which the caller may access, and the ids in the path.
pub struct At {
    pub scope: Scope,
    pub ids: HashMap<String, u64>,
}

impl At {
    pub fn id(&self, name: &str) -> Result<u64, Refusal> {
        self.ids.get(name).copied().ok_or_else(Refusal::not_found)
    }

    pub fn owner(&self) -> &str {
        self.scope.owner()
    }
}

impl FromRequestParts<Arc<Hub>> for At {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, hub: &Arc<Hub>) -> Result<Self, Refusal> {
        let By(caller) = By::from_request_parts(parts, hub).await?;
        let params = RawPathParams::from_request_parts(parts, hub).await.map_err(|_| Refusal::not_found())?;
        let text: HashMap<&str, &str> = params.iter().collect();
        let by_number = text.get("repository_id").and_then(|id| id.parse::<u64>().ok());
        let scope = match (text.get("org"), text.get("owner"), text.get("repo")) {
            (Some(org), ..) => Scope::Organization((*org).to_owned()),
            (_, Some(owner), Some(repo)) => Scope::Repository((*owner).to_owned(), (*repo).to_owned()),
            _ => hub.read(|world, _| {
                let known = world.repositories.iter().find(|known| Some(known.id) == by_number);
                let known = known.ok_or_else(Refusal::not_found)?;
                Ok(Scope::Repository(known.owner.clone(), known.name.clone()))
            })?,
        };
        let about_runners = parts.uri.path().contains("/actions/runner");
        let permission = match (&scope, about_runners) {
            (Scope::Organization(_), true) => "organization_self_hosted_runners",
            (Scope::Repository(..), true) => "administration",
            (Scope::Repository(..), false) if parts.uri.path().contains("/actions/") => "actions",
            _ => "metadata",
        };
        let level = if parts.method == Method::GET { "read" } else { "write" };
        hub.read(|world, _| {
            let exists = match &scope {
                Scope::Organization(login) => {
                    world.owner(login).is_some_and(|owner| owner.kind == OwnerKind::Organization)
                }
                Scope::Repository(owner, name) => world.repository(owner, name).is_some(),
            };
            if exists { caller.may(world, &scope, permission, level) } else { Err(Refusal::not_found()) }
        })?;
        let ids = text.iter().filter_map(|(name, value)| Some(((*name).to_owned(), value.parse().ok()?))).collect();
        Ok(Self { scope, ids })
    }
}

pub fn router(hub: &Arc<Hub>) -> Router<Arc<Hub>> {
    let mut router = Router::new()
        .route("/app", get(apps::app))
        .route("/app/installations", get(apps::installations))
        .route("/app/installations/{installation_id}", get(apps::installation))
        .route("/app/installations/{installation_id}/access_tokens", post(apps::access_token))
        .route("/app/hook/config", get(apps::hook_config).patch(apps::set_hook_config))
        .route("/app/hook/deliveries", get(apps::deliveries))
        .route("/app/hook/deliveries/{delivery_id}", get(apps::delivery))
        .route("/app/hook/deliveries/{delivery_id}/attempts", post(apps::redeliver))
        .route("/orgs/{org}/installation", get(apps::owner_installation))
        .route("/users/{username}/installation", get(apps::owner_installation))
        .route("/installation/repositories", get(apps::repositories))
        .route("/rate_limit", get(apps::rate_limit))
        .route("/meta", get(async || ok(json!({"verifiable_password_authentication": false}))))
        .route("/orgs/{org}", get(apps::organization))
        .route("/orgs/{org}/actions/runner-groups", get(groups::list_groups).post(groups::create))
        .route(
            "/orgs/{org}/actions/runner-groups/{runner_group_id}",
            get(groups::show).patch(groups::update).delete(groups::remove),
        )
        .route("/orgs/{org}/actions/runner-groups/{runner_group_id}/runners", get(groups::runners));
    // Redirects of renamed repositories lead to their numbers.
    let repositories = ["/repos/{owner}/{repo}", "/repositories/{repository_id}"];
    for repository in repositories {
        router = router
            .route(repository, get(apps::repository))
            .route(&format!("{repository}/installation"), get(apps::owner_installation))
            .route(&format!("{repository}/actions/jobs/{{job_id}}"), get(runs::job))
            .route(&format!("{repository}/actions/jobs/{{job_id}}/rerun"), post(runs::rerun_job))
            .route(&format!("{repository}/actions/runs"), get(runs::list_runs))
            .route(&format!("{repository}/actions/runs/{{run_id}}"), get(runs::run))
            .route(&format!("{repository}/actions/runs/{{run_id}}/jobs"), get(runs::jobs))
            .route(&format!("{repository}/actions/runs/{{run_id}}/rerun-failed-jobs"), post(runs::rerun_failed))
            .route(&format!("{repository}/actions/runs/{{run_id}}/cancel"), post(runs::cancel))
            .route(&format!("{repository}/actions/runs/{{run_id}}/force-cancel"), post(runs::force_cancel));
    }
    for scope in ["/orgs/{org}"].into_iter().chain(repositories) {
        let base = format!("{scope}/actions/runners");
        router = router
            .route(&base, get(runners::list_runners))
            .route(&format!("{base}/downloads"), get(downloads::downloads))
            .route(&format!("{base}/{{runner_id}}"), get(runners::show).delete(runners::remove))
            .route(&format!("{base}/generate-jitconfig"), post(runners::jit_config))
            .route(&format!("{base}/registration-token"), post(runners::registration_token))
            .route(&format!("{base}/remove-token"), post(runners::remove_token));
    }
    router
        .fallback(unknown)
        .layer(from_fn_with_state(Arc::clone(hub), gate::api))
        .layer(from_fn_with_state(Arc::clone(hub), gate::links))
        .layer(from_fn_with_state(Arc::clone(hub), gate::faults))
        .layer(from_fn_with_state(Arc::clone(hub), gate::in_flight))
}

/// A route that the simulator does not implement is reported as a violation.
async fn unknown(State(hub): State<Arc<Hub>>, method: Method, uri: Uri) -> Refusal {
    if let Some(checker) = &hub.checker {
        checker.not_simulated(method.as_str(), uri.path().strip_prefix(gate::PREFIX).unwrap_or(uri.path()));
    }
    Refusal::not_found()
}
