//! The file with the limits of owners.

use std::path::PathBuf;

use anyhow::Result;
use paddock_core::demand::quota::EntityLimits;
use paddock_effects::watched_file::WatchedFile;

pub struct Limits(Option<WatchedFile<EntityLimits>>);

impl Limits {
    pub fn new(file: Option<PathBuf>) -> Self {
        Self(file.map(|file| WatchedFile::new(file, |text| Ok(serde_saphyr::from_str(text)?))))
    }

    /// The limits in the file now. An error if it could never be read: a missing file must not lift a limit.
    pub fn read(&self) -> Result<EntityLimits> {
        self.0.as_ref().map_or_else(|| Ok(EntityLimits::default()), WatchedFile::read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_file_the_default_holds_and_a_file_that_cannot_be_read_is_an_error() {
        assert_eq!(Limits::new(None).read().unwrap().of("1"), 20);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("limits.yaml");
        let limits = Limits::new(Some(file.clone()));
        assert!(limits.read().is_err());
        std::fs::write(&file, "default: 3\noverrides: {\"7\": 1}\n").unwrap();
        assert_eq!(["1", "7"].map(|entity| limits.read().unwrap().of(entity)), [3, 1]);
    }
}
