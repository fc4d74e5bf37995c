//! Jobs and workflow runs.

use http::Method;
use paddock_core::{
    demand::quota::Scope,
    ec2::rerun::{Run, RunJob},
};
use serde::{Deserialize, de::IgnoredAny};

use super::{
    client::{GitHub, PER_PAGE},
    credentials::Credentials,
    error::GitHubError,
};

/// A job of a workflow run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct WorkflowJob {
    pub id: i64,
    pub run_id: i64,
    /// `queued`, `in_progress`, `completed`, `waiting`, …
    pub status: String,
    pub conclusion: Option<String>,
    pub runner_id: Option<i64>,
    pub runner_name: Option<String>,
}

#[derive(Deserialize)]
struct RunStatus {
    status: String,
    /// GitHub documents it as optional.
    run_attempt: Option<u32>,
}

impl GitHub {
    /// A job of a repository, given as `owner/name`. `NotFound` means that the repository is seen and has no such job.
    pub async fn job(&self, credentials: &Credentials, repository: &str, id: i64) -> Result<WorkflowJob, GitHubError> {
        let scope = repository_scope(repository);
        let route = format!("{}/actions/jobs/{id}", scope.route());
        let job = self.sessions.get_in_background(credentials, &scope, &route).await;
        if let Err(GitHubError::NotFound(_)) = job {
            self.sees_repository(credentials, &scope).await?;
        }
        job
    }

    async fn sees_repository(&self, credentials: &Credentials, scope: &Scope) -> Result<(), GitHubError> {
        match self.sessions.get_in_background::<IgnoredAny>(credentials, scope, &scope.route()).await {
            Err(GitHubError::NotFound(_)) => {
                Err(GitHubError::Unexpected(format!("404 for the whole repository {scope}")))
            }
            outcome => outcome.map(drop),
        }
    }

    /// Whether a workflow run has completed. `NotFound` is about the run, as above.
    pub async fn run_is_over(&self, credentials: &Credentials, repository: &str, id: i64) -> Result<bool, GitHubError> {
        Ok(self.run_status(credentials, repository, id).await?.status == "completed")
    }

    async fn run_status(&self, credentials: &Credentials, repository: &str, id: i64) -> Result<RunStatus, GitHubError> {
        let scope = repository_scope(repository);
        let route = format!("{}/actions/runs/{id}", scope.route());
        let run = self.sessions.get_in_background(credentials, &scope, &route).await;
        if let Err(GitHubError::NotFound(_)) = run {
            self.sees_repository(credentials, &scope).await?;
        }
        run
    }

    /// A workflow run with the jobs of its latest attempt.
    pub async fn workflow_run(&self, credentials: &Credentials, repository: &str, id: i64) -> Result<Run, GitHubError> {
        #[derive(Deserialize)]
        struct Page {
            jobs: Vec<RunJob>,
        }
        let (scope, mut jobs) = (repository_scope(repository), Vec::new());
        for page in 1.. {
            let query = format!("filter=latest&per_page={PER_PAGE}&page={page}");
            let route = format!("{}/actions/runs/{id}/jobs?{query}", scope.route());
            let found = self.sessions.get_in_background::<Page>(credentials, &scope, &route).await?.jobs;
            let last = found.len() < PER_PAGE;
            jobs.extend(found);
            if last {
                break;
            }
        }
        // Last: if it is in its first attempt still, so were the jobs.
        let RunStatus { status, run_attempt } = self.run_status(credentials, repository, id).await?;
        Ok(Run { completed: status == "completed", attempt: run_attempt.unwrap_or(1), jobs })
    }

    /// Runs one job of a completed run again, or all that failed, with the jobs that depend on them.
    pub async fn rerun(
        &self,
        credentials: &Credentials,
        repository: &str,
        run: i64,
        job: Option<i64>,
    ) -> Result<(), GitHubError> {
        let scope = repository_scope(repository);
        let route = match job {
            Some(job) => format!("{}/actions/jobs/{job}/rerun", scope.route()),
            None => format!("{}/actions/runs/{run}/rerun-failed-jobs", scope.route()),
        };
        self.sessions.call::<IgnoredAny>(credentials, &scope, Method::POST, &route, None).await.map(drop)
    }
}

fn repository_scope(full: &str) -> Scope {
    let (owner, name) = full.split_once('/').unwrap_or(("", full));
    Scope::Repository { owner: owner.into(), name: name.into() }
}
