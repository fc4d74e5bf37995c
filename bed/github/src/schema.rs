//! Validates the simulator's traffic against GitHub's published schemas.
//!
//! The documents are large: they are read on first use, on a separate thread, and only the operations in use are
//! compiled.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    sync::{LazyLock, mpsc},
};

use jsonschema::{Draft, Validator};
use paddock_bed_process::tool;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

fn package_file(path: &str) -> Value {
    let packages = tool("github-schemas").expect("GitHub's schemas can be fetched");
    let file = packages.join("@octokit").join(path);
    let text = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

static API: LazyLock<Value> = LazyLock::new(|| package_file("openapi/generated/api.github.com.json"));
static WEBHOOKS: LazyLock<Value> = LazyLock::new(|| package_file("openapi-webhooks/generated/api.github.com.json"));

/// The example payloads that GitHub publishes for an event, such as `workflow_job`.
pub fn examples(event: &str) -> Vec<Value> {
    let index = package_file("webhooks-examples/api.github.com/index.json");
    let entry = index.as_array().into_iter().flatten().find(|entry| entry["name"] == event);
    entry.and_then(|entry| entry["examples"].as_array()).cloned().unwrap_or_default()
}

/// Validates a webhook payload; returns its violations.
pub fn webhook_violations(event: &str, payload: &Value) -> Vec<String> {
    Schemas::default().webhook(event, payload)
}

enum Message {
    Exchange { method: String, path: String, sent: Vec<u8>, status: u16, received: Vec<u8> },
    Webhook { event: String, body: String },
    NotSimulated { method: String, path: String },
    Report(oneshot::Sender<Vec<String>>),
}

/// Validates messages in the background.
pub struct Checker {
    messages: mpsc::Sender<Message>,
}

impl Checker {
    pub(crate) fn start() -> Self {
        let (messages, queue) = mpsc::channel();
        std::thread::spawn(move || {
            let mut schemas = Schemas::default();
            let mut found = BTreeSet::new();
            for message in queue {
                match message {
                    Message::Exchange { method, path, sent, status, received } => {
                        found.extend(schemas.exchange(&method, &path, &sent, status, &received));
                    }
                    Message::Webhook { event, body } => {
                        let payload = serde_json::from_str(&body).unwrap_or_default();
                        found.extend(schemas.webhook(&event, &payload));
                    }
                    Message::NotSimulated { method, path } => {
                        let known = operation(&method, &path);
                        found.extend(known.map(|(template, _)| format!("{method} {template}: not simulated")));
                    }
                    Message::Report(report) => drop(report.send(found.iter().cloned().collect())),
                }
            }
        });
        Self { messages }
    }

    pub(crate) fn exchange(&self, method: &str, path: &str, sent: &[u8], status: u16, received: &[u8]) {
        let (method, path) = (method.to_owned(), path.to_owned());
        self.send(Message::Exchange { method, path, sent: sent.into(), status, received: received.into() });
    }

    pub(crate) fn webhook(&self, event: &str, body: &str) {
        self.send(Message::Webhook { event: event.to_owned(), body: body.to_owned() });
    }

    pub(crate) fn not_simulated(&self, method: &str, path: &str) {
        self.send(Message::NotSimulated { method: method.to_owned(), path: path.to_owned() });
    }

    /// If the checker thread has died, for example without schemas, [`Self::violations`] reports it.
    fn send(&self, message: Message) {
        let _ = self.messages.send(message);
    }

    pub(crate) async fn violations(&self) -> Vec<String> {
        let (report, answer) = oneshot::channel();
        self.send(Message::Report(report));
        answer.await.unwrap_or_else(|_| vec!["nothing was checked: the checker ended early, see its panic".into()])
    }
}

/// Compiled schemas, by what they describe.
#[derive(Default)]
struct Schemas {
    compiled: HashMap<String, Validator>,
}

impl Schemas {
    /// An accepted request must be valid at GitHub, and the response must match its schema.
    fn exchange(&mut self, method: &str, path: &str, sent: &[u8], status: u16, received: &[u8]) -> Vec<String> {
        let Some((template, operation)) = operation(method, path) else {
            return vec![format!("{method} {path}: GitHub has no such operation")];
        };
        let name = format!("{method} {template}");
        let mut violations = vec![];
        let body = &operation["requestBody"];
        if status < 300 && !(sent.is_empty() && body["required"] != true) {
            let schema = &body["content"]["application/json"]["schema"];
            match serde_json::from_slice(sent) {
                Ok(_) if schema.is_null() => {}
                Ok(value) => violations.extend(self.judge(&format!("{name} request"), &API, schema, &value)),
                Err(_) => violations.push(format!("{name} request: a body was expected and none in JSON came")),
            }
        }
        let what = format!("{name} {status}");
        let mut response = &operation["responses"][status.to_string()];
        if let Some(reference) = response["$ref"].as_str() {
            response = at(&API, reference);
        }
        let errors = json!({"$ref": "#/components/schemas/basic-error"});
        let schema = match &response["content"]["application/json"]["schema"] {
            // GitHub does not document most errors; all have the same schema.
            _ if response.is_null() && status >= 400 => &errors,
            _ if response.is_null() => return vec![format!("{what}: GitHub never answers with this status")],
            schema => corrected(&name, schema),
        };
        match (schema.is_null(), received.is_empty(), serde_json::from_slice(received)) {
            (true, true, _) => {}
            (true, false, _) => violations.push(format!("{what}: GitHub sends no body here")),
            (false, _, Err(_)) => violations.push(format!("{what}: the body is not JSON")),
            (false, _, Ok(value)) => violations.extend(self.judge(&what, &API, schema, &value)),
        }
        violations
    }

    fn webhook(&mut self, event: &str, payload: &Value) -> Vec<String> {
        let action = payload["action"].as_str().map(|action| format!("_{action}")).unwrap_or_default();
        let name = format!("{event}{action}").replace('_', "-");
        let schema = &WEBHOOKS["webhooks"][&name]["post"]["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            return vec![format!("webhook {name}: GitHub sends no such thing")];
        }
        self.judge(&format!("webhook {name}"), &WEBHOOKS, schema, payload)
    }

    fn judge(&mut self, what: &str, document: &Value, schema: &Value, value: &Value) -> Vec<String> {
        let validator = self.compiled.entry(what.to_owned()).or_insert_with(|| compile(document, schema));
        let errors = validator.iter_errors(value).take(5);
        errors.map(|error| format!("{what}: {} at {}", error.masked(), error.instance_path())).collect()
    }
}

/// Works around a contradiction in the document: in the list of installations, the account must be both a user and an
/// enterprise. In the single installation, the same object, it is one of them.
fn corrected<'a>(operation: &str, schema: &'a Value) -> &'a Value {
    static INSTALLATIONS: LazyLock<Value> =
        LazyLock::new(|| json!({"type": "array", "items": {"$ref": "#/components/schemas/installation"}}));
    if operation == "GET /app/installations" { &INSTALLATIONS } else { schema }
}

