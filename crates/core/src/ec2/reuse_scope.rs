//! Whose claims may use one machine after each other (`reuse.scope`).
//!
//! A machine that has served a claim has that claim's scope, and serves only claims of the same scope. One that has
//! served none has no scope and fits every claim.

use paddock_record::Instance;
use sha2::{Digest, Sha256};

use crate::api::{Ec2Pool, ReuseScope, RunnerClaimSpec};

/// The longest name that is kept as it is: that of a repository with its owner.
const NAME_MAX: usize = 201;

/// The scope of a machine that has served claims of which none is known. It fits only where every machine does.
const UNKNOWN: &str = "unknown";

/// The scope of a claim in this namespace; empty where the pool reuses machines freely. A number at GitHub is part of it
/// where the claim has one, because names can be given to another owner.
pub fn of_claim(claim: &RunnerClaimSpec, namespace: &str, reuse: ReuseScope) -> String {
    let owner = claim.owner.as_ref();
    let found = match reuse {
        ReuseScope::Pool => return String::new(),
        ReuseScope::Repository => {
            claim.repository.as_deref().map(|name| scope("repository", name, claim.repository_id))
        }
        ReuseScope::Owner => {
            let of_repository = claim.repository.as_deref().and_then(|name| name.split('/').next());
            let login = owner.map(|owner| owner.login.as_str()).or(of_repository);
            login.map(|login| scope("owner", login, owner.map(|owner| owner.id)))
        }
    };
    found.unwrap_or_else(|| scope("namespace", namespace, None))
}

/// The scope of a machine; empty if it has served no claim. A version without scopes recorded none.
pub fn of_machine(record: &Instance) -> &str {
    match record.scope.as_str() {
        "" if record.claims > 0 => UNKNOWN,
        scope => scope,
    }
}

/// Whether a machine of this scope may serve a claim of scope `wanted`.
pub fn fits(machine: &str, wanted: &str) -> bool {
    wanted.is_empty() || machine.is_empty() || machine == wanted
}

/// Whether any claim on the pool may have the machine, so that it counts for `minIdle`.
pub fn fits_all(record: &Instance, pool: &Ec2Pool) -> bool {
    pool.reuse.scope == ReuseScope::Pool || of_machine(record).is_empty()
}

/// Names are compared without case, as GitHub does. One that GitHub would not accept is replaced by its digest, so that
/// it cannot pass for another.
fn scope(kind: &str, name: &str, id: Option<i64>) -> String {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || b"-_./".contains(&c);
    let plain = !name.is_empty() && name.len() <= NAME_MAX && name.bytes().all(is_plain);
    let name = if plain { name.to_ascii_lowercase() } else { format!("={}", digest(name)) };
    id.map_or_else(|| format!("{kind}:{name}"), |id| format!("{kind}:{name}#{id}"))
}

fn digest(name: &str) -> String {
    Sha256::digest(name).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use paddock_record::State;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        api::SCOPE_MAX,
        fixtures::ec2::{at, pool, record},
    };
    use ReuseScope::{Owner, Pool, Repository};

    fn of(claim: Value, reuse: ReuseScope) -> String {
        let mut spec = json!({"pool": "linux", "runId": "1"});
        spec.as_object_mut().unwrap().extend(claim.as_object().unwrap().clone());
        of_claim(&serde_json::from_value(spec).unwrap(), "ci", reuse)
    }

    #[test]
    fn a_claim_has_the_scope_of_its_repository_owner_or_namespace() {
        let acme = json!({"id": 7, "login": "Acme", "type": "Organization"});
        for (claim, reuse, expected) in [
            (json!({"repository": "Acme/Rocket"}), Repository, "repository:acme/rocket"),
            (json!({"repository": "acme/rocket", "repositoryId": 42}), Repository, "repository:acme/rocket#42"),
            (json!({"owner": acme}), Repository, "namespace:ci"),
            (json!({}), Repository, "namespace:ci"),
            (json!({"repository": "Acme/Rocket", "repositoryId": 42}), Owner, "owner:acme"),
            (json!({"repository": "Acme/Rocket", "owner": acme}), Owner, "owner:acme#7"),
            (json!({"owner": acme}), Owner, "owner:acme#7"),
            (json!({}), Owner, "namespace:ci"),
            (json!({"repository": "acme/rocket", "owner": acme}), Pool, ""),
            (json!({}), Pool, ""),
        ] {
            assert_eq!(of(claim.clone(), reuse), expected, "{claim} {reuse:?}");
        }
    }

    #[test]
    fn no_name_passes_for_another_and_none_is_too_long() {
        let long = format!("acme/{}", "r".repeat(9_000));
        let names = [
            "acme/rocket",
            "acme/rocket#42",
            "acme/rocket ",
            "acme/rocket\n",
            "acme/rocket\u{0}",
            "acme/r\u{f6}cket",
            "acme/\u{212a}",
            "acme/k",
            "acme",
            "",
            "/",
            "=acme",
            "unknown",
            "namespace:ci",
            &long,
            &long[..long.len() - 1],
        ];
        let mut seen = HashSet::new();
        for name in names {
            for id in [json!(null), json!(42), json!(i64::MAX)] {
                let scope = of(json!({"repository": name, "repositoryId": id}), Repository);
                assert!(scope.is_ascii() && scope.chars().all(|c| c.is_ascii_graphic()), "{scope:?}");
                assert!(scope.len() <= SCOPE_MAX && scope != UNKNOWN, "{scope}");
                assert!(seen.insert(scope.clone()), "{name:?} {id} is {scope} too");
            }
        }
        let owners =
            ["acme", "acme#7", "acm\u{e9}", "x/../acme", ""].map(|name| of(json!({"repository": name}), Owner));
        assert_eq!(owners.iter().chain(&[of(json!({}), Owner)]).collect::<HashSet<_>>().len(), 6, "{owners:?}");
        let longest = of(json!({"repository": &long[..NAME_MAX], "repositoryId": i64::MAX}), Repository);
        assert!(longest.len() <= SCOPE_MAX, "{}", longest.len());
    }

    #[test]
    fn a_machine_fits_its_own_scope_and_a_new_one_every_scope() {
        let machine = |claims, scope: &str| {
            let mut record = record("i-1", State::Idle, "", at(0));
            (record.claims, record.scope) = (claims, scope.into());
            record
        };
        for (claims, scope, wanted, expected) in [
            (0, "", "repository:acme/a", true),
            (1, "repository:acme/a", "repository:acme/a", true),
            (1, "repository:acme/a", "repository:acme/b", false),
            (1, "repository:acme/a", "repository:acme/a#42", false),
            (1, "repository:acme/a", "owner:acme", false),
            // It served a claim before there were scopes, or while the pool reused machines freely.
            (3, "", "repository:acme/a", false),
            (3, "", "", true),
            (1, "repository:acme/a", "", true),
        ] {
            let record = machine(claims, scope);
            assert_eq!(fits(of_machine(&record), wanted), expected, "{claims} {scope} {wanted}");
        }
        let free = {
            let mut pool = pool();
            pool.reuse.scope = Pool;
            pool
        };
        for (claims, scope, kept, kept_freely) in
            [(0, "", true, true), (1, "repository:acme/a", false, true), (1, "", false, true)]
        {
            let record = machine(claims, scope);
            assert_eq!((fits_all(&record, &pool()), fits_all(&record, &free)), (kept, kept_freely), "{claims} {scope}");
        }
    }
}
