//! A settings file that is reloaded when it changes.

use std::{
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, anyhow};

use crate::lock;

/// Minimum age of a change before the file is reloaded, because it may still be being written.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// Keeps the last valid value while the file is missing, invalid or being written.
pub struct WatchedFile<T> {
    path: PathBuf,
    parse: fn(&str) -> Result<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    /// The file's version when it was last read.
    version: Option<Version>,
    value: Option<T>,
    /// The error of the last failed load.
    error: Option<String>,
}

/// Modification time and length.
type Version = (SystemTime, u64);

impl<T: Clone> WatchedFile<T> {
    pub fn new(path: PathBuf, parse: fn(&str) -> Result<T>) -> Self {
        Self { path, parse, state: Mutex::new(State { version: None, value: None, error: None }) }
    }

    /// The current value, or the last valid one; an error if there has never been one.
    pub fn read(&self) -> Result<T> {
        let mut state = lock(&self.state);
        let version = fs::metadata(&self.path).and_then(|meta| Ok((meta.modified()?, meta.len()))).ok();
        let settled = |(written, _): &Version| !written.elapsed().is_ok_and(|age| age < SETTLE_TIME);
        let changed = version != state.version && version.as_ref().is_none_or(settled);
        if changed || state.value.is_none() {
            state.version = version;
            let path = self.path.display();
            let text = fs::read_to_string(&self.path).with_context(|| format!("cannot read {path}"));
            match text.and_then(|text| (self.parse)(&text).with_context(|| format!("{path} is not valid"))) {
                Ok(value) => {
                    tracing::info!(file = %path, "file loaded");
                    (state.value, state.error) = (Some(value), None);
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    if state.value.is_some() {
                        tracing::warn!(error, "file reload failed; keeping the last valid content");
                    }
                    state.error = Some(error);
                }
            }
        }
        state.value.clone().ok_or_else(|| anyhow!(state.error.clone().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn number(text: &str) -> Result<u32> {
        Ok(text.trim().parse()?)
    }

    fn watched(directory: &tempfile::TempDir) -> WatchedFile<u32> {
        WatchedFile::new(directory.path().join("file"), number)
    }

    /// Writes the file and backdates it.
    fn write(file: &WatchedFile<u32>, text: &str, seconds_ago: u64) {
        fs::write(&file.path, text).unwrap();
        let written = SystemTime::now() - Duration::from_secs(seconds_ago);
        fs::File::options().append(true).open(&file.path).unwrap().set_modified(written).unwrap();
    }

    #[test]
    fn a_missing_or_invalid_file_has_no_value_but_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = watched(&directory);
        assert!(file.read().unwrap_err().to_string().contains("cannot read"));
        write(&file, "many", 10);
        assert!(file.read().unwrap_err().to_string().contains("is not valid"));
        write(&file, "1", 0);
        assert_eq!(file.read().unwrap(), 1, "without an older value there is nothing to wait for");
    }

    #[test]
    fn a_change_is_loaded_once_settled_and_an_invalid_one_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let file = loop {
            let file = watched(&directory);
            write(&file, "1", 60);
            assert_eq!(file.read().unwrap(), 1);
            let start = Instant::now();
            write(&file, "2", 0);
            let value = file.read().unwrap();
            // If the thread was delayed until the file had settled, the check is inconclusive: retry.
            if start.elapsed() < SETTLE_TIME {
                assert_eq!(value, 1, "it was just written");
                break file;
            }
        };
        write(&file, "2", 50);
        assert_eq!(file.read().unwrap(), 2);
        write(&file, "many", 40);
        assert_eq!(file.read().unwrap(), 2);
        write(&file, "3", 30);
        assert_eq!(file.read().unwrap(), 3);
        fs::remove_file(&file.path).unwrap();
        assert_eq!(file.read().unwrap(), 3);
    }
}
