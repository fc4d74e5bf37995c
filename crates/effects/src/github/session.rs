//! GitHub sessions: clients, installation tokens and rate limits.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::FutureExt;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{ETAG, IF_NONE_MATCH},
};
use jiff::{SignedDuration, Timestamp};
use octocrab::{Octocrab, service::middleware::retry::RetryConfig};
use paddock_core::demand::quota::Scope;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    concurrency::Concurrency,
    credentials::{Auth, Credentials, jwt},
    error::GitHubError,
    etags::Answers,
    rate_limits::{Account, Lane, RateLimits},
    redirect::{self, MAX_REDIRECTS},
};
use crate::{
    cache::ExpiringCache,
    clock::{self, Service},
    fence::Fence,
};

/// The version of the API that every request names: without one GitHub chooses, and may choose another some day.
const API_VERSION: (HeaderName, &str) = (HeaderName::from_static("x-github-api-version"), "2022-11-28");

/// Timeout of one request; GitHub's own is 10 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(12);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Installation tokens expire after an hour.
const TOKEN_LIFETIME: SignedDuration = SignedDuration::from_mins(59);

/// Limit of cached tokens and installation ids; larger than the number of installations in practice.
const CACHED_OWNERS: usize = 4096;

pub(super) struct Sessions {
    api_url: String,
    fence: Fence,
    /// By fingerprint: an App's own client, or a token's.
    clients: Mutex<HashMap<String, Octocrab>>,
    tokens: ExpiringCache<Account, SecretString>,
    /// By credential and owner, as GitHub named them. What a claim or a Secret says is used until it does not work.
    installations: ExpiringCache<(String, String), u64>,
    answers: Answers<(Account, String)>,
    rate_limits: RateLimits,
    concurrency: Concurrency,
}

impl Sessions {
    pub fn new(api_url: String, fence: Fence) -> Self {
        Self {
            api_url,
            fence,
            clients: Mutex::default(),
            tokens: ExpiringCache::new(CACHED_OWNERS),
            installations: ExpiringCache::new(CACHED_OWNERS),
            answers: Answers::default(),
            rate_limits: RateLimits::default(),
            concurrency: Concurrency::new(),
        }
    }

