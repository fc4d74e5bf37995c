//! Priority of requests to the API server.
//!
//! Every request is in one of two lanes. Urgent are those that a job waits for: finalizers, claims, orders, final
//! statuses, statuses of EC2 pools, Secrets and pods. Background are those that only report: progress statuses, Workers
//! that mirror machines, statuses of board pools, and Events. A background request waits until no urgent request or
//! section is open. After [`BACKGROUND_DELAY_MAX`] it no longer waits for that, but only [`BUSY_BACKGROUND_REQUESTS`] such
//! requests are sent at a time. So it is delayed, never skipped.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use kube::{Client, client::Body};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower::{BoxError, Service};

/// Maximum delay of a background request before it competes with urgent ones. Short, so that Workers show a Ready claim
/// within a second.
pub const BACKGROUND_DELAY_MAX: Duration = Duration::from_millis(500);
/// Concurrent background requests while urgent ones are open: few, so that urgent ones are answered soon.
const BUSY_BACKGROUND_REQUESTS: usize = 4;

#[derive(Clone)]
pub struct Lanes(Arc<State>);

struct State {
    /// The number of open urgent requests and sections. Only zero is notified: there may be many waiting.
    urgent: watch::Sender<usize>,
    background: Arc<Semaphore>,
}

impl Default for Lanes {
    fn default() -> Self {
        Self(Arc::new(State {
            urgent: watch::Sender::new(0),
            background: Arc::new(Semaphore::new(BUSY_BACKGROUND_REQUESTS)),
        }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    Urgent,
    Background,
}

/// An open urgent request or section. It ends when this is dropped.
pub struct UrgentGuard(Lanes);

/// The turn of a background request, with a permit if urgent requests were open.
pub struct BackgroundTurn(#[expect(dead_code, reason = "held until it is dropped")] Option<OwnedSemaphorePermit>);

impl Drop for UrgentGuard {
    fn drop(&mut self) {
        self.0.0.urgent.send_if_modified(|open| {
            *open -= 1;
            *open == 0
        });
    }
}

impl Lanes {
    /// Opens an urgent section: several requests that a job waits for, with calls to AWS or GitHub between them.
    pub fn urgent(&self) -> UrgentGuard {
        self.0.urgent.send_if_modified(|open| {
            *open += 1;
            false
        });
        UrgentGuard(self.clone())
    }

    /// Waits for the turn of a background request, which is over when the turn is dropped.
    pub async fn background(&self) -> BackgroundTurn {
        let mut urgent = self.0.urgent.subscribe();
        let delayed = async {
            tokio::time::sleep(BACKGROUND_DELAY_MAX).await;
            // The semaphore is never closed.
            self.0.background.clone().acquire_owned().await.ok()
        };
        tokio::select! {
            biased;
            _ = urgent.wait_for(|open| *open == 0) => BackgroundTurn(None),
            permit = delayed => BackgroundTurn(permit),
        }
    }

    /// Sends requests to `inner` in this lane.
    pub fn service(&self, lane: Lane, inner: Client) -> LaneService {
        LaneService { inner, lanes: self.clone(), lane }
    }
}

#[derive(Clone)]
pub struct LaneService {
    inner: Client,
    lanes: Lanes,
    lane: Lane,
}

impl Service<http::Request<Body>> for LaneService {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self { inner, lanes, lane } = self.clone();
        async move {
            let sent = match lane {
                Lane::Urgent => {
                    let _open = lanes.urgent();
                    inner.send(request).await
                }
                Lane::Background => {
                    let _turn = lanes.background().await;
                    inner.send(request).await
                }
            };
            sent.map_err(|error| match error {
                kube::Error::Service(error) => error,
                error => error.into(),
            })
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Long enough for a request without delay, also on a busy machine.
    const DEADLINE: Duration = Duration::from_secs(30);

    /// Whether a background request would be sent within this time.
    async fn is_sent(lanes: &Lanes, within: Duration) -> bool {
        tokio::time::timeout(within, lanes.background()).await.is_ok()
    }

    #[tokio::test]
    async fn a_background_request_is_delayed_by_urgent_ones_never_skipped() {
        let lanes = Lanes::default();
        assert!(is_sent(&lanes, DEADLINE).await);
        let (first, second) = (lanes.urgent(), lanes.urgent());
        drop(first);
        assert!(!is_sent(&lanes, BACKGROUND_DELAY_MAX / 2).await);
        assert!(is_sent(&lanes, DEADLINE).await, "it is delayed, never skipped");
        drop(second);
        assert!(is_sent(&lanes, DEADLINE).await);
    }

    #[tokio::test]
    async fn few_background_requests_run_while_urgent_ones_are_open() {
        let lanes = Lanes::default();
        let urgent = lanes.urgent();
        let mut running = Vec::new();
        for _ in 0..BUSY_BACKGROUND_REQUESTS {
            running.push(lanes.background().await);
        }
        assert!(!is_sent(&lanes, 2 * BACKGROUND_DELAY_MAX).await);
        running.pop();
        assert!(is_sent(&lanes, DEADLINE).await, "one is answered, the next is sent");
        running.push(lanes.background().await);
        let waiting = tokio::spawn({
            let lanes = lanes.clone();
            async move { is_sent(&lanes, DEADLINE).await }
        });
        drop(urgent);
        assert!(waiting.await.unwrap(), "without urgent ones there is no limit");
    }
}
