//! Many jobs at once.

use std::time::Instant;

use anyhow::{Result, ensure};
use paddock::api::{ClaimPhase, RunnerClaim};
use paddock_bed::github::Status;

use crate::fixture::{
    fleet::{Fleet, phase},
    world::World,
};

const RUNNERS_OF_GROUP: &str = "/orgs/{org}/actions/runner-groups/{runner_group_id}/runners";

/// Restarts the operator with the chart's own lease duration: a shorter lease is lost while the API server, on the same
/// cores, creates hundreds of pods.
async fn start_patient_operator(world: &World) -> Result<()> {
    world.kill_operator()?;
    world.start_operator_with(&["--lease-duration", "15s"]).await
}

/// 300 jobs of 20 organisations at once, on 300 boards: each gets one runner, and the operator sends GitHub little more
/// than one request per job.
pub async fn burst_of_300_jobs_over_20_organisations(world: &World) -> Result<()> {
    const JOBS: usize = 300;
    start_patient_operator(world).await?;
    let fleet = Fleet::new(world).await?;
    fleet.add_nodes(JOBS).await?;
    fleet.until_free(JOBS).await?;
    let github = &world.stage.github;
    github.reset_calls();
    let start = Instant::now();
    let jobs = fleet.queue(JOBS, None)?;
    let taken = |job: &u64| github.job(*job).is_some_and(|job| job.status == Status::InProgress);
    fleet.until(JOBS, "every job is taken", async || Ok(jobs.iter().all(taken))).await?;
    // Now all of them run; earlier samples may have seen fewer.
    fleet.sample(JOBS);
    fleet.finish(JOBS, &jobs).await?;
    fleet.until_done(JOBS, &jobs).await?;
    let mut calls = github.calls();
    calls.retain(|call| fleet.pool.accounts.contains(&call.account));
    let count = |wanted: &dyn Fn(&str) -> bool| -> u64 {
        calls.iter().filter(|call| wanted(&call.route)).map(|call| call.count).sum()
    };
    // Periodic requests are counted apart: the delivery log, and once a minute the list of runners for each worker that
    // no webhook mentioned.
    let (is_log, is_list) =
        (|route: &str| route.starts_with("/app/hook/deliveries"), |route: &str| route == RUNNERS_OF_GROUP);
    let (lists, minutes) = (count(&is_list), start.elapsed().as_secs() / 60);
    ensure!(lists <= minutes * JOBS as u64, "{lists} lists of runners in {minutes} min: {calls:?}");
    let asked = count(&|route| !is_log(route) && !is_list(route));
    ensure!(asked as f64 <= 1.2 * JOBS as f64, "{asked} calls for {JOBS} jobs: {calls:?}");
    fleet.check(&jobs).await?;
    ensure!(fleet.most_pods() == JOBS, "only {} pods ran at a time", fleet.most_pods());
    Ok(())
}

/// I1, I7: 1,000 jobs at once for 50 boards: none is lost, none is served twice, and each organisation's are served in
/// order.
pub async fn i1_i7_each_of_a_thousand_jobs_is_served_once_and_in_order(world: &World) -> Result<()> {
    const JOBS: usize = 1000;
    const NODES: usize = 50;
    start_patient_operator(world).await?;
    let fleet = Fleet::new(world).await?;
    let jobs = fleet.queue(JOBS, Some(1))?;
    // Every claim waits before the first is served, so that their order is certain.
    let waits = |claim: &RunnerClaim| phase(claim) == Some(ClaimPhase::Pending);
    let all_wait = async || {
        let claims = fleet.claims();
        Ok(claims.len() == JOBS && claims.iter().all(|claim| waits(claim)))
    };
    fleet.until(NODES, "every job has a claim that waits", all_wait).await?;
    fleet.add_nodes(NODES).await?;
    fleet.until_done(NODES, &jobs).await?;
    fleet.check(&jobs).await?;
    fleet.check_order(NODES).await
}
