//! What SQS keeps of a queue and ElasticMQ does not: the attributes it was made with, and that it was deleted a moment
//! ago. Source of all rules and numbers: CreateQueue and DeleteQueue in the SQS API reference, and the documentation in
//! botocore's `sqs/2012-11-05/service-2.json`.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    call::{Answer, Call, Service},
    front::{Front, Outcome},
    sqs::{body, parse, text},
};

/// "You must wait 60 seconds after deleting a queue before you can create another queue with the same name."
const DELETION_TIME: Duration = Duration::from_secs(60);

/// The attributes with a number: name, least, most, default.
const NUMBERS: [(&str, u32, u32, u32); 5] = [
    ("DelaySeconds", 0, 900, 0),
    ("MaximumMessageSize", 1024, 1_048_576, 1_048_576),
    ("MessageRetentionPeriod", 60, 1_209_600, 345_600),
    ("ReceiveMessageWaitTimeSeconds", 0, 20, 0),
    ("VisibilityTimeout", 0, 43_200, 30),
];

type Attributes = BTreeMap<String, String>;

/// The tags of a queue.
pub type Tags = BTreeMap<String, String>;

enum Known {
    There { attributes: Attributes, url: String },
    Deleted(Instant),
}

/// The queues by name.
pub struct Names {
    /// Locked for the whole of a call that makes, changes or deletes a queue.
    known: tokio::sync::Mutex<HashMap<String, Known>>,
    tags: Mutex<HashMap<String, Tags>>,
    deletion_time: Mutex<Duration>,
}

impl Default for Names {
    fn default() -> Self {
        Self { known: Default::default(), tags: Default::default(), deletion_time: DELETION_TIME.into() }
    }
}

impl Names {
    pub fn set_deletion_time(&self, time: Duration) {
        *self.deletion_time.lock().unwrap() = time;
    }

    /// Whether the queue of a call has been deleted.
    pub async fn is_deleted(&self, call: &Call) -> bool {
        let Ok(request) = body(call) else { return false };
        matches!(self.known.lock().await.get(name_of(&request)), Some(Known::Deleted(_)))
    }

    /// The tags of a queue by its name.
    pub fn tags(&self, name: &str) -> Tags {
        self.tags.lock().unwrap().get(name).cloned().unwrap_or_default()
    }
}

/// A queue that exists is made again if every attribute that the request names has this value.
pub async fn create(front: &Front, call: &Call) -> Outcome<Answer> {
    let request = body(call)?;
    let (name, wanted) = (text(&request, "QueueName"), attributes(&request));
    if let Some(refusal) = out_of_range(&wanted) {
        return Ok(refusal);
    }
    let mut known = front.queues.names.known.lock().await;
    match known.get(name) {
        Some(Known::Deleted(at)) if at.elapsed() < *front.queues.names.deletion_time.lock().unwrap() => {
            let message =
                "You must wait 60 seconds after deleting a queue before you can create another with the same name.";
            return Ok(refused("QueueDeletedRecently", message));
        }
        Some(Known::There { attributes, url }) => {
            let differs = |(name, value): &(&String, &String)| value_of(attributes, name).as_ref() != Some(*value);
            return Ok(match wanted.iter().find(differs) {
                Some((other, _)) => refused(
                    "QueueNameExists",
                    &format!("A queue already exists with the same name and a different value for attribute {other}"),
                ),
                None => Answer::json(&json!({ "QueueUrl": url })),
            });
        }
        _ => {}
    }
    let answer = front.forward(call, call.body.clone()).await?;
    if answer.ok() {
        let url = text(&parse(&answer.body)?, "QueueUrl").to_owned();
        known.insert(name.to_owned(), Known::There { attributes: wanted, url });
        front.queues.names.tags.lock().unwrap().insert(name.to_owned(), texts(&request, "tags"));
    }
    Ok(answer)
}

pub async fn delete(front: &Front, call: &Call) -> Outcome<Answer> {
    let request = body(call)?;
    let mut known = front.queues.names.known.lock().await;
    let answer = front.forward(call, call.body.clone()).await?;
    if answer.ok() {
        known.insert(name_of(&request).to_owned(), Known::Deleted(Instant::now()));
    }
    Ok(answer)
}

