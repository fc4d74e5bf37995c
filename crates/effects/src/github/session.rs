//! GitHub sessions: clients, installation tokens and rate limits.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::FutureExt;
use http::{HeaderMap, Method};
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
};
use crate::{
    cache::ExpiringCache,
    clock::{self, Service},
    fence::Fence,
};

/// Timeout of one request; GitHub's own is 10 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(12);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Installation tokens expire after an hour.
const TOKEN_LIFETIME: SignedDuration = SignedDuration::from_mins(59);

/// What GitHub's rate limits apply to: an App itself, one of its installations, or a token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Account {
    fingerprint: String,
    installation: Option<u64>,
}

/// The priority of a call while little of the hourly limit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// A job waits for it, or it releases something.
    Urgent,
    /// It can be retried later. The last tenth of the limit is reserved for urgent calls.
    Background,
}

/// The rate limit of an account.
#[derive(Clone, Copy, Default)]
struct RateLimitState {
    /// No request is sent before.
    until: Option<Timestamp>,
    /// Consecutive rate limited responses.
    failures: u32,
    budget: Option<Budget>,
}

/// The remaining hourly limit, according to the last response.
#[derive(Clone, Copy)]
struct Budget {
    limit: i64,
    remaining: i64,
    reset: Timestamp,
}

impl Budget {
    fn of(headers: &HeaderMap) -> Option<Self> {
        let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<i64>().ok();
        let reset = Timestamp::from_second(number("x-ratelimit-reset")?).ok()?;
        Some(Self { limit: number("x-ratelimit-limit")?, remaining: number("x-ratelimit-remaining")?, reset })
    }

    fn allows(self, lane: Lane, now: Timestamp) -> bool {
        let required = match lane {
            Lane::Urgent => 1,
            Lane::Background => self.limit / 10,
        };
        now >= self.reset || self.remaining >= required
    }
}

/// Limit of cached tokens and installation ids; larger than the number of installations in practice.
const CACHED_OWNERS: usize = 4096;

pub(super) struct Sessions {
    api_url: String,
    fence: Fence,
    /// By fingerprint: an App's own client, or a token's.
    clients: Mutex<HashMap<String, Octocrab>>,
    tokens: ExpiringCache<Account, SecretString>,
    /// By credential and owner.
    installations: ExpiringCache<(String, String), u64>,
    rate_limits: Mutex<HashMap<Account, RateLimitState>>,
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
            rate_limits: Mutex::default(),
            concurrency: Concurrency::new(),
        }
    }

    /// One call with the credentials for `scope`. After a 401 it is retried once with a new token, because nothing was
    /// done. No other failure is retried: the call may have succeeded and only the response was lost.
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
            match (outcome, account.installation) {
                (Err(GitHubError::Unauthorized(_)), Some(_)) => {
                    self.tokens.invalidate(&account).await;
                    let (client, account) = self.session(credentials, scope).await?;
                    self.send(lane, &client, &account, method, route, body).await
                }
                (outcome, _) => outcome,
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
        let installation = match installation {
            Some(id) => *id,
            None => self.find_installation(credentials, &own, scope).await?,
        };
        let account = Account { installation: Some(installation), ..own.clone() };
        let fetch = self.new_token(credentials, &own, scope, installation).boxed();
        let token = self.tokens.get_or_fetch(account.clone(), fetch).await?;
        let client = base.user_access_token(token).map_err(unavailable)?;
        Ok((client, account))
    }

    /// A new token and its time to live.
    async fn new_token(
        &self,
        app: &Credentials,
        own: &Account,
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
        if let Err(GitHubError::NotFound(_)) = answer {
            // The App may have been reinstalled: look the installation up again.
            self.installations.invalidate(&installation_key(own, scope)).await;
        }
        let (_, answer) = answer.map_err(|error| uninstalled(error, scope))?;
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
            found.map(|(_, found)| (found.id, Duration::MAX)).map_err(|error| uninstalled(error, scope))
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

    /// Sends one request, unless it is rate limited, or a write while the fence is closed.
    async fn exchange(
        &self,
        lane: Lane,
        client: &Octocrab,
        account: &Account,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<(HeaderMap, String), GitHubError> {
        let _permit = self.concurrency.acquire().await;
        let failures = self.check_rate_limit(account, lane)?;
        if method != Method::GET {
            self.fence.check()?;
        }
        let sent = Instant::now();
        let exchange = async {
            let answer = match method {
                Method::POST => client._post(route, body).await,
                Method::DELETE => client._delete(route, body).await,
                _ => client._get(route).await,
            };
            let answer = answer.map_err(unavailable)?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            clock::note(Service::GitHub, headers.get("date").and_then(|date| date.to_str().ok()), sent);
            let text = client.body_to_string(answer).await.map_err(unavailable)?;
            Ok::<_, GitHubError>((status, headers, text))
        };
        let (status, headers, text) =
            tokio::time::timeout(CALL_TIMEOUT, exchange).await.map_err(|_| GitHubError::NoAnswer(Duration::ZERO))??;
        if let Some(budget) = Budget::of(&headers) {
            let mut rate_limits = self.rate_limits.lock().unwrap_or_else(PoisonError::into_inner);
            rate_limits.entry(account.clone()).or_default().budget = Some(budget);
        }
        if status.is_success() {
            self.record_rate_limit(account, None);
            return Ok((headers, text));
        }
        let error = GitHubError::of(status, &headers, &text, failures, clock::now());
        if let GitHubError::RateLimited { until } = error {
            tracing::warn!(%until, route, "GitHub rate limit reached");
            self.record_rate_limit(account, Some(until));
        }
        Err(error)
    }

    /// The consecutive rate limited responses so far; an error while the account is limited.
    fn check_rate_limit(&self, account: &Account, lane: Lane) -> Result<u32, GitHubError> {
        let rate_limits = self.rate_limits.lock().unwrap_or_else(PoisonError::into_inner);
        let rate_limit = rate_limits.get(account).copied().unwrap_or_default();
        let now = clock::now();
        match (rate_limit.until, rate_limit.budget) {
            (Some(until), _) if now < until => Err(GitHubError::RateLimited { until }),
            (_, Some(budget)) if !budget.allows(lane, now) => Err(GitHubError::RateLimited { until: budget.reset }),
            _ => Ok(rate_limit.failures),
        }
    }

    fn record_rate_limit(&self, account: &Account, limited: Option<Timestamp>) {
        let mut rate_limits = self.rate_limits.lock().unwrap_or_else(PoisonError::into_inner);
        let rate_limit = rate_limits.entry(account.clone()).or_default();
        rate_limit.failures = if limited.is_some() { rate_limit.failures + 1 } else { 0 };
        rate_limit.until = limited;
    }
}

fn installation_key(own: &Account, scope: &Scope) -> (String, String) {
    (own.fingerprint.clone(), scope.owner().to_lowercase())
}

fn uninstalled(error: GitHubError, scope: &Scope) -> GitHubError {
    match error {
        GitHubError::NotFound(_) => GitHubError::NotFound(format!("the App is not installed for {scope}")),
        error => error,
    }
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