    /// One call with the credentials for `scope`. It is retried once with a new token after a 401, or if it turns out that
    /// the installation is not the owner's, because nothing was done. No other failure is retried: the call may have
    /// succeeded and only the response was lost.
    pub async fn call<T: DeserializeOwned>(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<T, GitHubError> {
        self.call_for(Lane::Urgent, credentials, scope, method, route, body).await
    }

    /// A GET that can be retried later; refused while little of the limit is left.
    pub async fn get_in_background<T: DeserializeOwned>(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        route: &str,
    ) -> Result<T, GitHubError> {
        self.call_for(Lane::Background, credentials, scope, Method::GET, route, None).await
    }

    async fn call_for<T: DeserializeOwned>(
        &self,
        lane: Lane,
        credentials: &Credentials,
        scope: &Scope,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<T, GitHubError> {
        let exchange = async {
            let (client, account) = self.session(credentials, scope).await?;
            let outcome = self.send(lane, &client, &account, method.clone(), route, body).await;
            match outcome {
                Err(error) if self.is_of_session(&error, credentials, scope, &account).await? => {
                    let (client, account) = self.session(credentials, scope).await?;
                    self.send(lane, &client, &account, method, route, body).await
                }
                outcome => outcome,
            }
        };
        self.concurrency.owner_limit(&credentials.fingerprint, scope).run(exchange).await
    }

    /// A GET as the App itself, without an installation.
    pub async fn call_as_app<T: DeserializeOwned>(
        &self,
        credentials: &Credentials,
        route: &str,
    ) -> Result<(HeaderMap, T), GitHubError> {
        self.send_as_app(Lane::Background, credentials, Method::GET, route).await
    }

    /// Sends a request as the App itself. GitHub refuses the JWT of a clock that is minutes off; its answer corrects the
    /// clock, and the request is repeated once.
    async fn send_as_app<T: DeserializeOwned>(
        &self,
        lane: Lane,
        credentials: &Credentials,
        method: Method,
        route: &str,
    ) -> Result<(HeaderMap, T), GitHubError> {
        let own = Account { fingerprint: credentials.fingerprint.clone(), installation: None };
        let base = self.client(credentials)?;
        let exchange = async || match &credentials.auth {
            Auth::App { id, key, .. } => {
                let jwt = jwt(*id, key, clock::now()).map_err(|error| GitHubError::Unauthorized(error.to_string()))?;
                let client = base.user_access_token(jwt).map_err(unavailable)?;
                self.exchange(lane, &client, &own, method.clone(), route, None).await
            }
            Auth::Token(_) => self.exchange(lane, &base, &own, method.clone(), route, None).await,
        };
        let corrected = clock::correction();
        let answer = match exchange().await {
            Err(GitHubError::Unauthorized(_)) if clock::correction() != corrected => exchange().await,
            answer => answer,
        };
        let (headers, text) = answer?;
        Ok((headers, parse(&text)?))
    }

    async fn session(&self, credentials: &Credentials, scope: &Scope) -> Result<(Octocrab, Account), GitHubError> {
        let base = self.client(credentials)?;
        let own = Account { fingerprint: credentials.fingerprint.clone(), installation: None };
        let Auth::App { installation, .. } = &credentials.auth else { return Ok((base, own)) };
        let key = installation_key(&own, scope);
        let mut id = match self.installations.last(&key).await.or(*installation) {
            Some(id) => id,
            None => self.find_installation(credentials, &own, scope).await?,
        };
        let token = match self.token(credentials, &own, scope, id).await {
            // The App may have been reinstalled, or the claim's id is wrong.
            Err(GitHubError::NoInstallation(why)) => {
                self.installations.invalidate(&key).await;
                let found = self.find_installation(credentials, &own, scope).await?;
                if found == id {
                    return Err(GitHubError::NoInstallation(why));
                }
                id = found;
                self.token(credentials, &own, scope, id).await?
            }
            token => token?,
        };
        let client = base.user_access_token(token).map_err(unavailable)?;
        Ok((client, Account { installation: Some(id), ..own }))
    }

    /// Whether a call failed because of its token or installation, and can be repeated with others. An error if the App
    /// has no installation there: then the failure says nothing about what was asked for.
    async fn is_of_session(
        &self,
        error: &GitHubError,
        credentials: &Credentials,
        scope: &Scope,
        account: &Account,
    ) -> Result<bool, GitHubError> {
        let Some(id) = account.installation else { return Ok(false) };
        match error {
            GitHubError::Unauthorized(_) => {
                self.tokens.invalidate(account).await;
                Ok(true)
            }
            // A new token tells whether it is suspended.
            error if error.is_suspension() => {
                self.tokens.invalidate(account).await;
                Ok(true)
            }
            // The token may be for another owner's installation.
            GitHubError::NotFound(_) | GitHubError::Forbidden(_) => {
                let own = Account { installation: None, ..account.clone() };
                Ok(self.find_installation(credentials, &own, scope).await? != id)
            }
            _ => Ok(false),
        }
    }

    async fn token(
        &self,
        credentials: &Credentials,
        own: &Account,
        scope: &Scope,
        installation: u64,
    ) -> Result<SecretString, GitHubError> {
        let account = Account { installation: Some(installation), ..own.clone() };
        self.tokens.get_or_fetch(account, self.new_token(credentials, scope, installation).boxed()).await
    }

    /// A new token and its time to live.
    async fn new_token(
        &self,
        app: &Credentials,
        scope: &Scope,
        installation: u64,
    ) -> Result<(SecretString, Duration), GitHubError> {
        #[derive(Deserialize)]
        struct Answer {
            token: String,
            expires_at: Timestamp,
        }
        let route = format!("/app/installations/{installation}/access_tokens");
        let answer = self.send_as_app::<Answer>(Lane::Urgent, app, Method::POST, &route).await;
        let (_, answer) = answer.map_err(|error| match error {
            // The App itself needs no permission for it.
            GitHubError::Forbidden(_) => GitHubError::suspended(scope),
            error => error.of_installation(scope),
        })?;
        let left = answer.expires_at.duration_since(clock::now()) - SignedDuration::from_mins(1);
        Ok((answer.token.into(), Duration::try_from(left.min(TOKEN_LIFETIME)).unwrap_or_default()))
    }

    async fn find_installation(&self, app: &Credentials, own: &Account, scope: &Scope) -> Result<u64, GitHubError> {
        #[derive(Deserialize)]
        struct Answer {
            id: u64,
        }
        let fetch = async {
            let route = format!("{}/installation", scope.route());
            let found = self.send_as_app::<Answer>(Lane::Urgent, app, Method::GET, &route).await;
            found.map(|(_, found)| (found.id, Duration::MAX)).map_err(|error| error.of_installation(scope))
        }
        .boxed();
        self.installations.get_or_fetch(installation_key(own, scope), fetch).await
    }

    /// Of an App, it has no credentials of its own.
    fn client(&self, credentials: &Credentials) -> Result<Octocrab, GitHubError> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&credentials.fingerprint) {
            return Ok(client.clone());
        }
        let builder = Octocrab::builder()
            .base_uri(self.api_url.as_str())
            .map_err(unavailable)?
            .add_header(API_VERSION.0, API_VERSION.1.to_owned())
            .add_retry_config(RetryConfig::None)
            .set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = match &credentials.auth {
            Auth::App { .. } => builder,
            Auth::Token(token) => builder.personal_token(token.expose_secret().to_owned()),
        };
        let client = client.build().map_err(unavailable)?;
        clients.insert(credentials.fingerprint.clone(), client.clone());
        Ok(client)
    }

