//! Parses the output of `run.sh`, the only place that shows whether the runner has a job.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use crate::step::Runner;

/// Follows the log of one `run.sh`.
#[derive(Debug, Default)]
pub struct RunnerLog {
    read: u64,
    /// An incomplete last line.
    partial: Vec<u8>,
    phase: Option<Runner>,
}

impl RunnerLog {
    /// Reads new lines and returns the runner's phase. An unreadable log leaves the phase unchanged.
    pub fn phase(&mut self, path: &Path) -> Runner {
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
            self.phase = String::from_utf8_lossy(&lines).lines().rev().find_map(phase_of).or(self.phase);
        }
        self.phase.unwrap_or(Runner::Starting)
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
            log.phase(file.path())
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
        assert_eq!(RunnerLog::default().phase(Path::new("/nonexistent")), Runner::Starting);
    }
}
