//! GitHub credentials, read from the Secret of a pool. The keys are the same as for ARC.

use std::{fmt, time::Duration};

use futures::FutureExt;
use jiff::Timestamp;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use octocrab::models::AppId;
use paddock_core::api::{SECRET_APP_ID, SECRET_APP_INSTALLATION_ID, SECRET_APP_PRIVATE_KEY, SECRET_TOKEN};
use secrecy::SecretString;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{cache::ExpiringCache, clock};

/// How long a Secret is cached: long enough for a burst of claims, short enough for key rotation.
const SECRET_CACHE_TTL: Duration = Duration::from_secs(30);

/// An App's key or a token. `Debug` shows neither.
#[derive(Clone)]
pub struct Credentials {
    pub(super) auth: Auth,
    /// A digest of the content: the cache key for tokens and clients.
    pub(super) fingerprint: String,
}

#[derive(Clone)]
pub(super) enum Auth {
    App { id: AppId, key: EncodingKey, installation: Option<u64> },
    Token(SecretString),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.auth {
            Auth::App { id, installation, .. } => write!(f, "App {id}, installation {installation:?}"),
            Auth::Token(_) => f.write_str("Token"),
        }
    }
}

impl Credentials {
    /// The App's id; none for a token.
    pub fn app(&self) -> Option<u64> {
        match &self.auth {
            Auth::App { id, .. } => Some(id.0),
            Auth::Token(_) => None,
        }
    }

