//! The GitHub runner: its directory, `config.sh` and `run.sh`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use paddock_record::RunnerArchive;
use tokio::process::{Child, Command};

use crate::{limits, process};

/// A registration or removal token. It never appears in a log or on a command line. Only `config.sh` has it in its
/// environment, and jobs do not inherit that.
pub struct Token(pub String);

/// The runner's installation on this machine.
#[derive(Clone)]
pub struct Installation {
    dir: PathBuf,
    log: PathBuf,
    user: User,
}

/// The user that runs the runner: `runner` if the image has it, else the agent's own.
#[derive(Debug, Clone, PartialEq, Eq)]
enum User {
    Runner { group: String, home: String },
    Root,
    Own,
}

impl User {
    fn of(uid: u32, passwd: &str) -> Self {
        let entry = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|entry| entry[0] == "runner");
        match entry.as_deref() {
            _ if uid != 0 => Self::Own,
            Some([_, _, _, group, _, home, ..]) => {
                Self::Runner { group: (*group).to_owned(), home: (*home).to_owned() }
            }
            Some(_) | None => Self::Root,
        }
    }
}

impl Installation {
    pub fn new(dir: PathBuf, log: PathBuf) -> Self {
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self { dir, log, user: User::of(nix::unistd::geteuid().as_raw(), &passwd) }
    }

