//! Compares every exchange with AWS's service models, in the background.
//!
//! The models are large: they are read on first use, on the checker's own thread.

use std::{
    collections::{BTreeSet, HashMap},
    sync::mpsc,
};

use axum::body::Bytes;
use paddock_bed_process::tool;
use roxmltree::Document;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::{
    call::{Answer, Call, Service},
    errors,
    form::Form,
    model::Model,
    validate::{Check, Scalars, Side},
    xml,
};

enum Message {
    Exchange(Box<Exchange>),
    Report(oneshot::Sender<Vec<String>>),
    Forget(String),
}

/// A request and its answer.
struct Exchange {
    service: Service,
    action: String,
    sent: Bytes,
    answer: Answer,
}

pub struct Checker {
    messages: mpsc::Sender<Message>,
}

impl Checker {
    pub fn start() -> Self {
        let (messages, queue) = mpsc::channel();
        std::thread::spawn(move || {
            let mut models = HashMap::new();
            let mut found = BTreeSet::new();
            for message in queue {
                match message {
                    Message::Exchange(exchange) => found.extend(judge(&mut models, &exchange)),
                    Message::Report(report) => drop(report.send(found.iter().cloned().collect())),
                    Message::Forget(text) => found.retain(|violation: &String| !violation.contains(&text)),
                }
            }
        });
        Self { messages }
    }

    /// Checks a call, once it has an answer.
    pub fn of(&self, call: &Call) -> impl FnOnce(&Answer) + use<'_> {
        let (service, action, sent) = (call.service, call.action.clone(), call.body.clone());
        move |answer| {
            let answer = answer.clone();
            self.send(Message::Exchange(Box::new(Exchange { service, action, sent, answer })));
        }
    }

    /// Drops the violations with this text, which a test made on purpose.
    pub fn forget(&self, text: &str) {
        self.send(Message::Forget(text.to_owned()));
    }

    /// If the thread has died, for example without models, [`Self::violations`] reports it.
    fn send(&self, message: Message) {
        let _ = self.messages.send(message);
    }

    pub async fn violations(&self) -> Vec<String> {
        let (report, answer) = oneshot::channel();
        self.send(Message::Report(report));
        answer.await.unwrap_or_else(|_| vec!["nothing was checked: the checker ended early, see its panic".into()])
    }
}

fn judge(models: &mut HashMap<Service, Model>, exchange: &Exchange) -> Vec<String> {
    let model = models.entry(exchange.service).or_insert_with(|| {
        let read = || Model::of_botocore(&tool("moto")?, exchange.service);
        read().expect("AWS's service models come with moto")
    });
    violations(model, exchange)
}

/// A request that was accepted must be valid, and so must every answer.
fn violations(model: &Model, exchange: &Exchange) -> Vec<String> {
    let Exchange { service, action, sent, answer } = exchange;
    let name = format!("{} {action}", service.name());
    let Some(operation) = model.operation(action) else { return vec![format!("{name}: no such operation")] };
    if !answer.ok() {
        return error(exchange).map(|what| format!("{name}: {what}")).into_iter().collect();
    }
    let (input, output) = (operation.input.as_ref(), operation.output.as_ref());
    let (request, result) = match service {
        Service::Ec2 => {
            let check = |side| Check::new(model, Scalars::Text, side);
            let request = input.map(|input| check(Side::Request).form(input, &Form::parse(sent))).unwrap_or_default();
            let text = answer.text();
            let result = match Document::parse(&text) {
                Ok(xml) if xml.root_element().tag_name().name() != format!("{action}Response") => {
                    vec!["its root has another name".to_owned()]
                }
                Ok(xml) => [check(Side::Answer).xml(output, xml.root_element()), fleet_errors(&xml)].concat(),
                Err(error) => vec![format!("it is no XML: {error}")],
            };
            (request, result)
        }
        Service::DynamoDb | Service::Sqs => {
            let check = |side| Check::new(model, Scalars::Json, side);
            (check(Side::Request).json(input, sent), check(Side::Answer).json(output, &answer.body))
        }
    };
    let request = request.into_iter().map(|what| format!("{name} request: {what}"));
    request.chain(result.into_iter().map(|what| format!("{name} answer: {what}"))).collect()
}

/// The errors in a fleet's answer, which are the same as those of the call.
fn fleet_errors(xml: &Document<'_>) -> Vec<String> {
    let codes = xml.descendants().filter(|node| node.tag_name().name() == "errorCode").filter_map(|node| node.text());
    let unknown = codes.filter(|code| errors::row_of(Service::Ec2, Some("CreateFleet"), code).is_none());
    unknown.map(not_in_table).collect()
}

/// What is wrong with an error.
fn error(Exchange { service, action, answer, .. }: &Exchange) -> Option<String> {
    let status = answer.status.as_u16();
    let Some(code) = code_of(*service, answer) else { return Some(format!("an error {status} without code")) };
    match errors::row_of(*service, Some(action), &code) {
        None => Some(not_in_table(&code)),
        Some(row) if row.status != status => {
            Some(format!("error {code} has status {status} and not {} ({})", row.status, row.source))
        }
        Some(_) => None,
    }
}

fn not_in_table(code: &str) -> String {
    format!("error {code} is not in the table for it (bed/aws/src/errors.rs)")
}

fn code_of(service: Service, answer: &Answer) -> Option<String> {
    let text = answer.text();
    if service == Service::Ec2 {
        let document = Document::parse(&text).ok()?;
        return Some(xml::find(&document, "Code")?.text()?.to_owned());
    }
    let body: Value = serde_json::from_str(&text).ok()?;
    Some(body["__type"].as_str()?.rsplit('#').next()?.to_owned())
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
