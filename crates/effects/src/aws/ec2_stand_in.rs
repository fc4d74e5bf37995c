//! A stand-in of EC2 for the tests of its adapter.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use aws_sdk_ec2::{
    Client,
    config::{BehaviorVersion, Credentials, Region, timeout::TimeoutConfig},
};
use axum::{Router, http::StatusCode, response::IntoResponse};

use super::ec2::Machines;

pub type Fields = BTreeMap<String, String>;

/// The fields of each request.
pub type Requests = Arc<Mutex<Vec<Fields>>>;

/// A stand-in of EC2 that answers like this.
pub async fn ec2<A>(answer: A) -> (Machines, Requests)
where
    A: Fn(&Fields) -> (StatusCode, String) + Clone + Send + Sync + 'static,
{
    ec2_that_takes(Duration::ZERO, Duration::from_secs(60), answer).await
}

pub async fn ec2_that_takes<A>(time: Duration, timeout: Duration, answer: A) -> (Machines, Requests)
where
    A: Fn(&Fields) -> (StatusCode, String) + Clone + Send + Sync + 'static,
{
    let requests = Requests::default();
    let received = requests.clone();
    let handler = async move |body: String| {
        let plain = body.replace('+', " ");
        let field = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap();
            (key.to_owned(), value.replace("%3A", ":").replace("%2F", "/").replace("%2A", "*"))
        };
        let fields: Fields = plain.split('&').map(field).collect();
        received.lock().unwrap().push(fields.clone());
        tokio::time::sleep(time).await;
        answer(&fields).into_response()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, Router::new().fallback(handler)).into_future());
    let config = aws_sdk_ec2::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .endpoint_url(url)
        .region(Region::from_static("us-east-1"))
        .timeout_config(TimeoutConfig::builder().operation_attempt_timeout(timeout).build())
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .build();
    (Machines::new(Client::from_conf(config)), requests)
}
