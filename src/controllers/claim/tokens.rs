//! Tokens for runners: one for each claim, for as long as it waits for machines. Claims of the same moment share one:
//! GitHub counts requests, and a burst of claims must not spend what is there for an hour. It is sealed to each machine
//! by itself, whoever else has it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use secrecy::SecretString;

/// GitHub lets a registration token live for an hour; a machine that got one late has time left to use it.
const LIFE: Duration = Duration::from_secs(30 * 60);

/// How long a token is given to other claims.
const MOMENT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    Registration,
    Removal,
}

#[derive(Default)]
pub struct Tokens {
    /// By the claim's uid.
    own: Mutex<HashMap<String, (SecretString, Instant)>>,
    shared: Mutex<HashMap<Place, Arc<Shared>>>,
}

/// Namespace and Secret, where its runners register, and what for.
pub type Place = (String, String, String, TokenKind);

/// Whoever finds it empty fills it, while the others wait.
pub type Shared = tokio::sync::Mutex<Option<(SecretString, Instant)>>;

impl Tokens {
    fn known(&self) -> MutexGuard<'_, HashMap<String, (SecretString, Instant)>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token of the moment, or a new one.
    pub async fn share<E>(
        &self,
        place: Place,
        new: impl AsyncFnOnce() -> Result<SecretString, E>,
    ) -> Result<SecretString, E> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner).entry(place).or_default().clone();
        let mut shared = shared.lock().await;
        if let Some((token, _)) = shared.as_ref().filter(|(_, since)| since.elapsed() < MOMENT) {
            return Ok(token.clone());
        }
        let token = new().await?;
        *shared = Some((token.clone(), Instant::now()));
        Ok(token)
    }

    pub fn get(&self, uid: &str) -> Option<SecretString> {
        let mut known = self.known();
        known.retain(|_, (_, since)| since.elapsed() < LIFE);
        known.get(uid).map(|(token, _)| token.clone())
    }

    pub fn keep(&self, uid: &str, token: &SecretString) {
        self.known().insert(uid.to_owned(), (token.clone(), Instant::now()));
    }

    /// The claim needs it no more, or it did not do.
    pub fn forget(&self, uid: &str) {
        self.known().remove(uid);
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
        let share = |kind, text: &'static str| tokens.share(place(kind), async move || Ok::<_, ()>(text.into()));
        let failed = tokens.share(place(TokenKind::Registration), async || Err("down")).await;
        assert_eq!(failed.unwrap_err(), "down");
        let (first, second) =
            tokio::join!(share(TokenKind::Registration, "one"), share(TokenKind::Registration, "two"));
        assert_eq!(first.unwrap().expose_secret(), "one");
        assert_eq!(second.unwrap().expose_secret(), "one");
        assert_eq!(share(TokenKind::Removal, "three").await.unwrap().expose_secret(), "three");
    }
}
