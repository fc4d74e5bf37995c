//! Which release of GitHub's runner machines install, and until when GitHub takes it.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use paddock_record::RunnerArchive;
use serde::Deserialize;

use crate::api::{Ec2Pool, RunnerRelease};

/// How long GitHub takes a runner after a newer one was released, as it documents.
const TAKEN_AFTER_NEWER: SignedDuration = SignedDuration::from_hours(30 * 24);

/// A runner that GitHub lists for download.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RunnerApplication {
    pub os: String,
    pub architecture: String,
    pub download_url: String,
    /// Ends with the version: `actions-runner-linux-x64-2.336.0.tar.gz`.
    pub filename: String,
    pub sha256_checksum: Option<String>,
}

impl RunnerApplication {
    fn version(&self) -> Option<&str> {
        let (_, version) = self.filename.strip_suffix(".tar.gz")?.rsplit_once('-')?;
        number(version).map(|_| version)
    }
}

/// The release that a pool's machines install where their image has no runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub version: String,
    pub listed: String,
    pub archives: BTreeMap<String, RunnerArchive>,
}

/// The pool's release, or else the one that GitHub lists; none if it lists none for Linux. Another release has its archives where
/// the listed one has them. Without a checksum an archive is refused on the machine, where the image may have a runner.
pub fn choose(pool: &Ec2Pool, list: &[RunnerApplication]) -> Option<Choice> {
    let linux: Vec<_> = list.iter().filter(|runner| runner.os == "linux").collect();
    let listed = linux.iter().find_map(|runner| runner.version())?;
    let version = pool.runner_version.as_deref().unwrap_or(listed);
    let archive = |runner: &&RunnerApplication| {
        let pinned = pool.runner_sha256.get(&runner.architecture).cloned();
        let of_list = runner.sha256_checksum.clone().filter(|sum| !sum.is_empty() && version == listed);
        let sha256 = if pool.runner_version.is_some() { pinned.or(of_list) } else { of_list.or(pinned) };
        (runner.architecture.clone(), RunnerArchive { url: runner.download_url.replace(listed, version), sha256 })
    };
    let archives = linux.iter().map(archive).collect();
    Some(Choice { version: version.to_owned(), listed: listed.to_owned(), archives })
}

/// What the pool's status shows of a release. The time of the first sight of a newer one stays.
pub fn shown(before: Option<&RunnerRelease>, choice: &Choice, now: Timestamp) -> RunnerRelease {
    let known = before.filter(|before| before.version == choice.version).and_then(|before| before.newer_since.clone());
    let newer_since = is_older(&choice.version, &choice.listed).then(|| known.unwrap_or(Time(now)));
    RunnerRelease {
        version: choice.version.clone(),
        latest: choice.listed.clone(),
        deadline: newer_since.as_ref().map(|since| Time(since.0 + TAKEN_AFTER_NEWER)),
        newer_since,
    }
}

/// Why a release is outdated, and what to do.
pub fn outdated_message(release: &RunnerRelease) -> Option<String> {
    let (since, deadline) = (release.newer_since.as_ref()?, release.deadline.as_ref()?);
    let day = |time: &Time| time.0.strftime("%Y-%m-%d").to_string();
    Some(format!(
        "runner {} is older than {}, which GitHub has listed at least since {}: GitHub may refuse it from {} on. Set runnerVersion and \
         runnerSha256 to those of a newer one, or remove both to follow GitHub's list",
        release.version,
        release.latest,
        day(since),
        day(deadline)
    ))
}

pub fn is_older(version: &str, than: &str) -> bool {
    matches!((number(version), number(than)), (Some(version), Some(than)) if version < than)
}

