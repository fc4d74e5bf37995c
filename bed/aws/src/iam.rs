//! IAM for the calls of machines: the policy that we ship for their role is evaluated for each. It covers what that policy
//! uses; anything else in it is an error, so that nothing is allowed that was not understood.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use axum::http::{HeaderMap, header};
use serde_json::Value;

use crate::{
    ACCOUNT, PARTITION, REGION,
    call::{Answer, Call, Service},
    instances::Instances,
    queues::Tags,
};

/// The policy of the role that all machines have.
static MACHINE_POLICY: LazyLock<Policy> = LazyLock::new(|| {
    let text = include_str!("../../../docs/iam/instance.json");
    Policy::parse(text).unwrap_or_else(|error| panic!("docs/iam/instance.json: {error}"))
});

/// How access keys of machines start; that of a user starts otherwise.
const MACHINE_KEY: &str = "ASIA";

/// A machine's access key has its id, so that a request tells its sender.
pub fn access_key(instance_id: &str) -> String {
    format!("{MACHINE_KEY}{}", instance_id.trim_start_matches("i-").to_uppercase())
}

/// The refusal of a machine's call, if it is not allowed. Other callers have no policy here.
pub fn refusal(call: &Call, instances: &Instances, tags: impl Fn(&str) -> Tags) -> Option<Answer> {
    let id = machine(&call.headers)?;
    if instances.get(&id).is_none() {
        let (code, message) = match call.service {
            Service::Ec2 => ("AuthFailure", "AWS was not able to validate the provided access credentials"),
            Service::DynamoDb | Service::Sqs => {
                ("UnrecognizedClientException", "The security token included in the request is invalid.")
            }
        };
        return Some(Answer::error(call.service, code, message, None));
    }
    let denied = requests(call, &id, tags).into_iter().find(|request| !MACHINE_POLICY.allows(request))?;
    let user = format!("arn:{PARTITION}:sts::{ACCOUNT}:assumed-role/paddock-runner/{id}");
    let Request { action, resource, .. } = denied;
    let message = format!(
        "User: {user} is not authorized to perform: {action} on resource: {resource} because no identity-based policy \
         allows the {action} action"
    );
    let code = if call.service == Service::Ec2 { "UnauthorizedOperation" } else { "AccessDeniedException" };
    Some(Answer::error(call.service, code, &message, None))
}

/// The machine that signed a request.
pub fn machine(headers: &HeaderMap) -> Option<String> {
    let signed = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let key = signed.split_once("Credential=")?.1.split('/').next()?;
    Some(format!("i-{}", key.strip_prefix(MACHINE_KEY)?.to_lowercase()))
}

/// What IAM decides on: an action, what it is done to, and the keys of the context.
#[derive(Debug, Clone)]
struct Request {
    action: String,
    resource: String,
    context: BTreeMap<String, Vec<String>>,
}

const SOURCE_INSTANCE: &str = "ec2:SourceInstanceARN";
const LEADING_KEYS: &str = "dynamodb:LeadingKeys";

/// What IAM is asked about a call, with the tags of a queue by its name. A call to several items or tables needs all to be
/// allowed.
fn requests(call: &Call, id: &str, tags: impl Fn(&str) -> Tags) -> Vec<Request> {
    let source = format!("arn:{PARTITION}:ec2:{REGION}:{ACCOUNT}:instance/{id}");
    let request = |action: &str, resource: String, leading_keys: Option<BTreeSet<String>>| {
        let mut context = BTreeMap::from([(SOURCE_INSTANCE.to_owned(), vec![source.clone()])]);
        context.extend(leading_keys.map(|keys| (LEADING_KEYS.to_owned(), keys.into_iter().collect())));
        Request { action: format!("{}:{action}", call.service.name()), resource, context }
    };
    match call.service {
        Service::Ec2 => vec![request(&call.action, "*".to_owned(), None)],
        Service::Sqs => {
            let body: Value = serde_json::from_slice(&call.body).unwrap_or_default();
            let name = body["QueueUrl"].as_str().and_then(|url| url.rsplit('/').next()).or(body["QueueName"].as_str());
            let resource = format!("arn:{PARTITION}:sqs:{REGION}:{ACCOUNT}:{}", name.unwrap_or("*"));
            let mut request = request(call.action.trim_end_matches("Batch"), resource, None);
            let tags = name.map(tags).unwrap_or_default().into_iter();
            request.context.extend(tags.map(|(key, value)| (format!("aws:ResourceTag/{key}"), vec![value])));
            vec![request]
        }
        Service::DynamoDb => {
            let body: Value = serde_json::from_slice(&call.body).unwrap_or_default();
            let table = |name: Option<&str>| {
                format!("arn:{PARTITION}:dynamodb:{REGION}:{ACCOUNT}:table/{}", name.unwrap_or("*"))
            };
            let accesses = accesses(&call.action, &body).into_iter();
            accesses
                .map(|access| request(&access.action, table(access.table.as_deref()), access.leading_keys))
                .collect()
        }
    }
}

