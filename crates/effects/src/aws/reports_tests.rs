use std::sync::{Arc, Mutex};

use aws_sdk_dynamodb::{
    Client,
    config::{BehaviorVersion, Credentials, Region},
};
use axum::{Json, Router, body::Bytes, extract::State, http::HeaderMap, routing::post};
use serde_json::{Value, json};

use super::*;

/// How a stand-in of DynamoDB answers for the keys of one call: the items, and the keys that it leaves out.
type Answer = Arc<dyn Fn(Vec<Value>) -> (Vec<Value>, Vec<Value>) + Send + Sync>;

#[derive(Clone)]
struct Table {
    answer: Answer,
    /// The number of keys in each call.
    calls: Arc<Mutex<Vec<usize>>>,
}

async fn serve(State(table): State<Table>, headers: HeaderMap, body: Bytes) -> Json<Value> {
    let request: Value = serde_json::from_slice(&body).unwrap();
    if headers["x-amz-target"].to_str().unwrap().ends_with("DescribeTable") {
        let arn = "arn:aws:dynamodb:us-east-1:123456789012:table/paddock-ci";
        return Json(json!({ "Table": { "TableArn": arn, "TableStatus": "ACTIVE" } }));
    }
    let wanted = &request["RequestItems"]["paddock-ci"];
    let expected = "#PK, #SK, #value, #updatedAt, #publicKey, #reclaimed, #signalledAt, #warning";
    assert_eq!(wanted["ProjectionExpression"], expected);
    let keys = wanted["Keys"].as_array().unwrap().clone();
    table.calls.lock().unwrap().push(keys.len());
    let (items, left) = (table.answer)(keys);
    // In the form of the request, as DynamoDB has it.
    let mut rest = wanted.clone();
    rest["Keys"] = json!(left);
    let unread = if left.is_empty() { json!({}) } else { json!({ "paddock-ci": rest }) };
    Json(json!({ "Responses": { "paddock-ci": items }, "UnprocessedKeys": unread }))
}

/// Records in a table that answers like this.
async fn records(
    answer: impl Fn(Vec<Value>) -> (Vec<Value>, Vec<Value>) + Send + Sync + 'static,
) -> (Records, Arc<Mutex<Vec<usize>>>) {
    let table = Table { answer: Arc::new(answer), calls: Arc::default() };
    let calls = table.calls.clone();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::from_static("us-east-1"))
        .endpoint_url(format!("http://{}", listener.local_addr().unwrap()))
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .build();
    let router = Router::new().route("/", post(serve)).with_state(table);
    tokio::spawn(async move { axum::serve(listener, router).await });
    let records = Records::new(Client::from_conf(config), "paddock-ci".into());
    assert_eq!(records.ensure_table().await, Ok(true));
    (records, calls)
}

fn beat(key: &Value) -> Value {
    let mut item = key.clone();
    item["updatedAt"] = json!({ "S": "2025-05-31T12:00:00Z" });
    item
}

fn ids(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("i-{number}")).collect()
}

fn is_of(key: &Value, id: &str) -> bool {
    key["SK"]["S"] == format!("ID#{id}")
}

#[tokio::test]
async fn what_an_answer_leaves_out_is_asked_for_again() {
    // As if each item had 400 KB: 16 MB are 40 items.
    let (records, calls) = records(|mut keys| {
        let left = keys.split_off(keys.len().min(40));
        (keys.iter().map(beat).collect(), left)
    })
    .await;
    let read = records.heartbeats(&ids(150)).await.unwrap();
    assert!(read.len() == 150 && read.values().all(|read| read.report.heartbeat.is_some() && read.fault.is_none()));
    let mut calls = calls.lock().unwrap().clone();
    calls.sort_unstable();
    assert_eq!(calls, [10, 20, 50, 60, 100]);
}

#[tokio::test]
async fn what_stays_unread_is_neither_silence_nor_a_report() {
    let (records, calls) = records(|keys| {
        let (left, read): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| is_of(key, "i-1"));
        (read.iter().map(beat).collect(), left)
    })
    .await;
    let read = records.heartbeats(&ids(3)).await.unwrap();
    let mut found: Vec<_> = read.keys().map(String::as_str).collect();
    found.sort_unstable();
    assert_eq!(found, ["i-0", "i-2"]);
    assert_eq!(calls.lock().unwrap().len(), READ_ROUNDS as usize);
    assert!(matches!(records.heartbeats(&["i-1".to_owned()]).await, Err(AwsError::Throttled { .. })));
}

#[tokio::test]
async fn an_agent_that_has_written_nothing_is_told_from_one_that_wrote_too_much_or_nonsense() {
    let (records, _) = records(|keys| {
        let heartbeats = |key: &&Value| key["PK"]["S"].as_str().unwrap().starts_with("TYPE#Heartbeat#arn:aws:ec2:");
        let items = keys.iter().filter(heartbeats).filter(|key| !is_of(key, "i-0")).map(|key| {
            let mut item = beat(key);
            if is_of(key, "i-1") {
                item["publicKey"] = json!({ "S": "x".repeat(300_000) });
            }
            if is_of(key, "i-2") {
                item["updatedAt"] = json!({ "S": "never" });
            }
            item
        });
        (items.collect(), Vec::new())
    })
    .await;
    let queries: Vec<_> = ids(4).into_iter().map(|id| ReportQuery { id, heartbeat: true }).collect();
    let read = records.report(&queries).await.unwrap();
    assert_eq!(read["i-0"], ReadReport::default());
    let heartbeat = |id: &str| read[id].report.heartbeat.is_some();
    assert!(heartbeat("i-1") && read["i-1"].fault == Some(ReportFault::Oversized));
    assert!(!heartbeat("i-2") && matches!(read["i-2"].fault, Some(ReportFault::Unreadable(_))));
    assert!(heartbeat("i-3") && read["i-3"].fault.is_none());
}
