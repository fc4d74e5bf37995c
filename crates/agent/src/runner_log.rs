//! Parses the output of `run.sh`, the only place that shows whether the runner has a job.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
    time::{Duration, Instant},
};

use crate::step::Runner;

/// Follows the log of one `run.sh`.
#[derive(Debug, Default)]
pub struct RunnerLog {
    read: u64,
    /// An incomplete last line.
    partial: Vec<u8>,
    phase: Option<Runner>,
    version: Option<String>,
    /// When it was found to listen; none once it had a job, which GitHub gives to no runner that it refuses.
    listening_since: Option<Instant>,
}

impl RunnerLog {
    /// Reads new lines. An unreadable log changes nothing.
    pub fn read(&mut self, path: &Path, now: Instant) {
        let mut new = Vec::new();
        let read = File::open(path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.read))?;
            file.read_to_end(&mut new)
        });
        if let Ok(count) = read {
            self.read += count as u64;
            self.partial.append(&mut new);
        }
        if let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') {
            let rest = self.partial.split_off(end + 1);
            let lines = std::mem::replace(&mut self.partial, rest);
            String::from_utf8_lossy(&lines).lines().for_each(|line| self.follow(line, now));
        }
    }

    fn follow(&mut self, line: &str, now: Instant) {
        if let Some(version) = line.strip_prefix("Current runner version: '") {
            self.version = version.strip_suffix('\'').map(str::to_owned);
        }
        let Some(phase) = phase_of(line) else { return };
        match phase {
            Runner::Idle if self.phase.is_none() => self.listening_since = Some(now),
            Runner::Busy => self.listening_since = None,
            _ => {}
        }
        self.phase = Some(phase);
    }

    /// The version of the runner, once it has told it.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The runner's phase. It must have listened for `patience` before it counts as idle.
    pub fn phase(&self, patience: Duration, now: Instant) -> Runner {
        match self.phase {
            Some(Runner::Idle) if self.listening_since.is_some_and(|since| now.duration_since(since) < patience) => {
                Runner::Starting
            }
            phase => phase.unwrap_or(Runner::Starting),
        }
    }
}

/// `2025-05-31 12:00:00Z: Listening for Jobs`
fn phase_of(line: &str) -> Option<Runner> {
    let (_time, words) = line.split_once("Z: ")?;
    if words.starts_with("Running job: ") {
        Some(Runner::Busy)
    } else if words.starts_with("Listening for Jobs")
        || words.starts_with("Job ") && words.contains(" completed with result: ")
    {
        Some(Runner::Idle)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_last_matching_line_decides_the_phase() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut log = RunnerLog::default();
        let mut after = |text: &str| {
            file.as_file().write_all(text.as_bytes()).unwrap();
            log.read(file.path(), Instant::now());
            log.phase(Duration::ZERO, Instant::now())
        };
        assert_eq!(after("\n√ Connected to GitHub\n\nCurrent runner version: '2.330.0'\n"), Runner::Starting);
        assert_eq!(after("2025-05-31 12:00:00Z: Listening for Jo"), Runner::Starting);
        assert_eq!(after("bs\n"), Runner::Idle);
        assert_eq!(after("2025-05-31 12:00:01Z: Running job: a completed with result: Succeeded\n"), Runner::Busy);
        assert_eq!(after("2025-05-31 12:00:02Z: Runner connect error: gone\n"), Runner::Busy);
        assert_eq!(after("2025-05-31 12:00:03Z: Job a completed with result: Failed\n"), Runner::Idle);
        assert_eq!(after("x\n2025-05-31 12:00:04Z: Running job: Listening for Jobs\nmore"), Runner::Busy);
    }

    #[test]
    fn a_missing_log_means_starting() {
        let mut log = RunnerLog::default();
        log.read(Path::new("/nonexistent"), Instant::now());
        assert_eq!(log.phase(Duration::ZERO, Instant::now()), Runner::Starting);
    }

    #[test]
    fn a_runner_that_may_be_refused_is_idle_after_a_while_or_once_it_had_a_job() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (mut log, start, patience) = (RunnerLog::default(), Instant::now(), Duration::from_secs(5));
        let at = |second| start + Duration::from_secs(second);
        let mut after = |text: &str, second| {
            file.as_file().write_all(text.as_bytes()).unwrap();
            log.read(file.path(), at(second));
            (log.phase(patience, at(second)), log.version().map(str::to_owned))
        };
        let version = Some("2.330.0".to_owned());
        assert_eq!(after("Current runner version: '2.330.0'\n", 0), (Runner::Starting, version.clone()));
        assert_eq!(after("2025-05-31 12:00:00Z: Listening for Jobs\n", 1), (Runner::Starting, version.clone()));
        assert_eq!(after("", 5), (Runner::Starting, version.clone()));
        assert_eq!(after("", 6), (Runner::Idle, version.clone()));

        let file = tempfile::NamedTempFile::new().unwrap();
        let mut log = RunnerLog::default();
        let jobs = "2025-05-31 12:00:00Z: Listening for Jobs\n2025-05-31 12:00:01Z: Running job: a\n2025-05-31 \
                    12:00:02Z: Job a completed with result: Succeeded\n";
        file.as_file().write_all(jobs.as_bytes()).unwrap();
        log.read(file.path(), start);
        assert_eq!(log.phase(patience, start), Runner::Idle);
    }
}
