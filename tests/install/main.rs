//! The chart and the image as users get them: real Helm installs, upgrades and removes the release, and a real kubelet
//! runs both replicas from the image that the repository builds. There is no AWS, and the pods run under the
//! `restricted` pod security level.

mod release;

use std::{
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, api::DeleteParams};
use libtest_mimic::{Arguments, Trial};
use paddock::api::{RunnerClaim, RunnerPool};
use paddock_bed::{
    isolate::{self, Options},
    kube::{RELEASE, RELEASE_NAMESPACE, TOOLS},
    node,
};
use release::{Bed, CHART, PREVIOUS_CHART, TEAM, file_of, pod_of, process_of, words};
use serde_json::json;
use tokio::runtime::Runtime;

/// The message of a claim for a board that no node has.
const NO_SLOT: &str = "no free slot on board test-board (0 of 0)";

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // All tests share one release, so they run one at a time.
    arguments.test_threads = Some(1);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None, false)).exit_code();
    }
    let tools = [&TOOLS[..], &node::TOOLS].concat();
    let isolated = isolate::enter(Options { tools: &tools, listen: 0 }).expect("a bed of its own");
    if let Err(why) = &isolated.node_possible {
        println!("skipped: {why}");
        return libtest_mimic::run(&arguments, trials(None, true)).exit_code();
    }
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let bed = runtime.block_on(Bed::start(&isolated)).unwrap_or_else(|error| panic!("a bed with a node: {error:?}"));
    libtest_mimic::run(&arguments, trials(Some((Arc::new(bed), runtime)), false)).exit_code()
}

fn trials(bed: Option<(Arc<Bed>, Arc<Runtime>)>, ignored: bool) -> Vec<Trial> {
    macro_rules! trials {
        ($($name:ident),*) => { vec![$({
            let bed = bed.clone();
            Trial::test(stringify!($name), move || {
                let (bed, runtime) = bed.expect("listed or skipped only");
                Ok(runtime.block_on($name(&bed)).map_err(|error| format!("{error:?}"))?)
            })
            .with_ignored_flag(ignored)
        }),*] };
    }
    trials!(
        both_replicas_become_ready_without_aws_and_one_leads,
        webhook_secrets_and_entity_limits_reach_the_operator_as_files,
        a_deleted_leader_hands_over_at_once,
        a_killed_leader_is_replaced_when_its_lease_runs_out,
        the_device_plugin_advertises_the_board_and_labels_its_node,
        an_upgrade_keeps_all_objects_and_so_does_an_uninstall_unless_asked
    )
}

async fn both_replicas_become_ready_without_aws_and_one_leads(bed: &Bed) -> Result<()> {
    let unrestricted = ["run", "any", "--image=any", "--dry-run=server", "--namespace", RELEASE_NAMESPACE];
    // Until the new namespace has a service account, pods are refused for that reason.
    bed.until("the level is enforced", async || {
        let refusal = bed.kubectl(&unrestricted).await.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(refusal.contains("violates PodSecurity \"restricted"), "it is not refused for its level: {refusal}");
        Ok(Some(()))
    })
    .await?;

    for pod in &bed.install(CHART, &[]).await? {
        let environment = words(&process_of(pod)?.join("environ"))?;
        ensure!(!environment.iter().any(|variable| variable.starts_with("AWS_")), "{environment:?}");
    }
    // If the lease changes hands meanwhile, the other pod logs it.
    bed.until("the leader says that it leads, and the follower that it does not", async || {
        let [leader, follower] = &bed.replicas().await?;
        Ok((says(leader, "paddock_leading 1.0").await? && says(follower, "paddock_leading 0.0").await?).then_some(()))
    })
    .await
}