    /// A command in the runner's directory, run as its user. Jobs inherit its environment, so the agent's own variables
    /// are removed.
    fn command(&self, program: &str) -> Command {
        let mut command = match &self.user {
            User::Own | User::Root => Command::new(program),
            User::Runner { group, home } => {
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

    /// Removes the runner from GitHub.
    pub async fn remove(&self, token: &Token) -> Result<()> {
        let mut command = self.command("./config.sh");
        command.arg("remove");
        self.config(command, token).await
    }

    async fn config(&self, mut command: Command, token: &Token) -> Result<()> {
        command.env("ACTIONS_RUNNER_INPUT_TOKEN", &token.0);
        output(&mut command, limits::CONFIG_TIMEOUT, Some(token)).await.context("config.sh")
    }

    /// Deletes the registration's files, including the runner's credentials.
    pub fn forget(&self) -> Result<()> {
        for name in [".runner", ".credentials", ".credentials_rsaparams"] {
            ignore_missing(fs::remove_file(self.dir.join(name))).with_context(|| format!("cannot remove {name}"))?;
        }
        Ok(())
    }

    /// Deletes the runner's work directory with everything that jobs left in it.
    pub async fn scrub(&self) -> Result<()> {
        let work = self.dir.join("_work");
        let removed = tokio::task::spawn_blocking(move || ignore_missing(fs::remove_dir_all(work))).await?;
        removed.context("cannot empty the runner's work directory")
    }

    /// Starts `run.sh` with an empty log. It outlives the agent, so that a restart does not interrupt a job.
    pub fn start(&self) -> Result<Child> {
        let log = File::create(&self.log).with_context(|| format!("cannot write {}", self.log.display()))?;
        let mut command = self.command("./run.sh");
        command.stdout(log.try_clone()?).stderr(log).spawn().context("cannot start run.sh")
    }

    pub fn log(&self) -> &Path {
        &self.log
    }
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

/// Runs a command and logs its output with the token redacted. On failure, the error is the last line.
async fn output(command: &mut Command, limit: Duration, token: Option<&Token>) -> Result<()> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let (status, text) = process::output(command, limit).await.with_context(|| program.clone())?;
    let text = token.map_or(text.clone(), |token| text.replace(&token.0, "***"));
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    for line in lines() {
        tracing::info!("{program}: {line}");
    }
    if !status.success() {
        bail!("{program} ended with {status}: {}", lines().next_back().unwrap_or("it said nothing"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use paddock_bed_process::write_program;

    use super::*;

    /// An installation whose `config.sh` and `run.sh` are the given script.
    fn installation(script: &str) -> (tempfile::TempDir, Installation) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.sh", "run.sh"] {
            write_program(&dir.path().join(name), format!("#!/bin/bash\n{script}\n")).unwrap();
        }
        let installation = Installation { dir: dir.path().into(), log: dir.path().join("log"), user: User::Own };
        (dir, installation)
    }

    #[tokio::test]
    async fn i10_the_token_is_in_the_environment_of_config_sh_and_nowhere_else() {
        let (dir, runner) =
            installation("printf '%s ' \"$@\" >args; env >env; echo \"bad token $ACTIONS_RUNNER_INPUT_TOKEN\"; exit 1");
        let token = Token("s3cr3t".into());
        let error = runner.configure("https://github.com/acme", "", &token, "i-1", "77").await.unwrap_err();
        assert_eq!(format!("{error:#}"), "config.sh: ./config.sh ended with exit status: 1: bad token ***");
        let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(
            read("args"),
            "--unattended --url https://github.com/acme --name i-1 --labels 77 --no-default-labels --replace \
             --disableupdate "
        );
        assert!(read("env").contains("ACTIONS_RUNNER_INPUT_TOKEN=s3cr3t"));
        runner.start().unwrap().wait().await.unwrap();
        assert!(!read("env").contains("s3cr3t"));
    }

    #[tokio::test]
    async fn a_registration_starts_from_nothing_even_where_the_last_was_cut_off() {
        let (dir, runner) = installation("test ! -e .runner && test ! -e .credentials");
        fs::write(dir.path().join(".runner"), "").unwrap();
        fs::write(dir.path().join(".credentials"), "").unwrap();
        runner.configure("https://github.com/acme", "", &Token("t".into()), "i-1", "77").await.unwrap();
    }

    #[tokio::test]
    async fn what_is_no_single_label_is_never_registered() {
        let (dir, runner) = installation("touch called");
        for run_id in ["", "1,2", "--ephemeral", "-1", "1 2", "1\n", "$(id)", "ü"] {
            let error =
                runner.configure("https://github.com/acme", "", &Token("t".into()), "i-1", run_id).await.unwrap_err();
            assert!(error.to_string().ends_with("cannot be a runner's label"), "{error}");
        }
        assert!(!dir.path().join("called").exists());
    }

    #[tokio::test]
    async fn scrubbing_leaves_nothing_of_the_jobs() {
        let (dir, runner) = installation("");
        runner.scrub().await.unwrap();
        fs::create_dir_all(dir.path().join("_work/repo/.git")).unwrap();
        runner.scrub().await.unwrap();
        assert!(!dir.path().join("_work").exists() && dir.path().join("config.sh").exists());
    }

    #[tokio::test]
    async fn the_runner_joins_the_group_of_its_record() {
        let (dir, runner) = installation("printf '%s\\n' \"$@\" >args");
        runner.configure("https://github.com/acme", "R&D boards", &Token("t".into()), "i-1", "77").await.unwrap();
        assert!(fs::read_to_string(dir.path().join("args")).unwrap().ends_with("--runnergroup\nR&D boards\n"));
    }

    /// Serves `body` to each request, and returns the address.
    async fn serve(body: Vec<u8>) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/runner.tar.gz", listener.local_addr().unwrap());
        let app = axum::Router::new().fallback(async move || body);
        tokio::spawn(async move { axum::serve(listener, app).await });
        url
    }

    #[tokio::test]
    async fn a_runner_is_installed_only_if_its_checksum_is_known_and_right() {
        let (source, _) = installation("");
        let archive = source.path().join("archive");
        let mut tar = Command::new("tar");
        assert!(
            tar.arg("-czf")
                .arg(&archive)
                .args(["config.sh", "run.sh"])
                .current_dir(&source)
                .status()
                .await
                .unwrap()
                .success()
        );
        let sum = Command::new("sha256sum").arg(&archive).output().await.unwrap().stdout;
        let sum = String::from_utf8(sum).unwrap()[..64].to_owned();
        let url = serve(fs::read(&archive).unwrap()).await;
        let dir = tempfile::tempdir().unwrap();
        let install = async |name: &str, architecture: &str, sha256: Option<&str>| {
            let dir = dir.path().join(name);
            let runner = Installation { dir: dir.clone(), log: dir.join("log"), user: User::Own };
            let archive = RunnerArchive { url: url.clone(), sha256: sha256.map(str::to_owned) };
            let installed = runner.install(&BTreeMap::from([(architecture.to_owned(), archive)])).await;
            (dir.join("config.sh").exists(), installed.map_err(|error| format!("{error:#}")).err().unwrap_or_default())
        };
        let here = architecture(std::env::consts::ARCH);
        assert_eq!(install("right", here, Some(&sum)).await, (true, String::new()));
        let (there, error) = install("wrong", here, Some(&"0".repeat(64))).await;
        assert!(!there && error.starts_with(&format!("what {url} serves does not have the checksum 000")), "{error}");
        let (there, error) = install("unknown", here, None).await;
        assert!(!there && error.ends_with("set runnerSha256 in the pool, or put a runner into the image"), "{error}");
        let (there, error) = install("other", "riscv64", Some(&sum)).await;
        assert!(!there && error.ends_with("put one into the image"), "{error}");
    }

    #[test]
    fn the_runner_runs_as_the_user_that_the_image_made_for_it() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nrunner:x:1001:1002:,,,:/home/runner:/bin/bash\n";
        let runner = User::Runner { group: "1002".into(), home: "/home/runner".into() };
        assert_eq!(User::of(0, passwd), runner);
        assert_eq!(User::of(0, "root:x:0:0:root:/root:/bin/bash"), User::Root);
        assert_eq!(User::of(1001, passwd), User::Own);
    }
}
