//! The operator's pages.

use anyhow::{Context, Result};
use paddock::api::ClaimPhase;
use serde_json::{Value, json};

use crate::fixture::{ec2_pool::Ec2Pool, page::Page, world::World};

/// The pages show what the cluster has, in HTML and in JSON, page by page.
pub async fn dashboards_show_pools_claims_and_workers(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1 })).await?;
    let namespace = &pool.namespace;
    pool.claim("build", "7600", json!({})).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    let answers = |page: &Page| page.status == 200 && !page.body.is_empty();
    for path in ["/health", "/readyz", "/metrics", "/usage", "/history", "/jobs", "/workers"] {
        Page::until(world, path, answers).await?;
    }
    let leads = |page: &Page| page.body.contains("paddock_leading 1.0");
    Page::until(world, "/metrics", leads).await.context("the metric of the leader")?;
    // Other tests have claims and workers too: all of them on one page.
    let own =
        |claim: &Value| claim["namespace"] == **namespace && claim["phase"] == "Ready" && claim["runId"] == "7600";
    let listed = |page: &Page| page.rows().iter().any(own);
    Page::until(world, "/jobs.json?start=-1d&per_page=1000", listed).await.context("the claim is listed")?;
    // Workers follow their claim.
    let serves = |worker: &Value| {
        worker["namespace"] == **namespace && worker["claim"] == "build" && worker["state"] == "running"
    };
    let listed = |page: &Page| page.rows().iter().any(serves);
    Page::until(world, "/workers.json?per_page=1000", listed).await.context("the claim's worker is listed")?;
    let counted = |page: &Page| {
        let usage: Value = serde_json::from_str(&page.body).unwrap_or_default();
        usage["pools"].as_array().is_some_and(|pools| !pools.is_empty())
    };
    Page::until(world, "/usage.json", counted).await?;
    let refused = |page: &Page| page.status == 400 && page.body.contains("page must be a number from 1");
    Page::until(world, "/jobs.json?page=0", refused).await?;
    // Workers come and go between two requests.
    let paged = async || {
        let one = Page::until(world, "/workers.json?per_page=1", answers).await?;
        let all = Page::until(world, "/workers.json?per_page=1000", answers).await?;
        Ok(one.rows().len() == 1 && (one.has_next() || all.rows().len() == 1))
    };
    world.until_true("a page has one worker, and a next page if there are more", paged).await?;
    pool.release("build").await?;
    pool.clean_up().await
}