fn number(version: &str) -> Option<Vec<u64>> {
    version.split('.').map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ec2::{at, pool};

    fn listed(version: &str, sum: Option<&str>) -> Vec<RunnerApplication> {
        let one = |os: &str, architecture: &str, end: &str| RunnerApplication {
            os: os.into(),
            architecture: architecture.into(),
            download_url: format!("https://ghe/download/v{version}/actions-runner-{os}-{architecture}-{version}.{end}"),
            filename: format!("actions-runner-{os}-{architecture}-{version}.{end}"),
            sha256_checksum: sum.map(|sum| format!("{sum}-{architecture}")),
        };
        vec![one("win", "x64", "zip"), one("linux", "x64", "tar.gz"), one("linux", "arm64", "tar.gz")]
    }

    fn pinned(version: Option<&str>, sums: &[(&str, &str)]) -> Ec2Pool {
        let runner_sha256 = sums.iter().map(|(arch, sum)| ((*arch).into(), (*sum).into())).collect();
        Ec2Pool { runner_version: version.map(str::to_owned), runner_sha256, ..pool() }
    }

    #[test]
    fn machines_get_the_listed_release_or_the_pools_with_a_checksum_for_each_architecture() {
        let x64 = |pool: &Ec2Pool, list: &[RunnerApplication]| {
            let choice = choose(pool, list).unwrap();
            let RunnerArchive { url, sha256 } = choice.archives["x64"].clone();
            (choice.version, url.replace("https://ghe/download/", ""), sha256)
        };
        let with = |version: &str, sum: Option<&str>| {
            let file = format!("v{version}/actions-runner-linux-x64-{version}.tar.gz");
            (version.to_owned(), file, sum.map(str::to_owned))
        };
        let list = listed("2.336.0", Some("list"));
        assert_eq!(x64(&pinned(None, &[]), &list), with("2.336.0", Some("list-x64")));
        assert_eq!(x64(&pinned(None, &[("x64", "own")]), &list), with("2.336.0", Some("list-x64")));
        assert_eq!(x64(&pinned(Some("2.330.0"), &[("x64", "own")]), &list), with("2.330.0", Some("own")));
        assert_eq!(x64(&pinned(Some("2.336.0"), &[("arm64", "own")]), &list), with("2.336.0", Some("list-x64")));
        assert_eq!(
            x64(&pinned(Some("2.330.0"), &[("arm64", "own")]), &list),
            with("2.330.0", None),
            "of another release"
        );
        let list = listed("2.336.0", None);
        assert_eq!(x64(&pinned(None, &[]), &list), with("2.336.0", None));
        assert_eq!(x64(&pinned(None, &[("x64", "own")]), &list), with("2.336.0", Some("own")));
        assert_eq!(choose(&pool(), &list).unwrap().archives.len(), 2, "Linux alone");
        assert_eq!(choose(&pool(), &list[..1]), None);
    }

    #[test]
    fn the_deadline_counts_from_the_first_sight_of_a_newer_release() {
        let choice = |version: Option<&str>, list: &str| choose(&pinned(version, &[]), &listed(list, None)).unwrap();
        let current = shown(None, &choice(None, "2.330.0"), at(0));
        assert_eq!((&current.newer_since, outdated_message(&current)), (&None, None));
        let old = shown(Some(&current), &choice(Some("2.330.0"), "2.336.0"), at(10));
        assert_eq!(old.newer_since, Some(Time(at(10))));
        assert_eq!(old.deadline, Some(Time(at(10 + 30 * 24 * 3600))));
        let message = outdated_message(&old).unwrap();
        assert!(message.starts_with("runner 2.330.0 is older than 2.336.0"), "{message}");
        let later = shown(Some(&old), &choice(Some("2.330.0"), "2.337.0"), at(99));
        assert_eq!(
            (later.latest.as_str(), later.deadline),
            ("2.337.0", old.deadline.clone()),
            "another one changes nothing"
        );
        let edited = shown(Some(&old), &choice(Some("2.335.0"), "2.337.0"), at(99));
        assert_eq!(edited.newer_since, Some(Time(at(99))));
        assert_eq!(shown(Some(&old), &choice(None, "2.337.0"), at(99)).newer_since, None);
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert!(is_older("2.99.0", "2.330.0") && is_older("2.330.0", "3.0.0"));
        assert!(!is_older("2.330.0", "2.330.0") && !is_older("2.336.0", "2.330.0") && !is_older("", "2.330.0"));
    }
}
