//! The release of GitHub's runner for a pool's machines.

use paddock_core::{
    api::{Ec2Pool, PoolReason, RunnerPool},
    ec2::{
        pool_status::PoolProblem,
        runner_release::{Choice, choose},
    },
    names::PoolKey,
};

use super::Ec2Context;
use crate::controllers::stale_runners;

impl Ec2Context {
    /// What the pool's machines install, by its spec and GitHub's list.
    pub async fn runner_choice(&self, pool: &RunnerPool, ec2: &Ec2Pool) -> Result<Choice, PoolProblem> {
        // What is known about bad credentials costs GitHub no call.
        if let Some(problem) = self.credentials_problem(pool, ec2).await {
            return Err(problem);
        }
        let (namespace, secret) = (PoolKey::of(pool).namespace, &ec2.github.credentials_ref.name);
        let unavailable = |why: String| (PoolReason::GitHubUnavailable, why);
        let credentials = self.shared.credentials.get_or_last(&namespace, secret).await;
        let credentials = credentials.map_err(|error| unavailable(error.to_string()))?;
        let list = self.shared.github.runner_list(&credentials, &stale_runners::scope(ec2)).await;
        let list = list.map_err(|error| unavailable(format!("no list of runners: {error}")))?;
        choose(ec2, &list).ok_or_else(|| unavailable("GitHub lists no runner for Linux".to_owned()))
    }
}
