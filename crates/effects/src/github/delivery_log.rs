//! An App's webhook delivery log.

use http::HeaderMap;
use paddock_core::webhook::redelivery::Delivery;
use serde::Deserialize;
use serde_json::Value;

use super::{GitHub, GitHubError, client::PER_PAGE, credentials::Credentials};

/// A page of the log, newest first, and the cursor of the next one.
#[derive(Debug)]
pub struct Page {
    pub deliveries: Vec<Delivery>,
    pub next: Option<String>,
}

impl GitHub {
    /// Lists deliveries to the App's webhook; with `failures` only those with an error response or none.
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

    /// The payload of a delivery.
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
    // The cursor is put into a URL unescaped.
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte);
    (!cursor.is_empty() && cursor.bytes().all(safe)).then(|| cursor.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use paddock_bed_github::{GitHub as Simulator, HookSource, JobRequest, Options};

    use super::{super::credentials::Auth, *};
    use crate::fence::Fence;

    #[tokio::test]
    async fn an_app_reads_its_log_page_by_page_and_payloads() {
        let simulator = Simulator::start(Options::default()).await.unwrap();
        simulator.organization("acme");
        let app = simulator.app("paddock");
        simulator.install(app.id, "acme").unwrap();
        // Nothing listens on this port.
        simulator.hook(HookSource::App(app.id), "http://127.0.0.1:9/webhook", "secret");
        let request = || JobRequest { owner: "acme".into(), repo: "hello".into(), ..JobRequest::default() };
        let jobs: Vec<u64> = (0..120).map(|_| simulator.queue_job(request()).unwrap().id).collect();
        let start = Instant::now();
        while simulator.deliveries().iter().any(|delivery| delivery.outcome.is_none()) {
            assert!(start.elapsed() < Duration::from_secs(120), "GitHub gives up");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let key = octocrab::auth::EncodingKey::from_rsa_pem(app.private_key.as_bytes()).unwrap();
        let auth = Auth::App { id: app.id.into(), key, installation: None };
        let app = Credentials { auth, fingerprint: "app".into() };
        // Reads do not need the lease.
        let github = GitHub::new(&simulator.api_url(), Fence::default());
        for failures in [false, true] {
            let first = github.deliveries(&app, failures, None).await.unwrap();
            let next = first.next.expect("there is more");
            let second = github.deliveries(&app, failures, Some(&next)).await.unwrap();
            assert_eq!((first.deliveries.len(), second.deliveries.len(), second.next), (100, 21, None), "and a ping");
            let newest = &first.deliveries[0];
            let sent = github.delivered(&app, newest.id).await.unwrap();
            assert_eq!(sent["workflow_job"]["id"].as_u64(), jobs.last().copied());
            assert_eq!((newest.event.as_str(), newest.status_code), ("workflow_job", 502));
        }
        assert!(matches!(github.delivered(&app, 1).await, Err(GitHubError::NotFound(_))));
    }

    #[test]
    fn the_next_cursor_is_taken_from_the_link_header() {
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
