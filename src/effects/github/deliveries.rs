//! The log of an App's webhooks, which the App itself may read.

use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::Value;

use super::{GitHub, GitHubError, PER_PAGE};
use crate::{effects::credentials::Credentials, plan::deliveries::Delivery};

/// A page of the log, newest first, and where the next one begins.
#[derive(Debug)]
pub struct Page {
    pub deliveries: Vec<Delivery>,
    pub next: Option<String>,
}

impl GitHub {
    /// Deliveries to the App's webhook; with `failures` those alone that were answered with an error, or not at all.
    pub async fn deliveries(
        &self,
        app: &Credentials,
        failures: bool,
        cursor: Option<&str>,
    ) -> Result<Page, GitHubError> {
        let status = if failures { "&status=failure" } else { "" };
        let cursor = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let route = format!("/app/hook/deliveries?per_page={PER_PAGE}{status}{cursor}");
        let (headers, deliveries) = self.sessions.call_as_app(app, &route).await?;
        Ok(Page { deliveries, next: next_cursor(&headers) })
    }

    /// What was sent: the body of the webhook.
    pub async fn delivered(&self, app: &Credentials, id: u64) -> Result<Value, GitHubError> {
        #[derive(Deserialize)]
        struct Answer {
            request: Request,
        }
        #[derive(Deserialize)]
        struct Request {
            payload: Value,
        }
        let (_, answer): (_, Answer) = self.sessions.call_as_app(app, &format!("/app/hook/deliveries/{id}")).await?;
        Ok(answer.request.payload)
    }
}

/// The cursor of `<https://…?cursor=CURSOR&…>; rel="next"`.
fn next_cursor(headers: &HeaderMap) -> Option<String> {
    let links = headers.get("link")?.to_str().ok()?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    let (_, address) = next.split_once('<')?;
    let (address, _) = address.split_once('>')?;
    let (_, query) = address.split_once('?')?;
    let cursor = query.split('&').find_map(|pair| pair.strip_prefix("cursor="))?;
    // It goes into an address again as it came.
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte);
    (!cursor.is_empty() && cursor.bytes().all(safe)).then(|| cursor.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_where_the_link_says() {
        for (link, expected) in [
            (r#"<https://api.github.com/app/hook/deliveries?per_page=1&cursor=v1_12>; rel="next""#, Some("v1_12")),
            (r#"<https://x/?cursor=a>; rel="prev", <https://x/?cursor=b&per_page=1>; rel="next""#, Some("b")),
            (r#"<https://x/?cursor=a>; rel="prev""#, None),
            (r#"<https://x/?cursor=>; rel="next""#, None),
            (r#"<https://x/?cursor=a b>; rel="next""#, None),
            ("nonsense", None),
        ] {
            let headers = [("link".parse().unwrap(), link.parse().unwrap())].into_iter().collect();
            assert_eq!(next_cursor(&headers).as_deref(), expected, "{link}");
        }
    }
}
