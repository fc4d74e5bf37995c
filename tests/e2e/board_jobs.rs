//! Jobs on boards: claims as webhooks make them, and what becomes of them.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use paddock::api::{ClaimPhase, RunnerClaim, Worker};
use paddock_bed::github::{Conclusion, Effect, Fault};
use serde_json::json;

use crate::{
    boards::{Boards, message, unplayed},
    support::{DEADLINE, World},
};

fn reason(claim: &RunnerClaim) -> String {
    let conditions = claim.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.first().map(|condition| condition.reason.clone()).unwrap_or_default()
}

/// The claim follows its job: the runner that has it, and its end.
pub async fn a_claim_follows_its_job(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    let job = boards.queue(None)?;
    let claim = boards.claim_for(&job).await?;
    let name = boards.until_running(&claim).await?;
    boards.tell(&claim, "in_progress", Some(&name)).await?;
    let ready = boards.until_claim(&claim, ClaimPhase::Ready).await?;
    let runner = ready.status.and_then(|status| status.runner).context("it says which runner has the job")?;
    ensure!(runner.name == name && runner.id.is_some(), "{runner:?}");
    boards.tell(&claim, "completed", Some(&name)).await?;
    let done = boards.until_claim(&claim, ClaimPhase::Completed).await?;
    ensure!(message(&done) == "the job is done");
    Ok(())
}

/// A job that is over before it got a worker gets none.
pub async fn a_job_cancelled_before_provisioning_makes_no_pod(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    boards.claim("blocker").await?;
    boards.until_running("blocker").await?;
    let job = boards.queue(None)?;
    let claim = boards.claim_for(&job).await?;
    boards.until_says(&claim, "no free slot").await?;
    boards.tell(&claim, "completed", None).await?;
    boards.until_claim(&claim, ClaimPhase::Completed).await?;
    world.api::<RunnerClaim>(&boards.namespace).delete("blocker", &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(&boards.namespace, "blocker").await?;
    let made = boards.workers().await?;
    ensure!(made.iter().all(|worker| worker.spec.board.as_ref().is_some_and(|board| board.claim != claim)), "{made:?}");
    Ok(())
}

/// A cancelled job frees its slot at once: its idle runner goes, at GitHub first.
pub async fn a_job_cancelled_after_provisioning_frees_its_slot(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    let job = boards.queue(None)?;
    let claim = boards.claim_for(&job).await?;
    let name = boards.until_running(&claim).await?;
    world.stage.github.cancel_job(job.id);
    boards.tell(&claim, "completed", None).await?;
    boards.until_claim(&claim, ClaimPhase::Completed).await?;
    boards.until_no_runner(&name).await?;
    world.until_gone::<Pod>(&boards.namespace, &name).await?;
    world.until_gone::<Worker>(&boards.namespace, &name).await?;
    boards.claim("next").await?;
    boards.until_running("next").await?;
    Ok(())
}

/// I1, fault 22: each of two runners takes the other's job, and neither job waits nor is a third runner made.
pub async fn a_runner_that_takes_another_job_leaves_none_waiting(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 4, unplayed()).await?;
    let jobs = [boards.queue(None)?, boards.queue(None)?];
    let claims = [boards.claim_for(&jobs[0]).await?, boards.claim_for(&jobs[1]).await?];
    let names = [boards.until_running(&claims[0]).await?, boards.until_running(&claims[1]).await?];
    boards.tell(&claims[0], "in_progress", Some(&names[1])).await?;
    boards.until_claim(&claims[0], ClaimPhase::Ready).await?;
    boards.tell(&claims[1], "in_progress", Some(&names[0])).await?;
    boards.until_says(&claims[1], &format!("runner {} has the job", names[0])).await?;
    // The first job is over, and with it the second claim's worker. The first claim's serves on.
    boards.tell(&claims[0], "completed", Some(&names[1])).await?;
    boards.until_claim(&claims[0], ClaimPhase::Completed).await?;
    let workers = boards.workers().await?;
    ensure!(workers.len() == 2, "no third worker: {workers:?}");
    ensure!(workers.iter().all(|worker| worker.metadata.deletion_timestamp.is_none()), "none is taken away");
    // A third job finds no idle runner, and gets one of its own.
    let third = boards.queue(None)?;
    let third = boards.claim_for(&third).await?;
    boards.until_running(&third).await?;
    Ok(())
}

/// A job that GitHub does not know, and one that is queued although its run is over, fail with their reasons.
pub async fn jobs_that_will_never_run_fail(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 2, json!({ "timeouts": { "stuckQueued": "2s" } })).await?;
    let stuck = boards.queue(None)?;
    world.stage.github.finish_run(stuck.run_id, Conclusion::Cancelled);
    let stuck = boards.claim_for(&stuck).await?;
    boards.claim_with("job-1", json!({ "job": { "id": 1 } })).await?;
    let unknown = boards.until_claim("job-1", ClaimPhase::Failed).await?;
    ensure!(reason(&unknown) == "JobNotFound", "{unknown:?}");
    let stuck = boards.until_claim(&stuck, ClaimPhase::Failed).await?;
    ensure!(reason(&stuck) == "JobStuckQueued", "{stuck:?}");
    world.until_true("their workers go", async || Ok(boards.pods().await?.is_empty())).await
}

