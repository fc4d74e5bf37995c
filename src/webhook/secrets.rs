//! The file with the webhook secrets.

use std::path::PathBuf;

use anyhow::Context;
use paddock_core::webhook::signature::Keys;
use paddock_effects::watched_file::WatchedFile;

pub struct Secrets(Option<WatchedFile<Keys>>);

/// Why no webhook can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSecrets {
    #[error("webhooks are not received here: --webhook-secret-file is not set")]
    NotConfigured,
    #[error("webhooks cannot be checked: the webhook secret file cannot be read, or has no secret in it")]
    NoneYet,
}

impl Secrets {
    pub fn new(file: Option<PathBuf>) -> Self {
        Self(file.map(|file| WatchedFile::new(file, |text| Keys::parse(text).context("it has no secret in it"))))
    }

    /// The secrets in the file now, or the last valid ones.
    pub fn keys(&self) -> Result<Keys, NoSecrets> {
        self.0.as_ref().ok_or(NoSecrets::NotConfigured)?.read().map_err(|_| NoSecrets::NoneYet)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::Path,
        time::{Duration, SystemTime},
    };

    use paddock_bed_github::signature;
    use paddock_core::webhook::signature::claimed;

    use super::*;

    fn trusts(secrets: &Secrets, secret: &str) -> Result<bool, NoSecrets> {
        let signature = claimed(Some(signature(secret, b"body").as_bytes()), None).unwrap();
        Ok(secrets.keys()?.check(&signature, b"body").is_ok())
    }

    /// Writes the file with a modification time `seconds_ago`.
    fn write(path: &Path, text: &str, seconds_ago: u64) {
        fs::write(path, text).unwrap();
        let written = SystemTime::now() - Duration::from_secs(seconds_ago);
        fs::File::options().append(true).open(path).unwrap().set_modified(written).unwrap();
    }

    #[test]
    fn i9_without_secrets_nothing_is_trusted() {
        assert_eq!(trusts(&Secrets::new(None), ""), Err(NoSecrets::NotConfigured));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets");
        let secrets = Secrets::new(Some(path.clone()));
        assert_eq!(trusts(&secrets, ""), Err(NoSecrets::NoneYet));
        write(&path, "\n \n", 10);
        assert_eq!(trusts(&secrets, ""), Err(NoSecrets::NoneYet));
        write(&path, "first", 0);
        assert_eq!((trusts(&secrets, "first"), trusts(&secrets, "")), (Ok(true), Ok(false)));
    }

    #[test]
    fn a_rotation_takes_effect_and_an_emptied_or_removed_file_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets");
        let secrets = Secrets::new(Some(path.clone()));
        write(&path, "old", 60);
        assert_eq!((trusts(&secrets, "old"), trusts(&secrets, "new")), (Ok(true), Ok(false)));
        write(&path, "old\nnew\n", 50);
        assert_eq!((trusts(&secrets, "old"), trusts(&secrets, "new")), (Ok(true), Ok(true)));
        write(&path, "new\n", 40);
        assert_eq!((trusts(&secrets, "old"), trusts(&secrets, "new")), (Ok(false), Ok(true)));
        write(&path, "", 30);
        assert_eq!((trusts(&secrets, ""), trusts(&secrets, "new")), (Ok(false), Ok(true)));
        fs::remove_file(&path).unwrap();
        assert_eq!(trusts(&secrets, "new"), Ok(true));
    }
}
