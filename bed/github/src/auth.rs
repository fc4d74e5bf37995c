//! Authentication and authorisation of API calls.

use std::sync::OnceLock;

use axum::http::StatusCode;
use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde_json::{Map, Value};

use crate::{
    api::Refusal,
    model::{Scope, TokenKind, same},
    world::World,
};

#[derive(Clone, Debug)]
pub enum Caller {
    App(u64),
    Installation { id: u64, owner: String, permissions: Map<String, Value>, repositories: Option<Vec<u64>> },
    Personal { owners: Vec<String> },
}

impl Caller {
    /// Whose rate limit the call counts against.
    pub fn account(&self) -> String {
        match self {
            Self::App(id) => format!("app {id}"),
            Self::Installation { id, .. } => format!("installation ID {id}"),
            Self::Personal { owners } => format!("user {}", owners.first().map_or("", String::as_str)),
        }
    }

    pub fn app(&self) -> Result<u64, Refusal> {
        match self {
            Self::App(id) => Ok(*id),
            _ => Err(Refusal::new(StatusCode::UNAUTHORIZED, "A JSON web token could not be decoded")),
        }
    }

    /// Like GitHub: 404 for what a token may not see, 403 for what it may see but not do.
    pub fn may(&self, world: &World, scope: &Scope, permission: &str, level: &str) -> Result<(), Refusal> {
        match self {
            Self::App(_) => Err(bad_credentials()),
            Self::Personal { owners } => match owners.iter().any(|owner| same(owner, scope.owner())) {
                true => Ok(()),
                false => Err(Refusal::not_found()),
            },
            Self::Installation { owner, permissions, repositories, .. } => {
                let seen = match scope {
                    Scope::Organization(_) => true,
                    Scope::Repository(owner, name) => world.repository(owner, name).is_some_and(|repository| {
                        repositories.as_ref().is_none_or(|only| only.contains(&repository.id))
                    }),
                };
                if !same(owner, scope.owner()) || !seen {
                    return Err(Refusal::not_found());
                }
                let granted = permissions.get(permission).and_then(Value::as_str);
                match (granted, level) {
                    (Some("write"), _) | (Some("read"), "read") => Ok(()),
                    _ => Err(Refusal::new(StatusCode::FORBIDDEN, "Resource not accessible by integration")),
                }
            }
        }
    }
}

pub fn bad_credentials() -> Refusal {
    Refusal::new(StatusCode::UNAUTHORIZED, "Bad credentials")
}

/// Reads the `Authorization` header. Tokens expire by the simulator's clock (`now`), JWTs by the real one (`wall`),
/// which tests do not move.
pub fn authenticate(
    world: &World,
    header: Option<&str>,
    now: Timestamp,
    wall: Timestamp,
) -> Result<Option<Caller>, Refusal> {
    let Some(header) = header else { return Ok(None) };
    let credentials = header.split_once(' ').filter(|(scheme, _)| same(scheme, "bearer") || same(scheme, "token"));
    let (_, secret) = credentials.ok_or_else(bad_credentials)?;
    // The token of an installation has dots, too.
    if secret.split('.').count() == 3 && !world.tokens.contains_key(secret) {
        return app_of_jwt(world, secret, wall).map(|id| Some(Caller::App(id)));
    }
    let token = world.tokens.get(secret).ok_or_else(bad_credentials)?;
    if token.expires_at.is_some_and(|expiry| expiry <= now) {
        return Err(bad_credentials());
    }
    match &token.kind {
        TokenKind::Personal { owners } => Ok(Some(Caller::Personal { owners: owners.clone() })),
        TokenKind::Installation { id, repositories } => {
            let installation = world.installation(*id).ok_or_else(bad_credentials)?;
            if installation.suspended_at.is_some() {
                return Err(suspended());
            }
            Ok(Some(Caller::Installation {
                id: *id,
                owner: installation.owner.clone(),
                permissions: installation.permissions.clone(),
                repositories: repositories.clone().or_else(|| installation.repositories.clone()),
            }))
        }
    }
}

pub fn suspended() -> Refusal {
    Refusal::new(StatusCode::FORBIDDEN, "This installation has been suspended")
}

fn app_of_jwt(world: &World, jwt: &str, wall: Timestamp) -> Result<u64, Refusal> {
    let refuse = |message: &str| Refusal::new(StatusCode::UNAUTHORIZED, message);
    let mut validation = Validation::new(Algorithm::RS256);
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation.required_spec_claims.clear();
    let key = DecodingKey::from_rsa_der(&app_key().public);
    let claims = decode::<Value>(jwt, &key, &validation);
    let claims = claims.map_err(|_| refuse("A JSON web token could not be decoded"))?.claims;
    let number = |claim: &str| claims[claim].as_i64().or_else(|| claims[claim].as_f64().map(|number| number as i64));
    let now = wall.as_second();
    match number("exp") {
        None => {
            return Err(refuse(
                "'Expiration time' claim ('exp') must be a numeric value representing the future time at which the assertion expires",
            ));
        }
        Some(exp) if exp <= now => {
            return Err(refuse(
                "'Expiration time' claim ('exp') must be a numeric value representing the future time at which the assertion expires",
            ));
        }
        Some(exp) if exp > now + 600 => return Err(refuse("'Expiration time' claim ('exp') is too far in the future")),
        Some(_) => {}
    }
    if number("iat").is_none_or(|iat| iat > now) {
        return Err(refuse(
            "'Issued at' claim ('iat') must be an Integer representing the time that the assertion was issued",
        ));
    }
    let issuer = claims["iss"].as_u64().or_else(|| claims["iss"].as_str()?.parse().ok());
    let app = world.apps.iter().find(|app| Some(app.id) == issuer);
    app.map(|app| app.id).ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "Integration not found"))
}

/// The RSA key pair of all simulated Apps, generated once per program because that is slow.
pub struct AppKey {
    /// PKCS#1 in PEM, as GitHub provides it.
    pub private_pem: String,
    public: Vec<u8>,
}

pub fn app_key() -> &'static AppKey {
    static KEY: OnceLock<AppKey> = OnceLock::new();
    KEY.get_or_init(|| {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).expect("the library can make RSA keys");
        // PKCS#8 of a 2048-bit RSA key is 26 bytes of wrapping, then PKCS#1.
        let pkcs1 = STANDARD.encode(&key.serialized_der()[26..]);
        let lines: Vec<&str> = (0..pkcs1.len()).step_by(64).map(|at| &pkcs1[at..pkcs1.len().min(at + 64)]).collect();
        let private_pem =
            format!("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----\n", lines.join("\n"));
        AppKey { private_pem, public: key.public_key_raw().to_vec() }
    })
}
