//! `POST /webhook`: deliveries from GitHub. Every replica serves it.
//!
//! A body is not parsed before its signature is verified. A delivery is answered with success only when its event is
//! stored in the API server. GitHub logs any other answer as failed, and `redelivery` reads that log.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{Extension, State},
    http::{
        HeaderMap, StatusCode,
        header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use paddock_core::webhook::{
    outcome::WebhookOutcome,
    signature::{BadSignature, claimed},
};
use paddock_effects::metrics::{Metrics, WebhookLabel};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{
    intake::Intake,
    secrets::{NoSecrets, Secrets},
};
use crate::web::server::Connection;

/// The longest body that is accepted. Relevant events have about 30 KB; GitHub sends other events of up to 25 MB.
const MAX_BODY_BYTES: usize = 4 << 20;
const GITHUB_MAX_BODY_BYTES: usize = 25 << 20;
/// Memory limit for all bodies that are being read. It is taken as they arrive.
const BODY_MEMORY_BYTES: usize = 32 << 20;
/// How long a body waits for the memory of a connection that was closed for it, before another one is.
const MEMORY_WAIT: Duration = Duration::from_millis(5);
/// Concurrent deliveries above which connections are closed after the answer: GitHub opens one per delivery, and idle
/// ones take memory.
const MAX_KEEP_ALIVE: usize = 64;
/// Time limit for one delivery; GitHub waits for 10 s.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(8);
/// How often refusals with the same reason are logged; metrics count all of them.
const REFUSAL_LOG_PERIOD: Duration = Duration::from_secs(60);

pub struct Hooks {
    secrets: Secrets,
    intake: Intake,
    metrics: Metrics,
    /// In KiB.
    body_memory: Semaphore,
    last_logged: Mutex<HashMap<&'static str, Instant>>,
    /// Cloned by each delivery in progress; the reference count is their number.
    under_way: Arc<()>,
}

/// Why a delivery was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Secrets(#[from] NoSecrets),
    #[error(transparent)]
    Signature(#[from] BadSignature),
    #[error("the body is longer than {MAX_BODY_BYTES} bytes")]
    TooLarge,
    #[error("the body did not arrive whole")]
    Incomplete,
    #[error("the content type is not application/json; choose it in the webhook's settings")]
    ContentType,
    #[error("X-GitHub-Event is missing")]
    NoEvent,
    #[error("this replica has just started and does not know the pools yet")]
    NotReady,
    #[error("this took too long")]
    Timeout,
}

impl Refusal {
    const fn status(&self) -> StatusCode {
        match self {
            Self::Secrets(NoSecrets::NotConfigured) => StatusCode::NOT_FOUND,
            Self::Secrets(NoSecrets::NoneYet) | Self::NotReady | Self::Timeout => StatusCode::SERVICE_UNAVAILABLE,
            Self::Signature(_) => StatusCode::UNAUTHORIZED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Incomplete | Self::NoEvent => StatusCode::BAD_REQUEST,
        }
    }

    /// The metric label.
    const fn reason(&self) -> &'static str {
        match self {
            Self::Secrets(NoSecrets::NotConfigured) => "not_configured",
            Self::Secrets(NoSecrets::NoneYet) => "no_secrets",
            Self::Signature(BadSignature::Missing) => "no_signature",
            Self::Signature(BadSignature::Sha1Only) => "sha1_signature",
            Self::Signature(BadSignature::Malformed) => "malformed_signature",
            Self::Signature(BadSignature::Wrong) => "wrong_signature",
            Self::TooLarge => "too_large",
            Self::Incomplete => "torn",
            Self::ContentType => "content_type",
            Self::NoEvent => "no_event",
            Self::NotReady => "not_ready",
            Self::Timeout => "slow",
        }
    }
}

impl Hooks {
    pub fn new(secret_file: Option<PathBuf>, intake: Intake, metrics: Metrics) -> Self {
        let secrets = Secrets::new(secret_file);
        let body_memory = Semaphore::new(BODY_MEMORY_BYTES >> 10);
        Self { secrets, intake, metrics, body_memory, last_logged: Mutex::default(), under_way: Arc::default() }
    }

