//! That the Rust types and the schemas mean the same.

use std::{fmt::Debug, sync::Arc};

use anyhow::{Result, ensure};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Resource,
    api::{Patch, PatchParams, PostParams, ValidationDirective},
};
use libtest_mimic::Trial;
use paddock::api::{
    self, ClaimPhase, ClaimReason, ClaimWorker, ClassTypes, ContainerEnd, Failure, FailureReason, Heartbeat,
    HeartbeatState, IncludedTypes, InstanceInfo, Interruption, LaunchOrder, LaunchTemplate, OrderSubnet, PodEvent,
    PodPlace, PoolKind, PoolReason, Queue, Rerun, RerunOutcome, Runner, RunnerClaim, RunnerClaimStatus, RunnerPool,
    RunnerPoolStatus, RunnerRelease, Slots, UsageClass, Worker, WorkerCounts, WorkerSource, WorkerState, WorkerStatus,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{Shared, cases, test};

pub fn tests(shared: &Arc<Shared>) -> Vec<Trial> {
    vec![
        test(shared, "types::defaults_of_the_server_are_those_of_the_types", defaults_agree),
        test(shared, "types::every_field_survives_the_types", specs_survive),
        test(shared, "types::null_is_the_same_as_leaving_out", null_is_absent),
        test(shared, "types::statuses_are_stored_as_the_types_write_them", statuses_survive),
        test(shared, "types::status_and_spec_are_written_apart", status_is_apart),
        test(shared, "types::phases_and_states_outside_the_contract_are_refused", unknown_states),
    ]
}

/// What the server makes of the least that it accepts is what the types make of it.
async fn defaults_agree(shared: Arc<Shared>) -> Result<()> {
    async fn check<T: DeserializeOwned + Serialize>(shared: &Shared, least: Value) -> Result<Value> {
        let stored = shared.server().create(&least, true).await.map_err(anyhow::Error::msg)?;
        let typed = serde_json::to_value(serde_json::from_value::<T>(least)?)?;
        ensure!(stored["spec"] == typed["spec"], "server: {}\ntypes: {}", stored["spec"], typed["spec"]);
        Ok(stored)
    }
    let object = |kind, name, spec| {
        json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec,
        })
    };
    let pool = check::<RunnerPool>(
        &shared,
        object(
            "RunnerPool",
            "least-ec2",
            json!({ "ec2": {
        "ami": { "id": "ami-01234567" }, "instanceProfile": "runner", "securityGroupIds": ["sg-01234567"],
        "subnetIds": ["subnet-01234567"],
        "agent": { "url": "https://example.com/agent", "sha256": "0".repeat(64) },
        "resourceClasses": [{ "name": "small", "cpu": 2, "memoryMiB": 4096 }],
        "github": { "owner": "my-org", "credentialsRef": { "name": "github-app" } },
    } }),
        ),
    )
    .await?;
    let ec2 = &pool["spec"]["ec2"];
    ensure!(
        ec2["lifetimes"] == json!({ "created": "10m", "claimed": "5m", "idle": "7m", "maxRuntime": "6h" }),
        "{ec2}"
    );
    ensure!(ec2["defaults"] == json!({ "usageClass": "on-demand", "allowedInstanceTypes": ["*"] }), "{ec2}");
    ensure!(ec2["minIdle"] == 0 && ec2["fallback"]["spotToOnDemand"] == false, "{ec2}");
    ensure!(ec2["reuse"]["scope"] == "Repository", "{ec2}");

    let pool = check::<RunnerPool>(&shared, object("RunnerPool", "least-board", json!({ "board": {
        "board": "rv1", "labels": [["riscv"]], "image": "runner", "github": { "credentialsRef": { "name": "github-app" } },
        "timeouts": { "idle": "1h" },
    } })))
    .await?;
    let board = &pool["spec"]["board"];
    ensure!(board["github"]["runnerGroup"] == "Paddock" && board["activeDeadline"] == "146h", "{board}");
    ensure!(board["timeouts"]["registration"] == "2m" && board["timeouts"]["idle"] == "1h", "{board}");

    let claim = object("RunnerClaim", "least", json!({ "pool": "linux", "runId": "1" }));
    ensure!(check::<RunnerClaim>(&shared, claim).await?["spec"]["count"] == 1, "one runner");
    Ok(())
}

async fn specs_survive(shared: Arc<Shared>) -> Result<()> {
    fn through<T: DeserializeOwned + Serialize>(object: &Value) -> Result<Value> {
        Ok(serde_json::to_value(serde_json::from_value::<T>(object.clone())?)?)
    }
    for object in cases::whole()? {
        let typed = match object["kind"].as_str() {
            Some("RunnerPool") => through::<RunnerPool>(&object)?,
            Some("RunnerClaim") => through::<RunnerClaim>(&object)?,
            _ => through::<Worker>(&object)?,
        };
        let stored = shared.server().create(&typed, true).await.map_err(anyhow::Error::msg)?;
        ensure!(stored["spec"] == typed["spec"], "server: {}\ntypes: {}", stored["spec"], typed["spec"]);
        ensure!(paths(&object["spec"]) == paths(&typed["spec"]), "the types drop a field of {}", object["spec"]);
    }
    Ok(())
}

