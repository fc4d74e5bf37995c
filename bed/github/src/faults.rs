//! Fault injection rules for future requests.

use std::time::Duration;

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header::LOCATION},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{model::signed, world::World};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Answers with an error and does nothing else: with `retry-after`, with an exhausted rate limit that resets after
    /// this many seconds, or with neither.
    Status { status: u16, retry_after: Option<u64>, reset_in: Option<u64> },
    /// Points to another address.
    Redirect { status: u16, location: String },
    /// Executed after a delay, by the simulator's clock.
    DelayMs(u64),
    /// Never answers.
    Hang,
    /// The connection closes before the request is executed.
    Drop,
    /// The request is executed, then the connection closes without a response.
    LostResponse,
}

/// A rule: the first one with a matching method and path applies. `path` is the route without the `/api/v3` prefix;
/// `*` stands for any text (`/orgs/*/actions/runners*`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    #[serde(default)]
    pub method: Option<String>,
    pub path: String,
    /// How many matching requests pass first.
    #[serde(default)]
    pub skip: u32,
    /// How many requests it affects; all, if omitted.
    #[serde(default)]
    pub times: Option<u32>,
    pub effect: Effect,
}

impl Fault {
    pub fn new(method: &str, path: &str, effect: Effect) -> Self {
        Self { method: Some(method.into()), path: path.into(), skip: 0, times: None, effect }
    }

    pub fn times(self, times: u32) -> Self {
        Self { times: Some(times), ..self }
    }
}

/// Whether the pattern, with `*` for any text, matches the whole text.
pub fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|tail| {
            let ends = tail.char_indices().map(|(at, _)| at).chain([tail.len()]);
            ends.into_iter().any(|at| fits(rest, &tail[at..]))
        }),
    }
}

impl World {
    /// The fault for this request; its counter is decremented.
    pub fn fault_for(&mut self, method: &str, path: &str) -> Option<Effect> {
        let applies = |fault: &Fault| {
            fault.method.as_ref().is_none_or(|wanted| wanted.eq_ignore_ascii_case(method))
                && fault.times != Some(0)
                && fits(&fault.path, path)
        };
        for fault in self.faults.iter_mut().filter(|fault| applies(fault)) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else {
                fault.times = fault.times.map(|left| left - 1);
                return Some(fault.effect.clone());
            }
        }
        None
    }
}

/// The response for [`Effect::Status`], with GitHub's own message.
pub fn refusal(status: u16, retry_after: Option<u64>, reset_in: Option<u64>, now: Timestamp) -> Response {
    let message = match status {
        403 | 429 if reset_in.is_some() => "API rate limit exceeded for installation.",
        403 | 429 => "You have exceeded a secondary rate limit. Please wait a few minutes before you try again.",
        500.. => "Server Error",
        _ => "Something went wrong",
    };
    let code = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = (code, Json(json!({"message": message, "documentation_url": crate::api::DOCS}))).into_response();
    let headers = answer.headers_mut();
    if let Some(seconds) = retry_after {
        headers.insert("retry-after", HeaderValue::from(seconds));
    }
    if let Some(seconds) = reset_in {
        let reset = now + signed(Duration::from_secs(seconds));
        headers.insert("x-ratelimit-remaining", HeaderValue::from(0));
        headers.insert("x-ratelimit-reset", HeaderValue::from(reset.as_second()));
    }
    answer
}

/// The response for a resource that has moved.
pub fn redirect(status: u16, location: &str) -> Response {
    let code = StatusCode::from_u16(status).unwrap_or(StatusCode::MOVED_PERMANENTLY);
    let body = json!({"message": "Moved Permanently", "url": location, "documentation_url": crate::api::DOCS});
    (code, [(LOCATION, location.to_owned())], Json(body)).into_response()
}

/// Closes the connection without a response: the server's task for it unwinds silently.
pub fn drop_connection() -> ! {
    std::panic::resume_unwind(Box::new("the connection is dropped by a fault"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        assert!(fits("/orgs/*/actions/runners*", "/orgs/acme/actions/runners/7"));
        assert!(fits("*", "/anything") && fits("/a", "/a"));
        assert!(!fits("/orgs/*/actions/runners", "/orgs/acme/actions/runners/7"));
        assert!(!fits("/a*b", "/ac"));
    }
}
