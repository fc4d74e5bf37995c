//! Runs controllers and periodic passes: counts outcomes, logs failures and retries them.

use std::{
    collections::HashMap,
    fmt::Debug,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex},
    time::Duration,
};

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
    clock,
    github::{GitHubError, credentials::CredentialsError},
    kube::objects::KubeError,
    lock,
    metrics::{ControllerLabel, Metrics},
};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

/// How soon a failed reconciliation is retried. Most failures are outages of other services.
pub const ERROR_RETRY: Duration = Duration::from_secs(5);
/// A request that the API server refuses will be refused again, until the object, a quota or a webhook changes.
pub const REFUSAL_RETRY: Backoff = Backoff::new(ERROR_RETRY, Duration::from_secs(300));
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
    /// The delay after this many failures of one object in a row.
    fn retry_after(&self, failures: u32) -> Duration {
        match self {
            Self::Conflict => CONFLICT_RETRY,
            Self::Kube(error) if error.is_refusal() => REFUSAL_RETRY.delay(failures),
            Self::GitHub(GitHubError::RateLimited { until }) => time_until(*until).max(ERROR_RETRY),
            Self::Aws(_) | Self::GitHub(_) | Self::Credentials(_) | Self::Kube(_) | Self::Incomplete(_) => ERROR_RETRY,
        }
    }
}

/// The time from now until just after a point in time.
pub fn time_until(at: Timestamp) -> Duration {
    at.duration_since(clock::now()).max(SignedDuration::ZERO).unsigned_abs() + TIME_UNTIL_MARGIN
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
    let failures = Arc::new(Failures::default());
    let run = {
        let failures = failures.clone();
        move |object: Arc<K>, context| {
            let (failures, key) = (failures.clone(), ObjectRef::from_obj(&*object));
            reconcile(object, context).map_ok(move |next| {
                failures.clear(&key);
                action(next)
            })
        }
    };
    let retry = {
        let failures = failures.clone();
        move |object: Arc<K>, error: &Error, _| {
            if matches!(error, Error::Conflict) {
                return Action::requeue(CONFLICT_RETRY);
            }
            let key = ObjectRef::from_obj(&*object);
            let (count, new) = failures.add(key.clone(), error.to_string());
            if new {
                tracing::warn!(controller = name, object = %key, %error, "reconciliation failed");
            }
            Action::requeue(error.retry_after(count))
        }
    };
    controller
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(run, retry, context)
        .for_each(|outcome| {
            metrics.reconciles.get_or_create(&label).inc();
            match outcome {
                Ok(_) | Err(controller::Error::ReconcilerFailed(Error::Conflict, _)) => {}
                // Deleted before it was reconciled.
                Err(controller::Error::ObjectNotFound(object)) => {
                    let ObjectRef { name, namespace, .. } = *object;
                    failures.clear(&reference(&namespace.unwrap_or_default(), &name));
                }
                Err(error) => {
                    metrics.reconcile_errors.get_or_create(&label).inc();
                    if !matches!(error, controller::Error::ReconcilerFailed(..)) {
                        tracing::warn!(controller = name, %error, "reconciliation failed");
                    }
                }
            }
            ready(())
        })
        .await;
}

/// Consecutive failures by object.
pub struct Failures<K>(Mutex<HashMap<K, (u32, String)>>);

impl<K> Default for Failures<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> Failures<K> {
    /// Counts a failure. Returns how many there were in a row, and whether the last one differed: a failure that repeats
    /// itself is logged once.
    pub fn add(&self, key: K, message: String) -> (u32, bool) {
        let mut all = lock(&self.0);
        let (count, last) = all.entry(key).or_default();
        *count += 1;
        let new = *last != message;
        *last = message;
        (*count, new)
    }

    pub fn clear(&self, key: &K) {
        lock(&self.0).remove(key);
    }
}

/// Runs `pass` now and after each `period`, until `stop`. A failed pass is retried sooner, see [`pause`]. `stop`
/// interrupts a pass, as a crash would.
pub async fn every<F: Future<Output = Result<(), Error>>>(
    name: &'static str,
    period: Duration,
    metrics: Metrics,
    stop: CancellationToken,
    pass: impl FnMut() -> F,
) {
    paced(name, || period, metrics, stop, pass).await;
}

/// Like [`every`], with a period that is asked for after each pass.
pub async fn paced<F: Future<Output = Result<(), Error>>>(
    name: &'static str,
    period: impl Fn() -> Duration,
    metrics: Metrics,
    stop: CancellationToken,
    mut pass: impl FnMut() -> F,
) {
    let label = ControllerLabel { controller: name };
    let failures = Failures::default();
    loop {
        metrics.reconciles.get_or_create(&label).inc();
        let outcome = tokio::select! {
            () = stop.cancelled() => return,
            outcome = pass() => outcome,
        };
        let count = match outcome {
            Ok(()) => {
                failures.clear(&name);
                0
            }
            Err(error) => {
                metrics.reconcile_errors.get_or_create(&label).inc();
                let (count, new) = failures.add(name, error.to_string());
                if new {
                    tracing::warn!(controller = name, %error, "pass failed");
                }
                count
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause(period(), count)) => {}
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
    fn a_failure_is_new_until_it_repeats_itself() {
        let failures = Failures::default();
        let add = |key: &'static str, message: &str| failures.add(key, message.to_owned());
        assert_eq!(
            [add("a", "no"), add("a", "no"), add("a", "never"), add("b", "no")],
            [(1, true), (2, false), (3, true), (1, true)]
        );
        failures.clear(&"a");
        assert_eq!(add("a", "never"), (1, true));
    }

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
