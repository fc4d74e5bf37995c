//! Child processes, each in its own process group.

use std::{
    fs,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Result, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

/// A process identified by PID and start time, so that a reused PID is not mistaken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alive {
    pid: u32,
    /// Start time in clock ticks since boot, from `/proc`.
    since: u64,
}

impl Alive {
    /// The process with this PID, if it is running.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may contain spaces and parentheses; the fields after it are fixed, the state first.
        let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
        let state = fields.next()?;
        let since = fields.nth(18)?.parse().ok()?;
        (state != "Z" && state != "X").then_some(Self { pid, since })
    }

    pub fn runs(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Signals the whole process group; a group that no longer exists is not an error.
    pub fn signal_group(self, signal: Signal) {
        let _ = killpg(Pid::from_raw(self.pid as i32), signal);
    }
}

/// Kills the group on drop unless its leader has exited, so that a cancelled future leaves no process behind.
struct Group(Option<Alive>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            leader.signal_group(Signal::SIGKILL);
        }
    }
}

/// Runs a command in its own process group and returns its status and output.
pub async fn output(command: &mut Command, limit: Duration) -> Result<(ExitStatus, String)> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()?;
    let mut group = Group(child.id().and_then(Alive::of));
    match tokio::time::timeout(limit, child.wait_with_output()).await {
        Ok(output) => {
            group.0 = None;
            let output = output?;
            let text = [output.stdout, output.stderr].concat();
            Ok((output.status, String::from_utf8_lossy(&text).into_owned()))
        }
        Err(_) => bail!("took longer than {limit:?}"),
    }
}

/// Runs a pool's script with the interpreter in its shebang line, or bash. The script inherits the agent's output, so
/// that a service it starts never blocks on a pipe without a reader.
pub async fn run_script(path: &Path, limit: Duration) -> Result<()> {
    let named = fs::read(path)?.starts_with(b"#!");
    let mut command = if named { Command::new(path) } else { Command::new("bash") };
    if !named {
        command.arg(path);
    }
    let mut child = command.stdin(Stdio::null()).process_group(0).spawn()?;
    let mut group = Group(child.id().and_then(Alive::of));
    match tokio::time::timeout(limit, child.wait()).await {
        Ok(status) => {
            group.0 = None;
            let status = status?;
            if !status.success() {
                bail!("ended with {status}");
            }
            Ok(())
        }
        Err(_) => bail!("took longer than {limit:?}"),
    }
}

#[cfg(test)]
mod tests {
    use paddock_bed_process::write_program;

    use super::*;

    #[tokio::test]
    async fn a_process_is_known_until_it_ends() {
        let mut child = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let alive = Alive::of(child.id().unwrap()).unwrap();
        assert!(alive.runs());
        assert!(!Alive { since: alive.since - 1, ..alive }.runs(), "a later process with the same PID");
        alive.signal_group(Signal::SIGKILL);
        child.wait().await.unwrap();
        assert!(!alive.runs());
    }

    #[tokio::test]
    async fn a_script_runs_with_bash_or_what_its_first_line_names() {
        let dir = tempfile::tempdir().unwrap();
        let run = async |text: &str, limit| {
            let path = dir.path().join("script");
            write_program(&path, text).unwrap();
            run_script(&path, limit).await.map_err(|error| error.to_string())
        };
        let (long, short) = (Duration::from_secs(60), Duration::from_millis(100));
        assert_eq!(run("[[ -n $BASH_VERSION ]]", long).await, Ok(()));
        assert_eq!(run("#!/usr/bin/env -S cat /dev/null\nnot a command", long).await, Ok(()));
        assert_eq!(run("exit 3", long).await, Err("ended with exit status: 3".to_owned()));
        assert_eq!(run("sleep 1000", short).await, Err("took longer than 100ms".to_owned()));
    }
}
