//! Tests the fence on its own and in the operator's clients.

use std::time::Duration;

use aws_config::{BehaviorVersion, Region, SdkConfig, retry::RetryConfig};
use aws_sdk_dynamodb::config::{Credentials, SharedCredentialsProvider};
use axum::{
    Router,
    http::{Method, StatusCode, header::RETRY_AFTER},
    response::IntoResponse,
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Config, api::PostParams};
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::timeout};

use super::*;
use crate::{
    aws::Clients,
    kube::{
        client::{self, LEADER_REQUESTS},
        lanes::Lanes,
    },
};

/// Timeout that is long enough for a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);

#[test]
fn the_fence_is_open_only_until_the_end_of_the_lease() {
    let fence = Fence::default();
    assert_eq!(fence.check(), Err(Fenced), "closed at start");
    fence.open_until(Instant::now() + Duration::from_secs(60));
    assert_eq!(fence.clone().check(), Ok(()));
    fence.open_until(Instant::now());
    assert_eq!(fence.check(), Err(Fenced), "the lease expired");
    fence.open_until(Instant::now() + Duration::from_secs(60));
    fence.close();
    assert_eq!(fence.check(), Err(Fenced), "the lease was released");
}

#[tokio::test]
async fn a_closed_fence_lets_reads_through_and_stops_writes() {
    let fence = Fence::default();
    let inner = tower::service_fn(async |_: Request| Ok::<_, tower::BoxError>("sent"));
    let mut service = fence.layer(inner);
    let request = |method: &str| http::Request::builder().method(method).body(Body::empty()).unwrap();
    assert_eq!(service.call(request("GET")).await.unwrap(), "sent");
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        assert!(service.call(request(method)).await.unwrap_err().is::<Fenced>(), "{method}");
    }
    fence.open_until(Instant::now() + Duration::from_secs(60));
    assert_eq!(service.call(request("PATCH")).await.unwrap(), "sent");
}

/// A server on loopback that ends with its test.
struct Server {
    url: String,
    received: watch::Receiver<usize>,
}

impl Server {
    /// `answer` gets the method and the number of the request, starting at 1.
    async fn start<A: IntoResponse>(answer: impl Fn(Method, usize) -> A + Clone + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (count, received) = watch::channel(0);
        let handler = async move |method| {
            let mut number = 0;
            count.send_modify(|received| {
                *received += 1;
                number = *received;
            });
            answer(method, number)
        };
        tokio::spawn(axum::serve(listener, Router::new().fallback(handler)).into_future());
        Self { url, received }
    }

    fn received(&self) -> usize {
        *self.received.borrow()
    }

    fn config_maps(&self, fence: &Fence) -> Api<ConfigMap> {
        let config = Config::new(self.url.parse().unwrap());
        Api::namespaced(client::leader(config, fence, &Lanes::default()).unwrap().urgent, "default")
    }
}

fn open_fence() -> Fence {
    let fence = Fence::default();
    fence.open_until(Instant::now() + Duration::from_secs(600));
    fence
}

async fn create(api: Api<ConfigMap>) -> kube::Result<ConfigMap> {
    timeout(DEADLINE, api.create(&PostParams::default(), &ConfigMap::default())).await.expect("no answer in time")
}

#[tokio::test]
async fn i5_a_throttled_write_is_not_repeated_after_the_lease_was_lost() {
    for refusal in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT] {
        let fence = open_fence();
        let lease = fence.clone();
        let server = Server::start(move |_, number| {
            lease.close();
            if number == 1 { (refusal, "") } else { (StatusCode::CREATED, "{}") }
        })
        .await;
        let outcome = create(server.config_maps(&fence)).await;
        assert_eq!(server.received(), 1, "{refusal}");
        assert!(matches!(outcome, Err(kube::Error::Service(error)) if error.is::<Fenced>()), "{refusal}");
    }
}

#[tokio::test]
async fn a_throttled_write_is_retried_after_retry_after() {
    let server = Server::start(|_, number| match number {
        1 => (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")], ""),
        _ => (StatusCode::CREATED, [(RETRY_AFTER, "0")], "{}"),
    })
    .await;
    let start = Instant::now();
    create(server.config_maps(&open_fence())).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(server.received(), 2);
}

#[tokio::test]
async fn writes_that_wait_for_a_retry_do_not_block_others() {
    let mut server = Server::start(|method, _| match method {
        Method::GET => (StatusCode::OK, [(RETRY_AFTER, "0")], "{}"),
        _ => (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "3600")], ""),
    })
    .await;
    let api = server.config_maps(&open_fence());
    let mut waiting = JoinSet::new();
    for _ in 0..LEADER_REQUESTS {
        let api = api.clone();
        waiting.spawn(async move { api.create(&PostParams::default(), &ConfigMap::default()).await });
    }
    let all = server.received.wait_for(|received| *received == LEADER_REQUESTS);
    timeout(DEADLINE, all).await.expect("not all writes were sent").unwrap();
    timeout(DEADLINE, api.get("a")).await.expect("blocked by waiting writes").unwrap();
}

#[tokio::test]
async fn i5_no_call_to_aws_is_repeated_after_the_lease_was_lost() {
    const ATTEMPTS: u32 = 3;
    for lost in [false, true] {
        let fence = open_fence();
        let lease = fence.clone();
        let server = Server::start(move |_, _| {
            if lost {
                lease.close();
            }
            StatusCode::INTERNAL_SERVER_ERROR
        })
        .await;
        let credentials = Credentials::new("test", "test", None, None, "test");
        let retry = RetryConfig::standard().with_max_attempts(ATTEMPTS).with_initial_backoff(Duration::from_millis(1));
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .endpoint_url(&server.url)
            .region(Region::from_static("us-east-1"))
            .retry_config(retry)
            .credentials_provider(SharedCredentialsProvider::new(credentials))
            .build();
        let clients = Clients::from_config(&config, &fence);
        let mut expected = 0;
        let attempts = if lost { 1 } else { ATTEMPTS as usize };
        for service in ["DynamoDB", "SQS", "EC2"] {
            fence.open_until(Instant::now() + Duration::from_secs(600));
            let failed = match service {
                "DynamoDB" => clients.dynamodb.list_tables().send().await.is_err(),
                "SQS" => clients.sqs.list_queues().send().await.is_err(),
                _ => clients.ec2.describe_instances().send().await.is_err(),
            };
            expected += attempts;
            assert!(failed, "{service}");
            assert_eq!(server.received(), expected, "{service}, lease lost: {lost}");
        }
    }
}
