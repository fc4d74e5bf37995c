//! What a person with `kubectl` sees.

use std::{fs, sync::Arc};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::{Shared, cases, server::root, test};

/// A terminal of the usual width shows a table without breaking its lines.
const WIDTH: usize = 100;

pub fn tests(shared: &Arc<Shared>) -> Vec<Trial> {
    vec![
        test(shared, "kubectl::examples_apply_as_they_stand", examples_apply),
        test(shared, "kubectl::the_claim_of_the_example_workflow_applies", workflow_claim_applies),
        test(shared, "kubectl::unknown_fields_are_refused_by_default_and_dropped_on_request", unknown_fields),
        test(shared, "kubectl::wait_for_ready_returns_when_the_condition_is_true", wait_for_ready),
        test(shared, "kubectl::a_hundred_workers_fit_the_terminal", workers_table),
        test(shared, "kubectl::claims_show_phase_progress_and_reason", claims_table),
        test(shared, "kubectl::pools_show_counts_slots_and_readiness", pools_table),
        test(shared, "kubectl::short_names_and_the_category_work", short_names),
        test(shared, "kubectl::field_selectors_filter_on_the_server", field_selectors),
        test(shared, "kubectl::explain_says_what_the_reference_says", explain),
    ]
}

async fn examples_apply(shared: Arc<Shared>) -> Result<()> {
    let examples = root().join("examples");
    let text =
        shared.server().kubectl_text(&["apply", "--dry-run=server", "-f", examples.to_str().context("path")?])?;
    let manifests =
        fs::read_dir(examples)?.filter(|file| file.as_ref().is_ok_and(|file| file.path().is_file())).count();
    ensure!(text.lines().count() == manifests && manifests >= 5, "{manifests} files: {text}");
    Ok(())
}

async fn workflow_claim_applies(shared: Arc<Shared>) -> Result<()> {
    let workflow: Value = serde_saphyr::from_str(&fs::read_to_string(root().join("examples/workflow/ci.yaml"))?)?;
    let script = workflow["jobs"]["claim"]["steps"][0]["run"].as_str().context("the script of the first step")?;
    let (_, rest) = script.split_once("<<EOF\n").context("a here-document")?;
    let (manifest, _) = rest.split_once("\nEOF\n").context("its end")?;
    let manifest = manifest
        .replace("$GITHUB_RUN_ID", "9876543210")
        .replace("$GITHUB_RUN_ATTEMPT", "1")
        .replace("$GITHUB_REPOSITORY", "my-org/my-repo");
    let access = fs::read_to_string(root().join("examples/workflow/access.yaml"))?;
    for manifest in [manifest, access] {
        let created = shared.server().kubectl(&["create", "--dry-run=server", "-f", "-"], &manifest)?;
        ensure!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    }
    ensure!(workflow["jobs"]["build"]["runs-on"] == "${{ github.run_id }}", "the build runs on the claimed machines");
    Ok(())
}

