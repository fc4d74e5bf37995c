//! The admin API: [`Control`] over HTTP, for the demo and for tests in other programs.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    control::Control,
    faults::Fault,
    hooks::{HookFault, HookSource},
    hub::Hub,
    model::{Conclusion, JobRequest, OwnerKind},
    protocol::Ending,
};

type Reply = Result<Json<Value>, Problem>;

/// A rejected admin request, with its reason.
struct Problem(anyhow::Error);

impl From<anyhow::Error> for Problem {
    fn from(error: anyhow::Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (StatusCode::UNPROCESSABLE_ENTITY, format!("{:#}\n", self.0)).into_response()
    }
}

impl axum::extract::FromRef<Arc<Hub>> for Control {
    fn from_ref(hub: &Arc<Hub>) -> Self {
        Self { hub: Arc::clone(hub) }
    }
}

fn done() -> Reply {
    Ok(Json(json!({})))
}

pub fn router() -> Router<Arc<Hub>> {
    let bed = Router::new()
        .route("/owners", post(owner))
        .route("/repositories", post(repository))
        .route("/apps", post(app))
        .route("/installations", post(install))
        .route("/installations/{id}", delete(uninstall))
        .route("/installations/{id}/suspended", post(suspend))
        .route("/tokens", post(token))
        .route("/hooks", post(hook))
        .route("/hooks/release", post(release))
        .route("/hook-faults", post(hook_fault).delete(clear_hook_faults))
        .route("/deliveries", get(async |State(control): State<Control>| Json(control.deliveries())))
        .route("/jobs", get(async |State(control): State<Control>| Json(control.jobs())).post(queue_job))
        .route("/jobs/{id}", get(job))
        .route("/jobs/{id}/finish", post(finish_job))
        .route("/jobs/{id}/cancel", post(cancel_job))
        .route("/jobs/{id}/approve", post(approve_job))
        .route("/runs/{id}/finish", post(finish_run))
        .route("/runners", get(async |State(control): State<Control>| Json(control.runners())))
        .route("/runners/{name}/play", post(play))
        .route("/runners/{name}/lose", post(lose))
        .route("/faults", get(async |State(control): State<Control>| Json(control.faults())).post(fault).delete(clear))
        .route("/calls", get(async |State(control): State<Control>| Json(control.calls())).delete(reset_calls))
        .route("/clock", post(clock))
        .route("/violations", get(async |State(control): State<Control>| Json(control.violations().await)));
    Router::new().nest("/_admin", bed)
}

#[derive(Deserialize)]
struct NewOwner {
    login: String,
    kind: OwnerKind,
}

async fn owner(State(control): State<Control>, Json(new): Json<NewOwner>) -> Reply {
    let owner = match new.kind {
        OwnerKind::Organization => control.organization(&new.login),
        OwnerKind::User => control.user(&new.login),
    };
    Ok(Json(json!(owner)))
}

#[derive(Deserialize)]
struct NewRepository {
    owner: String,
    name: String,
    private: bool,
}

async fn repository(State(control): State<Control>, Json(new): Json<NewRepository>) -> Reply {
    Ok(Json(json!(control.repository(&new.owner, &new.name, new.private)?)))
}

#[derive(Deserialize)]
struct NewApp {
    slug: String,
}

async fn app(State(control): State<Control>, Json(new): Json<NewApp>) -> Reply {
    Ok(Json(json!(control.app(&new.slug))))
}

#[derive(Deserialize)]
struct NewInstallation {
    app_id: u64,
    owner: String,
}

async fn install(State(control): State<Control>, Json(new): Json<NewInstallation>) -> Reply {
    Ok(Json(json!({"id": control.install(new.app_id, &new.owner)?})))
}

async fn uninstall(State(control): State<Control>, Path(id): Path<u64>) -> Reply {
    control.uninstall(id);
    done()
}

async fn suspend(State(control): State<Control>, Path(id): Path<u64>, Json(suspended): Json<bool>) -> Reply {
    control.suspend(id, suspended);
    done()
}

#[derive(Deserialize)]
struct NewToken {
    owners: Vec<String>,
}

async fn token(State(control): State<Control>, Json(new): Json<NewToken>) -> Reply {
    let owners: Vec<&str> = new.owners.iter().map(String::as_str).collect();
    Ok(Json(json!({"token": control.personal_token(&owners)})))
}

#[derive(Deserialize)]
struct NewHook {
    source: HookSource,
    url: String,
    secret: String,
}

async fn hook(State(control): State<Control>, Json(new): Json<NewHook>) -> Reply {
    Ok(Json(json!({"id": control.hook(new.source, &new.url, &new.secret)})))
}

#[derive(Deserialize)]
struct Release {
    reverse: bool,
}

async fn release(State(control): State<Control>, Json(release): Json<Release>) -> Reply {
    control.release_hooks(release.reverse);
    done()
}

async fn hook_fault(State(control): State<Control>, Json(fault): Json<HookFault>) -> Reply {
    control.hook_fault(fault);
    done()
}

async fn clear_hook_faults(State(control): State<Control>) -> Reply {
    control.clear_hook_faults();
    done()
}

async fn queue_job(State(control): State<Control>, Json(request): Json<JobRequest>) -> Reply {
    Ok(Json(json!(control.queue_job(request)?)))
}

async fn job(State(control): State<Control>, Path(id): Path<u64>) -> Reply {
    let job = control.job(id).ok_or_else(|| anyhow::anyhow!("there is no job {id}"))?;
    Ok(Json(json!(job)))
}

async fn finish_job(State(control): State<Control>, Path(id): Path<u64>, Json(end): Json<Ending>) -> Reply {
    control.finish_job(id, end.conclusion);
    done()
}

async fn cancel_job(State(control): State<Control>, Path(id): Path<u64>) -> Reply {
    control.finish_job(id, Conclusion::Cancelled);
    done()
}

async fn approve_job(State(control): State<Control>, Path(id): Path<u64>) -> Reply {
    control.approve_job(id);
    done()
}

async fn finish_run(State(control): State<Control>, Path(id): Path<u64>, Json(end): Json<Ending>) -> Reply {
    control.finish_run(id, end.conclusion);
    done()
}

async fn play(State(control): State<Control>, Path(name): Path<String>) -> Reply {
    control.play_runner(&name)?;
    done()
}

async fn lose(State(control): State<Control>, Path(name): Path<String>) -> Reply {
    control.lose_runner(&name)?;
    done()
}

async fn fault(State(control): State<Control>, Json(fault): Json<Fault>) -> Reply {
    control.fault(fault);
    done()
}

async fn clear(State(control): State<Control>) -> Reply {
    control.clear_faults();
    done()
}

async fn reset_calls(State(control): State<Control>) -> Reply {
    control.reset_calls();
    done()
}

#[derive(Deserialize)]
struct Advance {
    seconds: u64,
}

async fn clock(State(control): State<Control>, Json(advance): Json<Advance>) -> Reply {
    control.advance(Duration::from_secs(advance.seconds));
    done()
}
