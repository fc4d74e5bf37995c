//! What happens to claims when something happens to the operator, its rights or the API server.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{authorization::v1::SubjectAccessReview, coordination::v1::Lease, rbac::v1::ClusterRole};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use paddock::api::{RunnerClaim, RunnerPool};
use paddock_bed::{
    kube::{RELEASE, RELEASE_NAMESPACE},
    process::Signal,
};
use serde_json::{Value, json};

use crate::{
    ec2::{clean_up, is_ready},
    linux::patient,
    support::World,
};

async fn warm_pool(world: &World, namespace: &str) -> Result<()> {
    let pool = world.stage.ec2_pool(namespace, "linux", patient(json!({ "minIdle": 1 })));
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
    let before = world.operator_log().len();
    world.until_true("the first replica leads", async || Ok(leader(world).await? == "operator")).await?;
    // It is not started again when its lease is lost, so that lasts longer.
    let second = world.stage.operator("second", &["--lease-duration", "15s"]).await?;
    world.operator().as_ref().context("the first replica")?.signal(Signal::SIGSTOP)?;
    let served = async {
        world.until_true("the second replica leads", async || Ok(leader(world).await? == "second")).await?;
        claim(world, &namespace, "build", "7300").await?;
        until_ready(world, &namespace, "build").await
    };
    let served = served.await;
    world.operator().as_ref().context("the first replica")?.signal(Signal::SIGCONT)?;
    served?;
    // The log has what earlier replicas of the name said, too.
    let ended = async || Ok(world.operator_log().get(before..).is_some_and(|log| log.contains("the lease was lost")));
    world.until_true("the first replica ended and said why", ended).await?;
    ensure!(leader(world).await? == "second", "the second replica still leads");

    // A leader that is asked to end gives its lease up, and the next one leads at once.
    second.stop().await?;
    world.until_true("the new replica leads", async || Ok(leader(world).await? == "operator")).await?;
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}

/// Whether the API server lets the operator write the status of claims.
async fn may_write_claims(world: &World) -> Result<bool> {
    let review: SubjectAccessReview = serde_json::from_value(json!({
        "metadata": {},
        "spec": {
            "user": format!("system:serviceaccount:{RELEASE_NAMESPACE}:{RELEASE}"),
            "resourceAttributes": {
                "group": "paddock.dev", "resource": "runnerclaims", "subresource": "status", "verb": "patch",
            },
        },
    }))?;
    let reviews: Api<SubjectAccessReview> = Api::all(world.stage.kube.client());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
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
    ensure!(may_write_claims(world).await?, "the operator has the right");
    roles.replace(&name, &PostParams::default(), &reduced).await?;
    let missed = async {
        // The API server goes by a changed role a moment later.
        world.until_true("the right is gone", async || Ok(!may_write_claims(world).await?)).await?;
        claim(world, &namespace, "build", "7400").await?;
        let said = format!("cannot write the status of RunnerClaim {namespace}/build");
        let told = async || Ok(world.operator_log().contains(&said));
        world.until_true("the operator misses its right", told).await?;
        let stuck = world.api::<RunnerClaim>(&namespace).get("build").await?;
        ensure!(stuck.status.is_none(), "nothing could be written: {:?}", stuck.status);
        anyhow::Ok(())
    };
    let missed = missed.await;

    let mut restored = roles.get(&name).await?;
    restored.rules = whole.rules;
    roles.replace(&name, &PostParams::default(), &restored).await?;
    missed?;
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

struct Page {
    status: u16,
    link: Option<String>,
    body: String,
}

impl Page {
    async fn get(url: &str) -> Result<Self> {
        let answer = reqwest::get(url).await?;
        let link = answer.headers().get("link").and_then(|link| link.to_str().ok()).map(str::to_owned);
        Ok(Self { status: answer.status().as_u16(), link, body: answer.text().await? })
    }

    /// The rows of a page in JSON; none where it is something else.
    fn rows(&self) -> Vec<Value> {
        serde_json::from_str(&self.body).unwrap_or_default()
    }

    fn has_next(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.contains("rel=\"next\""))
    }
}

/// Waits until a page is as `wanted`. What it shows follows behind the API server, and an operator that starts again does
/// not answer for a moment.
async fn until_page(world: &World, path: &str, wanted: impl Fn(&Page) -> bool) -> Result<Page> {
    let url = format!("{}{path}", world.url());
    let (mut found, mut last) = (None, String::new());
    let shown = async || {
        match Page::get(&url).await {
            Ok(page) if wanted(&page) => found = Some(page),
            Ok(page) => last = format!("{} {}", page.status, page.body),
            Err(error) => last = format!("{error:#}"),
        }
        Ok(found.is_some())
    };
    let outcome = world.until_true(&format!("{path} shows what it should"), shown).await;
    outcome.with_context(|| format!("{path} last answered {last}"))?;
    found.context("the page was waited for")
}

/// The pages tell what the cluster has, in HTML and in JSON, page by page.
pub async fn dashboards_show_what_goes_on(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    warm_pool(world, &namespace).await?;
    claim(world, &namespace, "build", "7600").await?;
    until_ready(world, &namespace, "build").await?;
    let answers = |page: &Page| page.status == 200 && !page.body.is_empty();
    for path in ["/health", "/readyz", "/metrics", "/usage", "/history", "/jobs", "/workers"] {
        until_page(world, path, answers).await?;
    }
    let leads = |page: &Page| page.body.contains("paddock_leading 1.0");
    until_page(world, "/metrics", leads).await.context("it says that it leads")?;
    // Others have claims and workers too: all of them on one page.
    let ours =
        |claim: &Value| claim["namespace"] == *namespace && claim["phase"] == "Ready" && claim["runId"] == "7600";
    let listed = |page: &Page| page.rows().iter().any(ours);
    until_page(world, "/jobs.json?start=-1d&per_page=1000", listed).await.context("our claim is listed")?;
    // Workers follow their claim.
    let serves = |worker: &Value| {
        worker["namespace"] == *namespace && worker["claim"] == "build" && worker["state"] == "running"
    };
    let listed = |page: &Page| page.rows().iter().any(serves);
    until_page(world, "/workers.json?per_page=1000", listed).await.context("the claim's worker is listed")?;
    let counted = |page: &Page| {
        let usage: Value = serde_json::from_str(&page.body).unwrap_or_default();
        usage["pools"].as_array().is_some_and(|pools| !pools.is_empty())
    };
    until_page(world, "/usage.json", counted).await?;
    let refused = |page: &Page| page.status == 400 && page.body.contains("page must be a number from 1");
    until_page(world, "/jobs.json?page=0", refused).await?;
    // Workers come and go between two answers.
    let paged = async || {
        let one = until_page(world, "/workers.json?per_page=1", answers).await?;
        let all = until_page(world, "/workers.json?per_page=1000", answers).await?;
        Ok(one.rows().len() == 1 && (one.has_next() || all.rows().len() == 1))
    };
    world.until_true("there is one worker a page, and a next page if there are more", paged).await?;
    release(world, &namespace, "build").await?;
    clean_up(world, &namespace, "linux").await
}
