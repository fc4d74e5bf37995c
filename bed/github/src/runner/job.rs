//! Runs a job: its script, or a wait for its duration.

use std::{fs, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::process::Command;

use super::files::Settings;
use crate::{Conclusion, protocol::Assignment};

/// Runs the job. Dropping the future kills its processes.
pub async fn run(job: &Assignment, settings: &Settings) -> Conclusion {
    let Some(script) = &job.script else {
        match job.duration_ms {
            Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            None => std::future::pending().await,
        }
        return Conclusion::Success;
    };
    let _ = fs::create_dir_all(&settings.work_folder);
    let mut shell = Command::new("sh");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with(super::INPUT)) {
        shell.env_remove(name);
    }
    let child = shell
        .args(["-e", "-c", script])
        .current_dir(&settings.work_folder)
        .envs(variables())
        .env("CI", "true")
        .env("GITHUB_ACTIONS", "true")
        .env("GITHUB_JOB", &job.name)
        .env("GITHUB_REPOSITORY", &job.repository)
        .env("GITHUB_RUN_ID", job.run_id.to_string())
        .env("RUNNER_NAME", &settings.agent_name)
        .env_remove("RUNNER_JITCONFIG")
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            eprintln!("The job's script cannot be started: {error}");
            return Conclusion::Failure;
        }
    };
    let _family = Family(child.id());
    match child.wait().await {
        Ok(status) if status.success() => Conclusion::Success,
        _ => Conclusion::Failure,
    }
}

/// What the listener has loaded from `.env` at its start (`Program.cs`, LoadAndSetEnv).
fn variables() -> Vec<(String, String)> {
    let text = fs::read_to_string(".env").unwrap_or_default();
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Kills the job's process group on drop: as with the real runner, no process outlives its job.
struct Family(Option<u32>);

impl Drop for Family {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            let _ = killpg(Pid::from_raw(leader as i32), Signal::SIGKILL);
        }
    }
}

/// The runner's name for an outcome.
pub fn result(conclusion: Conclusion) -> &'static str {
    match conclusion {
        Conclusion::Success => "Succeeded",
        Conclusion::Failure | Conclusion::TimedOut => "Failed",
        Conclusion::Cancelled => "Canceled",
        Conclusion::Skipped => "Skipped",
    }
}
