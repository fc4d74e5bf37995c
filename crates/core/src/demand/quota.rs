//! Owners of a board's runners: where the runners register, and how many an owner may have.

use std::{collections::BTreeMap, fmt};

use serde::Deserialize;

use crate::api::{BoardPool, Owner, OwnerType, SecretRef};

/// Where a runner is registered at GitHub.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    Organization(String),
    Repository { owner: String, name: String },
}

impl Scope {
    /// An organisation registers runners itself; a personal account registers them with a repository.
    pub fn of(owner: &Owner, repository: Option<&str>) -> Result<Self, NoRepository> {
        match owner.type_ {
            OwnerType::Organization => Ok(Self::Organization(owner.login.clone())),
            OwnerType::User => match repository.and_then(|full| full.split_once('/')) {
                Some((owner, name)) => Ok(Self::Repository { owner: owner.into(), name: name.into() }),
                None => Err(NoRepository),
            },
        }
    }

    pub fn owner(&self) -> &str {
        match self {
            Self::Organization(login) | Self::Repository { owner: login, .. } => login,
        }
    }

    /// The start of this scope's routes in GitHub's REST API.
    pub fn route(&self) -> String {
        match self {
            Self::Organization(login) => format!("/orgs/{login}"),
            Self::Repository { owner, name } => format!("/repos/{owner}/{name}"),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Organization(login) => f.write_str(login),
            Self::Repository { owner, name } => write!(f, "{owner}/{name}"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a personal account's runners are registered with its repository, which is not given")]
pub struct NoRepository;

/// The App that serves this owner's kind of account.
pub fn credentials_ref<'a>(pool: &'a BoardPool, owner: &Owner) -> &'a SecretRef {
    match owner.type_ {
        OwnerType::Organization => &pool.github.credentials_ref,
        OwnerType::User => pool.github.personal_credentials_ref.as_ref().unwrap_or(&pool.github.credentials_ref),
    }
}

/// Where a runner is registered, and with which Secret: what GitHub's refusals are about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Registration {
    pub namespace: String,
    pub secret: String,
    pub scope: Scope,
}

impl Registration {
    pub fn new(namespace: &str, pool: &BoardPool, owner: &Owner, scope: Scope) -> Self {
        Self { namespace: namespace.to_owned(), secret: credentials_ref(pool, owner).name.clone(), scope }
    }
}

/// How many workers an organisation, or a repository of a personal account, may have at a time over all pools.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EntityLimits {
    pub default: u32,
    /// By the id of the organisation or repository.
    pub overrides: BTreeMap<String, u32>,
}

impl Default for EntityLimits {
    fn default() -> Self {
        Self { default: 20, overrides: BTreeMap::new() }
    }
}

impl EntityLimits {
    pub fn of(&self, entity: &str) -> u32 {
        self.overrides.get(entity).copied().unwrap_or(self.default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(type_: OwnerType) -> Owner {
        Owner { id: 7, login: "octo".into(), type_ }
    }

    #[test]
    fn an_organisation_registers_itself_and_a_person_the_repository() {
        let org = Scope::of(&owner(OwnerType::Organization), Some("octo/hello")).unwrap();
        assert_eq!((org.route(), org.to_string()), ("/orgs/octo".into(), "octo".into()));
        let repository = Scope::of(&owner(OwnerType::User), Some("octo/hello")).unwrap();
        assert_eq!((repository.route(), repository.owner()), ("/repos/octo/hello".into(), "octo"));
        assert_eq!(Scope::of(&owner(OwnerType::User), None), Err(NoRepository));
    }

    #[test]
    fn an_override_beats_the_default_cap() {
        let limits: EntityLimits = serde_saphyr::from_str("overrides: {\"42\": 3}").unwrap();
        assert_eq!((limits.of("42"), limits.of("43")), (3, 20));
        assert!(serde_saphyr::from_str::<EntityLimits>("limit: 3").is_err(), "a typo must not lift a cap");
    }
}
