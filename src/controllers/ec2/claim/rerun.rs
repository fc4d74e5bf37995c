//! Has jobs run again at GitHub that failed because EC2 took their spot machine back.

use paddock_core::{
    api::{Rerun, RerunOutcome},
    ec2::{
        claim::Applied,
        rerun::{self, Plan, RerunStep, Trouble},
    },
};
use paddock_effects::{clock, github::GitHubError, kube::objects};

use super::{Error, Work};

impl Work {
    pub(super) async fn rerun(&mut self, step: &RerunStep) -> Result<Applied, Error> {
        let rerun = self.status.rerun.clone().map(|rerun| *rerun).unwrap_or_default();
        let rerun = match step {
            RerunStep::Wait(_) => return Ok(Applied::Incomplete),
            RerunStep::Skip(why) => rerun::ended(rerun, RerunOutcome::Skipped, why),
            RerunStep::Ask => self.run_again(rerun).await?,
        };
        Ok(Applied::Rerun(Box::new(rerun)))
    }

    /// Looks at the run, and makes at most one call, which is in the claim's status before it is sent.
    async fn run_again(&mut self, rerun: Rerun) -> Result<Rerun, Error> {
        let pool = self.pool.clone();
        let pool = pool.as_ref().and_then(|pool| pool.spec.ec2.as_ref());
        let Some((pool, (repository, run))) = pool.and_then(|pool| Some((pool, rerun::run_of(&self.claim, pool)?)))
        else {
            let why =
                "interrupted jobs are not run again: the claim does not name its repository and the number of its run";
            return Ok(rerun::ended(rerun, RerunOutcome::Skipped, why));
        };
        let claims = self.context.shared.stores.claims.store.state();
        let interruptions = match rerun::of_run(&self.claim, &claims) {
            Ok(interruptions) => interruptions,
            Err(other) => {
                let why = format!("claim {other} of the same run sees to its interrupted jobs");
                return Ok(rerun::later(rerun, &why, None, clock::now()));
            }
        };
        let credentials = &pool.github.credentials_ref.name;
        let credentials = match self.context.shared.credentials.get_or_last(&self.namespace, credentials).await {
            Ok(credentials) => credentials,
            Err(error) => return Ok(rerun::later(rerun, &error.to_string(), None, clock::now())),
        };
        let seen = match self.context.shared.github.workflow_run(&credentials, &repository, run).await {
            Ok(seen) => seen,
            Err(error) => return Ok(rerun::failed(rerun, trouble(error)?, clock::now())),
        };
        match rerun::plan(&seen, &interruptions, &rerun, clock::now()) {
            Plan::Later(why) => Ok(rerun::later(rerun, &why, None, clock::now())),
            Plan::End(outcome, message) => Ok(rerun::ended(rerun, outcome, &message)),
            Plan::Done => self.claim_again(rerun).await,
            Plan::Call(call) => {
                let rerun = rerun::requested(rerun, &call, clock::now());
                self.status.rerun = Some(Box::new(rerun.clone()));
                self.write().await?;
                let github = &self.context.shared.github;
                let answer = github.rerun(&credentials, &repository, run, call.job).await;
                tracing::info!(claim = %self.name, run, jobs = call.names, ?answer, "jobs run again");
                match answer {
                    Ok(()) => self.claim_again(rerun).await,
                    Err(error) => Ok(rerun::failed(rerun, trouble(error)?, clock::now())),
                }
            }
        }
    }

    /// Claims machines for the jobs that run again.
    async fn claim_again(&self, rerun: Rerun) -> Result<Rerun, Error> {
        let next = rerun::next_claim(&self.claim, &rerun);
        objects::create(&self.context.shared.client, &next).await?;
        Ok(rerun::done(rerun, &next))
    }
}

/// An error is one that says nothing about GitHub: this replica does not lead any more.
fn trouble(error: GitHubError) -> Result<Trouble, Error> {
    Ok(match error {
        GitHubError::Forbidden(why) => Trouble::Forbidden(why),
        GitHubError::Refused(_) => Trouble::Refused(error.to_string()),
        GitHubError::RateLimited { until } => Trouble::Unavailable(error.to_string(), Some(until)),
        GitHubError::NotFound(_)
        | GitHubError::NoInstallation(_)
        | GitHubError::Unauthorized(_)
        | GitHubError::NameTaken
        | GitHubError::Busy
        | GitHubError::Unavailable(_)
        | GitHubError::NoAnswer(_)
        | GitHubError::Unexpected(_) => Trouble::Unavailable(error.to_string(), None),
        GitHubError::Fenced(_) => return Err(error.into()),
    })
}
