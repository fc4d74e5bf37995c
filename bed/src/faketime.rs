//! Programs with a wrong clock, by libfaketime.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::process::tool;

/// Fetched before the bed is isolated.
pub const TOOL: &str = "faketime";

/// The library for programs with threads, below a directory with the machine's architecture.
const LIBRARY: &str = "faketime/libfaketimeMT.so.1";

/// The environment of a program whose clock is so many seconds ahead. Its monotonic clock, by which it waits, stays right.
pub fn ahead(seconds: i64) -> Result<Vec<(String, String)>> {
    let library = library(&tool(TOOL)?)?.to_string_lossy().into_owned();
    let settings = [
        ("LD_PRELOAD", library),
        ("FAKETIME", format!("{seconds:+}s")),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    Ok(settings.map(|(name, value)| (name.to_owned(), value)).into())
}

fn library(tool: &Path) -> Result<PathBuf> {
    let lib = tool.join("usr/lib");
    let architectures = fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))?;
    let mut found = architectures.filter_map(|entry| Some(entry.ok()?.path().join(LIBRARY)));
    found.find(|path| path.exists()).with_context(|| format!("no {LIBRARY} in {}", lib.display()))
}
