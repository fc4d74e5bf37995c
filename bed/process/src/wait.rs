//! Waits for what becomes true later. Every wait has a deadline, and its error says what was seen last.

use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};

/// Short, so that a test sees states that pass quickly.
const PAUSE: Duration = Duration::from_millis(50);

/// What one look found.
pub enum Look<T> {
    Found(T),
    /// What was seen instead.
    NotYet(String),
}

impl<T> From<Option<T>> for Look<T> {
    fn from(found: Option<T>) -> Self {
        found.map_or(Self::NotYet(String::new()), Self::Found)
    }
}

/// How long to wait, how often to look, and after which errors to look again.
#[derive(Clone, Copy)]
pub struct Wait {
    deadline: Duration,
    pause: Duration,
    retries: fn(&Error) -> bool,
}

impl Wait {
    /// Any error ends the wait at once, unless [`Self::retrying`] says otherwise.
    pub const fn at_most(deadline: Duration) -> Self {
        Self { deadline, pause: PAUSE, retries: |_| false }
    }

    /// Pauses this long between two looks.
    pub const fn every(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }

    /// Looks again after the errors for which `retries` is true.
    pub const fn retrying(self, retries: fn(&Error) -> bool) -> Self {
        Self { retries, ..self }
    }

    /// Waits until a look finds something: an `Option`, or a [`Look`] that says what it saw instead.
    pub async fn until<T, L: Into<Look<T>>>(self, what: &str, mut look: impl AsyncFnMut() -> Result<L>) -> Result<T> {
        let start = Instant::now();
        loop {
            let seen = match look().await.map(Into::into) {
                Ok(Look::Found(found)) => return Ok(found),
                Ok(Look::NotYet(seen)) => seen,
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

    /// Waits until a look succeeds: each of its errors says what is still missing.
    pub async fn until_ok<T>(self, what: &str, mut look: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        self.retrying(|_| true).until(what, async || look().await.map(Some)).await
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
    async fn looks_until_something_is_found() {
        let mut looks = 0..;
        let found = WAIT.until("the third", async || Ok(looks.next().filter(|look| *look == 2))).await;
        assert_eq!(found.unwrap(), 2);
    }

    #[tokio::test]
    async fn deadline_error_says_what_was_seen_last() {
        let mut looks = 0..;
        let look = async || Ok(Look::<()>::NotYet(format!("look {}", looks.next().context("a number")?)));
        let error = NO_WAIT.until("the end", look).await.unwrap_err().to_string();
        assert!(error.starts_with("not within 0ns: the end; last seen: look "), "{error}");
    }

    #[tokio::test]
    async fn wrong_answer_ends_the_wait_at_once() {
        let mut looks = 0;
        let look = async || {
            looks += 1;
            Err::<bool, _>(anyhow!("wrong"))
        };
        let error = WAIT.until_true("an answer", look).await.unwrap_err();
        assert_eq!((format!("{error:#}").as_str(), looks), ("an answer: wrong", 1));
    }

    #[tokio::test]
    async fn retried_error_does_not_end_the_wait() {
        let wait = |wait: Wait| wait.retrying(|error| error.to_string() == "unreachable");
        let mut answers = [Err(anyhow!("unreachable")), Ok(false), Ok(true)].into_iter();
        let look = async || answers.next().context("no more answers")?;
        wait(WAIT).until_true("an answer", look).await.unwrap();
        let look = async || Err(anyhow!("unreachable"));
        let error = wait(NO_WAIT).until_true("an answer", look).await.unwrap_err().to_string();
        assert_eq!(error, "not within 0ns: an answer; last seen: unreachable");
    }
}
