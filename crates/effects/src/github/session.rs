//! Who asks GitHub: clients, installation tokens, and pauses that GitHub asked for.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
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
    credentials::{Auth, Credentials},
    error::GitHubError,
};
use crate::{cache::ExpiringCache, fence::Fence};

/// The longest that one call may take; GitHub itself gives up after 10 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(12);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Installation tokens live an hour.
const TOKEN_LIFE: SignedDuration = SignedDuration::from_mins(59);

/// Whom GitHub's limits count for: an App by itself, one of its installations, or a token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Account {
    fingerprint: String,
    installation: Option<u64>,
}

/// How much a call matters while little of the hourly limit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// A job waits for it, or something is given back.
    Urgent,
    /// A look that can be had later: a tenth of the limit is kept for what cannot.
    Background,
}

/// How an account stands with GitHub's limits.
#[derive(Clone, Copy, Default)]
struct RateLimitState {
    /// Nothing is asked before.
    until: Option<Timestamp>,
    /// How often in a row GitHub limited without saying until when.
    strikes: u32,
    budget: Option<Budget>,
}

/// What is left of the hourly limit, as the last answer said.
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

    fn allows(self, need: Lane, now: Timestamp) -> bool {
        let least = match need {
            Lane::Urgent => 1,
            Lane::Background => self.limit / 10,
        };
        now >= self.reset || self.remaining >= least
    }
}

/// Installations and owners whose tokens and numbers are cached: more than one App serves in practice.
const CACHED_OWNERS: usize = 4096;

