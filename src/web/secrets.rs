//! The file with the webhook secrets, read again when it changes.

use std::{
    fs,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use crate::plan::signature::Keys;

/// How long a changed file is left alone while older secrets hold: it may not have been written to its end.
const SETTLED: Duration = Duration::from_secs(1);

pub struct Secrets {
    file: Option<PathBuf>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// What the file looked like when it was read last.
    version: Option<Version>,
    keys: Option<Keys>,
}

/// When it was written, and how long it is.
type Version = (SystemTime, u64);

/// Why nobody can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSecrets {
    #[error("webhooks are not received here: --webhook-secret-file is not set")]
    NotConfigured,
    #[error("webhooks cannot be checked: the webhook secret file cannot be read, or has no secret in it")]
    NoneYet,
}

impl Secrets {
    pub fn new(file: Option<PathBuf>) -> Self {
        Self { file, known: Mutex::default() }
    }

    /// The secrets as the file has them now. While it is missing, empty or being written, the last good ones hold:
    /// without any, nobody is let in.
    pub fn keys(&self) -> Result<Keys, NoSecrets> {
        let file = self.file.as_ref().ok_or(NoSecrets::NotConfigured)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let version = fs::metadata(file).and_then(|meta| Ok((meta.modified()?, meta.len()))).ok();
        let settled = |(written, _): &Version| !written.elapsed().is_ok_and(|age| age < SETTLED);
        if version != known.version && (known.keys.is_none() || version.as_ref().is_none_or(settled)) {
            known.version = version;
            match fs::read_to_string(file).ok().as_deref().and_then(Keys::parse) {
                Some(keys) => {
                    tracing::info!(?keys, "the webhook secrets were read");
                    known.keys = Some(keys);
                }
                None => tracing::warn!(
                    file = %file.display(),
                    "no webhook secret can be read; {}",
                    if known.keys.is_some() { "the last good ones hold" } else { "webhooks are refused" },
                ),
            }
        }
        known.keys.clone().ok_or(NoSecrets::NoneYet)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use paddock_bed_github::signature;

    use super::*;
    use crate::plan::signature::claimed;

    fn trusts(secrets: &Secrets, secret: &str) -> Result<bool, NoSecrets> {
        let signature = claimed(Some(signature(secret, b"body").as_bytes()), None).unwrap();
        Ok(secrets.keys()?.check(&signature, b"body").is_ok())
    }

    /// Writes as somebody did that long ago.
    fn write(secrets: &Secrets, text: &str, seconds_ago: u64) {
        let path = secrets.file.as_ref().unwrap();
        fs::write(path, text).unwrap();
        let written = SystemTime::now() - Duration::from_secs(seconds_ago);
        fs::File::options().append(true).open(path).unwrap().set_modified(written).unwrap();
    }

    #[test]
    fn i9_without_secrets_nobody_is_let_in() {
        assert_eq!(trusts(&Secrets::new(None), ""), Err(NoSecrets::NotConfigured));
        let directory = tempfile::tempdir().unwrap();
        let secrets = Secrets::new(Some(directory.path().join("secrets")));
        assert_eq!(trusts(&secrets, ""), Err(NoSecrets::NoneYet));
        write(&secrets, "\n \n", 10);
        assert_eq!(trusts(&secrets, ""), Err(NoSecrets::NoneYet));
        write(&secrets, "first", 0);
        assert_eq!((trusts(&secrets, "first"), trusts(&secrets, "")), (Ok(true), Ok(false)));
    }

    #[test]
    fn a_rotation_takes_effect_when_it_is_whole_and_an_emptied_file_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let secrets = loop {
            let secrets = Secrets::new(Some(directory.path().join("secrets")));
            write(&secrets, "old", 60);
            assert_eq!((trusts(&secrets, "old"), trusts(&secrets, "new")), (Ok(true), Ok(false)));
            let start = Instant::now();
            write(&secrets, "old\nne", 0);
            let trusted = (trusts(&secrets, "old"), trusts(&secrets, "ne"));
            // A thread that did not run until the file had settled has shown nothing: it tries again.
            if start.elapsed() < SETTLED {
                assert_eq!(trusted, (Ok(true), Ok(false)), "it was just written");
                break secrets;
            }
        };
        write(&secrets, "old\nnew\n", 50);
        assert_eq!((trusts(&secrets, "old"), trusts(&secrets, "new")), (Ok(true), Ok(true)));
        write(&secrets, "new\n", 40);
        assert_eq!((trusts(&secrets, "old"), trusts(&secrets, "new")), (Ok(false), Ok(true)));
        write(&secrets, "", 30);
        assert_eq!((trusts(&secrets, ""), trusts(&secrets, "new")), (Ok(false), Ok(true)));
        fs::remove_file(secrets.file.as_ref().unwrap()).unwrap();
        assert_eq!(trusts(&secrets, "new"), Ok(true));
    }
}
