use axum::http::HeaderValue;
use serde_json::json;

use super::*;

const OURS: &str = "i-0abc";
const BEAT: &str = "TYPE#Heartbeat#arn:aws:ec2:us-east-1:000000000000:instance/i-0abc";
const SIGNAL: &str = "TYPE#WS#arn:aws:ec2:us-east-1:000000000000:instance/i-0abc";

fn call(service: Service, action: &str, body: Value) -> Call {
    let mut headers = HeaderMap::new();
    let signed = format!("AWS4-HMAC-SHA256 Credential={}/20260101/us-east-1/x/aws4_request", access_key(OURS));
    headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&signed).unwrap());
    Call { service, action: action.to_owned(), path: "/".into(), headers, body: body.to_string().into() }
}

/// Whether our machine may make this call to the table.
fn may(action: &str, body: Value) -> bool {
    let mut body = body;
    if body["TransactItems"].is_null() && body["RequestItems"].is_null() {
        body["TableName"] = json!("paddock-ci");
    }
    let requests = requests(&call(Service::DynamoDb, action, body), OURS, |_| Tags::default());
    assert!(!requests.is_empty());
    requests.iter().all(|request| MACHINE_POLICY.allows(request))
}

fn key(partition: &str) -> Value {
    json!({ "PK": { "S": partition }, "SK": { "S": "ID#i-0abc" } })
}

#[test]
fn a_machine_may_read_records_and_write_its_own_items() {
    assert!(may("GetItem", json!({ "Key": key("TYPE#INSTANCE") })));
    assert!(may("PutItem", json!({ "Item": key(BEAT) })));
    assert!(may("PutItem", json!({ "Item": key(SIGNAL) })));
    assert!(may(
        "TransactWriteItems",
        json!({ "TransactItems": [{ "Put": { "TableName": "paddock-ci", "Item": key(BEAT) } }] })
    ));
}

#[test]
fn a_machine_may_do_nothing_else() {
    let other = BEAT.replace("i-0abc", "i-0abd");
    for partition in
        [&other, &SIGNAL.replace("i-0abc", "i-0abcd"), "TYPE#INSTANCE", "TYPE#Heartbeat", "TYPE#WS", "", "*"]
    {
        assert!(!may("PutItem", json!({ "Item": key(partition) })), "{partition}");
    }
    for partition in [BEAT, SIGNAL, &other] {
        assert!(!may("GetItem", json!({ "Key": key(partition) })), "{partition}");
    }
    for action in ["UpdateItem", "DeleteItem", "Query", "Scan", "DescribeTable", "DeleteTable", "PartiQLInsert"] {
        for body in [json!({ "Key": key(BEAT) }), json!({ "Item": key(BEAT) }), json!({})] {
            assert!(!may(action, body), "{action}");
        }
    }
    for action in ["PutItem", "GetItem"] {
        assert!(!may(action, json!({})), "{action} without a key");
    }
    assert!(!may("BatchGetItem", json!({ "RequestItems": { "paddock-ci": { "Keys": [key("TYPE#INSTANCE")] } } })));
    let put = json!({ "PutRequest": { "Item": key(BEAT) } });
    assert!(!may("BatchWriteItem", json!({ "RequestItems": { "paddock-ci": [put] } })));
    let transaction = |parts: Value| json!({ "TransactItems": parts });
    let put = |partition: &str| json!({ "Put": { "TableName": "paddock-ci", "Item": key(partition) } });
    assert!(!may("TransactWriteItems", transaction(json!([put(BEAT), put(&other)]))));
    let foreign = json!({ "Put": { "TableName": "another", "Item": key(BEAT) } });
    assert!(!may("TransactWriteItems", transaction(json!([foreign]))));

    for (service, action, body) in [
        (Service::Sqs, "ReceiveMessage", json!({ "QueueUrl": "http://sqs/000000000000/paddock-ci" })),
        (Service::Sqs, "SendMessageBatch", json!({ "QueueUrl": "http://sqs/000000000000/paddock-ci" })),
        (Service::Ec2, "TerminateInstances", json!({})),
        (Service::Ec2, "DescribeInstances", json!({})),
    ] {
        let requests = requests(&call(service, action, body), OURS, |_| Tags::default());
        assert!(!requests.iter().any(|request| MACHINE_POLICY.allows(request)), "{action}");
    }
}

