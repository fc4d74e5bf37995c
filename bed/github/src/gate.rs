//! The API's middleware: faults, credentials, rate limits, counters, and schema checks.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use axum::{
    body::{Body, to_bytes},
    extract::{MatchedPath, Request, State},
    http::{
        HeaderValue, Method, StatusCode,
        header::{AUTHORIZATION, CONTENT_LENGTH, ETAG, HOST, IF_NONE_MATCH, LINK, LOCATION},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use jiff::Timestamp;

use crate::{
    api::Refusal,
    auth::{Caller, authenticate},
    faults::{Effect, drop_connection, redirect, refusal},
    hub::Hub,
    model::signed,
    rate::{Window, within_a_minute},
};

pub const PREFIX: &str = "/api/v3";

/// The header with the version of the API, and the version that the schemas describe
/// (docs.github.com/rest/about-the-rest-api/api-versions).
pub const API_VERSION: (&str, &str) = ("x-github-api-version", "2022-11-28");

/// Bodies larger than this are refused; GitHub's requests are small.
const BODY_LIMIT: usize = 25 << 20;

/// The caller if it cannot be identified.
const ANONYMOUS: &str = "anonymous";

fn without_prefix(path: &str) -> &str {
    path.strip_prefix(PREFIX).unwrap_or(path)
}

/// Applies faults to a request to the API or to the runners' service.
pub async fn faults(State(hub): State<Arc<Hub>>, request: Request, next: Next) -> Response {
    let path = without_prefix(request.uri().path());
    match hub.note(|world, _| world.fault_for(request.method().as_str(), path)) {
        None => next.run(request).await,
        Some(Effect::Status { status, retry_after, reset_in }) => {
            count(&hub, &request, ANONYMOUS);
            refusal(status, retry_after, reset_in, hub.clock.now())
        }
        Some(Effect::Redirect { status, location }) => {
            count(&hub, &request, ANONYMOUS);
            redirect(status, &location)
        }
        Some(Effect::DelayMs(ms)) => {
            hub.clock.sleep_until(hub.clock.now() + signed(Duration::from_millis(ms))).await;
            next.run(request).await
        }
        Some(Effect::Hang) => std::future::pending().await,
        Some(Effect::Drop) => drop_connection(),
        Some(Effect::LostResponse) => {
            next.run(request).await;
            drop_connection()
        }
    }
}

/// Counts a call by its route pattern.
fn count(hub: &Hub, request: &Request, account: &str) {
    let route = request.extensions().get::<MatchedPath>().map_or(request.uri().path(), MatchedPath::as_str);
    let key = (request.method().to_string(), without_prefix(route).to_owned(), account.to_owned());
    hub.note(|world, _| *world.calls.entry(key).or_default() += 1);
}

/// Checks credentials, limits, and the schemas of request and response.
pub async fn api(State(hub): State<Arc<Hub>>, mut request: Request, next: Next) -> Response {
    if let Some(refusal) = wrong_version(&request) {
        count(&hub, &request, ANONYMOUS);
        return refusal.into_response();
    }
    let header = request.headers().get("authorization").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let caller = hub.read(|world, now| authenticate(world, header.as_deref(), now, Timestamp::now()));
    let caller = match caller {
        Ok(caller) => caller,
        Err(refusal) => {
            count(&hub, &request, ANONYMOUS);
            return refusal.into_response();
        }
    };
    let account = caller.as_ref().map_or_else(|| ANONYMOUS.to_owned(), Caller::account);
    count(&hub, &request, &account);
    let free = without_prefix(request.uri().path()) == "/rate_limit";
    if !free && let Some(refused) = take(&hub, &request, &account) {
        return refused;
    }
    if let Some(caller) = caller {
        request.extensions_mut().insert(caller);
    }
    let known = request.headers().get(IF_NONE_MATCH).cloned();
    let read = request.method() == Method::GET;
    let mut answer = match (moved(&hub, &request), &hub.checker) {
        (Some(moved), _) => moved,
        (None, None) => next.run(request).await,
        (None, Some(_)) => checked(&hub, request, next).await,
    };
    if read && answer.status() == StatusCode::OK {
        answer = conditional(answer, known.as_ref()).await;
    }
    if answer.status() == StatusCode::NOT_MODIFIED {
        hub.note(|world, _| world.windows.get_mut(&account).map(|window| window.used = window.used.saturating_sub(1)));
    }
    rate_headers(&hub, &account, &mut answer);
    answer
}

/// GitHub refuses a version that it does not have, and takes a request without one to mean the oldest. Here a request with
/// credentials must name one: what it means without may change.
fn wrong_version(request: &Request) -> Option<Refusal> {
    let (header, version) = API_VERSION;
    let message = match request.headers().get(header).map(|value| value.to_str().unwrap_or_default()) {
        Some(named) if named == version => return None,
        Some(named) => format!("\"{named}\" is not a supported version. Supported versions: {version}"),
        None if !request.headers().contains_key(AUTHORIZATION) => return None,
        None => format!("the simulator takes no request with credentials without {header}: {version}"),
    };
    Some(Refusal::new(StatusCode::BAD_REQUEST, &message))
}

/// Sends a request for a renamed repository to the repository's number, as GitHub does: 301 for GET, 307 for the rest
/// (docs.github.com/rest/using-the-rest-api/best-practices-for-using-the-rest-api, "Follow redirects").
fn moved(hub: &Hub, request: &Request) -> Option<Response> {
    let path = without_prefix(request.uri().path());
    let mut parts = path.strip_prefix("/repos/")?.splitn(3, '/');
    let (owner, name, rest) = (parts.next()?, parts.next()?, parts.next());
    let location = hub.read(|world, _| {
        let id = world.renamed(owner, name)?;
        let rest = rest.map(|rest| format!("/{rest}")).unwrap_or_default();
        let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
        Some(format!("{}/repositories/{id}{rest}{query}", world.api))
    })?;
    Some(redirect(if request.method() == Method::GET { 301 } else { 307 }, &location))
}

/// Adds an entity tag, and leaves out a body that the caller has. Such an answer does not count against the limit
/// (docs.github.com/rest/using-the-rest-api/best-practices-for-using-the-rest-api, "Use conditional requests").
async fn conditional(answer: Response, known: Option<&HeaderValue>) -> Response {
    let (mut parts, body) = answer.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("the simulator's own bodies are whole");
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    let tag = HeaderValue::from_str(&format!("W/\"{:016x}\"", hasher.finish())).expect("digits fit into a header");
    if known == Some(&tag) {
        return (StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response();
    }
    parts.headers.insert(ETAG, tag);
    Response::from_parts(parts, Body::from(body))
}

/// Counts a call against the primary limit and any secondary ones; returns the refusal if one is exhausted.
fn take(hub: &Hub, request: &Request, account: &str) -> Option<Response> {
    let limits = &hub.options;
    let jit = request.method() == Method::POST && request.uri().path().ends_with("/generate-jitconfig");
    let (primary, secondary) = hub.note(|world, now| {
        let window = world.windows.entry(account.to_owned()).or_insert_with(|| Window::new(now));
        let primary = window.take(limits.hourly_limit, now);
        let secondary = limits.secondary.as_ref().filter(|secondary| {
            let times = world.jit_configs.entry(account.to_owned()).or_default();
            world.in_flight > secondary.concurrent
                || (jit && !within_a_minute(times, secondary.jit_configs_per_minute, now))
        });
        (primary, secondary)
    });
    if !primary {
        let message = format!("API rate limit exceeded for {account}.");
        let mut answer = Refusal::new(StatusCode::FORBIDDEN, &message).into_response();
        rate_headers(hub, account, &mut answer);
        return Some(answer);
    }
    secondary.map(|secondary| refusal(403, secondary.retry_after, None, hub.clock.now()))
}

fn rate_headers(hub: &Hub, account: &str, answer: &mut Response) {
    let limit = hub.options.hourly_limit;
    let window = hub.read(|world, now| world.windows.get(account).cloned().unwrap_or_else(|| Window::new(now)));
    let headers = answer.headers_mut();
    headers.insert("x-ratelimit-limit", HeaderValue::from(limit));
    headers.insert("x-ratelimit-remaining", HeaderValue::from(limit.saturating_sub(window.used)));
    headers.insert("x-ratelimit-used", HeaderValue::from(window.used));
    headers.insert("x-ratelimit-reset", HeaderValue::from(window.reset.as_second()));
    headers.insert("x-ratelimit-resource", HeaderValue::from_static("core"));
    headers.insert("x-github-media-type", HeaderValue::from_static("github.v3; format=json"));
}

/// Rewrites links to the address that the client called: behind a forwarder the simulator's own may be unreachable.
pub async fn links(State(hub): State<Arc<Hub>>, request: Request, next: Next) -> Response {
    let called = request.headers().get(HOST).and_then(|host| host.to_str().ok()).map(|host| format!("http://{host}"));
    let own = hub.read(|world, _| world.html.clone());
    let answer = next.run(request).await;
    match called {
        Some(called) if called != own => relink(answer, &own, &called).await,
        _ => answer,
    }
}

async fn relink(answer: Response, own: &str, called: &str) -> Response {
    let (mut parts, body) = answer.into_parts();
    for name in [LINK, LOCATION] {
        let value = parts.headers.get(&name).and_then(|value| value.to_str().ok());
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(&value.replace(own, called)).ok()) {
            parts.headers.insert(name, value);
        }
    }
    let body = to_bytes(body, usize::MAX).await.expect("the simulator's own bodies are whole");
    let body = match std::str::from_utf8(&body) {
        Ok(text) => Body::from(text.replace(own, called)),
        Err(_) => Body::from(body),
    };
    parts.headers.remove(CONTENT_LENGTH);
    Response::from_parts(parts, body)
}

/// Counts a request as in flight until it ends, including slow and hung ones.
pub async fn in_flight(State(hub): State<Arc<Hub>>, request: Request, next: Next) -> Response {
    let _guard = InFlight::new(&hub);
    next.run(request).await
}

struct InFlight<'a>(&'a Hub);