/// One table's part of a call.
struct Access {
    action: String,
    table: Option<String>,
    /// The partition keys that the request names; none where it names no item.
    leading_keys: Option<BTreeSet<String>>,
}

fn accesses(action: &str, body: &Value) -> Vec<Access> {
    let partition = |item: &Value| item["PK"]["S"].as_str().map(str::to_owned);
    let access = |action: &str, table: Option<&str>, items: Vec<&Value>| {
        let keys: Option<BTreeSet<_>> = items.into_iter().map(partition).collect();
        let leading_keys = keys.filter(|keys| !keys.is_empty());
        Access { action: action.to_owned(), table: table.map(str::to_owned), leading_keys }
    };
    let tables = body["RequestItems"].as_object().into_iter().flatten();
    match action {
        "BatchGetItem" => tables
            .map(|(table, wanted)| {
                access(action, Some(table), wanted["Keys"].as_array().into_iter().flatten().collect())
            })
            .collect(),
        "BatchWriteItem" => tables
            .map(|(table, writes)| {
                let writes = writes.as_array().into_iter().flatten().filter_map(|write| write.as_object());
                let parts = writes.flat_map(|write| write.values());
                access(action, Some(table), parts.map(item_of).collect())
            })
            .collect(),
        // A transaction needs the action of each of its parts.
        "TransactWriteItems" | "TransactGetItems" => {
            let parts = body["TransactItems"].as_array().into_iter().flatten().filter_map(Value::as_object).flatten();
            let part = |(kind, part): (&String, &Value)| {
                let action =
                    if kind == "ConditionCheck" { "ConditionCheckItem".to_owned() } else { format!("{kind}Item") };
                access(&action, part["TableName"].as_str(), vec![item_of(part)])
            };
            parts.map(part).collect()
        }
        _ => {
            let item = item_of(body);
            let items = if item.is_object() { vec![item] } else { Vec::new() };
            vec![access(action, body["TableName"].as_str(), items)]
        }
    }
}

/// The item, or its key, in a request.
fn item_of(part: &Value) -> &Value {
    if part["Key"].is_object() { &part["Key"] } else { &part["Item"] }
}

#[derive(Debug)]
struct Policy(Vec<Statement>);

#[derive(Debug)]
struct Statement {
    allow: bool,
    actions: Vec<String>,
    resources: Vec<String>,
    conditions: Vec<Condition>,
}

#[derive(Debug)]
struct Condition {
    operator: Operator,
    key: String,
    values: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Equals { all: bool },
    Like { all: bool },
    Null,
}

impl Policy {
    fn parse(text: &str) -> Result<Self, String> {
        let policy: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        known(&policy, &["Version", "Statement", "Id"])?;
        // The older version has no policy variables.
        if policy["Version"] != "2012-10-17" {
            return Err(format!("version {}", policy["Version"]));
        }
        let statements = policy["Statement"].as_array().ok_or("no list of statements")?;
        Ok(Self(statements.iter().map(Statement::parse).collect::<Result<_, _>>()?))
    }

    /// A request is allowed by a statement that allows it, unless another one denies it.
    fn allows(&self, request: &Request) -> bool {
        let applies = |allow| self.0.iter().any(|statement| statement.allow == allow && statement.applies(request));
        applies(true) && !applies(false)
    }
}

