//! What the operator writes to the API server: nothing is too long for it, and a refusal is not repeated without end.

use anyhow::{Result, ensure};
use jiff::Timestamp;
use kube::{
    api::{Patch, PatchParams},
    core::Request,
};
use paddock::api::{ClaimPhase, FailureReason, RunnerClaim, Worker};
use paddock_record::{Signal, State, WorkerSignal};
use serde_json::json;

use crate::fixture::{
    ec2_pool::{Ec2Pool, never_done, why},
    world::World,
};

/// More than an Event, a condition or a Worker may contain. DynamoDB takes up to 400 KB.
const LONG_DETAIL: usize = 300_000;

/// A machine may report an error of any length: it is cut, and shown in the claim, an Event and the Worker.
pub async fn long_error_of_a_machine_is_cut_and_shown(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "preRunnerScript": never_done() })).await?;
    pool.claim("build", "9600", json!({})).await?;
    let id = pool.the(State::Created).await?;
    let detail = format!("no disk {}", "\u{1F4BE}".repeat(LONG_DETAIL / 4));
    pool.cloud
        .forge(&WorkerSignal { detail, ..WorkerSignal::new(&id, Signal::ScriptFailed, "9600", 1, Timestamp::now()) })
        .await?;
    let failed = pool.until_phase("build", ClaimPhase::Failed).await?;
    let (reason, message) = why(&failed);
    ensure!(reason == "ValidationFailed" && message.contains("no disk"), "{reason}: {message}");
    ensure!(message.len() < LONG_DETAIL / 10, "the message has {} bytes", message.len());
    pool.until_event("build", "ValidationFailed").await?;
    pool.until_ended(&id, FailureReason::CreationAborted).await?;
    let worker = world.api::<Worker>(&pool.namespace).get(&id).await?;
    ensure!(worker.status.is_some_and(|status| status.failure.is_some()), "the Worker says why it ended");
    pool.release("build").await?;
    pool.clean_up().await
}

/// A status that the API server refuses is tried less and less often and logged once; the claim goes on when the
/// refusal ends.
pub async fn refused_status_is_logged_once_and_written_later(world: &World) -> Result<()> {
    let pool = Ec2Pool::new(world, json!({ "minIdle": 1, "maxInstances": 1 })).await?;
    let policy = Policy { pool: &pool, name: format!("refuse-{}", pool.namespace) };
    pool.claim("probe", "9700", json!({ "pool": "missing" })).await?;
    policy.enforce().await?;
    let probed = policy.refusals().await?;
    pool.claim("build", "9701", json!({})).await?;
    let refusals = async || Ok(policy.refusals().await? >= probed + 3);
    world.until_true("the status was refused three times", refusals).await?;
    let log = world.operator_log();
    let logged =
        |line: &&str| line.contains("reconciliation failed") && line.contains(&format!("build.{}", pool.namespace));
    let lines: Vec<_> = log.lines().filter(logged).collect();
    ensure!(lines.len() == 1, "a refusal that repeats itself is logged once: {lines:#?}");
    policy.lift().await?;
    // A change of the claim ends the wait.
    let touch = Patch::Merge(json!({ "metadata": { "annotations": { "touched": "yes" } } }));
    world.api::<RunnerClaim>(&pool.namespace).patch("build", &PatchParams::default(), &touch).await?;
    pool.until_phase("build", ClaimPhase::Ready).await?;
    pool.release("probe").await?;
    pool.release("build").await?;
    pool.clean_up().await
}

/// Refuses every change of a claim's status in the pool's namespace.
struct Policy<'a> {
    pool: &'a Ec2Pool<'a>,
    name: String,
}

impl Policy<'_> {
    /// Creates the policy, and waits until the API server enforces it: it does so a moment later.
    async fn enforce(&self) -> Result<()> {
        let (kube, name, namespace) = (&self.pool.world.stage.kube, &self.name, &self.pool.namespace);
        let kind = |kind: &str, spec: serde_json::Value| {
            json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": { "name": name },
                "spec": spec })
        };
        let rule = json!({ "apiGroups": ["paddock.dev"], "apiVersions": ["*"], "operations": ["UPDATE"],
            "resources": ["runnerclaims/status"] });
        let refuse =
            json!([{ "expression": format!("object.metadata.namespace != '{namespace}'"), "message": "frozen" }]);
        let policy = json!({ "failurePolicy": "Fail", "matchConstraints": { "resourceRules": [rule] },
            "validations": refuse });
        let binding = json!({ "policyName": name, "validationActions": ["Deny"] });
        kube.apply(&kind("ValidatingAdmissionPolicy", policy).to_string()).await?;
        kube.apply(&kind("ValidatingAdmissionPolicyBinding", binding).to_string()).await?;
        let claims = self.pool.world.api::<RunnerClaim>(namespace);
        let change = Patch::Merge(json!({ "status": { "ready": 0 } }));
        let probe = PatchParams { dry_run: true, ..PatchParams::default() };
        let enforced = async || Ok(claims.patch_status("probe", &probe, &change).await.is_err());
        self.pool.world.until_true("the policy is enforced", enforced).await
    }

    /// How often it has refused something.
    async fn refusals(&self) -> Result<u64> {
        let request = axum::http::Request::get("/metrics").body(Vec::new())?;
        let metrics = self.pool.world.stage.kube.client().request_text(request).await?;
        let counts = metrics.lines().filter(|line| {
            line.starts_with("apiserver_validating_admission_policy_check_total") && line.contains(&self.name)
        });
        Ok(counts.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum::<f64>() as u64)
    }

    async fn lift(&self) -> Result<()> {
        let client = self.pool.world.stage.kube.client();
        for kind in ["validatingadmissionpolicybindings", "validatingadmissionpolicies"] {
            let path = format!("/apis/admissionregistration.k8s.io/v1/{kind}");
            client.request_text(Request::new(path).delete(&self.name, &Default::default())?).await?;
        }
        Ok(())
    }
}