#[test]
fn a_machine_may_receive_from_the_queue_with_its_own_tag() {
    let own = "arn:aws:ec2:us-east-1:000000000000:instance/i-0abc";
    let may = |action: &str, queue: &str, owner: &str| {
        let body = json!({ "QueueUrl": format!("http://sqs/000000000000/{queue}") });
        let tags = |name: &str| {
            assert_eq!(name, queue);
            Tags::from([("paddock:machine".to_owned(), owner.to_owned())])
        };
        let requests = requests(&call(Service::Sqs, action, body), OURS, tags);
        requests.iter().all(|request| MACHINE_POLICY.allows(request))
    };
    for action in ["GetQueueUrl", "ReceiveMessage", "DeleteMessage", "DeleteMessageBatch"] {
        assert!(may(action, "paddock-ci-wake-i-0abc", own), "{action}");
        assert!(
            !may(action, "paddock-ci-wake-i-0abc", &own.replace("i-0abc", "i-0abd")),
            "{action} of another machine"
        );
        assert!(!may(action, "another", own), "{action}");
    }
    for action in ["SendMessage", "DeleteQueue", "SetQueueAttributes", "ChangeMessageVisibility", "TagQueue"] {
        assert!(!may(action, "paddock-ci-wake-i-0abc", own), "{action}");
    }
}

#[test]
fn the_caller_is_known_by_its_access_key() {
    let signed = call(Service::DynamoDb, "PutItem", json!({})).headers;
    assert_eq!(machine(&signed).as_deref(), Some(OURS));
    let mut user = HeaderMap::new();
    assert_eq!(machine(&user), None);
    user.insert(header::AUTHORIZATION, HeaderValue::from_static("AWS4-HMAC-SHA256 Credential=AKIABED/2026/x"));
    assert_eq!(machine(&user), None);
}

fn policy(statement: Value) -> Result<Policy, String> {
    Policy::parse(&json!({ "Version": "2012-10-17", "Statement": [statement] }).to_string())
}

fn request(context: &[(&'static str, &[&str])]) -> Request {
    let texts = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
    let context = context.iter().map(|(key, values)| ((*key).to_owned(), texts(values))).collect();
    Request { action: "dynamodb:PutItem".into(), resource: "arn:aws:dynamodb:::table/t".into(), context }
}

#[test]
fn conditions_hold_as_at_aws() {
    let holds = |condition: Value, context: &[(&'static str, &[&str])]| {
        let statement =
            json!({ "Effect": "Allow", "Action": "dynamodb:Put*", "Resource": "*", "Condition": condition });
        policy(statement).unwrap().allows(&request(context))
    };
    let all = |pattern: &str| json!({ "ForAllValues:StringLike": { "k": [pattern, "other"] } });
    assert!(holds(all("a*"), &[("k", &["ab", "other"])]) && !holds(all("a*"), &[("k", &["ab", "b"])]));
    assert!(holds(all("a*"), &[]), "every one of no values matches: hence Null");
    let mut guarded = all("a*");
    guarded["Null"] = json!({ "k": "false" });
    assert!(!holds(guarded.clone(), &[]) && holds(guarded, &[("k", &["a"])]));
    assert!(holds(json!({ "StringEquals": { "k": "a" } }), &[("k", &["a"])]));
    assert!(!holds(json!({ "StringEquals": { "k": "a*" } }), &[("k", &["ab"])]));
    assert!(!holds(json!({ "StringEquals": { "k": "a" } }), &[]));
    let own = json!({ "StringLike": { "k": "x-${id}-*" } });
    assert!(holds(own.clone(), &[("k", &["x-7-y"]), ("id", &["7"])]));
    assert!(!holds(own.clone(), &[("k", &["x-8-y"]), ("id", &["7"])]) && !holds(own, &[("k", &["x-7-y"])]));
    for (pattern, text, matches) in
        [("", "", true), ("*", "", true), ("a?c*", "aüc", true), ("a?c", "ac", false), ("ab", "abc", false)]
    {
        assert_eq!(like(pattern, text), matches, "{pattern} {text}");
    }
}

#[test]
fn a_denial_wins_and_what_is_not_understood_is_an_error() {
    let allow = json!({ "Effect": "Allow", "Action": "*", "Resource": "*" });
    let deny = json!({ "Effect": "Deny", "Action": "dynamodb:*", "Resource": "*" });
    let both = json!({ "Version": "2012-10-17", "Statement": [allow, deny] });
    assert!(!Policy::parse(&both.to_string()).unwrap().allows(&request(&[])));
    for (element, value) in [
        ("Effect", json!("Maybe")),
        ("NotAction", json!("*")),
        ("Condition", json!({ "ArnLike": { "k": "*" } })),
        ("Condition", json!({ "StringLikeIfExists": { "k": "*" } })),
        ("Condition", json!({ "StringLike": { "k": 7 } })),
        ("Resource", json!("${k}")),
        ("Action", json!([])),
    ] {
        let mut statement = json!({ "Effect": "Allow", "Action": "*", "Resource": "*" });
        statement[element] = value;
        assert!(policy(statement.clone()).is_err(), "{statement}");
    }
    assert!(Policy::parse(r#"{ "Version": "2008-10-17", "Statement": [] }"#).is_err());
}
