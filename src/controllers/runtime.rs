//! Runs controllers and periodic passes: counts outcomes, logs failures and retries them.

use std::{fmt::Debug, future::Future, sync::Arc, time::Duration};

use futures::{StreamExt, TryFutureExt, future::ready};
use jiff::{SignedDuration, Timestamp};
use kube::{
    Resource,
    runtime::{
        controller::{self, Action, Controller},
        reflector::ObjectRef,
    },
};
use paddock_core::backoff::Backoff;
pub use paddock_core::next::Next;
use paddock_effects::{
    aws::AwsError,
    github::{GitHubError, credentials::CredentialsError},
    kube::objects::KubeError,
    metrics::{ControllerLabel, Metrics},
};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

/// How soon a failed reconciliation is retried. Most failures are outages of other services.
pub const ERROR_RETRY: Duration = Duration::from_secs(5);
/// How soon a reconciliation is retried after a write conflict; the watch event usually comes first.
pub const CONFLICT_RETRY: Duration = Duration::from_millis(200);
/// Added to a point in time, so that it has passed for certain when the object is reconciled.
const TIME_UNTIL_MARGIN: Duration = Duration::from_millis(50);

/// What stopped a reconciliation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The next reconciliation observes everything that was done so far.
    #[error("the object has changed since it was read")]
    Conflict,
    #[error(transparent)]
    Aws(#[from] AwsError),
    #[error(transparent)]
    GitHub(#[from] GitHubError),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error(transparent)]
    Kube(#[from] KubeError),
    /// A periodic pass has to be retried soon.
    #[error("{0}")]
    Incomplete(String),
}

impl Error {
    fn retry_after(&self) -> Duration {
        match self {
            Self::Conflict => CONFLICT_RETRY,
            Self::GitHub(GitHubError::RateLimited { until }) => time_until(*until).max(ERROR_RETRY),
            Self::Aws(_) | Self::GitHub(_) | Self::Credentials(_) | Self::Kube(_) | Self::Incomplete(_) => ERROR_RETRY,
        }
    }
}

/// The time from now until just after a point in time.
pub fn time_until(at: Timestamp) -> Duration {
    at.duration_since(Timestamp::now()).max(SignedDuration::ZERO).unsigned_abs() + TIME_UNTIL_MARGIN
}

fn action(next: Next) -> Action {
    match next {
        Next::AwaitChange => Action::await_change(),
        Next::After(time) => Action::requeue(time),
        Next::At(at) => Action::requeue(time_until(at)),
    }
}

/// Runs one controller until `stop`.
pub async fn drive<K, C, F>(
    name: &'static str,
    controller: Controller<K>,
    context: Arc<C>,
    metrics: Metrics,
    stop: CancellationToken,
    mut reconcile: impl FnMut(Arc<K>, Arc<C>) -> F,
) where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
    C: Send + Sync + 'static,
    F: Future<Output = Result<Next, Error>> + Send + 'static,
{
    let label = ControllerLabel { controller: name };
    controller
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(
            move |object, context| reconcile(object, context).map_ok(action),
            move |_, error, _| Action::requeue(error.retry_after()),
            context,
        )
        .for_each(|outcome| {
            metrics.reconciles.get_or_create(&label).inc();
            match outcome {
                Ok(_) | Err(controller::Error::ReconcilerFailed(Error::Conflict, _)) => {}
                // Deleted before it was reconciled.
                Err(controller::Error::ObjectNotFound(_)) => {}
                Err(error) => {
                    metrics.reconcile_errors.get_or_create(&label).inc();
                    tracing::warn!(controller = name, %error, "reconciliation failed");
                }
            }
            ready(())
        })
        .await;
}

/// Runs `pass` now and after each `period`, until `stop`. A failed pass is retried sooner, see [`pause`]. `stop`
/// interrupts a pass, as a crash would.
pub async fn every<F: Future<Output = Result<(), Error>>>(
    name: &'static str,
    period: Duration,
    metrics: Metrics,
    stop: CancellationToken,
    mut pass: impl FnMut() -> F,
) {
    let label = ControllerLabel { controller: name };
    let mut failures = 0;
    loop {
        metrics.reconciles.get_or_create(&label).inc();
        let outcome = tokio::select! {
            () = stop.cancelled() => return,
            outcome = pass() => outcome,
        };
        match outcome {
            Ok(()) => failures = 0,
            Err(error) => {
                failures += 1;
                metrics.reconcile_errors.get_or_create(&label).inc();
                tracing::warn!(controller = name, %error, "pass failed");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause(period, failures)) => {}
        }
    }
}

/// The time until the next pass: the period, or less after a failure, from [`ERROR_RETRY`] doubling up to the period. A
/// pass that keeps failing makes no more calls than one that succeeds.
fn pause(period: Duration, failures: u32) -> Duration {
    match failures {
        0 => period,
        _ => Backoff::new(ERROR_RETRY, period).delay(failures),
    }
}

/// The reference to object `name` in `namespace`.
pub fn reference<K: Resource<DynamicType = ()>>(namespace: &str, name: &str) -> ObjectRef<K> {
    ObjectRef::new(name).within(namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_pass_is_retried_soon_and_then_less_often() {
        let pauses =
            |period| [0, 1, 2, 3, 4, 5, 99].map(|failures| pause(Duration::from_secs(period), failures).as_secs());
        assert_eq!(pauses(60), [60, 5, 10, 20, 40, 60, 60]);
        assert_eq!(pauses(3), [3; 7]);
    }

    #[tokio::test]
    async fn passes_go_on_after_a_failure_which_is_counted_and_end_with_stop() {
        let (metrics, stop) = (Metrics::default(), CancellationToken::new());
        let mut passes = 0;
        let pass = || {
            passes += 1;
            if passes == 3 {
                stop.cancel();
            }
            std::future::ready(if passes == 1 { Err(Error::Conflict) } else { Ok(()) })
        };
        every("test", Duration::from_millis(1), metrics.clone(), stop.clone(), pass).await;
        assert_eq!(passes, 3);
        let text = metrics.text();
        assert!(text.contains("paddock_reconciles_total{controller=\"test\"} 3"), "{text}");
        assert!(text.contains("paddock_reconcile_errors_total{controller=\"test\"} 1"), "{text}");
    }
}
