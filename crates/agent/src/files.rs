//! The agent's state on disk, so that a restarted agent continues where the previous one stopped.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use jiff::Timestamp;
use paddock_record::{Instance, KeyPair, Signal};
use serde::{Deserialize, Serialize};

use crate::process::Alive;

/// Paths of all files, below a root that tests override.
#[derive(Clone)]
pub struct Files {
    root: PathBuf,
}

/// The state that survives a restart of the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// The outcome of the pre-runner script. It is set to failed before the script starts, so that a script interrupted
    /// by a crash counts as failed and never runs twice.
    pub script: Option<Signal>,
    pub serving: Option<Serving>,
    /// The running `run.sh`.
    pub runner: Option<Alive>,
    /// The last signal for the operator, sent or still to be sent.
    #[serde(rename = "said")]
    pub reported: Option<Report>,
    /// The threshold and `updatedAt` of the record, and when they were first read: a restart of the agent is no more time.
    #[serde(default)]
    pub lifetime: Option<Lifetime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lifetime {
    pub threshold: Option<Timestamp>,
    pub updated_at: Timestamp,
    /// By the machine's own clock.
    pub since: Timestamp,
}

impl Lifetime {
    /// That of `record`, which was read at `now`. A `since` in the future is of a clock that was wrong then.
    pub fn of(record: &Instance, known: Option<Self>, now: Timestamp) -> Self {
        let Instance { threshold, updated_at, .. } = *record;
        let same = known.filter(|known| (known.threshold, known.updated_at) == (threshold, updated_at));
        Self { threshold, updated_at, since: same.map_or(now, |known| known.since.min(now)) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Serving {
    pub run_id: String,
    /// `config.sh` has succeeded and `config.sh remove` has not yet.
    pub configured: bool,
    /// The runner has ended, and starting it again does not help.
    #[serde(default)]
    pub ended: bool,
}

impl Serving {
    pub fn new(run_id: &str, configured: bool) -> Self {
        Self { run_id: run_id.to_owned(), configured, ended: false }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub signal: Signal,
    pub run_id: String,
    /// The record's number of claims.
    #[serde(default)]
    pub claims: u32,
    /// `reason`, `detail` and `log` are set for failures only.
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub detail: String,
    #[serde(default)]
    pub log: String,
}

impl Files {
    pub fn new(root: PathBuf) -> Result<Self> {
        let files = Self { root };
        for dir in [files.state_dir(), files.path("var/log")] {
            fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        Ok(files)
    }

    fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    fn state_dir(&self) -> PathBuf {
        self.path("var/lib/paddock")
    }

    pub fn runner_dir(&self) -> PathBuf {
        self.path("opt/actions-runner")
    }

    pub fn runner_log(&self) -> PathBuf {
        self.path("var/log/paddock-runner.log")
    }

    /// What the pool's script of this name wrote when it last ran.
    pub fn script_log(&self, name: &str) -> PathBuf {
        self.path(&format!("var/log/paddock-{name}.log"))
    }

    /// The variables that the image gives to its runner.
    pub fn environment(&self) -> PathBuf {
        self.state_dir().join("runner.env")
    }

    /// This machine's key pair and its creation time, which is the agent's first start on this machine.
    pub fn key(&self) -> Result<(KeyPair, Timestamp)> {
        let path = self.state_dir().join("key");
        let kept = fs::read(&path).ok().and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()).map(KeyPair::from_bytes);
        let key = match kept {
            Some(key) => key,
            None => {
                let key = KeyPair::generate();
                write(&path, &key.to_bytes(), 0o600)?;
                key
            }
        };
        let made = fs::metadata(&path)?.modified()?;
        Ok((key, Timestamp::try_from(made)?))
    }

    pub fn recall(&self) -> Memory {
        let path = self.state_dir().join("memory.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                tracing::error!(path = %path.display(), %error, "state file unreadable; starting from scratch");
                Memory::default()
            }),
            Err(_) => Memory::default(),
        }
    }

    pub fn remember(&self, memory: &Memory) -> Result<()> {
        write(&self.state_dir().join("memory.json"), &serde_json::to_vec(memory)?, 0o600)
    }

    /// Writes an executable script file and returns its path.
    pub fn script(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.state_dir().join(name);
        write(&path, text.as_bytes(), 0o700)?;
        Ok(path)
    }
}

/// Writes a file atomically.
fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let whole = || -> io::Result<()> {
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut file = fs::File::options().write(true).create_new(true).mode(mode).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        drop(file);
        fs::rename(new, path)
    };
    whole().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_next_agent_has_the_same_key_and_memory() {
        let root = tempfile::tempdir().unwrap();
        let files = Files::new(root.path().to_owned()).unwrap();
        assert_eq!(files.recall(), Memory::default());
        let memory = Memory {
            script: Some(Signal::ScriptOk),
            serving: Some(Serving { ended: true, ..Serving::new("7", true) }),
            runner: Alive::of(std::process::id()),
            reported: Some(Report {
                signal: Signal::Registered,
                run_id: "7".into(),
                claims: 3,
                reason: String::new(),
                detail: String::new(),
                log: String::new(),
            }),
            lifetime: Some(Lifetime {
                threshold: Some(Timestamp::UNIX_EPOCH),
                updated_at: Timestamp::UNIX_EPOCH,
                since: Timestamp::UNIX_EPOCH,
            }),
        };
        files.remember(&memory).unwrap();
        let (key, since) = files.key().unwrap();

        let next = Files::new(root.path().to_owned()).unwrap();
        assert_eq!(next.recall(), memory);
        let (same, still) = next.key().unwrap();
        assert_eq!((same.to_bytes(), still), (key.to_bytes(), since));
        let mode = fs::metadata(root.path().join("var/lib/paddock/key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_damaged_memory_is_as_good_as_none() {
        let root = tempfile::tempdir().unwrap();
        let files = Files::new(root.path().to_owned()).unwrap();
        fs::write(root.path().join("var/lib/paddock/memory.json"), "{").unwrap();
        fs::write(root.path().join("var/lib/paddock/key"), "short").unwrap();
        assert_eq!(files.recall(), Memory::default());
        assert_eq!(files.key().unwrap().0.to_bytes(), files.key().unwrap().0.to_bytes());
    }

    #[test]
    fn the_time_of_a_record_counts_from_its_first_read() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let item = paddock_record::instance_key("i-1");
        let mut record = Instance::from_item(&item);
        (record.threshold, record.updated_at) = (Some(at(900)), at(800));
        let first = Lifetime::of(&record, None, at(10));
        assert_eq!(first.since, at(10));
        assert_eq!(Lifetime::of(&record, Some(first), at(60)), first);
        assert_eq!(Lifetime::of(&record, Some(first), at(5)).since, at(5), "the clock was set back");
        record.threshold = Some(at(901));
        assert_eq!(Lifetime::of(&record, Some(first), at(60)).since, at(60), "renewed");
        record.threshold = Some(at(900));
        record.updated_at = at(801);
        assert_eq!(Lifetime::of(&record, Some(first), at(60)).since, at(60), "changed");
    }
}
