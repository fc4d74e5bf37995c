//! Priority of requests to the API server.
//!
//! Every request is in one of two lanes. Urgent are those that a job waits for: finalizers, claims, orders, final
//! statuses, statuses of EC2 pools, Secrets and pods. Background are those that only report: progress statuses, Workers
//! that mirror machines, statuses of board pools, and Events. At most [`BACKGROUND_REQUESTS`] background requests are
//! sent at a time, each when no urgent request or section has been open for [`CALM`]. After [`BACKGROUND_DELAY_MAX`] they
//! are sent anyway, one at a time. So a background request is delayed, never skipped.

use std::{
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use kube::{Client, client::Body};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tower::{BoxError, Service};

use crate::lock;

/// Maximum delay of a background request by urgent ones. Short, so that Workers show a Ready claim within a second.
pub const BACKGROUND_DELAY_MAX: Duration = Duration::from_millis(500);
/// How long after the last urgent request a background request waits for the next one: the requests of a job follow each
/// other within this time.
const CALM: Duration = Duration::from_millis(30);
/// Concurrent background requests: few, so that urgent ones that arrive meanwhile are answered soon.
pub const BACKGROUND_REQUESTS: usize = 4;

#[derive(Clone)]
pub struct Lanes(Arc<State>);

struct State {
    /// The number of open urgent requests and sections. Only zero is notified: there may be many waiting.
    urgent: watch::Sender<usize>,
    /// When that number last became zero.
    calm_since: Mutex<Instant>,
    background: Arc<Semaphore>,
    /// For the one that is sent while urgent requests are open.
    overdue: Arc<Semaphore>,
}

impl Default for Lanes {
    fn default() -> Self {
        Self(Arc::new(State {
            urgent: watch::Sender::new(0),
            calm_since: Mutex::new(Instant::now()),
            background: Arc::new(Semaphore::new(BACKGROUND_REQUESTS)),
            overdue: Arc::new(Semaphore::new(1)),
        }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    Urgent,
    Background,
    /// Background, and the caller holds a [`Turn`].
    InTurn,
}

/// An open urgent request or section. It ends when this is dropped.
pub struct UrgentGuard(Lanes);

impl Drop for UrgentGuard {
    fn drop(&mut self) {
        self.0.0.urgent.send_if_modified(|open| {
            *open -= 1;
            if *open == 0 {
                *lock(&self.0.0.calm_since) = Instant::now();
            }
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

    /// Waits for the turn of a background request. It ends when the permits are dropped.
    async fn background(&self) -> Permits {
        let deadline = Instant::now() + BACKGROUND_DELAY_MAX;
        // The semaphores are never closed.
        let background = self.0.background.clone().acquire_owned().await.ok();
        let overdue = match timeout_at(deadline, self.calm()).await {
            Ok(()) => None,
            Err(_) => self.0.overdue.clone().acquire_owned().await.ok(),
        };
        Permits { _background: background, _overdue: overdue }
    }

    /// Waits until no urgent request has been open for [`CALM`].
    async fn calm(&self) {
        let mut urgent = self.0.urgent.subscribe();
        loop {
            // The sender is in `self`.
            let _ = urgent.wait_for(|open| *open == 0).await;
            let until = *lock(&self.0.calm_since) + CALM;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }

    /// Sends requests to `inner` in this lane.
    pub fn service(&self, lane: Lane, inner: Client) -> LaneService {
        LaneService { inner, lanes: self.clone(), lane }
    }
}

/// The background lane of the leader.
#[derive(Clone)]
pub struct Background {
    /// Each request waits for a turn of its own.
    pub client: Client,
    /// Sends at once.
    pub(super) in_turn: Client,
    lanes: Lanes,
}

/// The turn of a background request.
pub struct Turn {
    /// Sends without further delay.
    pub client: Client,
    _permits: Permits,
}

struct Permits {
    _background: Option<OwnedSemaphorePermit>,
    _overdue: Option<OwnedSemaphorePermit>,
}

impl Background {
    /// `client` and `in_turn`: of these lanes.
    pub(super) fn new(client: Client, in_turn: Client, lanes: Lanes) -> Self {
        Self { client, in_turn, lanes }
    }

    /// Waits for a turn, which ends when it is dropped. What is written in it can be read after the wait, so that it is
    /// up to date.
    pub async fn turn(&self) -> Turn {
        let permits = self.lanes.background().await;
        Turn { client: self.in_turn.clone(), _permits: permits }
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
                    let _permits = lanes.background().await;
                    inner.send(request).await
                }
                Lane::InTurn => inner.send(request).await,
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
        let began = Instant::now();
        assert!(is_sent(&lanes, DEADLINE).await, "it is delayed, never skipped");
        assert!(began.elapsed() >= BACKGROUND_DELAY_MAX, "sent after {:?}", began.elapsed());
        drop(second);
        assert!(is_sent(&lanes, DEADLINE).await);
    }

    #[tokio::test]
    async fn a_background_request_waits_between_the_urgent_ones_of_a_job() {
        let lanes = Lanes::default();
        // A busy machine may take longer than that between the two.
        let waits = (0..100).any(|_| {
            drop(lanes.urgent());
            lanes.calm().now_or_never().is_none()
        });
        assert!(waits);
        assert!(is_sent(&lanes, DEADLINE).await);
    }

    #[tokio::test]
    async fn few_background_requests_run_at_a_time() {
        let lanes = Lanes::default();
        for (urgent, limit) in [(Some(lanes.urgent()), 1), (None, BACKGROUND_REQUESTS)] {
            let mut running = Vec::new();
            for _ in 0..limit {
                running.push(lanes.background().await);
            }
            assert!(!is_sent(&lanes, 2 * BACKGROUND_DELAY_MAX).await);
            running.pop();
            assert!(is_sent(&lanes, DEADLINE).await, "one is answered, the next is sent");
            drop(urgent);
        }
    }
}
