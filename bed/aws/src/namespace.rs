//! PID namespaces, in which machines run.

use std::{fs, process::Command};

use anyhow::{Result, ensure};
use nix::unistd::{Pid, geteuid};

/// Every process in the PID namespace that `unshare` created.
pub fn inhabitants(unshare: u32) -> Result<Vec<Pid>> {
    let namespace = fs::read_link(format!("/proc/{unshare}/ns/pid_for_children"))?;
    ensure!(namespace != fs::read_link("/proc/self/ns/pid")?, "the machine has not begun to boot");
    let lives_there = |pid: &i32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|own| own == namespace);
    let all = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(all.filter(lives_there).map(Pid::from_raw).collect())
}

/// Runs a command as the first process of a new PID namespace, with a matching `/proc`. Without root this needs a user
/// namespace.
pub fn namespace() -> Command {
    let mut command = Command::new("unshare");
    if !geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--pid", "--mount-proc", "--fork", "--kill-child"]);
    command
}
