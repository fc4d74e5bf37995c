//! Runner tokens, cached per claim while it waits for machines. Concurrent claims share one, so that a burst of claims
//! does not exhaust GitHub's hourly rate limit. A token is sealed to each machine separately.

use std::time::Duration;

use futures::FutureExt;
use paddock_core::{
    api::{Ec2Pool, PoolReason, RunnerPool},
    ec2::{machine::Machine, pool_status::PoolProblem},
    names::PoolKey,
};
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
    /// GitHub does not accept the credentials.
    Refused(String),
    /// GitHub does not answer as it should.
    GitHub(String),
}

impl Outage {
    pub fn message(&self) -> &str {
        let (Self::NoCredentials(message) | Self::Refused(message) | Self::GitHub(message)) = self;
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

    /// Why the pool's machines could not register, where a user has to change something.
    pub async fn credentials_problem(&self, pool: &RunnerPool, ec2: &Ec2Pool) -> Option<PoolProblem> {
        let (key, generation) = (PoolKey::of(pool), pool.metadata.generation);
        match self.shared.credentials.get(&key.namespace, &ec2.github.credentials_ref.name).await {
            Ok(_) => {}
            // The API server does not answer: nothing is known.
            Err(CredentialsError::Unreadable { .. }) => return None,
            Err(error) => {
                self.pools.forget_credentials(&key);
                return Some((PoolReason::CredentialsMissing, error.to_string()));
            }
        }
        let answer = match self.pools.credentials(&key, generation) {
            Some(answer) => answer,
            None => {
                let (token, new) = self.new_token(&key.namespace, ec2, TokenKind::Registration);
                let answer = match self.tokens.share(token, new).await {
                    Err(Outage::Refused(why)) => Err(why),
                    // An outage is no refusal; claims report it.
                    Ok(_) | Err(Outage::NoCredentials(_) | Outage::GitHub(_)) => Ok(()),
                };
                self.pools.note_credentials(&key, generation, answer.clone());
                answer
            }
        };
        answer.err().map(|why| (PoolReason::CredentialsRefused, why))
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
            token.map_err(|error| match error.is_final() {
                true => Outage::Refused(error.to_string()),
                false => Outage::GitHub(error.to_string()),
            })
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
