//! The IAM policies of `docs/iam` grant exactly what the sources call.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use paddock_record::{MACHINE_TAG, MachineArns, attribute, entity, instance_key, report_key, table_name};
use serde_json::{Value, json};

/// The permissions EC2 requires for `CreateFleet` with a launch template that has tags, an instance profile and an image in SSM.
const OF_CREATE_FLEET: [&str; 4] = ["ec2:CreateTags", "ec2:RunInstances", "iam:PassRole", "ssm:GetParameters"];

/// The permission SQS requires for `CreateQueue` with tags.
const OF_CREATE_QUEUE: &str = "sqs:TagQueue";

/// Parameters that AWS publishes for all.
const PUBLIC_PARAMETERS: &str = "arn:aws:ssm:*::parameter/aws/service/*";

/// EC2 and SQS support no resource-level permissions for these.
const WITHOUT_RESOURCE: [&str; 8] = [
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeLaunchTemplateVersions",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:GetInstanceTypesFromInstanceRequirements",
    "sqs:ListQueues",
];

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("PADDOCK_SOURCE")).join(path)).unwrap()
}

fn statements(policy: &str) -> Vec<Value> {
    let policy: Value = serde_json::from_str(&read(policy)).unwrap();
    assert_eq!(policy["Version"], "2012-10-17");
    let statements = policy["Statement"].as_array().unwrap().clone();
    assert!(statements.iter().all(|statement| statement["Effect"] == "Allow"));
    statements
}

/// One text or a list of them.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(list) => list.iter().map(|text| text.as_str().unwrap().to_owned()).collect(),
        other => panic!("neither a text nor a list: {other}"),
    }
}

fn actions(statements: &[Value]) -> BTreeSet<String> {
    statements.iter().flat_map(|statement| texts(&statement["Action"])).collect()
}

/// The Rust sources below a directory, with their names.
fn sources(dir: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(Path::new(env!("PADDOCK_SOURCE")).join(dir)).unwrap() {
        let name = format!("{dir}/{}", entry.unwrap().file_name().to_str().unwrap());
        if name.ends_with(".rs") {
            found.push((name.clone(), read(&name)));
        } else {
            found.extend(sources(&name));
        }
    }
    found
}

/// The service whose client a source calls, if it calls one.
fn service(text: &str) -> Option<&'static str> {
    let of_sdk = |service: &&str| text.contains(&format!("aws_sdk_{service}"));
    let mut services = ["dynamodb", "ec2", "sqs"].into_iter().filter(of_sdk);
    services.next().filter(|_| services.next().is_none())
}