async fn webhook_secrets_and_entity_limits_reach_the_operator_as_files(bed: &Bed) -> Result<()> {
    bed.apply_secret(RELEASE_NAMESPACE, "hooks", json!({ "secrets": "old\nnew\n" })).await?;
    for pod in bed.install(CHART, &["webhook.secretName=hooks", "entityLimits.overrides.1002=0"]).await? {
        let secrets = file_of(&pod, "--webhook-secret-file")?;
        ensure!(secrets == "old\nnew\n", "{secrets}");
    }
    apply_pool(bed).await?;
    apply_claim(bed, "free", 1001).await?;
    apply_claim(bed, "capped", 1002).await?;
    bed.until_claim_says("free", NO_SLOT).await?;
    bed.until_claim_says("capped", "quota 0/0: org-1002 runs as many workers as it may").await?;
    delete_objects(bed).await
}

async fn a_deleted_leader_hands_over_at_once(bed: &Bed) -> Result<()> {
    // Longer than the test can wait for the lease to expire.
    let [leader, _] = bed.install(CHART, &["extraArgs={--lease-duration=1h}"]).await?;
    bed.api::<Pod>(RELEASE_NAMESPACE).delete(&leader.name_any(), &DeleteParams::default()).await?;
    until_another_leads(bed, &leader.name_any()).await
}

async fn a_killed_leader_is_replaced_when_its_lease_runs_out(bed: &Bed) -> Result<()> {
    bed.install(CHART, &["extraArgs={--lease-duration=10s}"]).await?;
    let (leader, mut killed) = bed
        .until("the leader is killed", async || {
            let ([leader, _], identity) = (bed.replicas().await?, bed.identity().await?);
            if pod_of(&identity) != leader.name_any() {
                return Ok(None);
            }
            kill_operator(&leader)?;
            Ok(Some((leader, identity)))
        })
        .await?;
    let name = leader.name_any();
    bed.until(&format!("another pod than {name} has the lease"), async || {
        let identity = bed.identity().await?;
        // On a busy machine the restarted container may get the lease before the other pod: then the other one is
        // killed too and started later.
        if pod_of(&identity) == name && identity != killed {
            kill_operator(&leader)?;
            killed = identity;
            return Ok(None);
        }
        Ok((!identity.is_empty() && pod_of(&identity) != name).then_some(()))
    })
    .await?;
    until_another_leads(bed, &name).await
}

fn kill_operator(pod: &Pod) -> Result<()> {
    let process = process_of(pod)?;
    let pid = process.file_name().context("a process has a number")?;
    ensure!(Command::new("kill").arg("-9").arg(pid).status()?.success(), "the operator could not be killed");
    Ok(())
}

async fn the_device_plugin_advertises_the_board_and_labels_its_node(bed: &Bed) -> Result<()> {
    // There is no board with a device tree here.
    let board = ["devicePlugin.enabled=true", "devicePlugin.board=test-board", "devicePlugin.nodeSelector=null"];
    bed.privileged(async || {
        bed.install(CHART, &board).await?;
        bed.until("the node has a slot and its board's name", async || {
            let node = bed.kube_node().await?;
            let board = node.labels().get("riseproject.dev/board").cloned();
            let slots = node.status.and_then(|status| status.allocatable?.remove("riseproject.com/runner"));
            Ok((board.as_deref() == Some("test-board") && slots.is_some_and(|slots| slots.0 == "1")).then_some(()))
        })
        .await?;
        apply_pool(bed).await?;
        bed.until("the operator counts the slot", async || {
            let status = bed.api::<RunnerPool>(TEAM).get("riscv").await?.status;
            Ok(status.and_then(|status| status.slots).filter(|slots| slots.total == 1))
        })
        .await?;
        delete_objects(bed).await
    })
    .await
}

