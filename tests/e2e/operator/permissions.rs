//! The operator works with the permissions of the chart and no others.

use anyhow::{Result, ensure};
use k8s_openapi::api::{authorization::v1::SubjectAccessReview, rbac::v1::ClusterRole};
use kube::{Api, api::PostParams};
use paddock::api::{ClaimPhase, RunnerClaim};
use paddock_bed::kube::{RELEASE, RELEASE_NAMESPACE};
use serde_json::{Value, json};

use crate::fixture::{ec2_pool::Ec2Pool, world::World};

/// Whether the API server lets a user do this.
async fn allowed(world: &World, user: &str, attributes: Value) -> Result<bool> {
    let spec = json!({ "user": user, "resourceAttributes": attributes });
    let review: SubjectAccessReview = serde_json::from_value(json!({ "metadata": {}, "spec": spec }))?;
    let reviews: Api<SubjectAccessReview> = Api::all(world.stage.kube.client());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

/// Whether the operator may write the status of claims.
async fn may_write_claims(world: &World) -> Result<bool> {
    let operator = format!("system:serviceaccount:{RELEASE_NAMESPACE}:{RELEASE}");
    let write = json!({ "group": "paddock.dev", "resource": "runnerclaims", "subresource": "status", "verb": "patch" });
    allowed(world, &operator, write).await
}

/// A workflow's account with the role of the chart can claim in its namespace. It reads no Secret there, which has the App's
/// private key, and can do nothing else.
pub async fn claimer_can_claim_and_do_nothing_else(world: &World) -> Result<()> {
    let namespace = world.namespace().await?;
    let account = format!("system:serviceaccount:{namespace}:workflow");
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": { "name": "workflow", "namespace": namespace },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "paddock-claimer" },
        "subjects": [{ "kind": "ServiceAccount", "name": "workflow", "namespace": namespace }],
    });
    world.stage.kube.apply(&binding.to_string()).await?;
    let may = async |verb: &str, group: &str, resource: &str, subresource: &str, namespace: &str| {
        let attributes = json!({
            "verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": namespace,
        });
        allowed(world, &account, attributes).await
    };
    let claims = "runnerclaims";
    // RBAC applies a new binding a moment later.
    let bound = async || may("create", "paddock.dev", claims, "", &namespace).await;
    world.until_true("the account may claim", bound).await?;
    for verb in ["delete", "get", "list", "watch"] {
        ensure!(may(verb, "paddock.dev", claims, "", &namespace).await?, "{verb} {claims}");
    }
    for (group, resource, subresource) in [
        ("", "secrets", ""),
        ("", "pods", ""),
        ("", "pods", "log"),
        ("", "configmaps", ""),
        ("", "serviceaccounts", "token"),
        ("paddock.dev", "runnerpools", ""),
        ("paddock.dev", "workers", ""),
        ("paddock.dev", claims, "status"),
    ] {
        for verb in ["get", "list", "create", "patch", "update", "delete"] {
            let allowed = may(verb, group, resource, subresource, &namespace).await?;
            ensure!(!allowed, "it may {verb} {resource}/{subresource}");
        }
    }
    for (verb, namespace) in [("patch", namespace.as_str()), ("update", &namespace), ("create", "default")] {
        ensure!(!may(verb, "paddock.dev", claims, "", namespace).await?, "it may {verb} {claims} in {namespace}");
    }
    Ok(())
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