/// ElasticMQ answers with all queues at once. "If you do not set MaxResults, the response includes a maximum of 1,000 results.
/// You must set MaxResults to receive a value for NextToken."
pub async fn list(front: &Front, call: &Call) -> Outcome<Answer> {
    const LIMIT: usize = 1000;
    let request = body(call)?;
    let wanted = json!({ "QueueNamePrefix": text(&request, "QueueNamePrefix") });
    let answer = front.forward(call, wanted.to_string().into()).await?;
    if !answer.ok() {
        return Ok(answer);
    }
    let mut urls: Vec<String> = serde_json::from_value(parse(&answer.body)?["QueueUrls"].take()).unwrap_or_default();
    urls.sort();
    // The token is the last name of the page before.
    urls.retain(|url| url.as_str() > text(&request, "NextToken"));
    let size = request["MaxResults"].as_u64().map(|size| size as usize);
    let more = urls.len() > size.unwrap_or(LIMIT);
    urls.truncate(size.unwrap_or(LIMIT));
    let mut page = json!({ "QueueUrls": urls });
    if more && size.is_some() {
        page["NextToken"] = json!(urls.last());
    }
    Ok(Answer::json(&page))
}

pub async fn set_attributes(front: &Front, call: &Call) -> Outcome<Answer> {
    let request = body(call)?;
    let changed = attributes(&request);
    if let Some(refusal) = out_of_range(&changed) {
        return Ok(refusal);
    }
    let mut known = front.queues.names.known.lock().await;
    let answer = front.forward(call, call.body.clone()).await?;
    if let (true, Some(Known::There { attributes, .. })) = (answer.ok(), known.get_mut(name_of(&request))) {
        attributes.extend(changed);
    }
    Ok(answer)
}

/// ElasticMQ knows neither every attribute nor SQS's defaults.
pub async fn get_attributes(front: &Front, call: &Call) -> Outcome<Answer> {
    let request = body(call)?;
    let answer = front.forward(call, call.body.clone()).await?;
    let known = front.queues.names.known.lock().await;
    let Some(Known::There { attributes, .. }) = known.get(name_of(&request)).filter(|_| answer.ok()) else {
        return Ok(answer);
    };
    let asked = |name: &str| {
        let names = request["AttributeNames"].as_array().into_iter().flatten();
        names.filter_map(Value::as_str).any(|asked| asked == name || asked == "All")
    };
    let mut result = parse(&answer.body)?;
    for (name, ..) in NUMBERS.iter().filter(|(name, ..)| asked(name)) {
        result["Attributes"][name] = json!(value_of(attributes, name));
    }
    Ok(Answer::json(&result))
}

fn refused(code: &str, message: &str) -> Answer {
    Answer::error(Service::Sqs, code, message, None)
}

fn out_of_range(attributes: &Attributes) -> Option<Answer> {
    let wrong = |(name, least, most, _): &&(&str, u32, u32, u32)| {
        let value = attributes.get(*name).map(|value| value.parse::<u32>());
        value.is_some_and(|value| !value.is_ok_and(|value| (*least..=*most).contains(&value)))
    };
    let (name, ..) = NUMBERS.iter().find(wrong)?;
    Some(refused("InvalidAttributeValue", &format!("Invalid value for the parameter {name}.")))
}

/// The value that a queue has for an attribute, or would have by default.
fn value_of(attributes: &Attributes, name: &str) -> Option<String> {
    let default = || NUMBERS.iter().find(|(number, ..)| *number == name).map(|(.., default)| default.to_string());
    attributes.get(name).cloned().or_else(default)
}

fn attributes(request: &Value) -> Attributes {
    texts(request, "Attributes")
}

fn texts(request: &Value, key: &str) -> BTreeMap<String, String> {
    let pairs = request[key].as_object().into_iter().flatten();
    pairs.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

fn name_of(request: &Value) -> &str {
    text(request, "QueueUrl").rsplit('/').next().unwrap_or_default()
}
