//! What happens to claims when something happens to the operator, its rights or the API server.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{coordination::v1::Lease, rbac::v1::ClusterRole};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use paddock::api::{RunnerClaim, RunnerPool};
use paddock_bed::{
    kube::{RELEASE, RELEASE_NAMESPACE},
    process::Signal,
};
use serde_json::json;

use crate::{
    ec2::{clean_up, is_ready},
    support::World,
};

async fn warm_pool(world: &World, namespace: &str) -> Result<()> {
    let pool = world.stage.ec2_pool(namespace, "linux", json!({ "minIdle": 1 }));
    world.stage.kube.apply(&pool.to_string()).await?;
    let warm = |pool: &RunnerPool| pool.status.as_ref().is_some_and(|status| status.workers.idle >= 1);
    world.until::<RunnerPool>(namespace, "linux", "warm", warm).await.map(drop)
}

async fn claim(world: &World, namespace: &str, name: &str, run_id: &str) -> Result<()> {
    world.stage.kube.apply(&world.stage.claim(namespace, name, "linux", run_id, 1).to_string()).await
}

async fn until_ready(world: &World, namespace: &str, name: &str) -> Result<()> {
    world.until::<RunnerClaim>(namespace, name, "Ready", is_ready).await.map(drop)
}

async fn release(world: &World, namespace: &str, name: &str) -> Result<()> {
    world.api::<RunnerClaim>(namespace).delete(name, &DeleteParams::default()).await?;
    world.until_gone::<RunnerClaim>(namespace, name).await
}

/// The replica that the Lease names.
async fn leader(world: &World) -> Result<String> {
    let lease = world.api::<Lease>(RELEASE_NAMESPACE).get("paddock").await?;
    let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
    Ok(holder.split('_').next().unwrap_or_default().to_owned())
}

/// I5: an operator that is killed in the middle of a claim loses nothing; the next one finishes it.
pub async fn i5_killed_in_the_middle_of_a_claim(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    warm_pool(world, &namespace).await?;
    claim(world, &namespace, "build", "7200").await?;
    let begun = |claim: &RunnerClaim| claim.status.as_ref().is_some_and(|status| status.phase.is_some());
    world.until::<RunnerClaim>(&namespace, "build", "begun", begun).await?;
    world.kill_operator()?;
    world.start_operator().await?;
    until_ready(world, &namespace, "build").await?;
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}

/// Two replicas: the second takes over from a leader that was stopped past its lease, and the first, resumed, finds
/// itself fenced and ends.
pub async fn a_paused_leader_is_replaced_and_ends(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    warm_pool(world, &namespace).await?;
    ensure!(leader(world).await? == "operator", "the first replica leads");
    let second = world.stage.operator("second", &[]).await?;
    world.operator().as_ref().context("the first replica")?.signal(Signal::SIGSTOP)?;
    world.until_true("the second replica leads", async || Ok(leader(world).await? == "second")).await?;
    claim(world, &namespace, "build", "7300").await?;
    until_ready(world, &namespace, "build").await?;
    world.operator().as_ref().context("the first replica")?.signal(Signal::SIGCONT)?;
    let ended = async || Ok(world.operator_log().contains("the lease was lost"));
    world.until_true("the first replica ended and said why", ended).await?;
    ensure!(leader(world).await? == "second", "the second replica still leads");

    // A leader that is asked to end gives its lease up, and the next one leads at once.
    second.stop().await?;
    world.until_true("the new replica leads", async || Ok(leader(world).await? == "operator")).await?;
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}

