//! Owners of jobs: organisations and people, each with a cap, none of which delays another.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use paddock::api::{RunnerClaim, Worker};
use paddock_bed::github::{Effect, Fault};
use serde_json::json;

use crate::fixture::{
    board_pool::{BoardPool, late_runners},
    world::{DEADLINE, World},
};

/// Runners for a personal account are registered in the repository.
pub async fn a_personal_account_is_served(world: &World) -> Result<()> {
    let github = &world.stage.github;
    let user = github.user("octocat");
    let repository = github.repository("octocat", "hello", false)?;
    github.install(world.stage.app_id(), "octocat")?;
    let mut pool = BoardPool::simulated(world, 1, late_runners()).await?;
    pool.owner = json!({ "id": user.id, "login": "octocat", "type": "User" });
    pool.repository = json!({ "id": repository.id, "name": "octocat/hello" });
    let job = pool.queue(Some(100))?;
    let claim = pool.claim_for(&job).await?;
    let name = pool.until_running(&claim).await?;
    let worker = world.api::<Worker>(&pool.namespace).get(&name).await?;
    let entity = worker.spec.board.map(|board| board.entity);
    ensure!(entity == Some(repository.id.to_string()), "limits count by repository: {entity:?}");
    github.play_runner(&name)?;
    let taken = github.until_job(job.id, DEADLINE, |job| job.taken_by.is_some()).await?;
    ensure!(taken.taken_by.is_some_and(|taken| taken.runner_name == name), "the repository's runner took it");
    Ok(())
}

/// I7: the cap holds for all claims of an owner; the next one waits, names the quota, and is served once a worker ends.
pub async fn i7_an_owner_at_its_cap_waits(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 22, late_runners()).await?;
    pool.claim_with("many", json!({ "count": 20 })).await?;
    world.until_true("there are twenty pods", async || Ok(pool.pods().await?.len() == 20)).await?;
    let job = pool.queue(None)?;
    let claim = pool.claim_for(&job).await?;
    pool.until_says(&claim, "quota 20/20").await?;
    world.api::<RunnerClaim>(&pool.namespace).delete("many", &DeleteParams::default()).await?;
    pool.until_running(&claim).await?;
    Ok(())
}

/// An owner that removed the App gets no runner and is told so; it causes no endless retries and blocks no other owner.
pub async fn owner_without_the_app_is_told_and_blocks_no_other(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 1, late_runners()).await?;
    let gone = pool.for_organization(&format!("gone-{}", pool.namespace))?;
    world.stage.github.uninstall(gone.installation);
    for name in ["a", "b", "c"] {
        gone.claim(name).await?;
    }
    gone.until_says("a", "the App is not installed").await?;
    gone.until_says("c", "the App is not installed").await?;
    pool.claim("other").await?;
    pool.until_running("other").await?;
    let tried = gone.workers().await?.len();
    ensure!(tried <= 4, "no endless retries: {tried} workers");
    Ok(())
}

/// A claim with a wrong owner holds up no other claim of the same account, and a wrong installation is looked up.
pub async fn claim_with_wrong_data_delays_no_other(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 2, late_runners()).await?;
    let login = format!("wrong-{}", pool.namespace);
    let owner = json!({ "id": pool.owner["id"], "login": login, "type": "Organization" });
    pool.claim_with("a-wrong", json!({ "owner": owner, "repository": format!("{login}/x") })).await?;
    pool.until_says("a-wrong", "the App is not installed").await?;
    pool.claim_with("b-right", json!({ "installationId": 1 })).await?;
    pool.until_running("b-right").await?;
    pool.until_says("a-wrong", "the App is not installed").await?;
    Ok(())
}

/// I12: if GitHub does not answer for one owner, the jobs of another do not wait.
pub async fn i12_owner_whose_requests_hang_delays_no_other(world: &World) -> Result<()> {
    let pool = BoardPool::simulated(world, 30, late_runners()).await?;
    let login = format!("slow-{}", pool.namespace);
    let slow = pool.for_organization(&login)?;
    world.stage.github.fault(Fault::new("POST", &format!("/orgs/{login}/*"), Effect::Hang));
    slow.claim_with("slow", json!({ "count": 20 })).await?;
    world.until_true("twenty workers wait for GitHub", async || Ok(slow.workers().await?.len() >= 20)).await?;
    for name in ["a", "b", "c", "d", "e"] {
        pool.claim(name).await?;
    }
    for name in ["a", "b", "c", "d", "e"] {
        pool.until_running(name).await?;
    }
    let of_slow = |pod: &&Pod| pod.metadata.labels.as_ref().is_some_and(|labels| labels.values().any(|v| v == "slow"));
    ensure!(pool.pods().await?.iter().filter(of_slow).count() == 0, "GitHub still hangs");
    slow.until_says("slow", "GitHub did not answer").await?;
    Ok(())
}
