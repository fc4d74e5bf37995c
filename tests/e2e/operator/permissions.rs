//! The operator works with the permissions of the chart and no others.

use anyhow::{Result, ensure};
use k8s_openapi::api::{authorization::v1::SubjectAccessReview, rbac::v1::ClusterRole};
use kube::{Api, api::PostParams};
use paddock::api::{ClaimPhase, RunnerClaim};
use paddock_bed::kube::{RELEASE, RELEASE_NAMESPACE};
use serde_json::json;

use crate::fixture::{ec2_pool::Ec2Pool, world::World};

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

/// Without the permission to write a claim's status the claim stays as it is, the log says why, and it is served once
/// the permission is back.
pub async fn claim_waits_while_the_operator_lacks_a_permission(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1 })).await?;
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
    ensure!(may_write_claims(world).await?, "the operator has the permission");
    roles.replace(&name, &PostParams::default(), &reduced).await?;
    let denied = async {
        // The API server applies a changed role a moment later.
        world.until_true("the permission is gone", async || Ok(!may_write_claims(world).await?)).await?;
        pool.claim("build", "7400", json!({})).await?;
        let line = format!("cannot write the status of RunnerClaim {}/build", pool.namespace);
        let logged = async || Ok(world.operator_log().contains(&line));
        world.until_true("the operator logs the missing permission", logged).await?;
        let claim = world.api::<RunnerClaim>(&pool.namespace).get("build").await?;
        ensure!(claim.status.is_none(), "nothing could be written: {:?}", claim.status);
        anyhow::Ok(())
    };
    let denied = denied.await;

    let mut restored = roles.get(&name).await?;
    restored.rules = whole.rules;
    roles.replace(&name, &PostParams::default(), &restored).await?;
    denied?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("build").await?;
    pool.clean_up().await
}