/// The operation with a matching path template; the one with the fewest parameters if several match.
fn operation(method: &str, path: &str) -> Option<(&'static str, &'static Value)> {
    let fits = |template: &str| {
        let (mut parts, mut given) = (template.split('/'), path.split('/'));
        loop {
            match (parts.next(), given.next()) {
                (None, None) => return true,
                (Some(part), Some(text)) if part == text || (part.starts_with('{') && !text.is_empty()) => {}
                _ => return false,
            }
        }
    };
    let paths = API["paths"].as_object()?.iter().filter(|(template, _)| fits(template));
    let found = paths.filter_map(|(template, item)| Some((template.as_str(), item.get(method.to_lowercase())?)));
    found.min_by_key(|(template, _)| template.matches('{').count())
}

fn at<'a>(document: &'a Value, reference: &str) -> &'a Value {
    document.pointer(reference.trim_start_matches('#')).unwrap_or(&Value::Null)
}

/// A self-contained schema with only the components that it needs.
fn compile(document: &Value, schema: &Value) -> Validator {
    let mut components = Map::new();
    let mut root = plain(schema, document, &mut components);
    if let Value::Object(root) = &mut root {
        root.insert("components".into(), json!({"schemas": components}));
    }
    let options = jsonschema::options().with_draft(Draft::Draft202012).should_validate_formats(true);
    options.build(&root).unwrap_or_else(|error| panic!("GitHub's schema cannot be compiled: {error}"))
}

