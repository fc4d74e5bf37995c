//! The one HTTP port: health, metrics, webhooks, dashboards.

mod html;
mod paging;
mod rows;
pub mod server;

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{OriginalUri, Query as Params, State},
    http::{StatusCode, header},
    response::{IntoResponse, Redirect, Response},
    routing::{get, post},
};
use paddock_effects::{clock, kube::stores::Stores, metrics::Metrics};
use serde::Serialize;

use self::paging::{Query, Window};

use crate::webhook::receiver::{self, Hooks};

#[derive(Clone)]
struct Pages {
    stores: Stores,
    metrics: Metrics,
}

pub fn router(stores: Stores, metrics: Metrics, hooks: Hooks) -> Router {
    Router::new()
        .route("/", get(async || Redirect::temporary("/usage")))
        .route("/health", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_page))
        .route("/usage", get(async |State(pages): State<Pages>| html::usage(&pages.usage())))
        .route("/usage.json", get(async |State(pages): State<Pages>| Json(pages.usage())))
        .route("/history", get(history))
        .route("/jobs", get(history))
        .route("/history.json", get(history_json))
        .route("/jobs.json", get(history_json))
        .route("/workers", get(workers))
        .route("/workers.json", get(workers_json))
        .with_state(Pages { stores, metrics })
        .merge(Router::new().route("/webhook", post(receiver::receive)).with_state(Arc::new(hooks)))
}

/// Ready once every cache is filled: before that, pages would be incomplete and no lease may be taken.
async fn ready(State(pages): State<Pages>) -> impl IntoResponse {
    match pages.stores.is_ready() {
        true => (StatusCode::OK, "ready"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the caches are not filled yet"),
    }
}

async fn metrics_page(State(pages): State<Pages>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], pages.metrics.text())
}

impl Pages {
    fn usage(&self) -> rows::Usage {
        let (pools, claims, workers) =
            (self.stores.pools.store.state(), self.stores.claims.store.state(), self.stores.workers.store.state());
        let pools: Vec<_> = pools.iter().map(AsRef::as_ref).collect();
        let claims: Vec<_> = claims.iter().map(AsRef::as_ref).collect();
        let workers: Vec<_> = workers.iter().map(AsRef::as_ref).collect();
        rows::usage(&pools, &claims, &workers)
    }

    fn history(&self, window: &Window) -> Vec<rows::ClaimRow> {
        let claims = self.stores.claims.store.state();
        rows::history(claims.iter().map(AsRef::as_ref)).into_iter().filter(|row| window.includes(row.created)).collect()
    }

    fn workers(&self, window: &Window) -> Vec<rows::WorkerRow> {
        let workers = self.stores.workers.store.state();
        rows::workers(workers.iter().map(AsRef::as_ref))
            .into_iter()
            .filter(|row| window.includes(row.created))
            .collect()
    }
}

type PageRequest = (State<Pages>, OriginalUri, Params<Query>);

async fn history((State(pages), uri, Params(query)): PageRequest) -> Response {
    paginate(&uri, &query, |window| pages.history(window), |rows| html::history(&rows).into_response())
}

async fn history_json((State(pages), uri, Params(query)): PageRequest) -> Response {
    paginate(&uri, &query, |window| pages.history(window), |rows| json(&rows))
}

async fn workers((State(pages), uri, Params(query)): PageRequest) -> Response {
    paginate(&uri, &query, |window| pages.workers(window), |rows| html::workers(&rows).into_response())
}

async fn workers_json((State(pages), uri, Params(query)): PageRequest) -> Response {
    paginate(&uri, &query, |window| pages.workers(window), |rows| json(&rows))
}

fn json<T: Serialize>(rows: &Vec<T>) -> Response {
    Json(rows).into_response()
}

/// One page of rows, with links to the others.
fn paginate<T>(
    uri: &OriginalUri,
    query: &Query,
    rows: impl Fn(&Window) -> Vec<T>,
    show: impl Fn(Vec<T>) -> Response,
) -> Response {
    match query.window(clock::now()) {
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
        Ok(window) => {
            let (rows, link) = window.paginate(rows(&window), uri.path(), query);
            let mut response = show(rows);
            if let Some(link) = link.and_then(|link| link.parse().ok()) {
                response.headers_mut().insert(header::LINK, link);
            }
            response
        }
    }
}
