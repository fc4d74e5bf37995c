//! Which pool serves a claim.

use std::collections::BTreeSet;

use crate::api::{BoardPool, ClaimReason, Hardware, RunnerClaim, RunnerPool};

/// A set of `runs-on` labels as GitHub compares them: without order and case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelSet(BTreeSet<String>);

impl<T: AsRef<str>> FromIterator<T> for LabelSet {
    fn from_iter<I: IntoIterator<Item = T>>(labels: I) -> Self {
        Self(labels.into_iter().map(|label| label.as_ref().to_lowercase()).collect())
    }
}

impl LabelSet {
    /// Whether a pool lists this set; it lists no label twice.
    fn is(&self, listed: &[String]) -> bool {
        listed.len() == self.0.len() && listed.iter().all(|label| self.0.contains(&label.to_lowercase()))
    }
}

/// The pool of a claim: the one it names, the one that it has workers of, or the only one that serves its labels.
/// `pools` are those of the claim's namespace.
pub fn select<'a>(
    claim: &RunnerClaim,
    pools: impl IntoIterator<Item = &'a RunnerPool>,
) -> Result<&'a RunnerPool, (ClaimReason, String)> {
    let pools: Vec<_> = pools.into_iter().collect();
    let holding = claim.status.as_ref().filter(|status| status.workers.iter().any(|worker| !worker.state.is_over()));
    let chosen = claim.spec.pool.as_ref().or_else(|| holding?.pool.as_ref());
    if let Some(name) = chosen {
        let named = pools.into_iter().find(|pool| pool.metadata.name.as_ref() == Some(name));
        return named.ok_or_else(|| (ClaimReason::PoolNotFound, format!("there is no pool {name} in this namespace")));
    }
    let listed = claim.spec.labels.as_deref().unwrap_or_default();
    let owner = claim.spec.owner.as_ref().map(|owner| owner.login.as_str());
    let boards = most_specific(listed, owner, claim.spec.repository_name(), pools);
    match boards[..] {
        [pool] => Ok(pool),
        [] => Err((ClaimReason::NoPoolForLabels, format!("no pool serves exactly the labels {}", listed.join(", ")))),
        [..] => {
            let mut names: Vec<_> = boards.iter().filter_map(|pool| pool.metadata.name.as_deref()).collect();
            names.sort_unstable();
            let names = names.join(", ");
            Err((
                ClaimReason::AmbiguousLabels,
                format!("several pools serve these labels: {names}; name one in spec.pool"),
            ))
        }
    }
}

/// The pool, among those of all namespaces, whose namespace gets a job's claim. Among equally specific ones it is the
/// oldest, so that a new pool in another namespace takes no jobs away. If its own namespace has several, the claim
/// reports it.
pub fn home<'a>(
    labels: &[String],
    owner: &str,
    repository: &str,
    pools: impl IntoIterator<Item = &'a RunnerPool>,
) -> Option<&'a RunnerPool> {
    most_specific(labels, Some(owner), Some(repository), pools).into_iter().min_by_key(|pool| {
        let meta = &pool.metadata;
        (meta.creation_timestamp.as_ref().map(|time| time.0), &meta.namespace, &meta.name)
    })
}

/// The most specific board pools that serve exactly these labels.
fn most_specific<'a>(
    labels: &[String],
    owner: Option<&str>,
    repository: Option<&str>,
    pools: impl IntoIterator<Item = &'a RunnerPool>,
) -> Vec<&'a RunnerPool> {
    let labels: LabelSet = labels.iter().collect();
    let boards: Vec<_> = pools
        .into_iter()
        .filter(|pool| pool.metadata.deletion_timestamp.is_none())
        .filter_map(|pool| match pool.spec.hardware() {
            Some(Hardware::Board(board)) => Some((pool, specificity(board, &labels, owner, repository)?)),
            Some(Hardware::Ec2(_)) | None => None,
        })
        .collect();
    let highest = boards.iter().map(|(_, specificity)| *specificity).max();
    boards.into_iter().filter(|(_, specificity)| Some(*specificity) == highest).map(|(pool, _)| pool).collect()
}

/// How specifically a pool serves the labels, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Specificity {
    All,
    Owner,
    Repository,
}

fn specificity(
    pool: &BoardPool,
    labels: &LabelSet,
    owner: Option<&str>,
    repository: Option<&str>,
) -> Option<Specificity> {
    let serves = |sets: &[Vec<String>]| sets.iter().any(|set| labels.is(set));
    let same = |a: &str, b: Option<&str>| b.is_some_and(|b| a.eq_ignore_ascii_case(b));
    let own =
        pool.overrides.iter().filter(|over| same(&over.owner, owner) && serves(&over.labels)).filter_map(|over| {
            match over.repository.as_deref() {
                None => Some(Specificity::Owner),
                Some(name) => same(name, repository).then_some(Specificity::Repository),
            }
        });
    own.chain(serves(&pool.labels).then_some(Specificity::All)).max()
}