impl<'a> InFlight<'a> {
    fn new(hub: &'a Hub) -> Self {
        hub.note(|world, _| world.in_flight += 1);
        Self(hub)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.note(|world, _| world.in_flight -= 1);
    }
}

async fn checked(hub: &Hub, request: Request, next: Next) -> Response {
    let checker = hub.checker.as_ref().expect("asked for");
    let (parts, body) = request.into_parts();
    let Ok(sent) = to_bytes(body, BODY_LIMIT).await else {
        return Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "The body is too large").into_response();
    };
    let (method, path) = (parts.method.clone(), named(hub, without_prefix(parts.uri.path())));
    let answer = next.run(Request::from_parts(parts, Body::from(sent.clone()))).await;
    let (parts, body) = answer.into_parts();
    let received = to_bytes(body, usize::MAX).await.expect("the simulator's own bodies are whole");
    checker.exchange(method.as_str(), &path, &sent, parts.status.as_u16(), &received);
    Response::from_parts(parts, Body::from(received))
}

/// The path with the repository's name: GitHub's description of its API does not have those with its number.
fn named(hub: &Hub, path: &str) -> String {
    let by_number = path.strip_prefix("/repositories/").map(|rest| rest.split_once('/').unwrap_or((rest, "")));
    let found = by_number.and_then(|(id, rest)| {
        hub.read(|world, _| {
            let repository = world.repositories.iter().find(|known| Ok(known.id) == id.parse())?;
            Some(format!("/repos/{}/{}/{rest}", repository.owner, repository.name))
        })
    });
    found.map_or_else(|| path.to_owned(), |path| path.trim_end_matches('/').to_owned())
}