impl Statement {
    fn parse(statement: &Value) -> Result<Self, String> {
        known(statement, &["Sid", "Effect", "Action", "Resource", "Condition"])?;
        let allow = match statement["Effect"].as_str() {
            Some("Allow") => true,
            Some("Deny") => false,
            other => return Err(format!("effect {other:?}")),
        };
        let mut conditions = Vec::new();
        for (operator, keys) in statement["Condition"].as_object().into_iter().flatten() {
            for (key, values) in keys.as_object().ok_or("a condition without keys")? {
                let operator = Operator::parse(operator)?;
                conditions.push(Condition { operator, key: key.clone(), values: texts(values)? });
            }
        }
        let (actions, resources) = (texts(&statement["Action"])?, texts(&statement["Resource"])?);
        // A variable in a Resource would have to be replaced; that of the calling instance is for conditions only.
        match actions.iter().chain(&resources).find(|text| text.contains('$')) {
            Some(text) => Err(format!("a variable in {text}")),
            None => Ok(Self { allow, actions, resources, conditions }),
        }
    }

    fn applies(&self, request: &Request) -> bool {
        self.actions.iter().any(|action| like(&action.to_lowercase(), &request.action.to_lowercase()))
            && self.resources.iter().any(|resource| like(resource, &request.resource))
            && self.conditions.iter().all(|condition| condition.holds(request))
    }
}

impl Operator {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "StringEquals" => Ok(Self::Equals { all: false }),
            "StringLike" => Ok(Self::Like { all: false }),
            "ForAllValues:StringEquals" => Ok(Self::Equals { all: true }),
            "ForAllValues:StringLike" => Ok(Self::Like { all: true }),
            "Null" => Ok(Self::Null),
            other => Err(format!("operator {other}")),
        }
    }
}

impl Condition {
    fn holds(&self, request: &Request) -> bool {
        let found = request.context.get(self.key.as_str());
        // A variable without a value makes the condition false.
        let Some(wanted) = self.values.iter().map(|value| replaced(value, request)).collect::<Option<Vec<_>>>() else {
            return false;
        };
        let any = |matches: fn(&str, &str) -> bool, value: &String| wanted.iter().any(|wanted| matches(wanted, value));
        let check = |all: bool, matches: fn(&str, &str) -> bool| match found {
            // So it is at AWS: every one of no values matches.
            None => all,
            Some(values) if all => values.iter().all(|value| any(matches, value)),
            Some(values) => values.iter().any(|value| any(matches, value)),
        };
        match self.operator {
            Operator::Equals { all } => check(all, |wanted, value| wanted == value),
            Operator::Like { all } => check(all, like),
            Operator::Null => wanted == [if found.is_none() { "true" } else { "false" }],
        }
    }
}

/// The text with its variables replaced; none if one has no value.
fn replaced(text: &str, request: &Request) -> Option<String> {
    let Some((before, rest)) = text.split_once("${") else { return Some(text.to_owned()) };
    let (variable, after) = rest.split_once('}')?;
    match &request.context.get(variable)?[..] {
        [value] => Some(format!("{before}{value}{}", replaced(after, request)?)),
        _ => None,
    }
}

/// Whether a text matches a pattern, where `*` stands for any text and `?` for any character.
fn like(pattern: &str, text: &str) -> bool {
    match (pattern.chars().next(), text.chars().next()) {
        (None, None) => true,
        (Some('*'), _) if like(&pattern[1..], text) => true,
        (Some('*'), Some(next)) => like(pattern, &text[next.len_utf8()..]),
        (Some(wanted), Some(next)) if wanted == '?' || wanted == next => {
            like(&pattern[wanted.len_utf8()..], &text[next.len_utf8()..])
        }
        (None | Some(_), _) => false,
    }
}

/// One text or a list of them.
fn texts(value: &Value) -> Result<Vec<String>, String> {
    match value {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(list) if !list.is_empty() => {
            list.iter().map(|text| text.as_str().map(str::to_owned).ok_or(format!("{text} is no text"))).collect()
        }
        other => Err(format!("{other} is neither a text nor a list of them")),
    }
}

fn known(value: &Value, names: &[&str]) -> Result<(), String> {
    let object = value.as_object().ok_or("not an object")?;
    match object.keys().find(|name| !names.contains(&name.as_str())) {
        Some(name) => Err(format!("element {name}")),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "iam_tests.rs"]
mod tests;