/// Copies a schema, collects its references, and translates OpenAPI 3.0's `nullable` to JSON Schema. (Version 3.1 does
/// not have it.)
fn plain(schema: &Value, document: &Value, components: &mut Map<String, Value>) -> Value {
    match schema {
        Value::Array(items) => items.iter().map(|item| plain(item, document, components)).collect(),
        Value::Object(members) => {
            if let Some(name) = members.get("$ref").and_then(|it| it.as_str()?.strip_prefix("#/components/schemas/"))
                && !components.contains_key(name)
            {
                components.insert(name.to_owned(), Value::Null);
                let target = plain(&document["components"]["schemas"][name], document, components);
                components.insert(name.to_owned(), target);
            }
            let copied =
                members.iter().filter(|(key, _)| !matches!(key.as_str(), "example" | "examples" | "description"));
            // `description` is text as a schema keyword, but a schema as a property name.
            let properties = members.iter().filter(|(key, value)| key.as_str() == "description" && value.is_object());
            let copy = copied.chain(properties).map(|(key, value)| (key.clone(), plain(value, document, components)));
            let copy: Map<_, _> = copy.collect();
            if copy.get("nullable") == Some(&Value::Bool(true)) {
                json!({"anyOf": [{"type": "null"}, copy]})
            } else {
                copy.into()
            }
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some examples predate fields that GitHub added later; nothing else may be wrong with them.
    #[test]
    fn the_published_examples_fit_but_for_members_that_came_later() {
        let examples = examples("workflow_job");
        assert_eq!(examples.len(), 8);
        let violations = examples.iter().flat_map(|example| webhook_violations("workflow_job", example));
        let serious: Vec<_> = violations.filter(|text| !text.contains("is a required property")).collect();
        assert_eq!(serious, [] as [String; 0]);
    }

    #[test]
    fn what_github_would_not_say_is_found() {
        let mut schemas = Schemas::default();
        let mut judge =
            |path: &str, status, body: Value| schemas.exchange("GET", path, b"", status, body.to_string().as_bytes());
        let runner = |labels| json!({"id": 1, "name": "a", "os": "unknown", "status": "offline", "busy": false, "labels": labels});
        let path = "/orgs/acme/actions/runners/1";
        assert_eq!(judge(path, 200, runner(json!([]))), [] as [String; 0]);
        assert!(judge(path, 200, runner(json!(["x"])))[0].contains("at /labels/0"));
        assert!(judge(path, 299, json!({}))[0].contains("never answers with this status"));
        assert!(judge("/orgs/acme/actions/runer", 200, json!({}))[0].contains("no such operation"));
        assert!(judge("/repos/a/b/actions/jobs/1", 200, json!({"id": null}))[0].contains("GET /repos/{owner}/{repo}"));
    }

    #[test]
    fn a_request_that_github_refuses_must_not_be_accepted() {
        let mut schemas = Schemas::default();
        let path = "/orgs/acme/actions/runner-groups";
        let accepted = schemas.exchange("POST", path, br#"{"visibility": "all"}"#, 201, b"{}");
        assert!(accepted[0].contains("request: \"name\" is a required property"), "{accepted:?}");
        let refused = schemas.exchange("POST", path, br#"{"visibility": "all"}"#, 422, br#"{"message": "no"}"#);
        assert_eq!(refused, [] as [String; 0]);
    }
}
