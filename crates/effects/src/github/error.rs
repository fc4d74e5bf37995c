//! Maps GitHub's error responses.

use std::time::Duration;

use http::{HeaderMap, StatusCode};
use jiff::{SignedDuration, Timestamp};
use paddock_core::{backoff::Backoff, demand::quota::Scope};
use serde::Deserialize;

/// GitHub's message for a JWT of an App that does not exist.
const UNKNOWN_APP: &str = "Integration not found";
/// The window of the primary rate limit.
const MAX_RATE_LIMIT_WAIT: Duration = Duration::from_hours(1);
/// Used if a rate limited response has no reset time. GitHub documents at least a minute, and more on repetition.
const RATE_LIMIT_BACKOFF: Backoff = Backoff::new(Duration::from_mins(1), MAX_RATE_LIMIT_WAIT);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum GitHubError {
    #[error("GitHub does not know it, or does not show it to these credentials: {0}")]
    NotFound(String),
    /// The App has no installation at the owner, or a suspended one. That says nothing about runners and jobs there.
    #[error("{0}")]
    NoInstallation(String),
    #[error("GitHub does not accept the credentials: {0}")]
    Unauthorized(String),
    #[error("GitHub does not allow it; check the App's permissions: {0}")]
    Forbidden(String),
    #[error("GitHub has a runner of this name already")]
    NameTaken,
    #[error("the runner is busy with a job")]
    Busy,
    #[error("GitHub's rate limit is reached; nothing is asked before {until:.0}")]
    RateLimited { until: Timestamp },
    #[error("GitHub does not answer as it should: {0}")]
    Unavailable(String),
    /// With the time until the next request is allowed.
    #[error("GitHub did not answer in time for this owner; it is asked again in {} s", .0.as_secs() + 1)]
    NoAnswer(Duration),
    #[error("GitHub refuses it: {0}")]
    Refused(String),
    /// An answer that GitHub does not document; nothing follows from it.
    #[error("GitHub answers in a way that it does not document: {0}")]
    Unexpected(String),
    #[error(transparent)]
    Fenced(#[from] crate::fence::Fenced),
}

impl GitHubError {
    /// Whether a retry gives the same error.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::NotFound(_)
            | Self::NoInstallation(_)
            | Self::Unauthorized(_)
            | Self::Forbidden(_)
            | Self::Refused(_) => true,
            Self::NameTaken
            | Self::Busy
            | Self::RateLimited { .. }
            | Self::Unavailable(_)
            | Self::NoAnswer(_)
            | Self::Unexpected(_)
            | Self::Fenced(_) => false,
        }
    }

    /// GitHub's answer about the installation of an App.
    pub(super) fn of_installation(self, scope: &Scope) -> Self {
        match self {
            Self::NotFound(message) if message == UNKNOWN_APP => Self::Unauthorized(message),
            Self::NotFound(_) => Self::NoInstallation(format!("the App is not installed for {scope}")),
            error => error,
        }
    }

    pub(super) fn suspended(scope: &Scope) -> Self {
        Self::NoInstallation(format!("the App's installation for {scope} is suspended; its owner can unsuspend it"))
    }

    /// Whether a token is refused because its installation is suspended.
    pub(super) fn is_suspension(&self) -> bool {
        matches!(self, Self::Forbidden(message) if message.contains("has been suspended"))
    }

    /// Maps an error response. `failures` is the number of consecutive rate limited responses before this one.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap, body: &str, failures: u32, now: Timestamp) -> Self {
        let message = message(body);
        match status.as_u16() {
            401 => Self::Unauthorized(message),
            403 | 429 => match limited_until(status, headers, &message, failures, now) {
                Some(until) => Self::RateLimited { until },
                None => Self::Forbidden(message),
            },
            404 => Self::NotFound(message),
            409 => Self::NameTaken,
            422 => Self::Refused(format!("{status}: {message}")),
            500.. => Self::Unavailable(format!("{status}: {message}")),
            _ => Self::Unexpected(format!("{status}: {message}")),
        }
    }
}

