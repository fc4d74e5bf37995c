//! Tokens for runners: one for each claim, for as long as it waits for machines. Claims of the same moment share one:
//! GitHub counts requests, and a burst of claims must not spend what is there for an hour. It is sealed to each machine
//! by itself, whoever else has it.

use std::time::Duration;

use futures::FutureExt;
use paddock_effects::cache::ExpiringCache;
use secrecy::SecretString;

/// GitHub lets a registration token live for an hour; a machine that got one late has time left to use it.
const KEPT_FOR: Duration = Duration::from_secs(30 * 60);

/// How long a token is given to other claims.
const SHARED_FOR: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    Registration,
    Removal,
}

/// Claims whose token is cached; one that is displaced gets another.
const CACHED_TOKENS: usize = 4096;

pub struct Tokens {
    /// By the claim's uid.
    own: ExpiringCache<String, SecretString>,
    shared: ExpiringCache<TokenKey, SecretString>,
}

/// Namespace and Secret, where its runners register, and what for.
pub type TokenKey = (String, String, String, TokenKind);

impl Default for Tokens {
    fn default() -> Self {
        Self { own: ExpiringCache::new(CACHED_TOKENS), shared: ExpiringCache::new(CACHED_TOKENS) }
    }
}

impl Tokens {
    /// The token that claims of the same moment share, or a new one.
    pub async fn share<E: Send>(
        &self,
        place: TokenKey,
        new: impl Future<Output = Result<SecretString, E>> + Send,
    ) -> Result<SecretString, E> {
        self.shared.get_or_fetch(place, async { Ok((new.await?, SHARED_FOR)) }.boxed()).await
    }

    /// The claim's registration token: its own, while it waits for machines.
    pub async fn registration<E: Send>(
        &self,
        uid: String,
        place: TokenKey,
        new: impl Future<Output = Result<SecretString, E>> + Send,
    ) -> Result<SecretString, E> {
        self.own.get_or_fetch(uid, async { Ok((self.share(place, new).await?, KEPT_FOR)) }.boxed()).await
    }

    /// The claim needs its token no more, or GitHub did not accept it.
    pub async fn forget(&self, uid: &str) {
        self.own.invalidate(&uid.to_owned()).await;
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    #[tokio::test]
    async fn claims_of_the_same_moment_share_a_token_and_a_failure_is_not_shared() {
        let tokens = Tokens::default();
        let place = |kind| ("ci".to_owned(), "app".to_owned(), "acme".to_owned(), kind);
        let share = |kind, text: &'static str| tokens.share(place(kind), async move { Ok::<_, ()>(text.into()) });
        let failed = tokens.share(place(TokenKind::Registration), async { Err("down") }).await;
        assert_eq!(failed.unwrap_err(), "down");
        let (first, second) =
            tokio::join!(share(TokenKind::Registration, "one"), share(TokenKind::Registration, "two"));
        assert_eq!(first.unwrap().expose_secret(), "one");
        assert_eq!(second.unwrap().expose_secret(), "one");
        assert_eq!(share(TokenKind::Removal, "three").await.unwrap().expose_secret(), "three");
    }
}
