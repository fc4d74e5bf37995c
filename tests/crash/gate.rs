//! A proxy between the operator and Kubernetes, GitHub and AWS. It counts writes and kills the operator right after one
//! of them: the write was executed, but the operator never gets the response.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use anyhow::Result;
use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use kube::Client;
use serde_json::Value;
use tokio::{net::TcpListener, sync::Notify};

/// A kind of write in a stage of a life.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Write {
    pub stage: &'static str,
    pub what: String,
}

impl std::fmt::Display for Write {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.stage, self.what)
    }
}

/// When the operator dies.
#[derive(Clone, Debug)]
pub enum Fatal {
    Never,
    /// After so many writes of each stage.
    Nth(usize),
    /// After the first write of each of these kinds.
    First(BTreeSet<Write>),
}

pub struct Gate {
    fatal: Fatal,
    pub killed: Notify,
    written: Mutex<Written>,
}

#[derive(Default)]
struct Written {
    stage: &'static str,
    writes: Vec<Write>,
    last: Vec<Write>,
}

impl Gate {
    pub fn new(fatal: Fatal) -> Arc<Self> {
        Arc::new(Self { fatal, killed: Notify::new(), written: Mutex::default() })
    }

    /// Every write so far, in order.
    pub fn writes(&self) -> Vec<Write> {
        self.written.lock().expect("no panic while held").writes.clone()
    }

    /// The writes that were an operator's last, in order.
    pub fn last_writes(&self) -> Vec<Write> {
        self.written.lock().expect("no panic while held").last.clone()
    }

    /// Writes from now on belong to this stage.
    pub fn begin(&self, stage: &'static str) {
        self.written.lock().expect("no panic while held").stage = stage;
    }

    /// Serves `upstream`; returns the address.
    pub async fn serve(self: &Arc<Self>, upstream: Upstream) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let router = Router::new().fallback(pass).with_state((self.clone(), upstream));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(url)
    }

    /// Records a write; returns whether it is the last.
    fn record(&self, what: String) -> bool {
        let mut written = self.written.lock().expect("no panic while held");
        let write = Write { stage: written.stage, what };
        let of_stage = written.writes.iter().filter(|other| other.stage == write.stage).count();
        let fatal = match &self.fatal {
            Fatal::Never => false,
            Fatal::Nth(number) => of_stage + 1 == *number,
            Fatal::First(kinds) => kinds.contains(&write) && !written.writes.contains(&write),
        };
        if fatal {
            written.last.push(write.clone());
        }
        written.writes.push(write);
        fatal
    }
}

/// Where GitHub's API is below its address.
pub const API: &str = "/api/v3";

#[derive(Clone)]
pub enum Upstream {
    Kubernetes(Client),
    GitHub(reqwest::Client, String),
    Aws(reqwest::Client, String),
}

async fn pass(State((gate, upstream)): State<(Arc<Gate>, Upstream)>, request: Request) -> Response {
    match upstream.send(request).await {
        Ok((answer, Some(what))) if answer.status().is_success() => {
            if gate.record(what) {
                gate.killed.notify_one();
                // The operator is dead; there is no one to answer.
                std::future::pending::<()>().await;
            }
            answer
        }
        Ok((answer, _)) => answer,
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    }
}

impl Upstream {
    /// The answer, and what the request writes.
    async fn send(&self, request: Request) -> Result<(Response, Option<String>)> {
        let (mut parts, body) = request.into_parts();
        let body: Bytes = to_bytes(body, usize::MAX).await?;
        parts.headers.remove(header::HOST);
        match self {
            Self::Kubernetes(client) => {
                let what = object_written(&parts.method, parts.uri.path());
                // The client puts in its own server and rights.
                let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
                parts.uri = path.parse()?;
                parts.headers.remove(header::CONTENT_LENGTH);
                let answer = client.send(axum::http::Request::from_parts(parts, body.to_vec().into())).await?;
                Ok((answer.map(Body::new), what))
            }
            Self::GitHub(client, base) => {
                // Runners use this address too: the operator passes it to them.
                let what = parts.uri.path().strip_prefix(API).and_then(|path| object_written(&parts.method, path));
                let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
                let request = client.request(parts.method, format!("{base}{path}")).headers(parts.headers).body(body);
                let answer = request.send().await?;
                Ok(((answer.status(), answer.headers().clone(), answer.bytes().await?).into_response(), what))
            }
            Self::Aws(client, base) => {
                let request = client.post(base).headers(parts.headers.clone()).body(body.clone()).send().await?;
                let (status, headers, answer) = (request.status(), request.headers().clone(), request.bytes().await?);
                let what = aws_written(&parts.headers, &body, &answer);
                Ok(((status, headers, answer).into_response(), what))
            }
        }
    }
}

/// What a request to Kubernetes or GitHub writes, without names; nothing for a read. Leases and events are written all
/// the time and decide nothing, and a token changes nothing.
fn object_written(method: &Method, path: &str) -> Option<String> {
    let ignored = ["/leases", "/events", "/access_tokens", "/registration-token", "/remove-token"];
    if method.is_safe() || ignored.iter().any(|part| path.contains(part)) {
        return None;
    }
    let what = match path.split_once("/namespaces/").and_then(|(_, rest)| rest.split_once('/')) {
        // Numbers are names at GitHub.
        None => path
            .split('/')
            .map(|part| if part.parse::<u64>().is_ok() { "*" } else { part })
            .collect::<Vec<_>>()
            .join("/"),
        Some((_, object)) => match object.split('/').collect::<Vec<_>>()[..] {
            [kind, _, part] => format!("{kind}/{part}"),
            [kind, ..] => kind.to_owned(),
            [] => path.to_owned(),
        },
    };
    Some(format!("{method} {what}"))
}

/// What a call to AWS writes. A receive that brings messages hides them from everybody else, so it is a write.
fn aws_written(headers: &HeaderMap, body: &[u8], answer: &[u8]) -> Option<String> {
    let action = match headers.get("x-amz-target").and_then(|target| target.to_str().ok()) {
        Some(target) => target.split_once('.')?.1.to_owned(),
        None => {
            let form = String::from_utf8_lossy(body);
            form.split('&').find_map(|field| field.strip_prefix("Action="))?.to_owned()
        }
    };
    match action.as_str() {
        "ReceiveMessage" => {
            let answer: Value = serde_json::from_slice(answer).ok()?;
            answer["Messages"].as_array().filter(|messages| !messages.is_empty()).map(|_| action)
        }
        // Whether records move one by one or together is a matter of time.
        "UpdateItem" | "TransactWriteItems" => {
            let states: Vec<_> = new_states(body).into_iter().collect();
            Some(if states.is_empty() {
                "a record".to_owned()
            } else {
                format!("a record to {}", states.join(" and "))
            })
        }
        _ if ["Get", "Describe", "List", "Query", "BatchGet"].iter().any(|read| action.starts_with(read)) => None,
        _ => Some(action),
    }
}

/// The states that an update, or several at once, put instances in.
fn new_states(body: &[u8]) -> BTreeSet<String> {
    let request: Value = serde_json::from_slice(body).unwrap_or_default();
    let several = request["TransactItems"].as_array().into_iter().flatten().map(|item| &item["Update"]);
    several.chain([&request]).filter_map(new_state).collect()
}

fn new_state(update: &Value) -> Option<String> {
    let (_, assigned) = update["UpdateExpression"].as_str()?.split_once("#state = ")?;
    let value = assigned.split([',', ' ']).next()?;
    update["ExpressionAttributeValues"][value]["S"].as_str().map(str::to_owned)
}
