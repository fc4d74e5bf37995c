//! The data model of the simulated GitHub.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnerKind {
    Organization,
    User,
}

#[derive(Clone, Debug, Serialize)]
pub struct Owner {
    pub id: u64,
    pub login: String,
    pub kind: OwnerKind,
}

#[derive(Clone, Debug, Serialize)]
pub struct Repository {
    pub id: u64,
    pub owner: String,
    pub name: String,
    pub private: bool,
}

/// A release of the runner, as GitHub lists it.
#[derive(Clone, Debug, Serialize)]
pub struct Release {
    pub version: String,
    /// Whether the list has checksums.
    pub checksums: bool,
}

/// A GitHub App with the key that its owner downloaded.
#[derive(Clone, Debug, Serialize)]
pub struct App {
    pub id: u64,
    pub slug: String,
    pub private_key: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Installation {
    pub id: u64,
    pub app_id: u64,
    pub owner: String,
    pub created_at: Timestamp,
    pub suspended_at: Option<Timestamp>,
    pub permissions: Map<String, Value>,
    /// `None`: all repositories of the owner.
    pub repositories: Option<Vec<u64>>,
}

#[derive(Clone, Debug)]
pub enum TokenKind {
    /// Of an installation, restricted to some repositories if the caller asked for that.
    Installation { id: u64, repositories: Option<Vec<u64>> },
    /// A personal token, valid for these owners.
    Personal { owners: Vec<String> },
}

#[derive(Clone, Debug)]
pub struct Token {
    pub kind: TokenKind,
    pub expires_at: Option<Timestamp>,
}

/// The scope of runners and jobs: an organisation or a repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Scope {
    Organization(String),
    Repository(String, String),
}

impl Scope {
    pub fn owner(&self) -> &str {
        match self {
            Self::Organization(owner) | Self::Repository(owner, _) => owner,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerTokenKind {
    Registration,
    Removal,
}

#[derive(Clone, Debug)]
pub struct RunnerToken {
    pub kind: RunnerTokenKind,
    pub scope: Scope,
    pub expires_at: Timestamp,
}

/// The default group of every organisation; runners of repositories are shown in it too.
pub const DEFAULT_GROUP: u64 = 1;

#[derive(Clone, Debug, Serialize)]
pub struct Group {
    pub id: u64,
    pub owner: String,
    pub name: String,
    pub default: bool,
    /// `all`, `private` or `selected`.
    pub visibility: String,
    pub selected_repositories: Vec<u64>,
    pub allows_public_repositories: bool,
}

/// How a runner's program is connected.
#[derive(Clone, Debug, Serialize)]
pub enum Session {
    /// A process with `polls` open long polls, last seen then.
    Connected { polls: u32, last_seen: Timestamp },
    /// Simulated: it takes jobs and finishes them after their duration.
    Played,
}

#[derive(Clone, Debug, Serialize)]
pub struct Runner {
    pub id: u64,
    pub name: String,
    pub scope: Scope,
    pub group_id: u64,
    /// Labels as given; the first `default_labels` of them are GitHub's own.
    pub labels: Vec<String>,
    pub default_labels: usize,
    pub ephemeral: bool,
    /// The secret that the runner's process authenticates with.
    #[serde(skip)]
    pub secret: String,
    pub session: Option<Session>,
    pub job: Option<u64>,
    /// Unknown until the runner has connected once.
    pub os: &'static str,
    pub created_at: Timestamp,
}

impl Runner {
    pub fn online(&self, now: Timestamp, offline_after: Duration) -> bool {
        match &self.session {
            None => false,
            Some(Session::Played) => true,
            Some(Session::Connected { polls, last_seen }) => *polls > 0 || now < *last_seen + signed(offline_after),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Waiting,
    Queued,
    InProgress,
    Completed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    Success,
    Failure,
    Cancelled,
    Skipped,
    TimedOut,
}

/// The runner that took a job, kept after the runner is removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TakenBy {
    pub runner_id: u64,
    pub runner_name: String,
    pub group_id: u64,
    pub group_name: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Job {
    pub id: u64,
    pub run_id: u64,
    /// The attempt of its run, from 1.
    pub attempt: u64,
    /// A later attempt has run it again.
    pub superseded: bool,
    pub name: String,
    pub labels: Vec<String>,
    pub status: Status,
    pub conclusion: Option<Conclusion>,
    pub taken_by: Option<TakenBy>,
    pub created_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub completed_at: Option<Timestamp>,
    /// How long the runner runs it; without this and without a script, until a test finishes it.
    pub duration: Option<Duration>,
    pub script: Option<String>,
    /// The runner's process has received this job.
    pub heard: bool,
    /// Set if the runner was asked to stop the job, with this outcome.
    pub order: Option<Conclusion>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Run {
    pub id: u64,
    pub repository: u64,
    pub number: u64,
    /// From 1; a re-run keeps the run's id and has the next one.
    pub attempt: u64,
    pub workflow: String,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub status: Status,
    pub conclusion: Option<Conclusion>,
}

/// A job to queue: `POST /_admin/jobs`, or [`crate::GitHub::queue_job`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobRequest {
    pub owner: String,
    pub repo: String,
    pub labels: Vec<String>,
    /// The run that it belongs to; a new one if omitted.
    pub run_id: Option<u64>,
    pub name: Option<String>,
    pub workflow: Option<String>,
    pub duration_ms: Option<u64>,
    /// The script to run; its exit status decides the outcome.
    pub script: Option<String>,
    /// The job first waits for a deployment approval.
    pub waiting: bool,
}

pub(crate) fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).expect("durations of a test bed are short")
}

/// GitHub compares names of owners, repositories, runners and labels without case.
pub(crate) fn same(a: &str, b: &str) -> bool {
    a.to_lowercase() == b.to_lowercase()
}
