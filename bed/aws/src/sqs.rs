//! SQS behaviour that ElasticMQ never shows: duplicate, late, unordered or deleted messages, and false empty receives.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
};

use anyhow::Context;
use axum::http::{HeaderName, HeaderValue};
use serde_json::{Value, json};

use crate::{
    call::{Answer, Call, Service},
    faults::Effect,
    front::{Front, Outcome},
    queues::{self, Names},
};

/// The maximum number of messages of one receive.
const BATCH: usize = 10;

/// The longest wait of a receive at ElasticMQ, in seconds. SQS allows 20; ElasticMQ answers a call that takes longer than 21 s
/// with an error, and on a busy machine the answer may take a second more.
const LONGEST_WAIT: u64 = 10;

#[derive(Default)]
pub struct Queues {
    pub names: Names,
    /// Messages that the next receive of a queue delivers once more.
    echoes: Mutex<HashMap<String, Vec<Value>>>,
    /// Every delivered message, by receipt handle.
    issued: Mutex<HashMap<String, Value>>,
}

impl Queues {
    fn echo(&self, queue: &str, message: Value) {
        self.echoes.lock().unwrap().entry(queue.to_owned()).or_default().push(message);
    }

    fn take_echoes(&self, queue: &str, most: usize) -> Vec<Value> {
        let mut echoes = self.echoes.lock().unwrap();
        let waiting = echoes.entry(queue.to_owned()).or_default();
        waiting.drain(..most.min(waiting.len())).collect()
    }

    fn issue(&self, messages: &[Value]) {
        let handles = messages.iter().map(|message| (text(message, "ReceiptHandle").to_owned(), message.clone()));
        self.issued.lock().unwrap().extend(handles);
    }

    fn issued(&self, handle: &str) -> Option<Value> {
        self.issued.lock().unwrap().get(handle).cloned()
    }
}

pub async fn perform(front: &Front, call: Call, quirk: Option<Effect>) -> Outcome<Answer> {
    if front.sqs.url.is_empty() {
        return Ok(no_queue());
    }
    let outcome = match call.action.as_str() {
        "ReceiveMessage" => receive(front, &call, quirk).await,
        "DeleteMessage" => delete(front, &call).await,
        "DeleteMessageBatch" => delete_batch(front, &call).await,
        "CreateQueue" => queues::create(front, &call).await,
        "DeleteQueue" => queues::delete(front, &call).await,
        "ListQueues" => queues::list(front, &call).await,
        "SetQueueAttributes" => queues::set_attributes(front, &call).await,
        "GetQueueAttributes" => queues::get_attributes(front, &call).await,
        _ => front.forward(&call, call.body.clone()).await,
    };
    let mut answer = match outcome {
        Ok(answer) if answer.ok() || parse(&answer.body).is_ok() => answer,
        // ElasticMQ does not answer a call that was under way when its queue was deleted.
        _ if front.queues.names.is_deleted(&call).await => no_queue(),
        outcome => outcome?,
    };
    if answer.ok() && call.action.ends_with("Batch") {
        answer = with_both_lists(&answer)?;
    }
    if !answer.ok() {
        let kind = parse(&answer.body)?;
        let code = text(&kind, "__type").rsplit('#').next().unwrap_or_default();
        if let Some((name, value)) = query_error(code, answer.status.as_u16()) {
            answer.headers.insert(name, value);
        }
    }
    Ok(answer)
}

fn no_queue() -> Answer {
    Answer::error(Service::Sqs, "QueueDoesNotExist", "The specified queue does not exist.", None)
}

/// SQS answers a batch with what succeeded and what failed; ElasticMQ leaves out an empty list.
fn with_both_lists(answer: &Answer) -> Outcome<Answer> {
    let mut result = parse(&answer.body)?;
    for list in ["Successful", "Failed"] {
        if result[list].is_null() {
            result[list] = json!([]);
        }
    }
    Ok(Answer::json(&result))
}

/// The header with the error codes of SQS's older protocol, which SDKs rely on and ElasticMQ does not send.
pub fn query_error(code: &str, status: u16) -> Option<(HeaderName, HeaderValue)> {
    let prefix = match code {
        "QueueDoesNotExist" => return query_error("AWS.SimpleQueueService.NonExistentQueue", status),
        "QueueNameExists" => return query_error("QueueAlreadyExists", status),
        // aws/serverless-application-model issue 3633.
        "AccessDeniedException" => return query_error("AccessDenied", status),
        "BatchEntryIdsNotDistinct"
        | "BatchRequestTooLong"
        | "EmptyBatchRequest"
        | "InvalidBatchEntryId"
        | "MessageNotInflight"
        | "PurgeQueueInProgress"
        | "QueueDeletedRecently"
        | "TooManyEntriesInBatchRequest"
        | "UnsupportedOperation" => "AWS.SimpleQueueService.",
        _ => "",
    };
    let fault = if status < 500 { "Sender" } else { "Receiver" };
    let value = HeaderValue::from_str(&format!("{prefix}{code};{fault}")).ok()?;
    Some((HeaderName::from_static("x-amzn-query-error"), value))
}