/// Where the values are, whatever they are: the types may write `525600s` as `146h`.
fn paths(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            fields.iter().flat_map(|(k, v)| paths(v).into_iter().map(move |path| format!("{k}.{path}"))).collect()
        }
        _ => vec![String::new()],
    }
}

async fn null_is_absent(shared: Arc<Shared>) -> Result<()> {
    let mut pool = cases::objects()?["ec2-pool"].clone();
    pool["spec"]["board"] = Value::Null;
    pool["spec"]["ec2"]["minIdle"] = Value::Null;
    pool["spec"]["ec2"]["reuse"]["maxClaims"] = Value::Null;
    let stored = shared.server().create(&pool, true).await.map_err(anyhow::Error::msg)?;
    ensure!(stored["spec"].get("board").is_none() && stored["spec"]["ec2"]["minIdle"] == 0, "{}", stored["spec"]);
    ensure!(stored["spec"]["ec2"]["reuse"].get("maxClaims").is_none(), "{}", stored["spec"]);
    Ok(())
}

async fn statuses_survive(shared: Arc<Shared>) -> Result<()> {
    let now: Timestamp = "2025-05-31T12:00:00Z".parse()?;
    let time = || Some(Time(now));
    let ready = |reason: &'static str| vec![api::ready_condition(true, reason, "for a person", Some(1), now)];
    let counts = WorkerCounts {
        created: 1,
        running: 2,
        idle: 3,
        claimed: 4,
        terminated: 5,
        pending: 6,
        completed: 7,
        failed: 8,
    };
    let fleet = LaunchOrder {
        client_token: "t".repeat(64),
        attempt: 1,
        requested: 2,
        usage_class: UsageClass::Spot,
        ordered_at: Time(now),
        launch_template: LaunchTemplate {
            id: "lt-1".into(),
            version: 1,
            digest: Some("d".into()),
            image: Some("ami-1".into()),
        },
        subnets: vec![OrderSubnet { id: "subnet-12345678".into(), zone: "us-east-1a".into() }],
        resource_class: "small".into(),
        cpu: 2,
        memory_mib: 4096,
        allowed_instance_types: vec!["c7*".into()],
        include: IncludedTypes { any_price: true, burstable: true, bare_metal: true },
        allocation_strategy: "price-capacity-optimized".into(),
        tags: [("paddock:pool".to_owned(), "ci/linux".to_owned())].into(),
        fleet_id: Some("fleet-1".into()),
        instance_ids: vec!["i-1".into()],
    };
    let pool = RunnerPoolStatus {
        kind: Some(PoolKind::Ec2),
        workers: counts,
        outdated: 1,
        slots: Some(Slots::new(4, 3)),
        queues: vec![Queue { resource_class: "small".into(), url: "http://127.0.0.1/queue".into() }],
        classes: vec![ClassTypes { name: "small".into(), instance_types: 12 }],
        launch_template: Some(LaunchTemplate {
            id: "lt-01234567".into(),
            version: 3,
            digest: Some("d".into()),
            image: Some("ami-1".into()),
        }),
        runner: Some(RunnerRelease {
            version: "2.330.0".into(),
            latest: "2.336.0".into(),
            newer_since: time(),
            deadline: time(),
        }),
        fleet: Some(fleet.clone().into()),
        conditions: ready(PoolReason::Ready.as_str()),
        observed_generation: Some(1),
    };
    store(&shared, "ec2-pool", "status-pool", pool, |pool: RunnerPool| pool.status).await?;

    let mut claim = RunnerClaimStatus {
        pool: Some("linux".into()),
        workers: (0..512)
            .map(|number| ClaimWorker {
                name: format!("i-{number}"),
                state: WorkerState::Idle,
                source: WorkerSource::Created,
            })
            .collect(),
        fleet: Some(fleet.into()),
        interruptions: vec![Interruption { worker: "i-1".into(), since: Time(now) }],
        rerun: Some(Box::new(Rerun {
            attempt: Some(1),
            requested_at: time(),
            jobs: 2,
            claim: Some("c".repeat(63)),
            tries: 3,
            retry_at: time(),
            outcome: Some(RerunOutcome::Unneeded),
            message: api::head(&"m".repeat(10_000), api::RERUN_MESSAGE_MAX),
        })),
        runner: Some(Runner { id: Some(1), name: "runner".into() }),
        retry_at: time(),
        conditions: ready(ClaimReason::Ready.as_str()),
        observed_generation: Some(1),
        ..Default::default()
    };
    use ClaimPhase::{Claiming, Completed, Creating, Failed, Pending, Ready, Releasing, Validating};
    for phase in [Pending, Claiming, Creating, Validating, Ready, Releasing, Completed, Failed] {
        claim.enter(phase, now);
    }
    claim.set_progress(2, 2);
    store(&shared, "ec2-claim", "status-claim", claim, |claim: RunnerClaim| claim.status).await?;

    let mut worker = WorkerStatus {
        state: Some(WorkerState::Failed),
        state_since: time(),
        claim: Some("claim".into()),
        run_id: Some("1".into()),
        threshold: time(),
        heartbeat: Some(Heartbeat { state: HeartbeatState::Stale, since: Time(now) }),
        reclaimed: true,
        runner: Some(Runner { id: None, name: "runner".into() }),
        claims_served: 3,
        scope: Some("s".repeat(api::SCOPE_MAX)),
        failure: Some(Box::new(Failure {
            reason: FailureReason::PodFailed,
            message: api::clip(&"m".repeat(10_000), api::FAILURE_MESSAGE_MAX),
            containers: vec![ContainerEnd {
                name: "runner".into(),
                exit_code: Some(137),
                reason: Some("OOMKilled".into()),
                message: Some("m".into()),
            }],
            events: vec![PodEvent { at: time(), reason: "Killing".into(), message: "m".into(), count: 2 }],
            log_tail: Some(api::clip(&"\u{0}ü$(x)\n".repeat(10_000), api::LOG_TAIL_MAX)),
        })),
        conditions: ready("Ready"),
        observed_generation: Some(1),
        ..Default::default()
    };
    worker.set_pod(PodPlace { name: "pod".into(), node: Some("node".into()) });
    worker.set_instance(InstanceInfo {
        id: "i-01234567".into(),
        type_: "c7i.large".into(),
        usage_class: UsageClass::OnDemand,
        resource_class: "small".into(),
        zone: "eu-west-1a".into(),
    });
    store(&shared, "whole-pod", "status-worker", worker, |worker: Worker| worker.status).await
}