async fn unknown_fields(shared: Arc<Shared>) -> Result<()> {
    let mut claim = cases::objects()?["ec2-claim"].clone();
    claim["spec"]["cuont"] = json!(3);
    let manifest = claim.to_string();
    let refused = shared.server().kubectl(&["apply", "--dry-run=server", "-f", "-"], &manifest)?;
    let message = String::from_utf8(refused.stderr)?;
    ensure!(!refused.status.success() && message.contains(r#"unknown field "spec.cuont""#), "{message}");
    let args = ["create", "--dry-run=server", "--validate=ignore", "-o", "json", "-f", "-"];
    let accepted = shared.server().kubectl(&args, &manifest)?;
    let stored: Value = serde_json::from_slice(&accepted.stdout)?;
    ensure!(stored["spec"].get("cuont").is_none() && stored["spec"]["count"] == 2, "{stored}");
    Ok(())
}

async fn wait_for_ready(shared: Arc<Shared>) -> Result<()> {
    let claim = named("ec2-claim", "waited-for")?;
    let server = shared.server();
    server.create(&claim, false).await.map_err(anyhow::Error::msg)?;
    let wait = |seconds| server.kubectl(&["wait", "--for=condition=Ready", "rclaim/waited-for", seconds], "");
    server
        .patch(&claim, Some("status"), &ready("False", "NoFreeSlot", "no free slot"))
        .await
        .map_err(anyhow::Error::msg)?;
    ensure!(!wait("--timeout=1s")?.status.success(), "it is not ready yet");
    server.patch(&claim, Some("status"), &ready("True", "Ready", "2 of 2")).await.map_err(anyhow::Error::msg)?;
    let waited = wait("--timeout=60s")?;
    ensure!(waited.status.success(), "{}", String::from_utf8_lossy(&waited.stderr));
    server.delete(&claim).await
}

async fn workers_table(shared: Arc<Shared>) -> Result<()> {
    let server = shared.server();
    let objects = cases::objects()?;
    for number in 0..100 {
        let (from, name, status) = match number % 2 {
            0 => (
                "whole-machine",
                format!("i-0123456789abcde{number:02}"),
                json!({
                    "state": "terminated", "claim": "run-19876543210-1", "runId": "19876543210",
                    "instance": {
                        "id": format!("i-0123456789abcde{number:02}"), "type": "c7i-flex.12xlarge",
                        "usageClass": "on-demand", "resourceClass": "large", "zone": "ap-southeast-2a",
                    },
                    "location": "c7i-flex.12xlarge 2a",
                    "threshold": "2035-05-31T12:00:00Z",
                    "heartbeat": { "state": "fresh", "since": "2025-05-31T12:00:00Z" },
                }),
            ),
            _ => (
                "whole-pod",
                format!("riscv-runner-{number:05}"),
                json!({
                    "state": "completed", "claim": "job-55512345678", "runId": "19876543210",
                    "pod": { "name": format!("riscv-runner-{number:05}"), "node": "scw-em-rv1-node-0017" },
                    "location": "scw-em-rv1-node-0017",
                    "failure": { "reason": "runner_never_registered" },
                }),
            ),
        };
        let mut worker = objects[from].clone();
        worker["metadata"] = json!({ "name": name, "labels": { "table": "workers" } });
        worker["spec"]["pool"] = json!("linux-arm64-xl");
        server.create(&worker, false).await.map_err(anyhow::Error::msg)?;
        server.patch(&worker, Some("status"), &json!({ "status": status })).await.map_err(anyhow::Error::msg)?;
    }
    let table = server.kubectl_text(&["get", "workers", "-l", "table=workers"])?;
    fits(&table, &["NAME", "POOL", "STATE", "CLAIM", "WHERE", "AGE"])?;
    ensure!(table.lines().count() == 101, "{table}");
    let wide = server.kubectl_text(&["get", "wk", "-l", "table=workers", "-o", "wide"])?;
    for column in ["RUN", "RUNNER", "ZONE", "HEARTBEAT", "UNTIL", "SCOPE", "FAILURE"] {
        ensure!(wide.lines().next().is_some_and(|head| head.split_whitespace().any(|name| name == column)), "{wide}");
    }
    ensure!(wide.contains("runner_never_registered") && wide.contains("fresh"), "{wide}");
    server.kubectl_text(&["delete", "workers", "-l", "table=workers", "--wait=false"])?;
    Ok(())
}

async fn claims_table(shared: Arc<Shared>) -> Result<()> {
    let server = shared.server();
    let claim = named("ec2-claim", "run-19876543210-1")?;
    server.create(&claim, false).await.map_err(anyhow::Error::msg)?;
    let mut status = ready("False", "InsufficientCapacity", "insufficient capacity in zones a, b; retry at 12:00:00Z");
    status["status"]["pool"] = json!("linux-arm64-large");
    status["status"]["phase"] = json!("Validating");
    (status["status"]["ready"], status["status"]["count"]) = (json!(0), json!(2));
    status["status"]["progress"] = json!("0/2");
    server.patch(&claim, Some("status"), &status).await.map_err(anyhow::Error::msg)?;
    let table = server.kubectl_text(&["get", "rclaims", "run-19876543210-1"])?;
    fits(&table, &["NAME", "POOL", "PHASE", "READY", "RUN", "AGE", "REASON"])?;
    for cell in ["linux-arm64-large", "Validating", "0/2", "9876543210", "InsufficientCapacity"] {
        ensure!(table.contains(cell), "{cell} is missing: {table}");
    }
    let wide = server.kubectl_text(&["get", "rclaims", "run-19876543210-1", "-o", "wide"])?;
    ensure!(
        wide.contains("insufficient capacity in zones a, b; retry at") && wide.contains("my-org/my-repo"),
        "{wide}"
    );
    server.delete(&claim).await
}

async fn pools_table(shared: Arc<Shared>) -> Result<()> {
    let server = shared.server();
    let pool = named("board-pool", "table-riscv")?;
    server.create(&pool, false).await.map_err(anyhow::Error::msg)?;
    let mut status = ready("True", "Ready", "3 of 4 slots are free");
    status["status"]["kind"] = json!("board");
    status["status"]["workers"] = json!({ "running": 1 });
    status["status"]["slots"] = json!({ "total": 4, "free": 3, "summary": "3/4" });
    server.patch(&pool, Some("status"), &status).await.map_err(anyhow::Error::msg)?;
    let table = server.kubectl_text(&["get", "rpool", "table-riscv"])?;
    fits(&table, &["NAME", "KIND", "IDLE", "CLAIMED", "RUNNING", "SLOTS", "READY", "AGE"])?;
    let row: Vec<_> = table.lines().nth(1).context("a row")?.split_whitespace().collect();
    ensure!(row[..7] == ["table-riscv", "board", "0", "0", "1", "3/4", "True"], "{table}");
    server.delete(&pool).await
}

async fn short_names(shared: Arc<Shared>) -> Result<()> {
    for (short, kind) in [("rpool,rpools", "runnerpools"), ("rclaim,rclaims", "runnerclaims"), ("wk", "workers")] {
        let text = shared.server().kubectl_text(&["api-resources", "--api-group=paddock.dev", "--no-headers"])?;
        let found = text.lines().any(|line| line.starts_with(kind) && line.split_whitespace().nth(1) == Some(short));
        ensure!(found, "{text}");
    }
    let text = shared.server().kubectl_text(&["api-resources", "--categories=paddock", "-o", "name"])?;
    ensure!(text.lines().count() == 3, "{text}");
    Ok(())
}

async fn field_selectors(shared: Arc<Shared>) -> Result<()> {
    let server = shared.server();
    for (name, pool, phase) in [("sel-a", "pool-a", "Ready"), ("sel-b", "pool-b", "Pending")] {
        let mut claim = named("ec2-claim", name)?;
        claim["spec"]["pool"] = json!(pool);
        claim["spec"]["runId"] = json!(name);
        claim["metadata"]["labels"] = json!({ "table": "selectors" });
        server.create(&claim, false).await.map_err(anyhow::Error::msg)?;
        let status = json!({ "status": { "phase": phase, "pool": pool } });
        server.patch(&claim, Some("status"), &status).await.map_err(anyhow::Error::msg)?;
    }
    for selector in ["spec.pool=pool-a", "spec.runId=sel-a", "status.phase=Ready", "status.pool=pool-a"] {
        let names = server.kubectl_text(&[
            "get",
            "rclaim",
            "-l",
            "table=selectors",
            "--field-selector",
            selector,
            "-o",
            "name",
        ])?;
        ensure!(names.trim() == "runnerclaim.paddock.dev/sel-a", "{selector}: {names}");
    }
    for selector in ["spec.pool=none", "status.state=idle", "status.claim=none", "status.runId=none"] {
        let names = server.kubectl_text(&["get", "workers", "--field-selector", selector, "-o", "name"])?;
        ensure!(names.is_empty(), "{selector}: {names}");
    }
    server.kubectl_text(&["delete", "rclaim", "-l", "table=selectors"])?;
    Ok(())
}

async fn explain(shared: Arc<Shared>) -> Result<()> {
    let text = shared.server().kubectl_text(&["explain", "rclaim.spec.runId"])?;
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    ensure!(words.contains("reaches them and nothing else does."), "{text}");
    Ok(())
}

fn named(example: &str, name: &str) -> Result<Value> {
    let mut object = cases::objects()?[example].clone();
    object["metadata"]["name"] = json!(name);
    Ok(object)
}

fn ready(status: &str, reason: &str, message: &str) -> Value {
    json!({ "status": { "conditions": [{
        "type": "Ready", "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2025-05-31T12:00:00Z",
    }] } })
}

/// That the table has exactly these columns, and that no line of it is too long.
fn fits(table: &str, columns: &[&str]) -> Result<()> {
    let head: Vec<_> = table.lines().next().context("a head")?.split_whitespace().collect();
    ensure!(head == columns, "{table}");
    let widest = table.lines().map(|line| line.trim_end().chars().count()).max().unwrap_or_default();
    ensure!(widest <= WIDTH, "{widest} columns:\n{table}");
    Ok(())
}
