//! The stand-in for the Actions runner, run as in a machine image and in a pod.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use paddock_bed_github::{Conclusion, JobRequest, Options, Status, runner::write_runner_dir};
use paddock_bed_process::{Process, Signal};
use serde_json::json;
use tempfile::TempDir;

use crate::bed::{Bed, DEADLINE};

const PROGRAM: &str = env!("CARGO_BIN_EXE_paddock-bed-runner");

fn machine() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_runner_dir(&dir.path().join("actions-runner"), &[PROGRAM]).unwrap();
    dir
}

fn script(dir: &Path, name: &str, args: &[&str]) -> Command {
    let mut command = Command::new(dir.join("actions-runner").join(name));
    command.args(args).env("RUNNER_ALLOW_RUNASROOT", "1");
    command
}

/// Runs a program that uses the simulator of this test.
async fn output(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

async fn token(bed: &Bed, kind: &str) -> String {
    let answer = bed.post(&format!("/orgs/acme/actions/runners/{kind}"), json!({})).await;
    answer.body["token"].as_str().unwrap().to_owned()
}

async fn configure(bed: &Bed, dir: &Path, more: &[&str]) -> Output {
    let (token, url) = (token(bed, "registration-token").await, format!("{}/acme", bed.github.html_url()));
    let mut args = vec!["--unattended", "--url", &url, "--token", &token];
    args.extend(more);
    output(script(dir, "config.sh", &args)).await
}

async fn until(what: &str, mut true_yet: impl FnMut() -> bool) {
    let start = Instant::now();
    while !true_yet() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn exited(process: &mut Process) -> bool {
    let mut status = None;
    until("the runner ends", || {
        status = process.exited();
        status.is_some()
    })
    .await;
    status.unwrap().success()
}

#[tokio::test]
async fn a_machine_registers_runs_jobs_and_is_removed() {
    let bed = Bed::start().await;
    let dir = machine();
    let args = ["--name", "i-123", "--labels", "77", "--no-default-labels", "--disableupdate", "--work", "_work"];
    let configured = configure(&bed, dir.path(), &args).await;
    assert!(configured.status.success(), "{}", text(&configured));
    assert!(
        text(&configured).contains("√ Runner successfully added") && text(&configured).contains("√ Settings Saved.")
    );
    assert!(dir.path().join("actions-runner/.credentials").exists());
    assert_eq!(bed.github.runner("i-123").unwrap().labels, ["77"]);
    let twice = configure(&bed, dir.path(), &args).await;
    assert!(!twice.status.success());
    assert!(text(&twice).starts_with("Cannot configure the runner because it is already configured."));

    let mut runner = Process::spawn("runner", script(dir.path(), "run.sh", &[]), dir.path()).unwrap();
    bed.github.until_online("i-123", true, DEADLINE).await.unwrap();
    let greeting = JobRequest {
        run_id: Some(77),
        name: Some("greet".into()),
        script: Some("echo \"$GITHUB_RUN_ID on $RUNNER_NAME\" > greeting".into()),
        ..bed.job(&["77"])
    };
    let failing = JobRequest { script: Some("exit 3".into()), ..bed.job(&["77"]) };
    let job = bed.github.queue_job(greeting).unwrap();
    let job = bed.github.until_job(job.id, DEADLINE, |job| job.status == Status::Completed).await.unwrap();
    assert_eq!(job.conclusion, Some(Conclusion::Success));
    assert_eq!(job.taken_by.unwrap().runner_name, "i-123");
    let greeting = fs::read_to_string(dir.path().join("actions-runner/_work/greeting")).unwrap();
    assert_eq!(greeting.trim(), "77 on i-123");
    let job = bed.github.queue_job(failing).unwrap();
    let job = bed.github.until_job(job.id, DEADLINE, |job| job.status == Status::Completed).await.unwrap();
    assert_eq!(job.conclusion, Some(Conclusion::Failure));

    runner.signal(Signal::SIGINT).unwrap();
    assert!(exited(&mut runner).await);
    assert!(!bed.github.is_online("i-123"));
    let log = fs::read_to_string(runner.log()).unwrap();
    for line in [
        "√ Connected to GitHub",
        "Listening for Jobs",
        "Running job: greet",
        "Job greet completed with result: Succeeded",
        "completed with result: Failed",
    ] {
        assert!(log.contains(line), "'{line}' is not in:\n{log}");
    }

    let wrong = output(script(dir.path(), "config.sh", &["remove", "--token", "AWRONG"])).await;
    assert!(!wrong.status.success() && bed.github.runner("i-123").is_some());
    let token = token(&bed, "remove-token").await;
    let mut remove = script(dir.path(), "config.sh", &["remove"]);
    remove.env("ACTIONS_RUNNER_INPUT_TOKEN", &token);
    let removed = output(remove).await;
    assert!(removed.status.success(), "{}", text(&removed));
    assert!(bed.github.runner("i-123").is_none() && !dir.path().join("actions-runner/.runner").exists());
    bed.finish().await;
}

#[tokio::test]
async fn registration_needs_a_fresh_token_and_a_free_name() {
    let bed = Bed::start().await;
    let (dir, other) = (machine(), machine());
    let url = format!("{}/acme", bed.github.html_url());
    let stale = token(&bed, "registration-token").await;
    bed.github.advance(Duration::from_secs(3601));
    let args = ["--unattended", "--url", &url, "--token", &stale, "--name", "a", "--labels", "x"];
    let refused = output(script(dir.path(), "config.sh", &args)).await;
    assert!(!refused.status.success() && text(&refused).contains("404 (Not Found)"), "{}", text(&refused));

    let bed = Bed { token: bed.installation_token().await, ..bed };
    assert!(configure(&bed, dir.path(), &["--name", "a", "--labels", "x,X,big"]).await.status.success());
    let labels = bed.github.runner("a").unwrap().labels;
    assert_eq!(
        (&labels[..2], &labels[3..]),
        (&["self-hosted".to_owned(), "Linux".into()][..], &["x".to_owned(), "big".into()][..])
    );
    let taken = configure(&bed, other.path(), &["--name", "A"]).await;
    assert!(text(&taken).contains("A runner exists with the same name"), "{}", text(&taken));
    let old = bed.github.runner("a").unwrap().id;
    assert!(configure(&bed, other.path(), &["--name", "a", "--replace"]).await.status.success());
    assert_ne!(bed.github.runner("a").unwrap().id, old);
    let group = configure(&bed, machine().path(), &["--name", "b", "--runnergroup", "none"]).await;
    assert!(text(&group).contains("Could not find any self-hosted runner group named \"none\""));

    let deleted = output(script(dir.path(), "run.sh", &[])).await;
    let said = text(&deleted);
    assert!(said.contains("registration has been deleted") && said.contains("exit with terminated error"), "{said}");
    assert!(deleted.status.success(), "run.sh tells only a refused version by its exit status");
    bed.finish().await;
}

async fn delete(bed: &Bed, name: &str) {
    let id = bed.github.runner(name).unwrap().id;
    assert_eq!(bed.delete(&format!("/orgs/acme/actions/runners/{id}")).await.status, 204);
}

/// A runner that listens.
async fn listening(bed: &Bed, dir: &Path, name: &str) -> Process {
    assert!(configure(bed, dir, &["--name", name, "--labels", "x"]).await.status.success());
    let runner = Process::spawn("runner", script(dir, "run.sh", &[]), dir).unwrap();
    bed.github.until_online(name, true, DEADLINE).await.unwrap();
    runner
}

#[tokio::test]
async fn a_refused_version_is_told_by_the_first_poll_and_by_the_exit_status_if_asked_for() {
    let bed = Bed::start().await;
    bed.github.refuse_version("2.100.0");
    for (name, wanted, status) in [("i-1", "", 0), ("i-2", "1", 7)] {
        let dir = machine();
        fs::write(dir.path().join("actions-runner/.version"), "2.100.0\n").unwrap();
        assert!(configure(&bed, dir.path(), &["--name", name, "--labels", "x"]).await.status.success());
        let mut run = script(dir.path(), "run.sh", &[]);
        run.env("ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE", wanted);
        let ended = output(run).await;
        assert_eq!(ended.status.code(), Some(status), "{}", text(&ended));
        assert!(String::from_utf8_lossy(&ended.stdout).contains("Listening for Jobs"), "{}", text(&ended));
        let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(stderr.contains("Runner version v2.100.0 is deprecated and cannot receive messages."), "{stderr}");
        assert!(dir.path().join("actions-runner/.runner").exists() && bed.github.runner(name).is_some());
    }
    bed.finish().await;
}

#[tokio::test]
async fn a_runner_that_is_deleted_while_it_listens_removes_its_configuration_and_ends_well() {
    let bed = Bed::start().await;
    let dir = machine();
    let mut runner = listening(&bed, dir.path(), "i-1").await;
    delete(&bed, "i-1").await;
    assert!(exited(&mut runner).await);
    let log = fs::read_to_string(runner.log()).unwrap();
    assert!(log.contains("The runner no longer exists on the server") && log.contains("√ Removed .runner"), "{log}");
    assert!(!dir.path().join("actions-runner/.runner").exists());
    bed.finish().await;
}

#[tokio::test]
async fn the_removal_of_a_runner_that_is_gone_fails_in_the_admin_flow_only() {
    let bed = Bed::start().await;
    for (admin_flow, name) in [(true, "i-1"), (false, "i-2")] {
        bed.github.set_admin_flow(admin_flow);
        let dir = machine();
        assert!(configure(&bed, dir.path(), &["--name", name, "--labels", "x"]).await.status.success());
        delete(&bed, name).await;
        let token = token(&bed, "remove-token").await;
        let removed = output(script(dir.path(), "config.sh", &["remove", "--token", &token])).await;
        let said = text(&removed);
        assert_eq!(removed.status.code(), Some(i32::from(admin_flow)), "{said}");
        assert_eq!(dir.path().join("actions-runner/.runner").exists(), admin_flow, "{said}");
        let line =
            if admin_flow { "Http response code: NotFound from 'Delete http" } else { "Does not exist. Skipping" };
        assert!(said.contains(line), "{said}");
    }
    bed.finish().await;
}

#[tokio::test]
async fn the_files_of_the_newer_service_count_as_configured_and_are_removed() {
    let bed = Bed::start().await;
    let dir = machine();
    let home = dir.path().join("actions-runner");
    let args = ["--name", "i-1", "--labels", "x"];
    assert!(configure(&bed, dir.path(), &args).await.status.success());
    for name in [".runner", ".credentials"] {
        fs::rename(home.join(name), home.join(format!("{name}_migrated"))).unwrap();
    }
    assert!(text(&configure(&bed, dir.path(), &args).await).contains("already configured"));
    let token = token(&bed, "remove-token").await;
    let removed = output(script(dir.path(), "config.sh", &["remove", "--token", &token])).await;
    assert!(removed.status.success() && bed.github.runner("i-1").is_none(), "{}", text(&removed));
    assert!(!home.join(".runner_migrated").exists() && !home.join(".credentials_migrated").exists());
    bed.finish().await;
}

#[tokio::test]
async fn config_sh_checks_libraries_first_and_tells_its_version() {
    let dir = machine();
    let version = output(script(dir.path(), "config.sh", &["--version"])).await;
    assert_eq!(text(&version).trim(), paddock_bed_github::runner::VERSION);
    assert!(output(script(dir.path(), "bin/Runner.Listener", &["warmup"])).await.status.success());
    let missing = "Libicu's dependencies is missing for Dotnet Core 6.0\n";
    fs::write(dir.path().join("actions-runner/.missing"), missing).unwrap();
    let refused = output(script(dir.path(), "config.sh", &["--version"])).await;
    assert!(!refused.status.success() && text(&refused).starts_with(missing), "{}", text(&refused));
}

#[tokio::test]
async fn scripts_refuse_root_as_the_real_ones_do() {
    let dir = machine();
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let refused = output(Command::new(dir.path().join("actions-runner/config.sh"))).await;
    assert_eq!((refused.status.success(), text(&refused).trim()), (false, "Must not run with sudo"));
}

fn pod(config: &str, dir: &Path) -> Process {
    let mut command = Command::new(PROGRAM);
    command.arg("jit").current_dir(dir);
    command.env("RUNNER_JITCONFIG", config).env("RUNNER_WAIT_FOR_DOCKER_IN_SECONDS", "60");
    Process::spawn("pod", command, dir).unwrap()
}

#[tokio::test]
async fn a_jit_runner_runs_one_job_and_vanishes() {
    let bed = Bed::start().await;
    let dir = tempfile::tempdir().unwrap();
    let jit = bed.jit("board-1", &["riscv"]).await.body;
    let mut pod = pod(jit["encoded_jit_config"].as_str().unwrap(), dir.path());
    bed.github.until_online("board-1", true, DEADLINE).await.unwrap();
    let first = bed.github.queue_job(JobRequest { duration_ms: Some(20), ..bed.job(&["riscv"]) }).unwrap();
    let second = bed.github.queue_job(JobRequest { duration_ms: Some(20), ..bed.job(&["riscv"]) }).unwrap();
    assert!(exited(&mut pod).await, "{}", pod.log_tail(20));
    assert_eq!(bed.github.job(first.id).unwrap().conclusion, Some(Conclusion::Success));
    assert_eq!(bed.github.job(second.id).unwrap().status, Status::Queued);
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.body["total_count"], 0);
    bed.finish().await;
}

#[tokio::test]
async fn a_cancelled_job_ends_with_everything_it_started() {
    let bed = Bed::start().await;
    let dir = tempfile::tempdir().unwrap();
    let jit = bed.jit("board-1", &["x"]).await.body;
    let mut pod = pod(jit["encoded_jit_config"].as_str().unwrap(), dir.path());
    let script = Some("sleep 1000 & echo $! > child; wait".into());
    let job = bed.github.queue_job(JobRequest { script, run_id: Some(9), ..bed.job(&["x"]) }).unwrap();
    let child = dir.path().join("_work/child");
    until("the job runs", || fs::read_to_string(&child).is_ok_and(|pid| pid.ends_with('\n'))).await;
    assert_eq!(bed.post("/repos/acme/app/actions/runs/9/cancel", json!({})).await.status, 202);
    bed.github.until_job(job.id, DEADLINE, |job| job.conclusion == Some(Conclusion::Cancelled)).await.unwrap();
    assert!(exited(&mut pod).await);
    assert!(pod.log_tail(5).contains("completed with result: Canceled"), "{}", pod.log_tail(5));
    let stat = format!("/proc/{}/stat", fs::read_to_string(&child).unwrap().trim());
    until("the job's child ends", || fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))).await;
    bed.finish().await;
}

