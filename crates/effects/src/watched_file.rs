//! A file of settings that is read again when it changes.

use std::{
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, anyhow};

use crate::lock;

/// How long a changed file is left alone while an older value holds: it may still be being written.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// While the file is missing, broken or being written, the last good value holds.
pub struct WatchedFile<T> {
    path: PathBuf,
    parse: fn(&str) -> Result<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    /// What the file looked like when it was last read.
    version: Option<Version>,
    value: Option<T>,
    /// Why there is no value yet.
    error: Option<String>,
}

/// When it was written, and its length.
type Version = (SystemTime, u64);

impl<T: Clone> WatchedFile<T> {
    pub fn new(path: PathBuf, parse: fn(&str) -> Result<T>) -> Self {
        Self { path, parse, state: Mutex::new(State { version: None, value: None, error: None }) }
    }

    /// The value of the file as it is now, or the last good one; an error where there has been none.
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
                        tracing::warn!(error, "file not loaded; its last good content holds");
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

    /// Writes the file as if that long ago.
    fn write(file: &WatchedFile<u32>, text: &str, seconds_ago: u64) {
        fs::write(&file.path, text).unwrap();
        let written = SystemTime::now() - Duration::from_secs(seconds_ago);
        fs::File::options().append(true).open(&file.path).unwrap().set_modified(written).unwrap();
    }

    #[test]
    fn a_missing_or_broken_file_has_no_value_and_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let file = watched(&directory);
        assert!(file.read().unwrap_err().to_string().contains("cannot read"));
        write(&file, "many", 10);
        assert!(file.read().unwrap_err().to_string().contains("is not valid"));
        write(&file, "1", 0);
        assert_eq!(file.read().unwrap(), 1, "without an older value there is nothing to wait for");
    }

    #[test]
    fn a_change_takes_effect_when_it_is_settled_and_a_broken_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = loop {
            let file = watched(&directory);
            write(&file, "1", 60);
            assert_eq!(file.read().unwrap(), 1);
            let start = Instant::now();
            write(&file, "2", 0);
            let value = file.read().unwrap();
            // A thread that did not run until the file had settled has shown nothing: it tries again.
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
