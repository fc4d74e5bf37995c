//! The fence: a replica that does not hold the lease cannot write.
//!
//! Every client of the leader checks the fence right before it sends a request. So a replica that was paused until its
//! lease expired writes nothing after it resumes.

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

type Request = http::Request<Body>;

/// Open until an instant that only lease renewals extend.
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

/// For the Kubernetes client: every method except the safe ones is a write.
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

/// For the AWS clients: only the leader uses them, so every attempt of every call is checked.
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
#[path = "fence_tests.rs"]
mod tests;
