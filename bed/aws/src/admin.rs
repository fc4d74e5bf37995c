//! The bed's own HTTP API, beside the services on the same port.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use serde_json::{Value, json};

use crate::{
    capacity::Limit,
    ec2,
    faults::Rule,
    front::{Calls, Failure, Front, serve},
    instances::Instance,
};

type Bed = State<Arc<Front>>;

pub fn router(front: Arc<Front>) -> Router {
    Router::new()
        .route("/_admin/faults", get(faults).post(add_fault).delete(clear_faults))
        .route("/_admin/faults/{id}", delete(remove_fault))
        .route("/_admin/calls", get(calls).delete(reset_calls))
        .route("/_admin/capacity", get(capacity).post(set_capacity).delete(clear_capacity))
        .route("/_admin/violations", get(violations))
        .route("/_admin/instances", get(instances))
        .route("/_admin/instances/{id}/shutdown", post(shutdown))
        .route("/_files/{digest}/{name}", get(file))
        .fallback(serve)
        .with_state(front)
}

async fn faults(State(front): Bed) -> Json<Value> {
    Json(json!(front.faults.lock().unwrap().list()))
}

async fn add_fault(State(front): Bed, Json(rule): Json<Rule>) -> Response {
    match rule.check() {
        Ok(()) => Json(json!({ "id": front.faults.lock().unwrap().add(rule) })).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, error).into_response(),
    }
}

async fn violations(State(front): Bed) -> Json<Vec<String>> {
    Json(front.violations().await)
}

async fn remove_fault(State(front): Bed, Path(id): Path<u64>) {
    front.faults.lock().unwrap().remove(id);
}

async fn clear_faults(State(front): Bed) {
    front.faults.lock().unwrap().clear();
}

async fn calls(State(front): Bed) -> Json<Calls> {
    Json(front.calls.lock().unwrap().clone())
}

async fn reset_calls(State(front): Bed) {
    front.calls.lock().unwrap().clear();
}

async fn capacity(State(front): Bed) -> Json<Vec<Limit>> {
    Json(front.capacity.lock().unwrap().list().to_vec())
}

async fn set_capacity(State(front): Bed, Json(limit): Json<Limit>) {
    front.capacity.lock().unwrap().set(limit);
}

async fn clear_capacity(State(front): Bed) {
    front.capacity.lock().unwrap().clear();
}

async fn instances(State(front): Bed) -> Json<Vec<Instance>> {
    Json(front.instances.list())
}

async fn shutdown(State(front): Bed, Path(id): Path<String>) -> Response {
    let Some(instance) = front.instances.get(&id) else { return StatusCode::NOT_FOUND.into_response() };
    // The calling machine may die from this very call, so the call completes even if the client disconnects.
    let work = tokio::spawn(async move { ec2::shut_down(&front, &instance).await.map_err(Failure::into_answer) });
    match work.await {
        Ok(Ok(())) => StatusCode::OK.into_response(),
        Ok(Err(answer)) => answer.into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn file(State(front): Bed, Path((digest, name)): Path<(String, String)>) -> Response {
    let content = front.files.lock().unwrap().get(&format!("{digest}/{name}")).cloned();
    content.map_or_else(|| StatusCode::NOT_FOUND.into_response(), IntoResponse::into_response)
}
