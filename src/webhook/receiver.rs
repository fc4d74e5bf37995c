//! `POST /webhook`: what GitHub tells. Every replica listens.
//!
//! Nothing of a body is looked at before its signature fits, and a delivery is answered with success only when what it
//! tells is safe in the API server. Everything else counts as failed at GitHub, whose log is read again later.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::State,
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

/// The longest body that is read. The events that matter have some 30 KB; GitHub itself sends up to 25 MB of others.
const LONGEST: usize = 4 << 20;
const GITHUBS_LONGEST: usize = 25 << 20;
/// How much memory all bodies that are being read may take together.
const ROOM: usize = 32 << 20;
/// Deliveries at a time beyond which each takes its connection along: GitHub makes one for each, and one that idles takes
/// memory.
const CROWD: usize = 64;
/// How long one delivery may take; GitHub waits for 10 s.
const DEADLINE: Duration = Duration::from_secs(8);
/// How often the same complaint is logged; metrics count them all.
const COMPLAIN: Duration = Duration::from_secs(60);

pub struct Hooks {
    secrets: Secrets,
    intake: Intake,
    metrics: Metrics,
    /// In KiB.
    room: Semaphore,
    complaints: Mutex<HashMap<&'static str, Instant>>,
    /// Held by each delivery that is under way.
    under_way: Arc<()>,
}

/// Why a delivery was not even read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Secrets(#[from] NoSecrets),
    #[error(transparent)]
    Signature(#[from] BadSignature),
    #[error("the body is longer than {LONGEST} bytes")]
    TooLarge,
    #[error("the body did not arrive whole")]
    Torn,
    #[error("the content type is not application/json; choose it in the webhook's settings")]
    ContentType,
    #[error("X-GitHub-Event is missing")]
    NoEvent,
    #[error("this replica has just started and does not know the pools yet")]
    NotReady,
    #[error("this took too long")]
    Slow,
}

impl Refusal {
    const fn status(&self) -> StatusCode {
        match self {
            Self::Secrets(NoSecrets::NotConfigured) => StatusCode::NOT_FOUND,
            Self::Secrets(NoSecrets::NoneYet) | Self::NotReady | Self::Slow => StatusCode::SERVICE_UNAVAILABLE,
            Self::Signature(_) => StatusCode::UNAUTHORIZED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Torn | Self::NoEvent => StatusCode::BAD_REQUEST,
        }
    }

    /// A word for metrics.
    const fn reason(&self) -> &'static str {
        match self {
            Self::Secrets(NoSecrets::NotConfigured) => "not_configured",
            Self::Secrets(NoSecrets::NoneYet) => "no_secrets",
            Self::Signature(BadSignature::Missing) => "no_signature",
            Self::Signature(BadSignature::Sha1Only) => "sha1_signature",
            Self::Signature(BadSignature::Malformed) => "malformed_signature",
            Self::Signature(BadSignature::Wrong) => "wrong_signature",
            Self::TooLarge => "too_large",
            Self::Torn => "torn",
            Self::ContentType => "content_type",
            Self::NoEvent => "no_event",
            Self::NotReady => "not_ready",
            Self::Slow => "slow",
        }
    }
}

impl Hooks {
    pub fn new(secret_file: Option<PathBuf>, intake: Intake, metrics: Metrics) -> Self {
        let secrets = Secrets::new(secret_file);
        let room = Semaphore::new(ROOM >> 10);
        Self { secrets, intake, metrics, room, complaints: Mutex::default(), under_way: Arc::default() }
    }

    /// The body, once it is known to be signed, and the room it takes.
    async fn trusted(&self, headers: &HeaderMap, body: Body) -> Result<(Vec<u8>, SemaphorePermit<'_>), Refusal> {
        let keys = self.secrets.keys()?;
        let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
        let signature = claimed(header("x-hub-signature-256"), header("x-hub-signature"))?;
        let told = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length: usize = told.unwrap_or(LONGEST);
        if length > LONGEST {
            return Err(sent(length, body).await);
        }
        let kib = u32::try_from(length.div_ceil(1024)).unwrap_or(u32::MAX);
        let room = self.room.acquire_many(kib).await.map_err(|_| Refusal::Slow)?;
        let (mut whole, mut chunks) = (Vec::with_capacity(told.unwrap_or(0)), body.into_data_stream());
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| Refusal::Torn)?;
            if whole.len() + chunk.len() > length {
                return Err(Refusal::TooLarge);
            }
            whole.extend_from_slice(&chunk);
        }
        keys.check(&signature, &whole)?;
        Ok((whole, room))
    }

    async fn take(&self, headers: &HeaderMap, body: Body) -> Result<WebhookOutcome, Refusal> {
        let (body, _room) = self.trusted(headers, body).await?;
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let event = header("x-github-event").ok_or(Refusal::NoEvent)?;
        let media_type = header(CONTENT_TYPE.as_str()).and_then(|value| value.split(';').next());
        if !media_type.is_some_and(|it| it.trim().eq_ignore_ascii_case("application/json")) {
            return Err(Refusal::ContentType);
        }
        if !self.intake.is_ready() {
            return Err(Refusal::NotReady);
        }
        Ok(self.intake.take(event, &body).await)
    }

    /// Says it once in a while: anybody can send what is refused, and a log must not be theirs to fill.
    fn complain(&self, reason: &'static str, why: &str) {
        let mut complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        if complaints.get(reason).is_none_or(|last| last.elapsed() >= COMPLAIN) {
            complaints.insert(reason, Instant::now());
            tracing::warn!(reason, "webhook refused: {why}");
        }
    }
}

/// Lets a body that is too long pass by, as long as it is one that GitHub sends: many read the answer only when they have
/// sent it all.
async fn sent(length: usize, body: Body) -> Refusal {
    let mut chunks = body.into_data_stream();
    while length <= GITHUBS_LONGEST && matches!(chunks.next().await, Some(Ok(_))) {}
    Refusal::TooLarge
}

pub async fn receive(State(hooks): State<Arc<Hooks>>, headers: HeaderMap, body: Body) -> Response {
    let (start, under_way) = (Instant::now(), hooks.under_way.clone());
    let taken = tokio::time::timeout(DEADLINE, hooks.take(&headers, body)).await.unwrap_or(Err(Refusal::Slow));
    let (status, (outcome, reason), answer) = match taken {
        Ok(outcome) => {
            let (status, answer) = show(&outcome);
            if let WebhookOutcome::Unavailable(why) | WebhookOutcome::Malformed(why) = &outcome {
                hooks.complain(outcome.words().1, why);
            }
            (status, outcome.words(), answer)
        }
        Err(refusal) => {
            let (reason, answer) = (refusal.reason(), refusal.to_string());
            hooks.complain(reason, &answer);
            (refusal.status(), ("refused", reason), answer)
        }
    };
    hooks.metrics.webhooks.get_or_create(&WebhookLabel { source: "http", outcome, reason }).inc();
    hooks.metrics.webhook_seconds.observe(start.elapsed().as_secs_f64());
    let crowded = Arc::strong_count(&under_way) > CROWD + 1;
    (status, crowded.then_some([(CONNECTION, "close")]), answer + "\n").into_response()
}

/// The answer, which a person may read in GitHub's log of deliveries.
fn show(outcome: &WebhookOutcome) -> (StatusCode, String) {
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
