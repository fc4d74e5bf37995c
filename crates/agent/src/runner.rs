//! The GitHub runner: its directory, `config.sh` and `run.sh`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, lchown},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use paddock_record::RunnerArchive;
use tokio::process::{Child, Command};

use crate::{
    files::Files,
    limits,
    process::{self, Failed},
};

/// The files of a registration, with those of a runner that GitHub has moved to its newer service: either of `.runner` and
/// `.runner_migrated` makes it configured (actions/runner v2.336.0, `src/Runner.Common/ConfigurationStore.cs`).
const REGISTRATION: [&str; 5] =
    [".runner", ".credentials", ".credentials_rsaparams", ".runner_migrated", ".credentials_migrated"];

/// Variables that the next listener loads, which an image may have prepared; `config.sh` and jobs may add to them.
const ENVIRONMENT: &str = ".env";

/// What `config.sh` prints where the image lacks a library (actions/runner v2.336.0, `src/Misc/layoutroot/config.sh`).
const MISSING_LIBRARY: &str = "ependencies is missing";

/// What `config.sh remove` prints where GitHub does not have the runner, in the flow where it deletes it itself
/// (actions/runner v2.336.0, `src/Runner.Common/RunnerDotcomServer.cs`).
const REMOVED_BEFORE: &str = "Http response code: NotFound from 'Delete ";

/// A registration or removal token. It never appears in a log or on a command line. Only `config.sh` has it in its
/// environment, and jobs do not inherit that.
pub struct Token(pub String);

/// The runner's installation on this machine.
#[derive(Clone)]
pub struct Installation {
    dir: PathBuf,
    log: PathBuf,
    /// The image's own [`ENVIRONMENT`].
    environment: PathBuf,
    user: User,
}

/// The user that runs the runner: `runner` if the image has it, else the agent's own.
#[derive(Debug, Clone, PartialEq, Eq)]
enum User {
    Runner { uid: u32, group: String, home: String },
    Root,
    Own,
}

impl User {
    fn of(uid: u32, passwd: &str) -> Self {
        let entry = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|entry| entry[0] == "runner");
        match entry.as_deref() {
            _ if uid != 0 => Self::Own,
            Some([_, _, uid, group, _, home, ..]) => match uid.parse() {
                // Also by another name root is the agent's own user.
                Ok(0) | Err(_) => Self::Root,
                Ok(uid) => Self::Runner { uid, group: (*group).to_owned(), home: (*home).to_owned() },
            },
            Some(_) | None => Self::Root,
        }
    }
}

impl Installation {
    pub fn of(files: &Files) -> Self {
        Self::new(files.runner_dir(), files.runner_log(), files.environment())
    }

    fn new(dir: PathBuf, log: PathBuf, environment: PathBuf) -> Self {
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self { dir, log, environment, user: User::of(nix::unistd::geteuid().as_raw(), &passwd) }
    }

    /// The runner's user; none if it is the agent's own.
    pub fn uid(&self) -> Option<u32> {
        match self.user {
            User::Runner { uid, .. } => Some(uid),
            User::Root | User::Own => None,
        }
    }

