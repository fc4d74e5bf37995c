//! The file with the caps, read again when it changes.

use std::{path::PathBuf, sync::Mutex};

use anyhow::{Context, Result};

use super::lock;
use crate::plan::entity::EntityLimits;

pub struct Limits {
    file: Option<PathBuf>,
    last: Mutex<Option<(String, EntityLimits)>>,
}

impl Limits {
    pub fn new(file: Option<PathBuf>) -> Self {
        Self { file, last: Mutex::default() }
    }

    /// The caps as the file has them now. While it cannot be read the last good ones hold; without any, nothing may be
    /// made, because a missing file must not lift a cap.
    pub fn read(&self) -> Result<EntityLimits> {
        let Some(file) = &self.file else { return Ok(EntityLimits::default()) };
        let mut last = lock(&self.last);
        let read = std::fs::read_to_string(file)
            .with_context(|| format!("the entity limits {} cannot be read", file.display()));
        let parsed = read.and_then(|text| match &*last {
            Some((known, limits)) if *known == text => Ok((text, limits.clone())),
            _ => {
                let limits = serde_saphyr::from_str(&text);
                Ok((text, limits.with_context(|| format!("the entity limits {} make no sense", file.display()))?))
            }
        });
        match (parsed, &*last) {
            (Ok((text, limits)), _) => {
                *last = Some((text, limits.clone()));
                Ok(limits)
            }
            (Err(error), Some((_, limits))) => {
                tracing::warn!("{error:#}; the last good ones hold");
                Ok(limits.clone())
            }
            (Err(error), None) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_file_leaves_the_last_good_caps_and_none_at_first() {
        assert_eq!(Limits::new(None).read().unwrap().of("1"), 20);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("limits.yaml");
        let limits = Limits::new(Some(file.clone()));
        assert!(limits.read().is_err());
        std::fs::write(&file, "default: 3\noverrides: {\"7\": 1}\n").unwrap();
        assert_eq!(["1", "7"].map(|entity| limits.read().unwrap().of(entity)), [3, 1]);
        std::fs::write(&file, "default: many").unwrap();
        assert_eq!(limits.read().unwrap().of("1"), 3);
        std::fs::write(&file, "default: 4").unwrap();
        assert_eq!(limits.read().unwrap().of("7"), 4);
    }
}
