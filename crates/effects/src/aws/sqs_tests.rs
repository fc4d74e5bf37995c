use std::sync::{Arc, Mutex};

use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use axum::{
    Router,
    body::Bytes,
    http::{HeaderMap, StatusCode},
    response::IntoResponse,
    routing::post,
};
use serde_json::{Value, json};

use super::*;

/// What SQS answers to CreateQueue: the error type, and the header with the code of the older protocol.
type Refusal = (&'static str, Option<&'static str>);

/// Queues at a stand-in of SQS, and the calls that it gets after CreateQueue.
async fn queues(refusal: Refusal) -> (Queues, Arc<Mutex<Vec<(String, Value)>>>) {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let received = calls.clone();
    let answer = async move |headers: HeaderMap, body: Bytes| {
        let action = headers["x-amz-target"].to_str().unwrap().rsplit('.').next().unwrap().to_owned();
        let (kind, code) = refusal;
        if action == "CreateQueue" {
            let body = json!({ "__type": format!("com.amazonaws.sqs#{kind}"), "message": "No." }).to_string();
            let header = code.map(|code| [("x-amzn-query-error", format!("{code};Sender"))]);
            return (StatusCode::BAD_REQUEST, header, body).into_response();
        }
        received.lock().unwrap().push((action, serde_json::from_slice(&body).unwrap()));
        json!({ "QueueUrl": "http://sqs/queue" }).to_string().into_response()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, Router::new().route("/", post(answer))).into_future());
    let config = aws_sdk_sqs::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .endpoint_url(url)
        .region(Region::from_static("us-east-1"))
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .build();
    (Queues::new(Client::from_conf(config)), calls)
}

#[tokio::test]
async fn a_queue_with_other_attributes_gets_the_new_ones() {
    for refusal in [("QueueNameExists", Some("QueueAlreadyExists")), ("QueueNameExists", None)] {
        let (queues, calls) = queues(refusal).await;
        assert_eq!(queues.ensure("paddock-q", Duration::from_mins(9)).await.as_deref(), Ok("http://sqs/queue"));
        let calls = calls.lock().unwrap().clone();
        assert_eq!(
            calls.iter().map(|(action, _)| action.as_str()).collect::<Vec<_>>(),
            ["GetQueueUrl", "SetQueueAttributes"]
        );
        assert_eq!(calls[1].1["Attributes"]["MessageRetentionPeriod"], "540", "{refusal:?}");
    }
}