pub(super) struct Sessions {
    api_url: String,
    fence: Fence,
    /// By fingerprint: an App's own client, or a token's.
    clients: Mutex<HashMap<String, Octocrab>>,
    tokens: ExpiringCache<Account, SecretString>,
    /// Installations found by credential and owner.
    installations: ExpiringCache<(String, String), u64>,
    rate_limits: Mutex<HashMap<Account, RateLimitState>>,
    turns: Concurrency,
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
            turns: Concurrency::new(),
        }
    }

    /// One call in the name of whoever may act for `scope`. A refused token was not used for anything, so that the call
    /// is repeated once with a new one; nothing else is ever repeated here, because the answer to a creation may have
    /// been lost.
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

    /// A look that can be had later; not while little of the limit is left.
    pub async fn look<T: DeserializeOwned>(
        &self,
        credentials: &Credentials,
        scope: &Scope,
        route: &str,
    ) -> Result<T, GitHubError> {
        self.call_for(Lane::Background, credentials, scope, Method::GET, route, None).await
    }

    async fn call_for<T: DeserializeOwned>(
        &self,
        need: Lane,
        credentials: &Credentials,
        scope: &Scope,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<T, GitHubError> {
        let exchange = async {
            let (client, account) = self.session(credentials, scope).await?;
            let outcome = self.send(need, &client, &account, method.clone(), route, body).await;
            match (outcome, account.installation) {
                (Err(GitHubError::Unauthorized(_)), Some(_)) => {
                    self.tokens.invalidate(&account).await;
                    let (client, account) = self.session(credentials, scope).await?;
                    self.send(need, &client, &account, method, route, body).await
                }
                (outcome, _) => outcome,
            }
        };
        self.turns.line(&credentials.fingerprint, scope).run(exchange).await
    }

    /// Asks for something that is the App's own, which needs no installation.
    pub async fn call_as_app<T: DeserializeOwned>(
        &self,
        credentials: &Credentials,
        route: &str,
    ) -> Result<(HeaderMap, T), GitHubError> {
        let own = Account { fingerprint: credentials.fingerprint.clone(), installation: None };
        let (headers, text) =
            self.exchange(Lane::Background, &self.client(credentials)?, &own, Method::GET, route, None).await?;
        Ok((headers, parse(&text)?))
    }

    async fn session(&self, credentials: &Credentials, scope: &Scope) -> Result<(Octocrab, Account), GitHubError> {
        let base = self.client(credentials)?;
        let own = Account { fingerprint: credentials.fingerprint.clone(), installation: None };
        let Auth::App { installation, .. } = &credentials.auth else { return Ok((base, own)) };
        let installation = match installation {
            Some(id) => *id,
            None => self.find_installation(&base, &own, scope).await?,
        };
        let account = Account { installation: Some(installation), ..own.clone() };
        let fetch = self.new_token(&base, &own, scope, installation).boxed();
        let token = self.tokens.get_or_fetch(account.clone(), fetch).await?;
        let client = base.user_access_token(token).map_err(unavailable)?;
        Ok((client, account))
    }

    /// A token, and for how long it can be used.
    async fn new_token(
        &self,
        app: &Octocrab,
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
        let answer = self.send::<Answer>(Lane::Urgent, app, own, Method::POST, &route, None).await;
        if let Err(GitHubError::NotFound(_)) = answer {
            // The App was removed and installed again: look the installation up again.
            self.installations.invalidate(&installation_key(own, scope)).await;
        }
        let answer = answer.map_err(|error| uninstalled(error, scope))?;
        let left = answer.expires_at.duration_since(Timestamp::now()) - SignedDuration::from_mins(1);
        Ok((answer.token.into(), Duration::try_from(left.min(TOKEN_LIFE)).unwrap_or_default()))
    }

    async fn find_installation(&self, app: &Octocrab, own: &Account, scope: &Scope) -> Result<u64, GitHubError> {
        #[derive(Deserialize)]
        struct Answer {
            id: u64,
        }
        let fetch = async {
            let route = format!("{}/installation", scope.route());
            let found = self.send::<Answer>(Lane::Urgent, app, own, Method::GET, &route, None).await;
            found.map(|found| (found.id, Duration::MAX)).map_err(|error| uninstalled(error, scope))
        }
        .boxed();
        self.installations.get_or_fetch(installation_key(own, scope), fetch).await
    }

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
            Auth::App { id, key, .. } => builder.app(*id, key.clone()),
            Auth::Token(token) => builder.personal_token(token.expose_secret().to_owned()),
        };
        let client = client.build().map_err(unavailable)?;
        clients.insert(credentials.fingerprint.clone(), client.clone());
        Ok(client)
    }

    async fn send<T: DeserializeOwned>(
        &self,
        need: Lane,
        client: &Octocrab,
        account: &Account,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<T, GitHubError> {
        let (_, text) = self.exchange(need, client, account, method, route, body).await?;
        parse(&text)
    }

    /// One request: not while GitHub wants a pause, no write without the lease, never for longer than [`CALL_TIMEOUT`].
    async fn exchange(
        &self,
        need: Lane,
        client: &Octocrab,
        account: &Account,
        method: Method,
        route: &str,
        body: Option<&Value>,
    ) -> Result<(HeaderMap, String), GitHubError> {
        let _place = self.turns.one().await;
        let strikes = self.pass(account, need)?;
        if method != Method::GET {
            self.fence.check()?;
        }
        let exchange = async {
            let answer = match method {
                Method::POST => client._post(route, body).await,
                Method::DELETE => client._delete(route, body).await,
                _ => client._get(route).await,
            };
            let answer = answer.map_err(unavailable)?;
            let (status, headers) = (answer.status(), answer.headers().clone());
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
            self.note(account, None);
            return Ok((headers, text));
        }
        let error = GitHubError::of(status, &headers, &text, strikes, Timestamp::now());
        if let GitHubError::RateLimited { until } = error {
            tracing::warn!(%until, route, "GitHub's rate limit is reached");
            self.note(account, Some(until));
        }
        Err(error)
    }

    /// The strikes so far, or when the pause is over.
    fn pass(&self, account: &Account, need: Lane) -> Result<u32, GitHubError> {
        let rate_limits = self.rate_limits.lock().unwrap_or_else(PoisonError::into_inner);
        let rate_limit = rate_limits.get(account).copied().unwrap_or_default();
        let now = Timestamp::now();
        match (rate_limit.until, rate_limit.budget) {
            (Some(until), _) if now < until => Err(GitHubError::RateLimited { until }),
            (_, Some(budget)) if !budget.allows(need, now) => Err(GitHubError::RateLimited { until: budget.reset }),
            _ => Ok(rate_limit.strikes),
        }
    }

    fn note(&self, account: &Account, limited: Option<Timestamp>) {
        let mut rate_limits = self.rate_limits.lock().unwrap_or_else(PoisonError::into_inner);
        let rate_limit = rate_limits.entry(account.clone()).or_default();
        rate_limit.strikes = if limited.is_some() { rate_limit.strikes + 1 } else { 0 };
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

/// The cause without octocrab's backtraces; its requests carry no secret in their address.
fn unavailable(error: octocrab::Error) -> GitHubError {
    let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
    GitHubError::Unavailable(cause.lines().next().unwrap_or("no answer").to_owned())
}