/// The operator works with the chart's rights and no others: without one that it needs, the claim stays where it is.
pub async fn a_missing_right_is_missed(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    warm_pool(world, &namespace).await?;
    let roles: Api<ClusterRole> = Api::all(world.stage.kube.client());
    let name = format!("{RELEASE}-{RELEASE_NAMESPACE}");
    let whole = roles.get(&name).await?;
    let mut reduced = whole.clone();
    for rule in reduced.rules.iter_mut().flatten() {
        if let Some(resources) = &mut rule.resources {
            resources.retain(|resource| resource != "runnerclaims/status");
        }
    }
    ensure!(reduced != whole, "the chart grants runnerclaims/status");
    roles.replace(&name, &PostParams::default(), &reduced).await?;
    claim(world, &namespace, "build", "7400").await?;
    world
        .until_true("the operator misses its right", async || {
            Ok(world.operator_log().contains("cannot write the status of RunnerClaim"))
        })
        .await?;
    let stuck = world.api::<RunnerClaim>(&namespace).get("build").await?;
    ensure!(stuck.status.is_none(), "nobody could write {:?}", stuck.status);

    let mut restored = roles.get(&name).await?;
    restored.rules = whole.rules;
    roles.replace(&name, &PostParams::default(), &restored).await?;
    until_ready(world, &namespace, "build").await?;
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}

/// An API server that restarts in the middle of a claim slows it down, no more.
pub async fn the_api_server_restarts(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    warm_pool(world, &namespace).await?;
    claim(world, &namespace, "build", "7500").await?;
    world.stage.kube.restart_apiserver().await?;
    until_ready(world, &namespace, "build").await?;
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}

/// The pages tell what the cluster has, in HTML and in JSON, page by page.
pub async fn dashboards_show_what_goes_on(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    warm_pool(world, &namespace).await?;
    claim(world, &namespace, "build", "7600").await?;
    until_ready(world, &namespace, "build").await?;
    let url = world.operator().as_ref().context("the operator runs")?.url();
    let get = async |path: &str| -> Result<(u16, Option<String>, String)> {
        let answer = reqwest::get(format!("{url}{path}")).await?;
        let link = answer.headers().get("link").and_then(|link| link.to_str().ok()).map(str::to_owned);
        Ok((answer.status().as_u16(), link, answer.text().await?))
    };
    for path in ["/health", "/readyz", "/metrics", "/usage", "/history", "/jobs", "/workers"] {
        let (status, _, body) = get(path).await?;
        ensure!(status == 200 && !body.is_empty(), "{path} answers {status}");
    }
    ensure!(get("/metrics").await?.2.contains("paddock_leading 1.0"), "it says that it leads");
    // Others have claims and workers too: all of them on one page.
    let claims = get("/jobs.json?start=-1d&per_page=1000").await?.2;
    let claims: Vec<serde_json::Value> = serde_json::from_str(&claims)?;
    let ours = claims.iter().find(|claim| claim["namespace"] == *namespace).context("our claim is listed")?;
    ensure!(ours["phase"] == "Ready" && ours["runId"] == "7600", "{ours}");
    // Workers follow their claim.
    let listed = async || -> Result<Vec<serde_json::Value>> {
        Ok(serde_json::from_str(&get("/workers.json?per_page=1000").await?.2)?)
    };
    let serves = |worker: &serde_json::Value| {
        worker["namespace"] == *namespace && worker["claim"] == "build" && worker["state"] == "running"
    };
    world.until_true("the claim's worker is listed", async || Ok(listed().await?.iter().any(serves))).await?;
    let usage: serde_json::Value = serde_json::from_str(&get("/usage.json").await?.2)?;
    ensure!(usage["pools"].as_array().is_some_and(|pools| !pools.is_empty()), "{usage}");
    let (status, _, body) = get("/jobs.json?page=0").await?;
    ensure!(status == 400 && body.contains("page must be a number from 1"), "{status} {body}");
    let (_, link, body) = get("/workers.json?per_page=1").await?;
    let one: Vec<serde_json::Value> = serde_json::from_str(&body)?;
    ensure!(one.len() == 1, "one worker a page, not {}", one.len());
    ensure!(
        link.is_some_and(|link| link.contains("rel=\"next\"")) || listed().await?.len() == 1,
        "there is a next page"
    );
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}
