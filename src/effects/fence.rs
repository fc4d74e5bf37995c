//! The fence: no write leaves a replica that does not hold the lease.
//!
//! Leader election decides who works; the fence makes sure of it at the edge. Each client the leader writes with
//! asks it right before a request is sent, so a replica that was paused past its lease and resumed does nothing more.

use std::{
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Instant,
};

use aws_sdk_dynamodb::{
    config::{ConfigBag, Intercept, RuntimeComponents, interceptors::BeforeTransmitInterceptorContextRef},
    error::BoxError,
};
use futures::future::{Either, Ready, ready};
use kube::client::Body;
use tower::{Layer, Service};

type Request = axum::http::Request<Body>;

/// Open until an instant that only the lease's renewals move forward.
#[derive(Clone, Default)]
pub struct Fence(Arc<Mutex<Option<Instant>>>);

#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
#[error("this replica does not hold the lease any more, so it writes nothing")]
pub struct Fenced;

impl Fence {
    pub fn open_until(&self, end: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
    }

    pub fn close(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn check(&self) -> Result<(), Fenced> {
        let end = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if end.is_some_and(|end| Instant::now() < end) { Ok(()) } else { Err(Fenced) }
    }
}

/// For the Kubernetes client: everything but reading is a write.
impl<S> Layer<S> for Fence {
    type Service = FencedService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        FencedService { inner, fence: self.clone() }
    }
}

#[derive(Clone)]
pub struct FencedService<S> {
    inner: S,
    fence: Fence,
}

impl<S> Service<Request> for FencedService<S>
where
    S: Service<Request, Error = tower::BoxError>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<S::Response, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        match self.fence.check() {
            Err(fenced) if !request.method().is_safe() => Either::Right(ready(Err(fenced.into()))),
            _ => Either::Left(self.inner.call(request)),
        }
    }
}

/// For the AWS clients: only the leader uses them, so every attempt of every call is asked for.
#[derive(Clone)]
pub struct FenceInterceptor(pub Fence);

impl std::fmt::Debug for FenceInterceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FenceInterceptor")
    }
}

impl Intercept for FenceInterceptor {
    fn name(&self) -> &'static str {
        "fence"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        Ok(self.0.check()?)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_fence_is_open_only_until_the_end_of_the_lease() {
        let fence = Fence::default();
        assert_eq!(fence.check(), Err(Fenced), "nobody leads at start");
        fence.open_until(Instant::now() + Duration::from_secs(60));
        assert_eq!(fence.clone().check(), Ok(()));
        fence.open_until(Instant::now());
        assert_eq!(fence.check(), Err(Fenced), "the lease ran out");
        fence.open_until(Instant::now() + Duration::from_secs(60));
        fence.close();
        assert_eq!(fence.check(), Err(Fenced), "the lease was given up");
    }

    #[tokio::test]
    async fn a_closed_fence_lets_reads_through_and_stops_writes() {
        let fence = Fence::default();
        let inner = tower::service_fn(async |_: Request| Ok::<_, tower::BoxError>("sent"));
        let mut service = fence.layer(inner);
        let request = |method: &str| axum::http::Request::builder().method(method).body(Body::empty()).unwrap();
        assert_eq!(service.call(request("GET")).await.unwrap(), "sent");
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            assert!(service.call(request(method)).await.unwrap_err().is::<Fenced>(), "{method}");
        }
        fence.open_until(Instant::now() + Duration::from_secs(60));
        assert_eq!(service.call(request("PATCH")).await.unwrap(), "sent");
    }
}