#[tokio::test]
async fn a_stopped_runner_cancels_its_job_and_a_finished_one_is_told() {
    let bed = Bed::start().await;
    let dir = machine();
    assert!(configure(&bed, dir.path(), &["--name", "i-1", "--labels", "x"]).await.status.success());
    let mut runner = Process::spawn("runner", script(dir.path(), "run.sh", &[]), dir.path()).unwrap();
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    bed.github.until_job(job.id, DEADLINE, |job| job.heard).await.unwrap();
    bed.github.finish_job(job.id, Conclusion::Success);
    bed.github.until_job(job.id, DEADLINE, |job| job.conclusion == Some(Conclusion::Success)).await.unwrap();
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    bed.github.until_job(job.id, DEADLINE, |job| job.heard).await.unwrap();
    runner.signal(Signal::SIGINT).unwrap();
    assert!(exited(&mut runner).await);
    assert_eq!(bed.github.job(job.id).unwrap().conclusion, Some(Conclusion::Cancelled));
    assert!(!bed.github.is_online("i-1") && bed.github.runner("i-1").is_some());
    bed.finish().await;
}

#[tokio::test]
async fn a_killed_runner_goes_offline_and_its_job_is_lost_in_time() {
    let bed = Bed::with(Options { offline_after: Duration::from_millis(50), ..Options::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let jit = bed.jit("board-1", &["x"]).await.body;
    let config = jit["encoded_jit_config"].as_str().unwrap();
    let mut first = pod(config, dir.path());
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap();
    bed.github.until_job(job.id, DEADLINE, |job| job.heard).await.unwrap();
    first.kill().unwrap();
    until("the runner is offline", || !bed.github.is_online("board-1")).await;
    assert!(bed.github.runner("board-1").unwrap().job.is_some(), "GitHub still thinks it busy");
    bed.github.advance(Duration::from_secs(601));
    assert_eq!(bed.github.job(job.id).unwrap().conclusion, Some(Conclusion::Failure));
    let mut second = pod(config, dir.path());
    assert!(!exited(&mut second).await);
    assert!(second.log_tail(5).contains("registration has been deleted"), "{}", second.log_tail(5));
    bed.finish().await;
}
