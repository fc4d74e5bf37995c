//! The machine's processes, as the host sees them.

use std::{fs, path::PathBuf};

/// Their directories in `/proc`.
pub fn processes() -> impl Iterator<Item = PathBuf> {
    let numeric = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().parse::<u32>().is_ok();
    fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).filter(numeric)
}

pub fn pids() -> impl Iterator<Item = u32> {
    processes().filter_map(|process| process.file_name()?.to_str()?.parse().ok())
}

/// What the kernel says of a process after its name, from its state on.
pub fn stat(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    Some(fields.split_whitespace().map(str::to_owned).collect())
}

/// When a process was started, in ticks since the machine was; nothing for one that has ended, reaped or not. A pid with
/// another start is another process.
pub fn started(pid: u32) -> Option<String> {
    stat(pid).filter(|stat| stat[0] != "Z" && stat[0] != "X")?.into_iter().nth(19)
}