    async fn send<T: DeserializeOwned>(
        &self,
        lane: Lane,
        client: &Octocrab,
        account: &Account,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<T, GitHubError> {
        let (_, text) = self.exchange(lane, client, account, method, route, body).await?;
        parse(&text)
    }

    /// Sends one request, unless it is rate limited, or a write while the fence is closed, and follows its redirects.
    async fn exchange(
        &self,
        lane: Lane,
        client: &Octocrab,
        account: &Account,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<(HeaderMap, String), GitHubError> {
        let key = (account.clone(), route.to_owned());
        let known = if lane == Lane::Background { self.answers.get(&key) } else { None };
        let mut route = route.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let failures = self.rate_limits.check(account, lane)?;
            let tag = known.as_ref().map(|known| &known.tag);
            let (status, headers, text) = self.send_once(client, &method, &route, body, tag).await?;
            self.rate_limits.note_budget(account, &headers);
            if let Some(next) = redirect::target(&self.api_url, status, &headers)? {
                tracing::debug!(route, next, "GitHub redirects");
                route = next;
                continue;
            }
            let text = match known {
                Some(known) if status == StatusCode::NOT_MODIFIED => known.text.to_string(),
                _ if status.is_success() => text,
                _ => {
                    let error = GitHubError::of(status, &headers, &text, failures, clock::now());
                    if let GitHubError::RateLimited { until } = error {
                        tracing::warn!(%until, route, "GitHub rate limit reached");
                        self.rate_limits.record(account, Some(until));
                    }
                    return Err(error);
                }
            };
            self.rate_limits.record(account, None);
            if let (Lane::Background, StatusCode::OK, Some(tag)) = (lane, status, headers.get(ETAG)) {
                self.answers.keep(key, tag.clone(), &text);
            }
            return Ok((headers, text));
        }
        Err(GitHubError::Unexpected("too many redirects".into()))
    }

    async fn send_once(
        &self,
        client: &Octocrab,
        method: &Method,
        route: &str,
        body: Option<&Value>,
        tag: Option<&HeaderValue>,
    ) -> Result<(StatusCode, HeaderMap, String), GitHubError> {
        let _permit = self.concurrency.acquire().await;
        if method != Method::GET {
            self.fence.check()?;
        }
        let sent = Instant::now();
        let exchange = async {
            let answer = match *method {
                Method::POST => client._post(route, body).await,
                Method::DELETE => client._delete(route, body).await,
                _ => {
                    let headers = tag.map(|tag| HeaderMap::from_iter([(IF_NONE_MATCH, tag.clone())]));
                    client._get_with_headers(route, headers).await
                }
            };
            let answer = answer.map_err(unavailable)?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            clock::note(Service::GitHub, headers.get("date").and_then(|date| date.to_str().ok()), sent);
            let text = client.body_to_string(answer).await.map_err(unavailable)?;
            Ok((status, headers, text))
        };
        tokio::time::timeout(CALL_TIMEOUT, exchange).await.map_err(|_| GitHubError::NoAnswer(Duration::ZERO))?
    }
}

fn installation_key(own: &Account, scope: &Scope) -> (String, String) {
    (own.fingerprint.clone(), scope.owner().to_lowercase())
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, GitHubError> {
    let text = if text.is_empty() { "null" } else { text };
    serde_json::from_str(text).map_err(|error| GitHubError::Unavailable(format!("an unexpected answer: {error}")))
}

/// The cause without octocrab's backtraces. Request URLs contain no secret.
fn unavailable(error: octocrab::Error) -> GitHubError {
    let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
    GitHubError::Unavailable(cause.lines().next().unwrap_or("no answer").to_owned())
}