/// A personal account's runners are its repository's.
pub async fn a_personal_account_is_served(world: &World) -> Result<()> {
    let github = &world.stage.github;
    let user = github.user("octocat");
    let repository = github.repository("octocat", "hello", false)?;
    github.install(world.stage.app_id(), "octocat")?;
    let mut boards = Boards::simulated(world, 1, unplayed()).await?;
    boards.owner = json!({ "id": user.id, "login": "octocat", "type": "User" });
    boards.repository = json!({ "id": repository.id, "name": "octocat/hello" });
    let job = boards.queue(Some(100))?;
    let claim = boards.claim_for(&job).await?;
    let name = boards.until_running(&claim).await?;
    let worker = world.api::<Worker>(&boards.namespace).get(&name).await?;
    let entity = worker.spec.board.map(|board| board.entity);
    ensure!(entity == Some(repository.id.to_string()), "limits count by repository: {entity:?}");
    github.play_runner(&name)?;
    let taken = github.until_job(job.id, DEADLINE, |job| job.taken_by.is_some()).await?;
    ensure!(taken.taken_by.is_some_and(|taken| taken.runner_name == name), "the repository's runner took it");
    Ok(())
}

/// I7: the cap of an owner holds over its claims; the next one waits, says so with numbers, and is served when one is done.
pub async fn i7_an_owner_at_its_cap_waits(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 22, unplayed()).await?;
    boards.claim_with("many", json!({ "count": 20 })).await?;
    world.until_true("twenty pods", async || Ok(boards.pods().await?.len() == 20)).await?;
    let job = boards.queue(None)?;
    let claim = boards.claim_for(&job).await?;
    boards.until_says(&claim, "quota 20/20").await?;
    world.api::<RunnerClaim>(&boards.namespace).delete("many", &DeleteParams::default()).await?;
    boards.until_running(&claim).await?;
    Ok(())
}

/// An owner that removed the App gets no runner, is told so, loops nowhere, and keeps nobody's slot.
pub async fn an_owner_without_the_app_is_told_and_harms_nobody(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 1, unplayed()).await?;
    let gone = boards.for_organization(&format!("gone-{}", boards.namespace))?;
    world.stage.github.uninstall(gone.installation);
    for name in ["a", "b", "c"] {
        gone.claim(name).await?;
    }
    gone.until_says("a", "the App is not installed").await?;
    gone.until_says("c", "the App is not installed").await?;
    boards.claim("other").await?;
    boards.until_running("other").await?;
    let tried = gone.workers().await?.len();
    ensure!(tried <= 4, "nothing loops: {tried} workers");
    Ok(())
}

/// I12: GitHub does not answer for one owner; another's jobs do not wait for it, whatever slots and turns there are.
pub async fn i12_an_owner_that_hangs_delays_nobody_else(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 30, unplayed()).await?;
    let login = format!("slow-{}", boards.namespace);
    let slow = boards.for_organization(&login)?;
    world.stage.github.fault(Fault::new("POST", &format!("/orgs/{login}/*"), Effect::Hang));
    slow.claim_with("slow", json!({ "count": 20 })).await?;
    world.until_true("its workers wait for GitHub", async || Ok(slow.workers().await?.len() >= 20)).await?;
    for name in ["a", "b", "c", "d", "e"] {
        boards.claim(name).await?;
    }
    for name in ["a", "b", "c", "d", "e"] {
        boards.until_running(name).await?;
    }
    let of_slow = |pod: &&Pod| pod.metadata.labels.as_ref().is_some_and(|labels| labels.values().any(|v| v == "slow"));
    ensure!(boards.pods().await?.iter().filter(of_slow).count() == 0, "GitHub still hangs");
    slow.until_says("slow", "GitHub did not answer").await?;
    Ok(())
}

/// A claim for several runners, applied by hand, is Ready when all of them are online.
pub async fn a_claim_for_two_by_hand(world: &World) -> Result<()> {
    let boards = Boards::simulated(world, 2, unplayed()).await?;
    boards.claim_with("two", json!({ "count": 2 })).await?;
    world.until_true("two pods", async || Ok(boards.pods().await?.len() == 2)).await?;
    for worker in boards.workers().await? {
        let name = worker.metadata.name.unwrap_or_default();
        world.until_true("it is registered", async || Ok(world.stage.github.play_runner(&name).is_ok())).await?;
    }
    let claim = boards.until_claim("two", ClaimPhase::Ready).await?;
    ensure!(claim.status.is_some_and(|status| status.progress == "2/2"));
    Ok(())
}
