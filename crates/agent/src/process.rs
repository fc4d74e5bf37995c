//! Child processes, each in its own process group.

use std::{
    fmt,
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use paddock_record::log_tail;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::words::why;

/// The error of a program that failed, with the end of what it wrote.
#[derive(Debug)]
pub struct Failed {
    what: String,
    pub log: String,
}

impl Failed {
    pub fn new(what: String, output: &str) -> Self {
        Self { what, log: log_tail(output).to_owned() }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match why(&self.log).as_str() {
            "" => write!(f, "{} and said nothing", self.what),
            why => write!(f, "{}: {why}", self.what),
        }
    }
}

impl std::error::Error for Failed {}

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

/// Runs a pool's script with the interpreter in its shebang line, or bash. Its output goes to a file, so that a service it
/// starts never blocks on a pipe without a reader.
pub async fn run_script(path: &Path, log: &Path, limit: Duration) -> Result<()> {
    let named = fs::read(path)?.starts_with(b"#!");
    let mut command = if named { Command::new(path) } else { Command::new("bash") };
    if !named {
        command.arg(path);
    }
    let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    command.stdout(output.try_clone()?).stderr(output);
    let mut child = command.stdin(Stdio::null()).process_group(0).spawn()?;
    let mut group = Group(child.id().and_then(Alive::of));
    let failed = |what: String| Err(Failed::new(what, &end_of(log)).into());
    match tokio::time::timeout(limit, child.wait()).await {
        Ok(status) => {
            group.0 = None;
            let status = status?;
            if status.success() { Ok(()) } else { failed(format!("ended with {status}")) }
        }
        Err(_) => failed(format!("took longer than {limit:?}")),
    }
}

/// The end of a log file; empty if it cannot be read.
pub fn end_of(log: &Path) -> String {
    const READ_MAX: u64 = 64 * 1024;
    let read = || -> std::io::Result<Vec<u8>> {
        let (mut file, mut end) = (File::open(log)?, Vec::new());
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(READ_MAX)))?;
        file.take(READ_MAX).read_to_end(&mut end)?;
        Ok(end)
    };
    log_tail(&String::from_utf8_lossy(&read().unwrap_or_default())).to_owned()
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
            run_script(&path, &dir.path().join("log"), limit).await.map_err(|error| error.to_string())
        };
        let (long, short) = (Duration::from_secs(60), Duration::from_millis(100));
        assert_eq!(run("[[ -n $BASH_VERSION ]]", long).await, Ok(()));
        assert_eq!(run("#!/usr/bin/env -S cat /dev/null\nnot a command", long).await, Ok(()));
        assert_eq!(run("exit 3", long).await, Err("ended with exit status: 3 and said nothing".to_owned()));
        let said = Err("ended with exit status: 3: no disk; give up".to_owned());
        assert_eq!(run("echo no disk; echo give up >&2; exit 3", long).await, said);
        assert_eq!(run("sleep 1000", short).await, Err("took longer than 100ms and said nothing".to_owned()));
    }
}