/// The labels of the claim's runners: its own, or the pool's first set where it names the pool alone.
pub fn runner_labels<'a>(claim: &'a RunnerClaim, pool: &'a BoardPool) -> &'a [String] {
    match claim.spec.labels.as_deref() {
        Some(labels) => labels,
        None => pool.labels.first().map(Vec::as_slice).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures::boards::{board_pool, claim, with};

    fn pool(name: &str, board: serde_json::Value) -> RunnerPool {
        with(&board_pool(name), json!({"spec": {"board": board}}))
    }

    fn asking(spec: serde_json::Value) -> RunnerClaim {
        with(&claim("c", 0), json!({"spec": spec}))
    }

    fn selected(claim: &RunnerClaim, pools: &[RunnerPool]) -> Result<String, ClaimReason> {
        select(claim, pools).map(|pool| pool.metadata.name.clone().unwrap()).map_err(|(reason, _)| reason)
    }

    #[test]
    fn the_whole_set_must_match_in_any_order_and_case() {
        let pools = [pool("a", json!({"labels": [["self-hosted", "riscv64"], ["rv"]]}))];
        for (labels, expected) in [
            (json!(["RISCV64", "Self-Hosted"]), Ok("a")),
            (json!(["rv"]), Ok("a")),
            (json!(["self-hosted"]), Err(ClaimReason::NoPoolForLabels)),
            (json!(["self-hosted", "riscv64", "rv"]), Err(ClaimReason::NoPoolForLabels)),
        ] {
            let outcome = selected(&asking(json!({"labels": labels})), &pools);
            assert_eq!(outcome, expected.map(str::to_owned), "{labels}");
        }
    }

    #[test]
    fn a_repositorys_override_beats_its_owners_which_beats_what_serves_all() {
        let all = pool("all", json!({"labels": [["rv"]]}));
        let owner = pool("owner", json!({"labels": [], "overrides": [{"owner": "ACME", "labels": [["RV"]]}]}));
        let repository = pool(
            "repository",
            json!({"labels": [], "overrides": [{"owner": "acme", "repository": "Kernel", "labels": [["rv"]]}]}),
        );
        let pools = [all, owner, repository];
        for (login, name, expected) in
            [("acme", "kernel", "repository"), ("acme", "libc", "owner"), ("other", "kernel", "all")]
        {
            let owner = json!({"id": 1, "login": login, "type": "Organization"});
            let claim = asking(json!({"labels": ["rv"], "owner": owner, "repository": format!("{login}/{name}")}));
            assert_eq!(selected(&claim, &pools), Ok(expected.into()), "{login}/{name}");
        }
    }

    #[test]
    fn two_pools_for_one_set_are_ambiguous_until_one_is_being_deleted() {
        let [a, b] = ["a", "b"].map(|name| pool(name, json!({"labels": [["rv"]]})));
        let claim = asking(json!({"labels": ["rv"]}));
        assert_eq!(selected(&claim, &[a.clone(), b.clone()]), Err(ClaimReason::AmbiguousLabels));
        let going = with(&b, json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}}));
        assert_eq!(selected(&claim, &[a, going]), Ok("a".into()));
    }

    #[test]
    fn a_jobs_home_is_the_most_specific_pool_of_all_namespaces_and_the_oldest_of_those() {
        let at = |namespace: &str, created: &str, board: serde_json::Value| {
            let pool = pool("p", board);
            with(&pool, json!({"metadata": {"namespace": namespace, "creationTimestamp": created}}))
        };
        let older = at("team-b", "2024-01-01T00:00:00Z", json!({"labels": [["rv", "big"]]}));
        let newer = at("team-a", "2025-01-01T00:00:00Z", json!({"labels": [["RV", "Big"], ["rv"]]}));
        let own = json!({"labels": [], "overrides": [{"owner": "acme", "labels": [["rv", "big"]]}]});
        let own = at("team-c", "2026-01-01T00:00:00Z", own);
        let pools = [newer, own, older];
        let home = |labels: &[&str], owner: &str| {
            let labels: Vec<_> = labels.iter().map(|label| label.to_string()).collect();
            home(&labels, owner, "kernel", &pools).and_then(|pool| pool.metadata.namespace.as_deref())
        };
        assert_eq!(home(&["big", "RV"], "other"), Some("team-b"));
        assert_eq!(home(&["big", "rv"], "Acme"), Some("team-c"));
        assert_eq!(home(&["rv"], "acme"), Some("team-a"));
        assert_eq!(home(&["big"], "acme"), None);
        assert_eq!(home(&[], "acme"), None);
    }

    #[test]
    fn a_claim_keeps_the_pool_whose_workers_it_has_and_moves_while_it_waits() {
        let pools = [pool("a", json!({"labels": [["rv"]]})), pool("b", json!({"labels": [["x"]]}))];
        let claim = |pool: &str, state: &str| {
            let workers = json!([{"name": "w", "state": state, "source": "created"}]);
            with(&asking(json!({"labels": ["rv"]})), json!({"status": {"pool": pool, "workers": workers}}))
        };
        assert_eq!(selected(&claim("b", "running"), &pools), Ok("b".into()));
        assert_eq!(selected(&claim("gone", "pending"), &pools), Err(ClaimReason::PoolNotFound));
        for over in ["failed", "completed"] {
            assert_eq!(selected(&claim("b", over), &pools), Ok("a".into()));
        }
    }
}
