//! A simulator with an organisation, an App installed there, and a client.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    http::{HeaderMap, Method, StatusCode},
};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use paddock_bed_github::{API_VERSION, App, GitHub, JobRequest, Options};
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc};

/// Far longer than any step takes, even on a slow machine.
pub const DEADLINE: Duration = Duration::from_secs(180);

pub struct Bed {
    pub github: GitHub,
    pub app: App,
    pub installation: u64,
    pub token: String,
    pub http: reqwest::Client,
}

pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Answer {
    pub fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The URL of the next page.
    pub fn next(&self) -> Option<String> {
        let link = self.header("link").split(", ").find(|link| link.ends_with("rel=\"next\""))?;
        Some(link[1..link.find('>')?].to_owned())
    }
}

impl Bed {
    pub async fn start() -> Self {
        Self::with(Options::default()).await
    }

    pub async fn with(options: Options) -> Self {
        let github = GitHub::start(Options { validate: true, ..options }).await.unwrap();
        github.organization("acme");
        github.repository("acme", "app", true).unwrap();
        let app = github.app("paddock");
        let installation = github.install(app.id, "acme").unwrap();
        let token = github.personal_token(&["acme"]);
        let mut bed = Self { github, app, installation, token, http: reqwest::Client::new() };
        bed.token = bed.installation_token().await;
        bed
    }

    pub fn jwt(&self) -> String {
        let now = jiff::Timestamp::now().as_second();
        self.jwt_with(json!({"iss": self.app.id, "iat": now - 60, "exp": now + 540}))
    }

    pub fn jwt_with(&self, claims: Value) -> String {
        let key = EncodingKey::from_rsa_pem(self.app.private_key.as_bytes()).unwrap();
        encode(&Header::new(Algorithm::RS256), &claims, &key).unwrap()
    }

    pub async fn installation_token(&self) -> String {
        let path = format!("/app/installations/{}/access_tokens", self.installation);
        let answer = self.call_as(&self.jwt(), Method::POST, &path, None).await;
        assert_eq!(answer.status, 201, "{}", answer.body);
        answer.body["token"].as_str().unwrap().to_owned()
    }

    /// A GET with the bed's token.
    pub fn authorized(&self, url: String) -> reqwest::RequestBuilder {
        self.http.get(url).bearer_auth(&self.token).header(API_VERSION.0, API_VERSION.1)
    }

    /// `path` is an API path, or a full URL from a link.
    pub async fn try_call(
        &self,
        token: &str,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> reqwest::Result<Answer> {
        let url = if path.starts_with("http") { path.to_owned() } else { format!("{}{path}", self.github.api_url()) };
        let mut request = self.http.request(method, url).header("accept", "application/vnd.github+json");
        request = request.header(API_VERSION.0, API_VERSION.1);
        if !token.is_empty() {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await?;
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let text = answer.text().await?;
        let body = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() };
        Ok(Answer { status, headers, body })
    }

    pub async fn call_as(&self, token: &str, method: Method, path: &str, body: Option<Value>) -> Answer {
        self.try_call(token, method, path, body).await.unwrap()
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call_as(&self.token, Method::GET, path, None).await
    }

    pub async fn app_get(&self, path: &str) -> Answer {
        self.call_as(&self.jwt(), Method::GET, path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call_as(&self.token, Method::POST, path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.call_as(&self.token, Method::DELETE, path, None).await
    }

    /// A JIT runner of the organisation, in its default group.
    pub async fn jit(&self, name: &str, labels: &[&str]) -> Answer {
        let body = json!({"name": name, "runner_group_id": 1, "labels": labels});
        self.post("/orgs/acme/actions/runners/generate-jitconfig", body).await
    }

    pub fn job(&self, labels: &[&str]) -> JobRequest {
        let labels = labels.iter().map(|&label| label.to_owned()).collect();
        JobRequest { owner: "acme".into(), repo: "app".into(), labels, ..JobRequest::default() }
    }

    /// The same with permission to read actions alone.
    pub async fn read_only(self) -> Self {
        let read = json!({"actions": "read", "metadata": "read"}).as_object().cloned();
        self.github.restrict(self.installation, read, None);
        Self { token: self.installation_token().await, ..self }
    }

    /// Asserts that all traffic matched GitHub's schemas.
    pub async fn finish(self) {
        assert_eq!(self.github.violations().await, [] as [String; 0]);
    }
}

/// A webhook receiver with a configurable status; it forwards what it receives.
pub struct Receiver {
    pub url: String,
    received: mpsc::UnboundedReceiver<(HeaderMap, Bytes)>,
    /// The response status; `None`: it does not answer.
    pub answer: Arc<Mutex<Option<StatusCode>>>,
}

impl Receiver {
    pub async fn start() -> Self {
        let (sender, received) = mpsc::unbounded_channel();
        let answer = Arc::new(Mutex::new(Some(StatusCode::OK)));
        let answers = Arc::clone(&answer);
        let handler = async move |headers: HeaderMap, body: Bytes| {
            sender.send((headers, body)).unwrap();
            let answer = *answers.lock().await;
            match answer {
                Some(status) => status,
                None => std::future::pending().await,
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/webhook", listener.local_addr().unwrap());
        let router = axum::Router::new().route("/webhook", axum::routing::post(handler));
        tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
        Self { url, received, answer }
    }

    pub async fn next(&mut self) -> (HeaderMap, Bytes) {
        tokio::time::timeout(DEADLINE, self.received.recv()).await.expect("a webhook comes").unwrap()
    }

    /// Event and action of the next webhook, with its payload.
    pub async fn event(&mut self) -> (String, Value) {
        let (headers, body) = self.next().await;
        let payload: Value = serde_json::from_slice(&body).unwrap();
        let event = headers["x-github-event"].to_str().unwrap().to_owned();
        (payload["action"].as_str().map_or(event.clone(), |action| format!("{event} {action}")), payload)
    }

    pub async fn names(&mut self, count: usize) -> Vec<String> {
        let mut names = vec![];
        for _ in 0..count {
            names.push(self.event().await.0);
        }
        names
    }

    pub fn nothing_waits(&mut self) -> bool {
        self.received.try_recv().is_err()
    }
}