/// Writes the status by server-side apply, as the operator does, twice: it comes back whole, and the second time
/// nothing is written.
async fn store<T, S>(shared: &Shared, from: &str, name: &str, status: S, of: fn(T) -> Option<S>) -> Result<()>
where
    T: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + Serialize
        + DeserializeOwned
        + Debug,
    S: Clone + Default + PartialEq + Serialize + Debug,
{
    let api: Api<T> = Api::namespaced(shared.server().client.clone(), "default");
    let mut object = cases::objects()?[from].clone();
    object["metadata"] = json!({ "name": name });
    api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    let params = PatchParams {
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::apply(api::FIELD_MANAGER).force()
    };
    let patch = json!({ "apiVersion": T::api_version(&()), "kind": T::kind(&()), "status": status });
    let stored = api.patch_status(name, &params, &Patch::Apply(&patch)).await?;
    let version = stored.meta().resource_version.clone();
    let stored = of(stored).unwrap_or_default();
    ensure!(stored == status, "written: {status:?}\nstored: {stored:?}");
    let again = api.patch_status(name, &params, &Patch::Apply(&patch)).await?;
    ensure!(again.meta().resource_version == version, "the same status was written twice");
    api.delete(name, &Default::default()).await?;
    Ok(())
}

async fn status_is_apart(shared: Arc<Shared>) -> Result<()> {
    let mut claim = cases::objects()?["ec2-claim"].clone();
    claim["metadata"]["name"] = json!("apart");
    claim["status"] = json!({ "phase": "Ready" });
    let stored = shared.server().create(&claim, false).await.map_err(anyhow::Error::msg)?;
    ensure!(stored.get("status").is_none(), "a user cannot set the status: {stored}");
    let patch = json!({ "spec": { "count": 7 }, "status": { "phase": "Pending" } });
    let stored = shared.server().patch(&claim, Some("status"), &patch).await.map_err(anyhow::Error::msg)?;
    ensure!(stored["spec"]["count"] == 2 && stored["status"]["phase"] == "Pending", "{stored}");
    ensure!(stored["metadata"]["generation"] == 1, "a status is no new generation: {stored}");
    shared.server().delete(&claim).await
}

async fn unknown_states(shared: Arc<Shared>) -> Result<()> {
    for (from, status) in [
        ("ec2-claim", json!({ "phase": "Running" })),
        ("whole-machine", json!({ "state": "Idle" })),
        ("whole-machine", json!({ "failure": { "reason": "bad luck" } })),
    ] {
        let mut object = cases::objects()?[from].clone();
        object["metadata"]["name"] = json!("states");
        shared.server().create(&object, false).await.map_err(anyhow::Error::msg)?;
        let answer = shared.server().patch(&object, Some("status"), &json!({ "status": status })).await;
        shared.server().delete(&object).await?;
        let message = answer.err().unwrap_or_default();
        ensure!(message.contains("Unsupported value"), "{status}: {message}");
    }
    Ok(())
}
