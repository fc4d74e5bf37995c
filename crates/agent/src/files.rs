//! What the agent keeps on disk, so that its successor on the same machine goes on where it stopped.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use jiff::Timestamp;
use paddock_record::{KeyPair, Signal};
use serde::{Deserialize, Serialize};

use crate::process::Alive;

/// Where everything lies, below a root that tests move.
#[derive(Clone)]
pub struct Files {
    root: PathBuf,
}

/// The agent's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// The outcome of the pre-runner script; failed from its start until it has succeeded, so that one interrupted by
    /// the agent's death counts as failed and is never run twice.
    pub script: Option<Signal>,
    pub serving: Option<Serving>,
    /// The `run.sh` that runs.
    pub runner: Option<Alive>,
    /// What the operator was last told, or is to be told.
    pub said: Option<Said>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Serving {
    pub run_id: String,
    /// `config.sh` succeeded, and its counterpart has not.
    pub configured: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Said {
    pub signal: Signal,
    pub run_id: String,
    pub at: Timestamp,
    /// Of a failure: what and why.
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub detail: String,
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

    /// This machine's key pair and when it was made, which is when the agent first started here.
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
                tracing::error!(path = %path.display(), %error, "cannot read what the agent remembered; starting anew");
                Memory::default()
            }),
            Err(_) => Memory::default(),
        }
    }

    pub fn remember(&self, memory: &Memory) -> Result<()> {
        write(&self.state_dir().join("memory.json"), &serde_json::to_vec(memory)?, 0o600)
    }

    /// Puts a script where it can be run.
    pub fn script(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.state_dir().join(name);
        write(&path, text.as_bytes(), 0o700)?;
        Ok(path)
    }
}

/// Writes a file as a whole or not at all.
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
            serving: Some(Serving { run_id: "7".into(), configured: true }),
            runner: Alive::of(std::process::id()),
            said: Some(Said {
                signal: Signal::Registered,
                run_id: "7".into(),
                at: Timestamp::UNIX_EPOCH,
                reason: String::new(),
                detail: String::new(),
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
}
