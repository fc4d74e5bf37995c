//! The env file through which outside programs find the bed: `. FILE` in a shell, or parsed line by line.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::process::write_atomically;

/// Removed when dropped.
pub struct EnvFile {
    path: PathBuf,
}

impl EnvFile {
    /// Writes the file atomically.
    pub fn write(path: PathBuf, values: &[(&str, String)]) -> Result<Self> {
        write_atomically(&path, text(values)).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for EnvFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A line for each variable, and one that exports them to child processes of the shell.
fn text(values: &[(&str, String)]) -> String {
    let mut text: String = values.iter().map(|(name, value)| format!("{name}={}\n", quoted(value))).collect();
    let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
    text += &format!("export {}\n", names.join(" "));
    text
}

/// Quotes a value for the shell.
fn quoted(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@".contains(c);
    match !value.is_empty() && value.chars().all(plain) {
        true => value.to_owned(),
        false => format!("'{}'", value.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_shell_reads_what_was_written_and_passes_it_on() {
        let dir = tempfile::tempdir().unwrap();
        let values = ["plain", "", "It's a secret", "$(false) `x` \"y\" \\ *", "two\nlines", "#no comment"];
        let values: Vec<_> = ["A", "B", "C", "D", "E", "F"].into_iter().zip(values.map(str::to_owned)).collect();
        let file = EnvFile::write(dir.path().join("env"), &values).unwrap();
        for (name, value) in &values {
            let script = format!(". {}; printenv {name}", file.path().display());
            let output = Command::new("sh").args(["-euc", &script]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{value}\n"), "{name}");
        }
        let path = file.path().to_owned();
        drop(file);
        assert!(!path.exists());
    }
}
