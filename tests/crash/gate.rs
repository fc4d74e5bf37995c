//! Stands between the operator and both Kubernetes and GitHub, counts its writes, and kills it right after one of them:
//! the write was carried out, and the operator never learns.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use kube::Client;
use tokio::{net::TcpListener, sync::Notify};

/// One write among all: what was written, and the how-manieth of its kind it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    pub what: String,
    pub number: usize,
}

pub struct Gate {
    /// The write after which the operator dies.
    fatal: Option<Write>,
    pub killed: Notify,
    writes: Mutex<Vec<Write>>,
}

impl Gate {
    pub fn new(fatal: Option<Write>) -> Arc<Self> {
        Arc::new(Self { fatal, killed: Notify::new(), writes: Mutex::default() })
    }

    /// Every write so far, in order.
    pub fn writes(&self) -> Vec<Write> {
        self.writes.lock().expect("nobody panics with it").clone()
    }

    /// Serves `upstream` at an address that it gives.
    pub async fn serve(self: &Arc<Self>, upstream: Upstream) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let router = Router::new().fallback(pass).with_state((self.clone(), upstream));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(url)
    }

    /// Notes a write; says whether it is the last.
    fn note(&self, what: String) -> bool {
        let mut writes = self.writes.lock().expect("nobody panics with it");
        let number = writes.iter().filter(|write| write.what == what).count() + 1;
        writes.push(Write { what, number });
        writes.last() == self.fatal.as_ref()
    }
}

/// What a request writes, without names; nothing for a read. Leases and events are written all the time and decide
/// nothing, and a token changes nothing.
fn written(method: &Method, path: &str) -> Option<String> {
    let ignored = ["/leases", "/events", "/access_tokens"];
    if method.is_safe() || ignored.iter().any(|part| path.contains(part)) {
        return None;
    }
    let what = match path.split_once("/namespaces/").and_then(|(_, rest)| rest.split_once('/')) {
        None => path.to_owned(),
        Some((_, object)) => match object.split('/').collect::<Vec<_>>()[..] {
            [kind, _, part] => format!("{kind}/{part}"),
            [kind, ..] => kind.to_owned(),
            [] => path.to_owned(),
        },
    };
    Some(format!("{method} {what}"))
}

#[derive(Clone)]
pub enum Upstream {
    Kubernetes(Client),
    GitHub(reqwest::Client, String),
}

async fn pass(State((gate, upstream)): State<(Arc<Gate>, Upstream)>, request: Request) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let answer = match upstream.send(request).await {
        Ok(answer) => answer,
        Err(error) => (StatusCode::BAD_GATEWAY, error.to_string()).into_response(),
    };
    if let Some(what) = written(&method, &path)
        && gate.note(what)
    {
        gate.killed.notify_one();
        // Nobody is there to hear the answer.
        std::future::pending::<()>().await;
    }
    answer
}

impl Upstream {
    async fn send(&self, request: Request) -> Result<Response> {
        let (mut parts, body) = request.into_parts();
        let body: Bytes = to_bytes(body, usize::MAX).await?;
        parts.headers.remove(header::HOST);
        match self {
            Self::Kubernetes(client) => {
                // The client puts in its own server and rights.
                let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
                parts.uri = path.parse()?;
                parts.headers.remove(header::CONTENT_LENGTH);
                let answer = client.send(axum::http::Request::from_parts(parts, body.to_vec().into())).await?;
                Ok(answer.map(Body::new))
            }
            Self::GitHub(client, base) => {
                let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
                let request = client.request(parts.method, format!("{base}{path}")).headers(parts.headers).body(body);
                let answer = request.send().await?;
                let status = answer.status();
                let headers = answer.headers().clone();
                Ok((status, headers, answer.bytes().await?).into_response())
            }
        }
    }
}