async fn receive(front: &Front, call: &Call, quirk: Option<Effect>) -> Outcome<Answer> {
    if quirk == Some(Effect::FalseEmpty) {
        return Ok(Answer::json(&json!({})));
    }
    let mut request = body(call)?;
    let queue = text(&request, "QueueUrl").to_owned();
    let most = request["MaxNumberOfMessages"].as_u64().unwrap_or(1) as usize;
    let echoes = front.queues.take_echoes(&queue, most);
    if !echoes.is_empty() {
        return Ok(Answer::json(&json!({ "Messages": echoes })));
    }
    let reorder = quirk == Some(Effect::Reorder);
    if reorder {
        request["MaxNumberOfMessages"] = BATCH.into();
    }
    let mut wait = request["WaitTimeSeconds"].as_u64().unwrap_or_default();
    let mut messages: Vec<Value> = loop {
        let part = wait.min(LONGEST_WAIT);
        request["WaitTimeSeconds"] = part.into();
        let answer = front.forward(call, request.to_string().into()).await?;
        if !answer.ok() {
            return Ok(answer);
        }
        let messages: Vec<_> = serde_json::from_value(parse(&answer.body)?["Messages"].take()).unwrap_or_default();
        wait -= part;
        if wait == 0 || !messages.is_empty() {
            break messages;
        }
    };
    if reorder {
        messages.reverse();
        for surplus in messages.drain(most.min(messages.len())..) {
            hide(front, &queue, &surplus, 0).await?;
        }
    }
    let mut delivered = Vec::new();
    for message in messages {
        let effect = front.faults.lock().unwrap().on_message("ReceiveMessage", text(&message, "Body"));
        match effect {
            Some(Effect::Late { seconds }) => hide(front, &queue, &message, seconds).await?,
            Some(Effect::Duplicate) => {
                front.queues.echo(&queue, message.clone());
                delivered.push(message);
            }
            _ => delivered.push(message),
        }
    }
    front.queues.issue(&delivered);
    Ok(Answer::json(&if delivered.is_empty() { json!({}) } else { json!({ "Messages": delivered }) }))
}

/// Deleting a deleted message succeeds at SQS and fails at ElasticMQ.
async fn delete(front: &Front, call: &Call) -> Outcome<Answer> {
    let request = body(call)?;
    let answer = front.forward(call, call.body.clone()).await?;
    let known = front.queues.issued(text(&request, "ReceiptHandle"));
    let Some(message) = known else { return Ok(answer) };
    if answer.ok() {
        redeliver_deleted(front, text(&request, "QueueUrl"), message);
        return Ok(answer);
    }
    Ok(if answer.text().contains("ReceiptHandleIsInvalid") { Answer::json(&json!({})) } else { answer })
}

async fn delete_batch(front: &Front, call: &Call) -> Outcome<Answer> {
    let request = body(call)?;
    let answer = front.forward(call, call.body.clone()).await?;
    if !answer.ok() {
        return Ok(answer);
    }
    let result = parse(&answer.body)?;
    let handles: HashMap<&str, &str> =
        entries(&request, "Entries").map(|entry| (text(entry, "Id"), text(entry, "ReceiptHandle"))).collect();
    let known = |entry: &Value| front.queues.issued(handles.get(text(entry, "Id")).copied().unwrap_or_default());
    for message in entries(&result, "Successful").filter_map(known) {
        redeliver_deleted(front, text(&request, "QueueUrl"), message);
    }
    let gone: HashSet<&str> = entries(&result, "Failed")
        .filter(|entry| text(entry, "Code").contains("ReceiptHandleIsInvalid") && known(entry).is_some())
        .map(|entry| text(entry, "Id"))
        .collect();
    let successful: Vec<Value> =
        entries(&result, "Successful").cloned().chain(gone.iter().map(|id| json!({ "Id": id }))).collect();
    let failed: Vec<&Value> = entries(&result, "Failed").filter(|entry| !gone.contains(text(entry, "Id"))).collect();
    Ok(Answer::json(&json!({ "Successful": successful, "Failed": failed })))
}

/// Redelivers a deleted message if a rule says so.
fn redeliver_deleted(front: &Front, queue: &str, message: Value) {
    let effect = front.faults.lock().unwrap().on_message("DeleteMessage", text(&message, "Body"));
    if effect == Some(Effect::AfterDeletion) {
        front.queues.echo(queue, message);
    }
}

/// Hides a received message for this long.
async fn hide(front: &Front, queue: &str, message: &Value, seconds: u32) -> Outcome<()> {
    let body = json!({ "QueueUrl": queue, "ReceiptHandle": message["ReceiptHandle"], "VisibilityTimeout": seconds });
    let headers =
        [("x-amz-target", "AmazonSQS.ChangeMessageVisibility"), ("content-type", "application/x-amz-json-1.0")];
    let call = headers.iter().fold(front.http.post(&front.sqs.url), |call, (name, value)| call.header(*name, *value));
    front.post(&front.sqs, call.body(body.to_string())).await?;
    Ok(())
}

pub fn body(call: &Call) -> Outcome<Value> {
    debug_assert_eq!(call.service, Service::Sqs);
    Ok(parse(&call.body)?)
}

pub fn parse(body: &[u8]) -> anyhow::Result<Value> {
    serde_json::from_slice(body).context("SQS speaks JSON")
}

pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn entries<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}