    /// The body with a verified signature, and the permit for its memory.
    async fn verified_body(
        &self,
        headers: &HeaderMap,
        body: Body,
        connection: &Connection,
    ) -> Result<(Vec<u8>, SemaphorePermit<'_>), Refusal> {
        let keys = self.secrets.keys()?;
        let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
        let signature = claimed(header("x-hub-signature-256"), header("x-hub-signature"))?;
        let content_length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length: usize = content_length.unwrap_or(MAX_BODY_BYTES);
        if length > MAX_BODY_BYTES {
            return Err(drain(length, body).await);
        }
        let (mut whole, mut chunks) = (Vec::new(), body.into_data_stream());
        let mut body_memory = self.memory(0, connection).await?;
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| Refusal::Incomplete)?;
            let arrived = whole.len() + chunk.len();
            if arrived > length {
                return Err(Refusal::TooLarge);
            }
            let missing = arrived.div_ceil(1024).saturating_sub(body_memory.num_permits());
            body_memory.merge(self.memory(missing, connection).await?);
            whole.extend_from_slice(&chunk);
        }
        connection.received();
        keys.check(&signature, &whole)?;
        Ok((whole, body_memory))
    }

    /// Memory for a part of a body. While there is none, connections that have kept the server waiting for longer are
    /// closed.
    async fn memory(&self, kib: usize, connection: &Connection) -> Result<SemaphorePermit<'_>, Refusal> {
        let kib = u32::try_from(kib).unwrap_or(u32::MAX);
        loop {
            let taken = self.body_memory.acquire_many(kib);
            match tokio::time::timeout(MEMORY_WAIT, taken).await {
                Ok(permit) => return permit.map_err(|_| Refusal::Timeout),
                Err(_) => connection.close_another(),
            };
        }
    }

    async fn handle(
        &self,
        headers: &HeaderMap,
        body: Body,
        connection: &Connection,
    ) -> Result<WebhookOutcome, Refusal> {
        let (body, _body_memory) = self.verified_body(headers, body, connection).await?;
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let event = header("x-github-event").ok_or(Refusal::NoEvent)?;
        let media_type = header(CONTENT_TYPE.as_str()).and_then(|value| value.split(';').next());
        if !media_type.is_some_and(|it| it.trim().eq_ignore_ascii_case("application/json")) {
            return Err(Refusal::ContentType);
        }
        if !self.intake.is_ready() {
            return Err(Refusal::NotReady);
        }
        Ok(self.intake.process(event, &body).await)
    }

    /// Logs a refusal, rate-limited: anyone can send refused requests and must not be able to flood the log.
    fn log_refusal(&self, reason: &'static str, why: &str) {
        let mut last_logged = self.last_logged.lock().unwrap_or_else(PoisonError::into_inner);
        if last_logged.get(reason).is_none_or(|last| last.elapsed() >= REFUSAL_LOG_PERIOD) {
            last_logged.insert(reason, Instant::now());
            tracing::warn!(reason, "webhook refused: {why}");
        }
    }
}

/// Drains a body that is too long, up to GitHub's own limit: many clients read the answer only after sending the whole
/// body.
async fn drain(length: usize, body: Body) -> Refusal {
    let mut chunks = body.into_data_stream();
    while length <= GITHUB_MAX_BODY_BYTES && matches!(chunks.next().await, Some(Ok(_))) {}
    Refusal::TooLarge
}

pub async fn receive(
    State(hooks): State<Arc<Hooks>>,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let (start, under_way) = (Instant::now(), hooks.under_way.clone());
    let handled = tokio::time::timeout(DELIVERY_TIMEOUT, hooks.handle(&headers, body, &connection));
    let handled = handled.await.unwrap_or(Err(Refusal::Timeout));
    let (status, (outcome, reason), answer) = match handled {
        Ok(outcome) => {
            let (status, answer) = describe(&outcome);
            if let WebhookOutcome::Unavailable(why) | WebhookOutcome::Malformed(why) = &outcome {
                hooks.log_refusal(outcome.words().1, why);
            }
            (status, outcome.words(), answer)
        }
        Err(refusal) => {
            let (reason, answer) = (refusal.reason(), refusal.to_string());
            hooks.log_refusal(reason, &answer);
            (refusal.status(), ("refused", reason), answer)
        }
    };
    hooks.metrics.webhooks.get_or_create(&WebhookLabel { source: "http", outcome, reason }).inc();
    hooks.metrics.webhook_seconds.observe(start.elapsed().as_secs_f64());
    let crowded = Arc::strong_count(&under_way) > MAX_KEEP_ALIVE + 1;
    (status, crowded.then_some([(CONNECTION, "close")]), answer + "\n").into_response()
}

/// The answer, which GitHub shows in its log of deliveries.
fn describe(outcome: &WebhookOutcome) -> (StatusCode, String) {
    match outcome {
        WebhookOutcome::Made(claim) => (StatusCode::OK, format!("claim {claim} was made")),
        WebhookOutcome::Noted(1) => (StatusCode::OK, "the claim was told".into()),
        WebhookOutcome::Noted(count) => (StatusCode::OK, format!("{count} claims were told")),
        WebhookOutcome::Known => (StatusCode::OK, "nothing new".into()),
        WebhookOutcome::Ignored(why) => (StatusCode::OK, why.message().into()),
        WebhookOutcome::Malformed(why) => (StatusCode::BAD_REQUEST, format!("not what GitHub sends: {why}")),
        WebhookOutcome::Unavailable(_) => {
            let answer = "the claim cannot be written now; this delivery is read again from GitHub's log";
            (StatusCode::SERVICE_UNAVAILABLE, answer.into())
        }
    }
}
