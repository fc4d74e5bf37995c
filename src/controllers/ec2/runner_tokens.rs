//! Runner tokens, cached per claim while it waits for machines. Concurrent claims share one, so that a burst of claims
//! does not exhaust GitHub's hourly rate limit. A token is sealed to each machine separately.

use std::time::Duration;

use futures::FutureExt;
use paddock_core::{api::Ec2Pool, ec2::machine::Machine};
use paddock_effects::{cache::ExpiringCache, github::credentials::CredentialsError};
use secrecy::{ExposeSecret, SecretString};

use super::Ec2Context;
use crate::controllers::stale_runners;

/// How long a claim keeps its token. It is valid for an hour, so a machine that gets it late still has time to use it.
const CLAIM_TOKEN_TTL: Duration = Duration::from_secs(30 * 60);

/// How long a token is shared with other claims.
const SHARED_TOKEN_TTL: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    Registration,
    Removal,
}

/// Maximum cached tokens; an evicted claim requests another.
const CACHED_TOKENS: usize = 4096;

pub struct Tokens {
    /// By the claim's uid.
    own: ExpiringCache<String, SecretString>,
    shared: ExpiringCache<TokenKey, SecretString>,
}

/// Namespace, Secret, the scope where runners register, and the token's kind.
pub type TokenKey = (String, String, String, TokenKind);

impl Default for Tokens {
    fn default() -> Self {
        Self { own: ExpiringCache::new(CACHED_TOKENS), shared: ExpiringCache::new(CACHED_TOKENS) }
    }
}

impl Tokens {
    /// The token shared by concurrent claims, or a new one.
    pub async fn share<E: Send>(
        &self,
        key: TokenKey,
        new: impl Future<Output = Result<SecretString, E>> + Send,
    ) -> Result<SecretString, E> {
        self.shared.get_or_fetch(key, async { Ok((new.await?, SHARED_TOKEN_TTL)) }.boxed()).await
    }

    /// The claim's registration token, cached while it waits for machines.
    pub async fn registration<E: Send>(
        &self,
        uid: String,
        key: TokenKey,
        new: impl Future<Output = Result<SecretString, E>> + Send,
    ) -> Result<SecretString, E> {
        self.own.get_or_fetch(uid, async { Ok((self.share(key, new).await?, CLAIM_TOKEN_TTL)) }.boxed()).await
    }

    /// Drops the claim's token, when it is no longer needed or GitHub did not accept it.
    pub async fn forget(&self, uid: &str) {
        self.own.invalidate(&uid.to_owned()).await;
    }
}

/// Why there is no token.
pub enum Outage {
    /// The Secret is missing or invalid, and has to be fixed by a user.
    NoCredentials(String),
    GitHub(String),
}

impl Outage {
    pub fn message(&self) -> &str {
        let (Self::NoCredentials(message) | Self::GitHub(message)) = self;
        message
    }
}

impl Ec2Context {
    /// The token with which the machines of a claim register.
    pub async fn registration_token(
        &self,
        namespace: &str,
        pool: &Ec2Pool,
        claim_uid: String,
    ) -> Result<SecretString, Outage> {
        let (key, new) = self.new_token(namespace, pool, TokenKind::Registration);
        self.tokens.registration(claim_uid, key, new).await
    }

    /// The token with which machines deregister.
    pub async fn removal_token(&self, namespace: &str, pool: &Ec2Pool) -> Result<SecretString, Outage> {
        let (key, new) = self.new_token(namespace, pool, TokenKind::Removal);
        self.tokens.share(key, new).await
    }

    fn new_token(
        &self,
        namespace: &str,
        pool: &Ec2Pool,
        kind: TokenKind,
    ) -> (TokenKey, impl Future<Output = Result<SecretString, Outage>> + Send) {
        let (secret, scope) = (&pool.github.credentials_ref.name, stale_runners::scope(pool));
        let key = (namespace.to_owned(), secret.clone(), scope.to_string(), kind);
        let (namespace, secret, shared) = (namespace.to_owned(), secret.clone(), self.shared.clone());
        let new = async move {
            let credentials = shared.credentials.get_or_last(&namespace, &secret).await;
            let credentials = credentials.map_err(|error| match error {
                CredentialsError::Unreadable { .. } => Outage::GitHub(error.to_string()),
                error => Outage::NoCredentials(error.to_string()),
            })?;
            let token = match kind {
                TokenKind::Registration => shared.github.registration_token(&credentials, &scope).await,
                TokenKind::Removal => shared.github.remove_token(&credentials, &scope).await,
            };
            token.map_err(|error| Outage::GitHub(error.to_string()))
        };
        (key, new)
    }
}

/// A token that only this machine can read; none while its key is unknown.
pub fn sealed(machine: &Machine, token: &SecretString) -> Option<String> {
    machine.public_key().map(|key| key.seal(token.expose_secret()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn claims_of_the_same_moment_share_a_token_and_a_failure_is_not_shared() {
        let tokens = Tokens::default();
        let key = |kind| ("ci".to_owned(), "app".to_owned(), "acme".to_owned(), kind);
        let share = |kind, text: &'static str| tokens.share(key(kind), async move { Ok::<_, ()>(text.into()) });
        let failed = tokens.share(key(TokenKind::Registration), async { Err("down") }).await;
        assert_eq!(failed.unwrap_err(), "down");
        let (first, second) =
            tokio::join!(share(TokenKind::Registration, "one"), share(TokenKind::Registration, "two"));
        assert_eq!(first.unwrap().expose_secret(), "one");
        assert_eq!(second.unwrap().expose_secret(), "one");
        assert_eq!(share(TokenKind::Removal, "three").await.unwrap().expose_secret(), "three");
    }
}