/// In the order that GitHub documents: `retry-after`, the reset of an exhausted limit, at least a minute.
fn limited_until(
    status: StatusCode,
    headers: &HeaderMap,
    message: &str,
    failures: u32,
    now: Timestamp,
) -> Option<Timestamp> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<i64>().ok();
    let after = |wait: Duration| now.saturating_add(wait.min(MAX_RATE_LIMIT_WAIT)).unwrap_or(Timestamp::MAX);
    if let Some(seconds) = number("retry-after") {
        return Some(after(Duration::from_secs(seconds.max(1).unsigned_abs())));
    }
    let reset = number("x-ratelimit-reset").and_then(|second| Timestamp::from_second(second).ok());
    if number("x-ratelimit-remaining") == Some(0)
        && let Some(reset) = reset
    {
        // At least a second, because clock skew must not cause a busy loop.
        return Some(after(reset.duration_since(now).max(SignedDuration::from_secs(1)).unsigned_abs()));
    }
    let limited = status == StatusCode::TOO_MANY_REQUESTS || message.to_lowercase().contains("rate limit");
    limited.then(|| after(RATE_LIMIT_BACKOFF.delay(failures + 1)))
}

/// GitHub's error message; any other body, such as a proxy's page, is truncated.
fn message(body: &str) -> String {
    #[derive(Deserialize)]
    struct ErrorBody {
        message: String,
    }
    let text = serde_json::from_str::<ErrorBody>(body).map_or_else(|_| body.to_owned(), |parsed| parsed.message);
    let text: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
    if text.is_empty() { "no explanation".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn error(status: u16, headers: &[(&'static str, &str)], message: &str, failures: u32) -> GitHubError {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let body = format!("{{\"message\": \"{message}\"}}");
        GitHubError::of(StatusCode::from_u16(status).unwrap(), &headers, &body, failures, NOW)
    }

    #[test]
    fn limits_are_obeyed_as_told_and_doubled_when_untold() {
        let spent = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "90")];
        let both = [("retry-after", "7"), spent[0], spent[1]];
        let secondary = "You have exceeded a secondary rate limit.";
        for (status, headers, message, failures, seconds) in [
            (403, &both[..], "x", 0, 7),
            (429, &both[..1], "x", 5, 7),
            (403, &spent[..], "x", 5, 90),
            (429, &[][..], "x", 0, 60),
            (403, &[][..], secondary, 0, 60),
            (403, &[][..], secondary, 2, 240),
            (429, &[][..], "x", 31, 3600),
            (403, &[("retry-after", "99999999")][..], "x", 0, 3600),
            (403, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "-50")][..], "x", 0, 1),
        ] {
            let until = Timestamp::from_second(seconds).unwrap();
            assert_eq!(
                error(status, headers, message, failures),
                GitHubError::RateLimited { until },
                "{status} {headers:?}"
            );
        }
    }

    #[test]
    fn a_missing_permission_is_no_rate_limit() {
        let message = "Resource not accessible by integration";
        let left = [("x-ratelimit-remaining", "4999"), ("x-ratelimit-reset", "90")];
        assert_eq!(error(403, &left, message, 0), GitHubError::Forbidden(message.into()));
    }

    #[test]
    fn other_responses_are_mapped() {
        assert_eq!(error(401, &[], "Bad credentials", 0), GitHubError::Unauthorized("Bad credentials".into()));
        assert_eq!(error(404, &[], "Not Found", 0), GitHubError::NotFound("Not Found".into()));
        assert_eq!(error(409, &[], "Already exists", 0), GitHubError::NameTaken);
        assert!(matches!(error(422, &[], "x", 0), GitHubError::Refused(_)));
        assert!(matches!(error(503, &[], "x", 0), GitHubError::Unavailable(_)));
        for status in [400, 405, 410, 418, 451] {
            assert!(matches!(error(status, &[], "x", 0), GitHubError::Unexpected(_)), "{status}");
        }
        let page = GitHubError::of(StatusCode::BAD_GATEWAY, &HeaderMap::new(), &"<p>".repeat(900), 0, NOW);
        assert!(page.to_string().len() < 400);
    }
}