    /// The same App with the installation of a claim, which overrides that of the Secret.
    pub fn for_installation(mut self, id: Option<i64>) -> Self {
        if let (Auth::App { installation, .. }, Some(id)) = (&mut self.auth, id.and_then(|id| u64::try_from(id).ok())) {
            *installation = Some(id);
        }
        self
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    #[error("Secret {0} does not exist; create it with the GitHub App's id and private key")]
    Missing(String),
    #[error("Secret {secret} has no key {SECRET_APP_ID} with {SECRET_APP_PRIVATE_KEY}, and no {SECRET_TOKEN}")]
    NoKeys { secret: String },
    #[error("Secret {secret} has {SECRET_APP_ID} but no {SECRET_APP_PRIVATE_KEY}")]
    NoPrivateKey { secret: String },
    #[error("{key} in Secret {secret} is not a number")]
    NotANumber { secret: String, key: &'static str },
    #[error("{SECRET_APP_PRIVATE_KEY} in Secret {secret} is not an RSA private key in PEM form, as GitHub gives it")]
    BadPrivateKey { secret: String },
    #[error("Secret {secret} cannot be read: {why}")]
    Unreadable { secret: String, why: String },
}

fn parse(name: &str, secret: &Secret) -> Result<Credentials, CredentialsError> {
    let secret_name = || name.to_owned();
    let text = |key: &str| {
        let value = secret.data.as_ref()?.get(key)?;
        Some(String::from_utf8_lossy(&value.0).trim().to_owned()).filter(|text| !text.is_empty())
    };
    let number = |key: &'static str, text: &str| {
        text.parse::<u64>().map_err(|_| CredentialsError::NotANumber { secret: secret_name(), key })
    };
    let Some(id) = text(SECRET_APP_ID) else {
        let token = text(SECRET_TOKEN).ok_or_else(|| CredentialsError::NoKeys { secret: secret_name() })?;
        return Ok(Credentials { fingerprint: fingerprint(&["token", &token]), auth: Auth::Token(token.into()) });
    };
    let pem = text(SECRET_APP_PRIVATE_KEY).ok_or_else(|| CredentialsError::NoPrivateKey { secret: secret_name() })?;
    let id = AppId(number(SECRET_APP_ID, &id)?);
    let installation =
        text(SECRET_APP_INSTALLATION_ID).map(|id| number(SECRET_APP_INSTALLATION_ID, &id)).transpose()?;
    let bad = || CredentialsError::BadPrivateKey { secret: secret_name() };
    let key = EncodingKey::from_rsa_pem(pem.as_bytes()).map_err(|_| bad())?;
    // Sign once, because the PEM parser does not validate the key.
    jwt(id, &key, clock::now()).map_err(|_| bad())?;
    Ok(Credentials {
        fingerprint: fingerprint(&["app", &id.to_string(), &pem]),
        auth: Auth::App { id, key, installation },
    })
}

/// The token of an App for the next minutes. GitHub takes none that is issued in the future or expires in more than 10 min;
/// a minute at each end is for clocks that differ a little.
pub(super) fn jwt(app: AppId, key: &EncodingKey, now: Timestamp) -> Result<SecretString, jsonwebtoken::errors::Error> {
    let claims = json!({ "iss": app, "iat": now.as_second() - 60, "exp": now.as_second() + 540 });
    encode(&Header::new(Algorithm::RS256), &claims, key).map(SecretString::from)
}

fn fingerprint(parts: &[&str]) -> String {
    let digest = Sha256::digest(parts.join("\0"));
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Reads Secrets by name, with a short cache.
pub struct CredentialStore {
    client: Client,
    /// By namespace and name.
    cache: ExpiringCache<(String, String), Credentials>,
}

/// Limit of cached Secrets; there are one or two per pool.
const CACHED_SECRETS: usize = 1024;

impl CredentialStore {
    pub fn new(client: Client) -> Self {
        Self { client, cache: ExpiringCache::new(CACHED_SECRETS) }
    }

    pub async fn get(&self, namespace: &str, name: &str) -> Result<Credentials, CredentialsError> {
        let fetch = async { Ok((self.read(namespace, name).await?, SECRET_CACHE_TTL)) }.boxed();
        self.cache.get_or_fetch((namespace.to_owned(), name.to_owned()), fetch).await
    }

    /// For cleanup: if the Secret was deleted, for example with its namespace, uses the last cached one.
    pub async fn get_or_last(&self, namespace: &str, name: &str) -> Result<Credentials, CredentialsError> {
        match self.get(namespace, name).await {
            Err(missing @ CredentialsError::Missing(_)) => {
                self.cache.last(&(namespace.to_owned(), name.to_owned())).await.ok_or(missing)
            }
            outcome => outcome,
        }
    }

    async fn read(&self, namespace: &str, name: &str) -> Result<Credentials, CredentialsError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let secret = api
            .get_opt(name)
            .await
            .map_err(|error| CredentialsError::Unreadable { secret: name.to_owned(), why: error.to_string() })?;
        let secret = secret.ok_or_else(|| CredentialsError::Missing(name.to_owned()))?;
        parse(name, &secret)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde_json::json;

    use super::*;

    async fn pem() -> String {
        let simulator = paddock_bed_github::GitHub::start(paddock_bed_github::Options::default()).await.unwrap();
        simulator.app("paddock").private_key
    }

    fn parsed(data: serde_json::Value) -> Result<Credentials, CredentialsError> {
        let mut secret = Secret::default();
        let data: HashMap<String, String> = serde_json::from_value(data).unwrap();
        let bytes = |text: String| k8s_openapi::ByteString(text.into_bytes());
        secret.data = Some(data.into_iter().map(|(key, value)| (key, bytes(value))).collect());
        parse("app", &secret)
    }

    #[tokio::test]
    async fn an_app_or_a_token_is_parsed_and_not_leaked() {
        let pem = pem().await;
        let app = parsed(json!({SECRET_APP_ID: "12\n", SECRET_APP_PRIVATE_KEY: pem})).unwrap();
        assert_eq!(format!("{app:?}"), "App 12, installation None");
        let pinned = app.clone().for_installation(Some(7));
        assert_eq!(format!("{pinned:?}"), "App 12, installation Some(7)");
        assert_eq!(app.fingerprint, pinned.fingerprint);
        let token = parsed(json!({SECRET_TOKEN: "canary"})).unwrap();
        assert_eq!(format!("{token:?}"), "Token");
        assert!(!token.fingerprint.contains("canary"));
    }

    #[tokio::test]
    async fn each_mistake_has_its_own_error() {
        let pem = pem().await;
        let secret = || "app".to_owned();
        let not_a_number = |key| CredentialsError::NotANumber { secret: secret(), key };
        for (data, expected) in [
            (json!({}), CredentialsError::NoKeys { secret: secret() }),
            (json!({SECRET_APP_ID: "1"}), CredentialsError::NoPrivateKey { secret: secret() }),
            (json!({SECRET_APP_ID: "Iv1", SECRET_APP_PRIVATE_KEY: pem}), not_a_number(SECRET_APP_ID)),
            (
                json!({SECRET_APP_ID: "1", SECRET_APP_PRIVATE_KEY: pem, SECRET_APP_INSTALLATION_ID: "x"}),
                not_a_number(SECRET_APP_INSTALLATION_ID),
            ),
            (
                json!({SECRET_APP_ID: "1", SECRET_APP_PRIVATE_KEY: "canary"}),
                CredentialsError::BadPrivateKey { secret: secret() },
            ),
            (
                json!({SECRET_APP_ID: "1", SECRET_APP_PRIVATE_KEY: "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----"}),
                CredentialsError::BadPrivateKey { secret: secret() },
            ),
        ] {
            let error = parsed(data).unwrap_err();
            assert_eq!(error, expected);
            assert!(!error.to_string().contains("canary"));
        }
    }
}
