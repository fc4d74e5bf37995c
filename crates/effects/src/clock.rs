//! The operator's time: that of AWS, so that every replica writes and judges the same instants whatever its own clock says.
//! Without AWS it is GitHub's.
//!
//! The skew of this machine's clock is measured by the `Date` of answers, and corrected beyond
//! [`CLOCK_SKEW_TOLERATED`](paddock_core::clock_skew::CLOCK_SKEW_TOLERATED). Between two answers the time follows the
//! monotonic clock, so it does not jump when this machine's clock is set.

use std::{
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicI64, Ordering},
    },
    time::{Instant, SystemTime},
};

use aws_sdk_dynamodb::{
    config::{
        ConfigBag, Intercept, RuntimeComponents,
        interceptors::{BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextRef},
    },
    error::BoxError,
};
use aws_smithy_async::time::TimeSource;
use aws_smithy_types::config_bag::{Storable, StoreReplace};
use jiff::{SignedDuration, Timestamp, fmt::rfc2822};
use paddock_core::clock_skew::{Correction, Sample};

use crate::lock;

/// A service whose answers have the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    Aws,
    GitHub,
}

impl Service {
    pub const ALL: [Self; 2] = [Self::Aws, Self::GitHub];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Aws => "AWS",
            Self::GitHub => "GitHub",
        }
    }

    /// The label value for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::GitHub => "github",
        }
    }
}

static CLOCK: LazyLock<Clock> = LazyLock::new(|| Clock::new(Timestamp::now(), Instant::now()));

struct Clock {
    start: (Timestamp, Instant),
    /// In milliseconds; what [`Clock::measured`] comes to.
    correction: AtomicI64,
    measured: Mutex<[Measured; 2]>,
}

#[derive(Clone, Copy, Default)]
struct Measured {
    correction: Correction,
    /// Of this machine's clock, which may have been set since its start.
    skew: Option<SignedDuration>,
}

impl Clock {
    fn new(start: Timestamp, started: Instant) -> Self {
        Self { start: (start, started), correction: AtomicI64::default(), measured: Mutex::default() }
    }

    /// The time of this machine's clock as of the start.
    fn uncorrected(&self, at: Instant) -> Timestamp {
        let (start, started) = self.start;
        start + SignedDuration::try_from(at.duration_since(started)).expect("an operator runs for less than 292 years")
    }

    fn correction(&self) -> SignedDuration {
        SignedDuration::from_millis(self.correction.load(Ordering::Relaxed))
    }

    fn now(&self, at: Instant) -> Timestamp {
        self.uncorrected(at) - self.correction()
    }

    /// The service answered with this time. `wall`: this machine's clock when the answer came.
    fn note(&self, service: Service, date: Timestamp, sent: Instant, received: Instant, wall: Timestamp) {
        let took = SignedDuration::try_from(received.duration_since(sent)).unwrap_or(SignedDuration::MAX);
        let mut measured = lock(&self.measured);
        let of = &mut measured[service as usize];
        of.skew = Some(Sample::new(date, wall.saturating_sub(took).unwrap_or(Timestamp::MIN), wall).skew());
        of.correction.note(Sample::new(date, self.uncorrected(sent), self.uncorrected(received)));
        let by = measured.iter().find_map(|measured| measured.correction.by()).unwrap_or_default();
        let before = self.correction.swap(by.as_millis().try_into().unwrap_or_default(), Ordering::Relaxed);
        if i128::from(before) != by.as_millis() {
            let (service, seconds_ahead) = (service.name(), by.as_secs());
            tracing::warn!(service, seconds_ahead, "this machine's clock is wrong; its time is corrected");
        }
    }
}

/// The time, corrected to that of AWS. Everything that the operator writes or compares with what others wrote is by this.
pub fn now() -> Timestamp {
    CLOCK.now(Instant::now())
}

/// What is subtracted from this machine's clock.
pub fn correction() -> SignedDuration {
    CLOCK.correction()
}

/// How far this machine's clock is ahead of each service that has answered.
pub fn skews() -> impl Iterator<Item = (Service, SignedDuration)> {
    let measured = *lock(&CLOCK.measured);
    Service::ALL.into_iter().filter_map(move |service| Some((service, measured[service as usize].skew?)))
}

/// Takes in the `Date` of an answer to a request that was sent at `sent`.
pub fn note(service: Service, date: Option<&str>, sent: Instant) {
    let date = date.and_then(|date| rfc2822::DateTimeParser::new().parse_timestamp(date).ok());
    if let Some(date) = date {
        CLOCK.note(service, date, sent, Instant::now(), Timestamp::now());
    }
}

/// Measures by DynamoDB's answers: its records are what the time is for, and it answers every few seconds.
#[derive(Debug)]
pub struct DateInterceptor;

/// When the attempt was sent.
#[derive(Debug)]
struct Sent(Instant);

impl Storable for Sent {
    type Storer = StoreReplace<Self>;
}

impl Intercept for DateInterceptor {
    fn name(&self) -> &'static str {
        "date"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        config.interceptor_state().store_put(Sent(Instant::now()));
        Ok(())
    }

    fn read_after_transmit(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        if let Some(Sent(sent)) = config.load::<Sent>() {
            note(Service::Aws, context.response().headers().get("date"), *sent);
        }
        Ok(())
    }
}

/// For signatures: AWS refuses those of a clock that differs by more than five minutes.
#[derive(Debug)]
pub struct CorrectedTime;

impl TimeSource for CorrectedTime {
    fn now(&self) -> SystemTime {
        now().into()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_time_is_that_of_aws_whatever_this_machines_clock_says_or_is_set_to() {
        let (truth, started) = (Timestamp::from_second(1_750_000_000).unwrap(), Instant::now());
        for ahead in [-300, 0, 300] {
            let ahead = SignedDuration::from_secs(ahead);
            let clock = Clock::new(truth + ahead, started);
            assert_eq!(clock.now(started), truth + ahead, "no answer yet");
            let skew = |service| lock(&clock.measured)[service as usize].skew;
            let mut wall_ahead = ahead;
            for second in 1..6 {
                let sent = started + Duration::from_secs(second);
                let date = truth + SignedDuration::from_secs(second.cast_signed());
                if second == 3 {
                    wall_ahead = SignedDuration::ZERO;
                }
                let service = if second == 1 { Service::GitHub } else { Service::Aws };
                clock.note(service, date, sent, sent, date + wall_ahead);
                let error = clock.now(sent).duration_since(date).abs();
                assert!(error <= SignedDuration::from_secs(1), "{ahead} {second}: {error}");
            }
            assert!((skew(Service::GitHub).unwrap() - ahead).abs() <= SignedDuration::from_secs(1));
            assert_eq!(skew(Service::Aws), Some(SignedDuration::ZERO), "the clock was set");
        }
    }

    #[test]
    fn the_date_of_an_http_answer_is_understood() {
        let date = rfc2822::DateTimeParser::new().parse_timestamp("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        assert_eq!(date, "1994-11-06T08:49:37Z".parse().unwrap());
    }
}
