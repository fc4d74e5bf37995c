//! The bed's HTTP API, through which outside programs control the operator and machines.

use std::{collections::BTreeMap, net::TcpListener, sync::Arc, time::Duration};

use anyhow::Result;
use axum::{
    Json, Router,
    body::Bytes,
    extract::{FromRequest, Path, Request, State},
    http::{Method, StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    aws::{Instance, InstanceState},
    operator::{Additions, Supervisor},
    process::Signal,
    stage::Stage,
};

const ROUTES: &str = "POST /operator, GET /operator/log, GET /machines, PUT /machines/env, GET /machines/ID/log, \
                      POST /machines/ID/ACTION";
const ACTIONS: &str = "freeze, thaw, kill, stop, interrupt, terminate";

pub struct Admin {
    stage: Arc<Stage>,
    supervisor: Arc<Supervisor>,
}

impl Admin {
    pub fn new(stage: Arc<Stage>, supervisor: Arc<Supervisor>) -> Self {
        Self { stage, supervisor }
    }

    fn instance(&self, id: &str) -> Result<Instance, Problem> {
        let found = self.stage.aws.instances().into_iter().find(|instance| instance.id == id);
        found.ok_or_else(|| Problem(StatusCode::NOT_FOUND, format!("there is no machine '{id}'")))
    }
}

/// Serves forever.
pub async fn serve(listener: TcpListener, admin: Admin) -> Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new()
        .route("/operator", post(restart))
        .route("/operator/log", get(operator_log))
        .route("/machines", get(machines))
        .route("/machines/env", put(set_env))
        .route("/machines/{id}/log", get(machine_log))
        .route("/machines/{id}/{action}", post(act))
        .fallback(unknown)
        .with_state(Arc::new(admin));
    Ok(axum::serve(tokio::net::TcpListener::from_std(listener)?, router).await?)
}

type Bed = State<Arc<Admin>>;
type Answer = Result<Json<Value>, Problem>;

/// A failed request, with its reason.
struct Problem(StatusCode, String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.0, format!("{}\n", self.1)).into_response()
    }
}

/// A JSON body of any content type; an empty one is `{}`.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bad = |error: String| Problem(StatusCode::BAD_REQUEST, error);
        let bytes = Bytes::from_request(request, state).await.map_err(|error| bad(error.to_string()))?;
        let text = if bytes.is_empty() { b"{}" } else { &bytes[..] };
        serde_json::from_slice(text).map(Self).map_err(|error| bad(format!("the body is not as expected: {error}")))
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Restart {
    args: Vec<String>,
    env: BTreeMap<String, String>,
    signal: EndSignal,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum EndSignal {
    #[default]
    Kill,
    Term,
}

async fn restart(State(admin): Bed, Body(Restart { args, env, signal }): Body<Restart>) -> Answer {
    check_env(&env)?;
    let signal = match signal {
        EndSignal::Kill => Signal::SIGKILL,
        EndSignal::Term => Signal::SIGTERM,
    };
    let additions = Additions { args, env };
    let answer = json!(additions);
    // Spawned, so that it completes even if the client disconnects.
    let work = tokio::spawn(async move { admin.supervisor.restart(additions, signal).await });
    match work.await {
        Ok(Ok(())) => Ok(Json(answer)),
        Ok(Err(error)) => Err(Problem(StatusCode::UNPROCESSABLE_ENTITY, format!("{error:#}"))),
        Err(error) => Err(Problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

async fn operator_log(State(admin): Bed) -> String {
    admin.supervisor.log()
}

/// The running instances, as the AWS front end knows them; `state` is the machine's own.
async fn machines(State(admin): Bed) -> Json<Value> {
    let states = admin.stage.machines.list();
    let running = admin.stage.aws.instances().into_iter().filter(|instance| instance.state == InstanceState::Running);
    let shown = running.map(|instance| {
        let mut shown = json!(instance);
        shown["state"] = states.get(&instance.id).map_or(json!("booting"), |state| json!(state));
        shown
    });
    Json(shown.collect())
}

async fn set_env(State(admin): Bed, Body(env): Body<BTreeMap<String, String>>) -> Answer {
    check_env(&env)?;
    admin.stage.machines.set_env(env.into_iter().collect());
    Ok(Json(json!({})))
}

async fn machine_log(State(admin): Bed, Path(id): Path<String>) -> Result<String, Problem> {
    admin.instance(&id)?;
    Ok(admin.stage.machines.log(&id))
}

/// How long before its end EC2 announces a spot interruption.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Notice {
    notice_ms: u64,
}

impl Default for Notice {
    fn default() -> Self {
        Self { notice_ms: 120_000 }
    }
}

async fn act(
    State(admin): Bed,
    Path((id, action)): Path<(String, String)>,
    Body(Notice { notice_ms }): Body<Notice>,
) -> Answer {
    let Admin { stage, .. } = &*admin;
    let state = admin.instance(&id)?.state;
    let outcome = match action.as_str() {
        "freeze" | "thaw" | "kill" | "stop" | "interrupt" if state != InstanceState::Running => {
            return Err(Problem(
                StatusCode::CONFLICT,
                format!("{id} is {}", json!(state).as_str().unwrap_or_default()),
            ));
        }
        "freeze" => stage.machines.freeze(&id),
        "thaw" => stage.machines.thaw(&id),
        "kill" => stage.machines.crash(&id),
        "stop" => stage.aws.stop(&id).await,
        "interrupt" => stage.machines.interrupt_spot(&id, Duration::from_millis(notice_ms)),
        "terminate" => stage.aws.terminate(&id).await,
        _ => {
            let text = format!("there is no action '{action}'; there are {ACTIONS}");
            return Err(Problem(StatusCode::NOT_FOUND, text));
        }
    };
    outcome.map(|()| Json(json!({}))).map_err(|error| Problem(StatusCode::CONFLICT, format!("{error:#}")))
}

async fn unknown(method: Method, uri: Uri) -> Problem {
    Problem(StatusCode::NOT_FOUND, format!("there is no {method} {}; there are {ROUTES}", uri.path()))
}

/// Rejects environment variables that no process can have, before something is started with them.
fn check_env(env: &BTreeMap<String, String>) -> Result<(), Problem> {
    let bad =
        |(name, value): &(&String, &String)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0');
    match env.iter().find(bad) {
        Some((name, _)) => Err(Problem(StatusCode::BAD_REQUEST, format!("no environment can have {name:?} so"))),
        None => Ok(()),
    }
}
