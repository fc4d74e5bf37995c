//! The front end: the single endpoint of all SDK clients. It detects the service, counts calls, injects faults and
//! forwards.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::anyhow;
use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::{
    call::{Answer, Call, Service},
    capacity::Capacity,
    catalogue::Catalogue,
    checker::Checker,
    dynamodb, ec2,
    faults::{Effect, Faults},
    fleet::Fleets,
    form::Form,
    iam,
    instances::Instances,
    line::Line,
    records::Records,
    sqs::{self, Queues},
    template_fields::Parameters,
    templates,
};

/// moto detects the service by the credential's scope and does not check the signature.
pub const EC2_CREDENTIAL: &str =
    "AWS4-HMAC-SHA256 Credential=bed/20260101/us-east-1/ec2/aws4_request, SignedHeaders=host, Signature=bed";

/// DynamoDB's largest request is 16 MB.
const BODY_LIMIT: usize = 32 << 20;

/// How often each action of each service was called.
pub type Calls = BTreeMap<Service, BTreeMap<String, u64>>;

/// Why a call has no ordinary response.
pub enum Failure {
    /// The service refused the call.
    Refused(Box<Answer>),
    /// The bed itself failed.
    Broken(anyhow::Error),
}

pub type Outcome<T> = Result<T, Failure>;

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Broken(error.into())
    }
}

impl Failure {
    pub fn refused(code: &str, message: impl AsRef<str>) -> Self {
        Self::Refused(Box::new(Answer::error(Service::Ec2, code, message.as_ref(), None)))
    }

    pub fn into_answer(self) -> Answer {
        match self {
            Self::Refused(answer) => *answer,
            Self::Broken(error) => {
                tracing::error!("AWS bed failed: {error:#}");
                Answer::new(502, "text/plain", format!("the AWS bed failed: {error:#}"))
            }
        }
    }
}

pub struct Front {
    pub http: reqwest::Client,
    pub dynamodb: Upstream,
    pub sqs: Upstream,
    pub ec2: Upstream,
    pub faults: Mutex<Faults>,
    pub calls: Mutex<Calls>,
    /// Those of machines among them, by machine.
    pub machine_calls: Mutex<HashMap<String, Calls>>,
    pub capacity: Mutex<Capacity>,
    pub catalogue: Catalogue,
    pub queues: Queues,
    pub instances: Instances,
    pub records: Records,
    pub fleets: Fleets,
    pub templates: templates::Hidden,
    pub checker: Option<Checker>,
    pub parameters: Parameters,
    /// Files that machines download, by URL path. They are in memory: a hundred machines boot at a time, and streaming
    /// from disk costs an unoptimised build one CPU second each.
    pub files: Mutex<HashMap<String, Bytes>>,
    /// moto is not thread-safe: one call at a time. Its descriptions, by request, since the last change.
    pub moto: tokio::sync::Mutex<HashMap<String, String>>,
}

#[derive(Default)]
pub struct Upstream {
    pub url: String,
    pub log: PathBuf,
}