/// `client.get_item()` becomes `GetItem`, however the line is broken.
fn calls(text: &str) -> BTreeSet<String> {
    let dense: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let calls = dense.split("client.").skip(1).filter_map(|rest| rest.split_once("()").map(|(name, _)| name));
    let names = calls.filter(|name| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') && *name != "clone");
    names.map(|name| name.split('_').map(capitalised).collect()).collect()
}

fn capitalised(word: &str) -> String {
    let (first, rest) = word.split_at(1);
    first.to_uppercase() + rest
}

/// The action that IAM knows for a call: those for batches go by that for one, and a transaction by what is in it.
fn action(service: &str, call: &str) -> String {
    let call = match (service, call) {
        ("sqs", call) => call.trim_end_matches("Batch"),
        ("dynamodb", "TransactWriteItems") => "UpdateItem",
        (_, call) => call,
    };
    format!("{service}:{call}")
}

/// Every action that the sources below `dir` need, with the files that call it.
fn needed(dir: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut needed: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for (name, text) in sources(dir) {
        let called = calls(&text);
        match service(&text) {
            Some(service) => {
                for call in called {
                    needed.entry(action(service, &call)).or_default().insert(name.clone());
                }
            }
            None if !text.contains("aws_sdk_") => {}
            None => assert_eq!(called, BTreeSet::new(), "{name} uses several services: one adapter for each"),
        }
    }
    needed
}

fn assert_exact(policy: &str, dir: &str, implied: &[&str]) {
    let (granted, needed) = (actions(&statements(policy)), needed(dir));
    for (action, files) in &needed {
        assert!(granted.contains(action), "{policy} does not grant {action}, which {files:?} call");
    }
    for action in &granted {
        let used = needed.contains_key(action) || implied.contains(&action.as_str());
        assert!(used, "{policy} grants {action}, which nothing below {dir} calls");
    }
}

#[test]
fn the_operator_may_do_exactly_what_it_calls() {
    assert_exact("docs/iam/operator.json", "crates/effects/src", &[&OF_CREATE_FLEET[..], &[OF_CREATE_QUEUE]].concat());
}

#[test]
fn an_instance_may_do_exactly_what_its_agent_calls() {
    assert_exact("docs/iam/instance.json", "crates/agent/src", &[]);
}

#[test]
fn an_error_names_the_call_that_was_refused() {
    for (name, text) in sources("crates/effects/src").into_iter().filter(|(_, text)| service(text).is_some()) {
        let named = text.split("word(\"").skip(1).filter_map(|rest| rest.split_once('"'));
        let named: BTreeSet<_> = named.map(|(call, _)| call.to_owned()).collect();
        assert_eq!(named, calls(&text), "{name}");
    }
}

#[test]
fn nothing_is_granted_beyond_our_names_and_tags() {
    let ours = table_name("");
    for statement in [statements("docs/iam/operator.json"), statements("docs/iam/instance.json")].concat() {
        let actions = texts(&statement["Action"]);
        for resource in texts(&statement["Resource"]) {
            let tagged = statement["Condition"].to_string().contains("Tag/paddock:cluster");
            let made_by_us = statement["Condition"].to_string().contains("ec2:CreateAction");
            let part_of_a_launch =
                actions.iter().all(|action| action == "ec2:CreateFleet" || action == "ec2:RunInstances");
            let fits = match resource.split(':').nth(2) {
                None => actions.iter().all(|action| WITHOUT_RESOURCE.contains(&action.as_str())),
                Some("ssm") if resource == PUBLIC_PARAMETERS => true,
                Some("ec2") => tagged || made_by_us || part_of_a_launch,
                Some(_) => resource.rsplit([':', '/']).next().unwrap().starts_with(&ours),
            };
            assert!(fits, "{actions:?} on {resource}");
        }
    }
}

#[test]
fn an_instance_writes_only_what_its_agent_writes() {
    let source = MachineArns::of_table("arn:aws:dynamodb:us-east-1:123456789012:table/paddock-ci").unwrap();
    let own = |entity: &str| {
        let key = report_key(entity, &source, "i-1")[attribute::PK].as_s().unwrap().clone();
        key.replace(&source.arn("i-1"), "${ec2:SourceInstanceARN}")
    };
    let instances = instance_key("")[attribute::PK].as_s().unwrap().clone();
    let granted = |action: &str, operator: &str, keys: &[String]| {
        let statements = statements("docs/iam/instance.json");
        let of_action: Vec<_> =
            statements.iter().filter(|it| texts(&it["Action"]).contains(&action.to_owned())).collect();
        let condition = json!({
            operator: { "dynamodb:LeadingKeys": keys },
            // A request without keys would fulfil the condition on all of them.
            "Null": { "dynamodb:LeadingKeys": "false" },
        });
        assert_eq!(of_action.len(), 1, "{action}");
        assert_eq!(of_action[0]["Condition"], condition, "{action}");
    };
    granted("dynamodb:GetItem", "ForAllValues:StringEquals", &[instances]);
    granted("dynamodb:PutItem", "ForAllValues:StringLike", &[own(entity::HEARTBEAT), own(entity::SIGNAL)]);
}

#[test]
fn an_instance_receives_from_the_queue_with_its_tag() {
    let tag = format!("aws:ResourceTag/{MACHINE_TAG}");
    let condition = json!({ "StringEquals": { tag: "${ec2:SourceInstanceARN}" } });
    let statements = statements("docs/iam/instance.json");
    let of_sqs: Vec<_> =
        statements.iter().filter(|it| texts(&it["Action"]).iter().any(|action| action.starts_with("sqs:"))).collect();
    assert_eq!(of_sqs.len(), 1);
    assert_eq!(of_sqs[0]["Condition"], condition);
}

#[test]
fn calls_are_found_however_they_are_written() {
    let text = "use aws_sdk_sqs::Client; self.client.send_message().queue_url(u); self\n  .client\n  .delete_message_batch()\n; client.clone()";
    assert_eq!(service(text), Some("sqs"));
    assert_eq!(calls(text), ["DeleteMessageBatch", "SendMessage"].map(str::to_owned).into());
    assert_eq!(action("sqs", "DeleteMessageBatch"), "sqs:DeleteMessage");
    assert_eq!(service("aws_sdk_sqs::Client aws_sdk_ec2::Client"), None);
}