    /// A command in the runner's directory, run as its user. Jobs inherit its environment, so the agent's own variables
    /// are removed.
    fn command(&self, program: &str) -> Command {
        let mut command = match &self.user {
            User::Own | User::Root => Command::new(program),
            User::Runner { group, home, .. } => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid=runner", &format!("--regid={group}"), "--init-groups", "--", program]);
                command.env("HOME", home).env("USER", "runner").env("LOGNAME", "runner");
                command
            }
        };
        if self.user == User::Root {
            command.env("RUNNER_ALLOW_RUNASROOT", "1");
            command.env("HOME", std::env::var_os("HOME").unwrap_or_else(|| "/root".into()));
        }
        for (name, _) in std::env::vars_os() {
            if ["AWS_", "PADDOCK_"].iter().any(|ours| name.to_string_lossy().starts_with(ours)) {
                command.env_remove(name);
            }
        }
        command.current_dir(&self.dir).stdin(Stdio::null()).process_group(0);
        command
    }

    /// Downloads the runner if the image has none.
    pub async fn install(&self, archives: &BTreeMap<String, RunnerArchive>) -> Result<()> {
        if self.dir.join("config.sh").exists() {
            return Ok(());
        }
        let architecture = architecture(std::env::consts::ARCH);
        let Some(RunnerArchive { url, sha256 }) = archives.get(architecture) else {
            bail!(
                "no runner in {}, and GitHub lists none for {architecture}: put one into the image",
                self.dir.display()
            );
        };
        let Some(sha256) = sha256 else {
            bail!("no checksum of {url} is known: set runnerSha256 in the pool, or put a runner into the image");
        };
        tracing::info!(%url, "downloading the runner");
        fs::create_dir_all(&self.dir)?;
        if let User::Runner { group, .. } = &self.user {
            let mut chown = Command::new("chown");
            output(chown.arg(format!("runner:{group}")).arg(&self.dir).process_group(0), limits::CONFIG_TIMEOUT, None)
                .await?;
        }
        let archive = self.dir.join("runner.tar.gz");
        let mut curl = self.command("curl");
        curl.args(["--fail", "--silent", "--show-error", "--location", "--retry", "10", "--output"]);
        output(curl.arg(&archive).args(["--url", url]), limits::INSTALL_TIMEOUT, None).await?;
        let sums = self.dir.join("runner.sha256");
        fs::write(&sums, format!("{sha256}  {}\n", archive.display()))?;
        let mut check = Command::new("sha256sum");
        let checked =
            output(check.args(["--check", "--quiet"]).arg(&sums).process_group(0), limits::INSTALL_TIMEOUT, None);
        checked.await.with_context(|| format!("what {url} serves does not have the checksum {sha256}"))?;
        fs::remove_file(sums)?;
        let mut tar = self.command("tar");
        output(tar.args(["--extract", "--gzip", "--file"]).arg(&archive), limits::INSTALL_TIMEOUT, None).await?;
        Ok(fs::remove_file(archive)?)
    }

    /// Checks what the runner needs from the machine, before a claim waits for it: `config.sh` refuses to work without it.
    /// It ends after that check when it is asked for the version.
    pub async fn check(&self) -> Result<()> {
        let kept = fs::read(self.dir.join(ENVIRONMENT)).ok();
        if let Some(text) = kept {
            write(&self.environment, &text)?;
        }
        let mut command = self.command("./config.sh");
        match output(command.arg("--version"), limits::CONFIG_TIMEOUT, None).await {
            Err(error) if error.to_string().contains(MISSING_LIBRARY) => Err(error.context(
                "the image lacks libraries that GitHub's runner needs: install them in the image or in preRunnerScript \
                 (libicu; on Amazon Linux 2023 `dnf install -y libicu`, on Debian, Ubuntu and others \
                 `/opt/actions-runner/bin/installdependencies.sh`)",
            )),
            checked => checked.context("GitHub's runner does not start on this machine"),
        }
    }

    /// Loads the runner's code once, so that the first registration does not wait for the disk.
    pub async fn warm_up(&self) {
        let listener = "./bin/Runner.Listener";
        if self.dir.join(listener).exists() {
            let mut command = self.command(listener);
            match process::output(command.arg("warmup"), limits::WARM_UP_TIMEOUT).await {
                Ok((status, _)) => tracing::info!(%status, "the runner is warmed up"),
                Err(error) => tracing::warn!("the runner is not warmed up: {error:#}"),
            }
        }
    }

    /// Registers the runner with the run's id as its only label.
    pub async fn configure(&self, url: &str, group: &str, token: &Token, name: &str, run_id: &str) -> Result<()> {
        // A comma would make it two labels, a leading dash an option.
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !run_id.starts_with(|c: char| c.is_ascii_alphanumeric()) || !run_id.chars().all(fits) {
            bail!("the run id {run_id:?} cannot be a runner's label");
        }
        self.forget()?;
        let mut command = self.command("./config.sh");
        command.args(["--unattended", "--url", url, "--name", name, "--labels", run_id]);
        command.args(["--no-default-labels", "--replace", "--disableupdate"]);
        if !group.is_empty() {
            command.args(["--runnergroup", group]);
        }
        self.config(command, token).await
    }

    /// Removes the runner from GitHub, where an admin may have removed it before.
    pub async fn remove(&self, token: &Token) -> Result<()> {
        let mut command = self.command("./config.sh");
        command.arg("remove");
        match self.config(command, token).await {
            Err(error) if error.downcast_ref::<Failed>().is_some_and(|failed| failed.log.contains(REMOVED_BEFORE)) => {
                tracing::info!("GitHub did not have the runner any more");
                Ok(())
            }
            removed => removed,
        }
    }

    async fn config(&self, mut command: Command, token: &Token) -> Result<()> {
        command.env("ACTIONS_RUNNER_INPUT_TOKEN", &token.0);
        output(&mut command, limits::CONFIG_TIMEOUT, Some(token)).await.context("config.sh")
    }

    /// Deletes the registration's files, including the runner's credentials, and the variables of its jobs.
    pub fn forget(&self) -> Result<()> {
        for name in REGISTRATION.iter().chain(&[ENVIRONMENT, ".path"]) {
            ignore_missing(fs::remove_file(self.dir.join(name))).with_context(|| format!("cannot remove {name}"))?;
        }
        if let Ok(text) = fs::read(&self.environment) {
            let (path, owner) = (self.dir.join(ENVIRONMENT), fs::metadata(&self.dir)?);
            write(&path, &text)?;
            lchown(&path, Some(owner.uid()), Some(owner.gid()))?;
        }
        Ok(())
    }

    /// Whether there is a registration to start the runner with. The runner deletes it when GitHub does not know it.
    pub fn is_configured(&self) -> bool {
        [".runner", ".runner_migrated"].iter().any(|name| self.dir.join(name).exists())
    }

    /// Deletes what jobs left in the runner's directory: their work, and logs about them.
    pub async fn scrub(&self) -> Result<()> {
        let dirs = ["_work", "_diag"].map(|name| self.dir.join(name));
        let remove = move || dirs.iter().try_for_each(|dir| ignore_missing(fs::remove_dir_all(dir)));
        tokio::task::spawn_blocking(remove).await?.context("cannot empty the runner's work directory")
    }

    /// The end of the runner's newest log about itself, which has the cause of an error. It is read by the runner's user,
    /// who may have put a link there.
    pub async fn diagnostics(&self) -> String {
        let mut command = self.command("bash");
        let newest = "ls -t _diag/Runner_*.log 2>/dev/null | head -n 1 | xargs -r tail -c 4096";
        match process::output(command.args(["-c", newest]), limits::DIAGNOSTICS_TIMEOUT).await {
            Ok((status, text)) if status.success() => text,
            Ok(_) | Err(_) => String::new(),
        }
    }

    /// Starts `run.sh` with an empty log. It outlives the agent, so that a restart does not interrupt a job.
    pub fn start(&self) -> Result<Child> {
        let log = File::create(&self.log).with_context(|| format!("cannot write {}", self.log.display()))?;
        let mut command = self.command("./run.sh");
        command.env("ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE", "1");
        command.stdout(log.try_clone()?).stderr(log).spawn().context("cannot start run.sh")
    }

    pub fn log(&self) -> &Path {
        &self.log
    }
}

/// Writes a file that everyone may read in the place of what is there, even if that is a link.
fn write(path: &Path, text: &[u8]) -> Result<()> {
    let written = ignore_missing(fs::remove_file(path)).and_then(|()| {
        let mut file = File::options().write(true).create_new(true).mode(0o644).open(path)?;
        file.write_all(text)
    });
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// GitHub's name of this CPU architecture, in its archives' names.
fn architecture(arch: &str) -> &str {
    match arch {
        "x86_64" => "x64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Runs a command and logs its output with the token redacted.
async fn output(command: &mut Command, limit: Duration, token: Option<&Token>) -> Result<()> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let (status, text) = process::output(command, limit).await.with_context(|| program.clone())?;
    let text = token.map_or(text.clone(), |token| text.replace(&token.0, "***"));
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        tracing::info!("{program}: {line}");
    }
    if !status.success() {
        return Err(Failed::new(format!("{program} ended with {status}"), &text).into());
    }
    Ok(())
}

#[cfg(test)]
#[path = "runner_tests.rs"]
mod tests;