impl Front {
    /// Forwards a call of a JSON protocol unchanged except for `body`.
    pub async fn forward(&self, call: &Call, body: Bytes) -> Outcome<Answer> {
        let upstream = if call.service == Service::Sqs { &self.sqs } else { &self.dynamodb };
        let mut headers = call.headers.clone();
        for name in [header::HOST, header::CONTENT_LENGTH, header::CONNECTION, header::TRANSFER_ENCODING] {
            headers.remove(name);
        }
        if call.action == "ReceiveMessage" {
            // ElasticMQ may close the connection of a receive whose queue is deleted; another call must not be on it.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        let url = format!("{}{}", upstream.url, call.path.trim_start_matches('/'));
        let request = || self.http.post(&url).headers(headers.clone()).body(body.clone());
        match self.post(upstream, request()).await {
            // A connection that was closed meanwhile. SQS promises to deliver at least once, and its other calls can be repeated.
            Err(Failure::Broken(_)) if call.service == Service::Sqs => self.post(upstream, request()).await,
            outcome => outcome,
        }
    }

    /// Calls moto; its errors become [`Failure::Refused`]. moto takes seconds to list a thousand instances, so a
    /// description is kept until the next call that may change something.
    pub async fn moto(&self, form: &Form) -> Outcome<String> {
        let body = form.encode();
        let describes = form.get("Action").is_some_and(|action| action.starts_with("Describe"));
        // Held during the call: moto answers one at a time.
        let mut descriptions = self.moto.lock().await;
        match descriptions.get(&body) {
            Some(text) if describes => return Ok(text.clone()),
            _ if !describes => descriptions.clear(),
            _ => {}
        }
        let request = self.http.post(&self.ec2.url).header(header::AUTHORIZATION, EC2_CREDENTIAL);
        let request = request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded").body(body.clone());
        let answer = self.post(&self.ec2, request).await?;
        if !answer.ok() {
            return Err(Failure::Refused(Box::new(answer)));
        }
        let text = answer.text();
        if describes {
            descriptions.insert(body, text.clone());
        }
        Ok(text)
    }

    pub async fn post(&self, upstream: &Upstream, request: reqwest::RequestBuilder) -> Outcome<Answer> {
        let failed = |error| anyhow!("an emulator did not answer: {error:#}; see {}", upstream.log.display());
        let answer = request.send().await.map_err(failed)?;
        let (status, mut headers) = (answer.status(), HeaderMap::new());
        for (name, value) in answer.headers() {
            if name.as_str().starts_with("x-amz") || name == header::CONTENT_TYPE {
                headers.insert(name, value.clone());
            }
        }
        Ok(Answer { status, headers, body: answer.bytes().await.map_err(failed)? })
    }

    /// Where requests or answers are not as AWS's service models have them; empty without a checker.
    pub async fn violations(&self) -> Vec<String> {
        match &self.checker {
            Some(checker) => checker.violations().await,
            None => Vec::new(),
        }
    }

    /// Counts a call and picks its fault, if any.
    fn admit(&self, call: &Call) -> Option<Effect> {
        let count = |calls: &mut Calls| {
            *calls.entry(call.service).or_default().entry(call.action.clone()).or_default() += 1;
        };
        count(&mut self.calls.lock().unwrap());
        if let Some(machine) = iam::machine(&call.headers) {
            count(self.machine_calls.lock().unwrap().entry(machine).or_default());
        }
        self.faults.lock().unwrap().on_call(call)
    }

    /// Executes a call. It completes even if the client disconnects, as in the cloud.
    async fn perform(self: &Arc<Self>, call: Call, quirk: Option<Effect>) -> Answer {
        let front = self.clone();
        let work = async move {
            if let Some(refusal) = iam::refusal(&call, &front.instances, |queue| front.queues.names.tags(queue)) {
                return refusal;
            }
            let outcome = match call.service {
                Service::DynamoDb => {
                    let answer = dynamodb::perform(&front, &call, quirk).await;
                    answer.inspect(|answer| front.records.note(&call, answer))
                }
                Service::Sqs => sqs::perform(&front, call, quirk).await,
                Service::Ec2 => ec2::perform(&front, &call.action, call.form(), quirk).await,
            };
            outcome.unwrap_or_else(Failure::into_answer)
        };
        tokio::spawn(work).await.unwrap_or_else(|error| Failure::Broken(error.into()).into_answer())
    }
}

/// Serves every request that is not for the admin API.
pub async fn serve(
    State(front): State<Arc<Front>>,
    ConnectInfo(line): ConnectInfo<Line>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_LIMIT).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let Some(call) = Call::read(parts.uri.path(), parts.headers, body) else {
        let hint = "no service of the bed: it speaks DynamoDB and SQS (JSON) and EC2 (query)\n";
        return (StatusCode::BAD_REQUEST, hint).into_response();
    };
    let service = call.service;
    let check = front.checker.as_ref().map(|checker| checker.of(&call));
    let check = |answer: &Answer| check.into_iter().for_each(|check| check(answer));
    let answer = match front.admit(&call) {
        Some(Effect::Throttle) => Answer::throttled(service, &call.action),
        Some(Effect::Error { code, message, status }) => Answer::error(service, &code, &message, status),
        Some(Effect::ServerError { status }) => Answer::broken(service, status),
        Some(Effect::Delay { ms }) => {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            front.perform(call, None).await
        }
        Some(Effect::LostResponse) => {
            check(&front.perform(call, None).await);
            line.close();
            return Response::new(Body::empty());
        }
        Some(Effect::Reset) => {
            line.reset();
            return Response::new(Body::empty());
        }
        Some(Effect::Hang) => std::future::pending().await,
        quirk => front.perform(call, quirk).await,
    };
    check(&answer);
    answer.into_response()
}
