//! Waits for a condition. Every wait has a deadline, and its error shows the last observed state.

use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};

/// Short, so that a test sees short-lived states.
const POLL_PAUSE: Duration = Duration::from_millis(50);

/// The result of one check.
pub enum Check<T> {
    Found(T),
    /// The state observed instead.
    NotYet(String),
}

impl<T> From<Option<T>> for Check<T> {
    fn from(found: Option<T>) -> Self {
        found.map_or(Self::NotYet(String::new()), Self::Found)
    }
}

/// How long to wait, how often to check, and which errors to retry.
#[derive(Clone, Copy)]
pub struct Wait {
    deadline: Duration,
    pause: Duration,
    retries: fn(&Error) -> bool,
}

impl Wait {
    /// Any error ends the wait, except those set by [`Self::retrying`].
    pub const fn at_most(deadline: Duration) -> Self {
        Self { deadline, pause: POLL_PAUSE, retries: |_| false }
    }

    /// Pauses this long between two checks.
    pub const fn every(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }

    /// Retries after errors for which `retries` returns true.
    pub const fn retrying(self, retries: fn(&Error) -> bool) -> Self {
        Self { retries, ..self }
    }

    /// Waits until a check finds something: an `Option`, or a [`Check`] with the state observed instead.
    pub async fn until<T, L: Into<Check<T>>>(self, what: &str, mut check: impl AsyncFnMut() -> Result<L>) -> Result<T> {
        let start = Instant::now();
        loop {
            let seen = match check().await.map(Into::into) {
                Ok(Check::Found(found)) => return Ok(found),
                Ok(Check::NotYet(seen)) => seen,
                Err(error) if (self.retries)(&error) => format!("{error:#}"),
                Err(error) => return Err(error.context(what.to_owned())),
            };
            if start.elapsed() > self.deadline {
                let seen = if seen.is_empty() { seen } else { format!("; last seen: {seen}") };
                bail!("not within {:?}: {what}{seen}", self.deadline);
            }
            tokio::time::sleep(self.pause).await;
        }
    }

    /// Waits until a check succeeds; its errors say what is still missing.
    pub async fn until_ok<T>(self, what: &str, mut check: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        self.retrying(|_| true).until(what, async || check().await.map(Some)).await
    }

    pub async fn until_true(self, what: &str, mut is_true: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        self.until(what, async || Ok(is_true().await?.then_some(()))).await
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    const WAIT: Wait = Wait::at_most(Duration::from_secs(60)).every(Duration::ZERO);
    const NO_WAIT: Wait = Wait::at_most(Duration::ZERO).every(Duration::from_millis(1));

    #[tokio::test]
    async fn checks_until_something_is_found() {
        let mut checks = 0..;
        let found = WAIT.until("the third", async || Ok(checks.next().filter(|check| *check == 2))).await;
        assert_eq!(found.unwrap(), 2);
    }

    #[tokio::test]
    async fn deadline_error_says_what_was_seen_last() {
        let mut checks = 0..;
        let check = async || Ok(Check::<()>::NotYet(format!("check {}", checks.next().context("a number")?)));
        let error = NO_WAIT.until("the end", check).await.unwrap_err().to_string();
        assert!(error.starts_with("not within 0ns: the end; last seen: check "), "{error}");
    }

    #[tokio::test]
    async fn wrong_answer_ends_the_wait_at_once() {
        let mut checks = 0;
        let check = async || {
            checks += 1;
            Err::<bool, _>(anyhow!("wrong"))
        };
        let error = WAIT.until_true("an answer", check).await.unwrap_err();
        assert_eq!((format!("{error:#}").as_str(), checks), ("an answer: wrong", 1));
    }

    #[tokio::test]
    async fn retried_error_does_not_end_the_wait() {
        let wait = |wait: Wait| wait.retrying(|error| error.to_string() == "unreachable");
        let mut answers = [Err(anyhow!("unreachable")), Ok(false), Ok(true)].into_iter();
        let check = async || answers.next().context("no more answers")?;
        wait(WAIT).until_true("an answer", check).await.unwrap();
        let check = async || Err(anyhow!("unreachable"));
        let error = wait(NO_WAIT).until_true("an answer", check).await.unwrap_err().to_string();
        assert_eq!(error, "not within 0ns: an answer; last seen: unreachable");
    }
}
