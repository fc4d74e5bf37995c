//! `paddock-bed serve`, used from the host as any program would: by its env file, with kubectl and over HTTP.
//!
//! One bed serves all tests, which run one after another; the last one ends it.

mod bed;
#[path = "../processes/mod.rs"]
mod processes;

use std::{
    collections::BTreeSet,
    fs,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use bed::{Bed, SIMULATED_NODES, until};
use libtest_mimic::{Arguments, Trial};
use nix::{sys::signal::kill, unistd::Pid};
use paddock_bed::{github::API_VERSION, process::Signal, stage::WEBHOOK_SECRET};
use processes::started;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

const NAMES: [&str; 17] = [
    "KUBECONFIG",
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_REGION",
    "PADDOCK_TABLE",
    "PADDOCK_URL",
    "PADDOCK_INTERNAL_URL",
    "PADDOCK_PAGES_URL",
    "WEBHOOK_SECRET",
    "GITHUB_API_URL",
    "GITHUB_ADMIN_URL",
    "AWS_ADMIN_URL",
    "BED_ADMIN_URL",
    "BED_NAMESPACE",
    "BED_OWNER",
    "BED_REPOSITORY",
];

fn main() -> ExitCode {
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    let start = Instant::now();
    let bed = Bed::start().unwrap_or_else(|error| panic!("the bed does not start: {error:#}"));
    println!("the bed was ready after {:.1?}", start.elapsed());
    let bed = Arc::new(Mutex::new(bed));
    libtest_mimic::run(&arguments, trials(Some((bed, Arc::new(Runtime::new().expect("a runtime")))))).exit_code()
}

fn trials(bed: Option<(Arc<Mutex<Bed>>, Arc<Runtime>)>) -> Vec<Trial> {
    macro_rules! trials {
        ($($name:ident),* $(,)?) => { vec![$({
            let bed = bed.clone();
            Trial::test(stringify!($name), move || {
                let (bed, runtime) = bed.expect("listed only");
                let mut bed = bed.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(runtime.block_on($name(&mut bed)).map_err(|error| format!("{error:#}"))?)
            })
        }),*] };
    }
    trials!(
        the_env_file_has_every_name_and_its_addresses_answer,
        bad_input_is_refused_with_a_reason,
        a_claim_goes_ready_on_machines_that_can_be_frozen_and_terminated,
        jobs_are_served_by_simulated_boards_and_the_real_kubelet,
        addresses_that_are_given_away_lead_back_from_outside,
        the_operator_is_started_with_other_settings,
        an_operator_that_dies_is_started_again,
        sigterm_ends_everything,
    )
}

async fn the_env_file_has_every_name_and_its_addresses_answer(bed: &mut Bed) -> Result<()> {
    let names: BTreeSet<_> = bed.env.keys().map(String::as_str).collect();
    ensure!(names == NAMES.into(), "{names:?}");
    ensure!(bed.var("WEBHOOK_SECRET") == WEBHOOK_SECRET, "{}", bed.var("WEBHOOK_SECRET"));
    for (name, path) in [
        ("PADDOCK_URL", "/health"),
        ("PADDOCK_INTERNAL_URL", "/readyz"),
        ("PADDOCK_PAGES_URL", "/usage"),
        ("GITHUB_API_URL", "/meta"),
        ("GITHUB_ADMIN_URL", "/jobs"),
        ("AWS_ADMIN_URL", "/instances"),
        ("BED_ADMIN_URL", "/machines"),
    ] {
        let url = bed.url(name, path);
        let (status, text) = bed.call("GET", &url, "").await?;
        ensure!(url.starts_with("http://127.0.0.1:") && status == 200, "{name}: {url} answers {status} {text}");
    }
    let (ec2, boards) = (bed.pool("ec2").await?, bed.pool("board").await?);
    ensure!(
        ec2["status"]["workers"]["idle"] == 1
            && boards["status"]["slots"]["free"] == boards["status"]["slots"]["total"]
    );
    Ok(())
}

async fn bad_input_is_refused_with_a_reason(bed: &mut Bed) -> Result<()> {
    let machine = bed.machines().await?.into_keys().next().context("a machine is warm")?;
    for (method, path, body, status, reason) in [
        ("POST", "/machines/i-0/freeze", "", 404, "no machine 'i-0'"),
        ("GET", "/machines/i-0/log", "", 404, "no machine 'i-0'"),
        ("POST", &format!("/machines/{machine}/melt"), "", 404, "freeze, thaw, kill, stop, interrupt, terminate"),
        ("POST", &format!("/machines/{machine}/interrupt"), r#"{"notice_ms": 1}"#, 409, "is not a spot instance"),
        ("GET", "/nothing", "", 404, "POST /operator"),
        ("DELETE", "/operator", "", 405, ""),
        ("POST", "/operator", "{", 400, "EOF"),
        ("POST", "/operator", r#"{"arguments": []}"#, 400, "unknown field `arguments`"),
        ("POST", "/operator", r#"{"signal": "HUP"}"#, 400, "unknown variant `HUP`"),
        ("POST", "/operator", r#"{"args": "--help"}"#, 400, "expected a sequence"),
        ("POST", "/operator", r#"{"env": {"A=B": ""}}"#, 400, "A=B"),
        ("PUT", "/machines/env", r#"{"A": 1}"#, 400, "expected a string"),
    ] {
        let answer = bed.call(method, &bed.url("BED_ADMIN_URL", path), body).await?;
        ensure!(answer.0 == status && answer.1.contains(reason), "{method} {path} {body}: {answer:?}");
    }
    Ok(())
}

async fn a_claim_goes_ready_on_machines_that_can_be_frozen_and_terminated(bed: &mut Bed) -> Result<()> {
    bed.admin("PUT", "/machines/env", json!({ "BED_TEST_MARK": "It's here" })).await?;
    let pool = bed.pool("ec2").await?["metadata"]["name"].clone();
    let claim = json!({
        "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim", "metadata": { "name": "build" },
        "spec": { "pool": pool, "runId": "4711", "count": 2 },
    });
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("claim.json");
    fs::write(&file, claim.to_string())?;
    bed.kubectl(&["apply", "-f", &file.display().to_string()]).await?;
    bed.kubectl(&["wait", "--for=condition=Ready", "rclaim/build", "--timeout=300s"]).await?;

    let claim = bed.kubectl_json(&["get", "rclaim/build"]).await?;
    let workers = claim["status"]["workers"].as_array().context("a Ready claim has workers")?;
    let ids: Vec<_> = workers.iter().filter_map(|worker| worker["name"].as_str()).collect();
    let [one, other] = ids[..] else { bail!("two machines, not {ids:?}") };
    let marked = |pid: u32| {
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|line| line == b"BED_TEST_MARK=It's here")
    };
    ensure!(bed.processes().into_keys().any(marked), "the machine that was not warm has the environment");
    let log = bed.call("GET", &bed.url("BED_ADMIN_URL", &format!("/machines/{one}/log")), "").await?;
    ensure!(log.0 == 200 && log.1.contains(one), "the agent logs which instance it is on: {log:?}");

    for (action, state) in [("freeze", "frozen"), ("thaw", "running"), ("kill", "dead")] {
        bed.admin("POST", &format!("/machines/{one}/{action}"), json!({})).await?;
        let machines = bed.machines().await?;
        ensure!(machines.get(one).is_some_and(|now| now == state), "{action}: {machines:?}");
    }
    // What is stopped the operator may have terminated by now.
    for (id, action, states) in [(other, "stop", &["stopped", "terminated"][..]), (one, "terminate", &["terminated"])] {
        bed.admin("POST", &format!("/machines/{id}/{action}"), json!({})).await?;
        let instances = bed.get(&bed.url("AWS_ADMIN_URL", "/instances")).await?;
        let instance = instances.as_array().into_iter().flatten().find(|instance| instance["id"] == id);
        let state = instance.and_then(|instance| instance["state"].as_str());
        ensure!(state.is_some_and(|state| states.contains(&state)), "{action}: {instances}");
        ensure!(!bed.machines().await?.contains_key(id), "{action}: no machine is left");
    }
    let frozen = bed.call("POST", &bed.url("BED_ADMIN_URL", &format!("/machines/{one}/freeze")), "").await?;
    ensure!(frozen.0 == 409 && frozen.1.contains("is terminated"), "{frozen:?}");
    bed.admin("PUT", "/machines/env", json!({})).await?;
    // It takes its time to give its machines up.
    bed.kubectl(&["delete", "rclaim/build", "--wait=false"]).await.map(drop)
}

/// The webhooks go to the operator, whose pods run wherever a slot of the board is.
async fn jobs_are_served_by_simulated_boards_and_the_real_kubelet(bed: &mut Bed) -> Result<()> {
    let pool = bed.pool("board").await?;
    let slots = pool["status"]["slots"]["total"].as_u64().context("the pool counts slots")?;
    let request = json!({
        "owner": bed.var("BED_OWNER"), "repo": bed.var("BED_REPOSITORY"), "labels": pool["spec"]["board"]["labels"][0],
    });
    let jobs = bed.url("GITHUB_ADMIN_URL", "/jobs");
    let mut ids = Vec::new();
    for _ in 0..slots {
        let (status, text) = bed.call("POST", &jobs, &request.to_string()).await?;
        ensure!(status == 200, "{status} {text}");
        ids.push(serde_json::from_str::<Value>(&text)?["id"].as_u64().context("a job has an id")?);
    }
    for id in &ids {
        until(&format!("job {id} runs"), async || {
            Ok((bed.get(&format!("{jobs}/{id}")).await?["status"] == "in_progress").then_some(()))
        })
        .await?;
    }
    let pods = bed.kubectl_json(&["get", "pods"]).await?;
    let nodes: BTreeSet<_> =
        pods["items"].as_array().into_iter().flatten().map(|it| it["spec"]["nodeName"].as_str()).collect();
    ensure!(nodes.len() as u64 == slots, "each on a node of its own: {nodes:?}");
    let real = slots as usize > SIMULATED_NODES;
    ensure!(
        nodes.contains(&Some("real-board")) == real,
        "the real kubelet is among them, where there is one: {nodes:?}"
    );
    for id in &ids {
        bed.call("POST", &format!("{jobs}/{id}/finish"), r#"{"conclusion": "success"}"#).await?;
        let done = ["wait", "--for=jsonpath={.status.phase}=Completed", "--timeout=300s"];
        bed.kubectl(&[&done[..], &[&format!("rclaim/job-{id}")]].concat()).await?;
    }
    Ok(())
}

async fn addresses_that_are_given_away_lead_back_from_outside(bed: &mut Bed) -> Result<()> {
    let sqs = async |url: &str, action: &str, body: Value| {
        let call = bed.http.post(url).header("x-amz-target", format!("AmazonSQS.{action}"));
        let answer = call.header("content-type", "application/x-amz-json-1.0").body(body.to_string()).send().await?;
        anyhow::Ok((answer.status().as_u16(), answer.json::<Value>().await?))
    };
    let (_, listed) = sqs(bed.var("AWS_ENDPOINT_URL"), "ListQueues", json!({})).await?;
    let queue = listed["QueueUrls"][0].as_str().with_context(|| format!("the pool has queues: {listed}"))?;
    let (status, answer) =
        sqs(queue, "GetQueueAttributes", json!({ "QueueUrl": queue, "AttributeNames": ["All"] })).await?;
    ensure!(status == 200 && answer["Attributes"]["QueueArn"].is_string(), "{queue}: {status} {answer}");

    let jobs = json!({ "owner": bed.var("BED_OWNER"), "repo": bed.var("BED_REPOSITORY"), "labels": ["nobody"] });
    for _ in 0..2 {
        bed.call("POST", &bed.url("GITHUB_ADMIN_URL", "/jobs"), &jobs.to_string()).await?;
    }
    let owners = json!({ "owners": [bed.var("BED_OWNER")] }).to_string();
    let (_, token) = bed.call("POST", &bed.url("GITHUB_ADMIN_URL", "/tokens"), &owners).await?;
    let token = serde_json::from_str::<Value>(&token)?["token"].as_str().context("a token")?.to_owned();
    let runs = format!("/repos/{}/{}/actions/runs?per_page=1", bed.var("BED_OWNER"), bed.var("BED_REPOSITORY"));
    let get = |url: String| bed.http.get(url).bearer_auth(&token).header(API_VERSION.0, API_VERSION.1);
    let page = get(bed.url("GITHUB_API_URL", &runs)).send().await?;
    let link = page.headers().get("link").context("there is more than one run")?.to_str()?;
    let next = link.split([',', '<', '>']).find(|part| part.starts_with("http")).context("a link")?.to_owned();
    let page = get(next.clone()).send().await.with_context(|| next.clone())?;
    ensure!(page.status() == 200, "{next}: {page:?}");
    Ok(())
}

async fn the_operator_is_started_with_other_settings(bed: &mut Bed) -> Result<()> {
    let start = bed.operator_log().await?.len();
    let settings = json!({ "args": ["--log-format", "json"], "env": { "RUST_LOG": "debug" }, "signal": "TERM" });
    bed.admin("POST", "/operator", settings).await?;
    let is_json = |line: &str| serde_json::from_str::<Value>(line).is_ok_and(|line| line["level"] == "DEBUG");
    until("a line in JSON of level DEBUG", async || {
        Ok(bed.operator_log().await?.get(start..).is_some_and(|log| log.lines().any(is_json)).then_some(()))
    })
    .await?;

    let refused = bed.call("POST", &bed.url("BED_ADMIN_URL", "/operator"), r#"{"args": ["--no-such-flag"]}"#).await?;
    ensure!(refused.0 == 422 && refused.1.contains("unexpected argument '--no-such-flag'"), "{refused:?}");
    let end = bed.operator_log().await?.len();
    until("the operator runs as before", async || {
        Ok(bed.operator_log().await?.get(end..).is_some_and(|log| log.lines().any(is_json)).then_some(()))
    })
    .await?;
    ensure!(bed.call("GET", &bed.url("PADDOCK_URL", "/readyz"), "").await?.0 == 200);

    let start = bed.operator_log().await?.len();
    bed.admin("POST", "/operator", json!({})).await?;
    until("a line for people", async || {
        let log = bed.operator_log().await?;
        Ok(log.get(start..).is_some_and(|log| log.lines().any(|line| line.contains(" INFO "))).then_some(()))
    })
    .await
}

async fn an_operator_that_dies_is_started_again(bed: &mut Bed) -> Result<()> {
    let first = bed.operator().context("an operator runs")?;
    kill(Pid::from_raw(first as i32), Signal::SIGKILL)?;
    until("another operator answers", async || {
        let other = bed.operator().is_some_and(|pid| pid != first);
        let answers = bed.call("GET", &bed.url("PADDOCK_URL", "/readyz"), "").await?.0 == 200;
        Ok((other && answers).then_some(()))
    })
    .await
}

async fn sigterm_ends_everything(bed: &mut Bed) -> Result<()> {
    let processes = bed.processes();
    ensure!(processes.len() > 10, "{processes:?}");
    kill(Pid::from_raw(bed.child.id() as i32), Signal::SIGTERM)?;
    until("the bed ends", async || Ok(bed.child.try_wait()?)).await.and_then(|status| {
        ensure!(status.success(), "{status}");
        Ok(())
    })?;
    ensure!(!bed.env_file.exists(), "the env file is gone");
    let home = bed.env_file.ancestors().nth(2).context("it lies in the bed's directory")?;
    ensure!(!home.exists(), "{} is left", home.display());
    let left: Vec<_> = processes.iter().filter(|(pid, moment)| started(**pid).as_ref() == Some(moment)).collect();
    ensure!(left.is_empty(), "still there: {left:?}");
    Ok(())
}