async fn an_upgrade_keeps_all_objects_and_so_does_an_uninstall_unless_asked(bed: &Bed) -> Result<()> {
    remove_everything(bed).await?;
    let before = bed.install(PREVIOUS_CHART, &[]).await?;
    apply_pool(bed).await?;
    apply_claim(bed, "first", 1001).await?;
    bed.until_claim_says("first", NO_SLOT).await?;
    let objects = uids(bed).await?;

    let after = bed.install(CHART, &[]).await?;
    let names = before.map(|pod| pod.name_any());
    ensure!(after.iter().all(|pod| !names.contains(&pod.name_any())), "the pods were not replaced");
    // The new operator knows the old claim.
    apply_claim(bed, "second", 1001).await?;
    bed.until_claim_says("second", "1 earlier claim comes first").await?;
    bed.until_claim_says("first", NO_SLOT).await?;
    ensure!(uids(bed).await? == objects, "the upgrade replaced objects");

    bed.helm(&["uninstall", "--wait", RELEASE]).await?;
    ensure!(uids(bed).await? == objects, "the uninstall replaced objects");

    // A later release adopts the existing objects.
    bed.install(CHART, &[]).await?;
    remove_everything(bed).await
}

/// Uninstalls as the chart's README describes, until no CRD is left. Does nothing if nothing is installed.
async fn remove_everything(bed: &Bed) -> Result<()> {
    if bed.helm(&["list", "--short"]).await?.is_empty() {
        return Ok(());
    }
    delete_objects(bed).await?;
    bed.install(CHART, &["crds.keep=false"]).await?;
    bed.helm(&["uninstall", "--wait", RELEASE]).await?;
    // CRDs are removed after their remaining objects.
    bed.until("no CRD is left", async || {
        Ok(bed.kubectl(&["get", "crds", "--output=name"]).await?.is_empty().then_some(()))
    })
    .await
}

async fn delete_objects(bed: &Bed) -> Result<()> {
    bed.kubectl(&["delete", "rclaims,rpools", "--all", "--all-namespaces", "--timeout=300s"]).await.map(drop)
}

async fn apply_pool(bed: &Bed) -> Result<()> {
    bed.apply_secret(TEAM, "github", json!({ "github_token": "none that any GitHub knows" })).await?;
    bed.apply(json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerPool", "metadata": { "name": "riscv", "namespace": TEAM },
        "spec": { "board": {
            "board": "test-board", "labels": [["riscv"]], "image": "runner",
            "github": { "credentialsRef": { "name": "github" }, "runnerGroup": "Boards" },
        } },
    }))
    .await
}

async fn apply_claim(bed: &Bed, name: &str, owner: u64) -> Result<()> {
    let login = format!("org-{owner}");
    bed.apply(json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim", "metadata": { "name": name, "namespace": TEAM },
        "spec": {
            "runId": "1", "labels": ["riscv"], "repository": format!("{login}/rocket"),
            "owner": { "id": owner, "login": login, "type": "Organization" },
        },
    }))
    .await
}

/// The UIDs of the pool and the first claim, which distinguish them from recreated ones.
async fn uids(bed: &Bed) -> Result<[Option<String>; 2]> {
    let (pool, claim) =
        (bed.api::<RunnerPool>(TEAM).get("riscv").await?, bed.api::<RunnerClaim>(TEAM).get("first").await?);
    Ok([pool.uid(), claim.uid()])
}

async fn until_another_leads(bed: &Bed, before: &str) -> Result<()> {
    bed.until(&format!("another pod than {before} leads, and says so"), async || {
        let (holder, pods) = (bed.holder().await?, bed.pods().await?);
        let Some(leader) = pods.into_iter().find(|pod| pod.name_any() == holder && holder != before) else {
            return Ok(None);
        };
        Ok(says(&leader, "paddock_leading 1.0").await?.then_some(()))
    })
    .await
}

/// Whether the line is among a pod's metrics.
async fn says(pod: &Pod, line: &str) -> Result<bool> {
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
    let request = reqwest::Client::new().get(format!("http://{address}:8080/metrics"));
    // Connections to a deleted pod time out instead of being refused.
    let answer = request.timeout(Duration::from_secs(10)).send().await?;
    Ok(answer.text().await?.lines().any(|said| said == line))
}
