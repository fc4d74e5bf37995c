//! Child processes, ports and tools, as every part of the test bed needs them.
//!
//! A [`Process`] dies with the program that started it, however that ends: the kernel kills it when the spawning
//! thread does, so all are spawned from one thread that lives as long as the program.

use std::{
    fs::{self, File},
    future::Future,
    io::{self, Write},
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        OnceLock,
        mpsc::{Sender, channel},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
pub use nix::sys::signal::Signal;
use nix::{
    sys::{prctl, signal::killpg},
    unistd::Pid,
};

/// How long a process may take to end after SIGTERM before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(30);

/// A child in a process group of its own, its output in a log file; killed with its group when dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output in `<log_dir>/<name>.log`.
    pub fn spawn(name: &str, mut command: Command, log_dir: &Path) -> Result<Self> {
        fs::create_dir_all(log_dir)?;
        let log = log_dir.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let program = command.get_program().to_owned();
        let child = spawn(command).with_context(|| format!("cannot start {name} ({})", program.display()))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The last lines of the log, for error messages.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let all: Vec<_> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends `signal` to the whole process group.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(killpg(Pid::from_raw(self.child.id() as i32), signal)?)
    }

    /// Waits until `probe` says yes; an early exit or a passed deadline is an error that shows the end of the log.
    pub async fn until_ready<F, R>(&mut self, deadline: Duration, mut probe: F) -> Result<()>
    where
        F: FnMut() -> R,
        R: Future<Output = bool>,
    {
        let start = Instant::now();
        while !probe().await {
            if let Some(status) = self.exited() {
                bail!("{} ended with {status} before it was ready:\n{}", self.name, self.log_tail(20));
            }
            if start.elapsed() > deadline {
                bail!("{} was not ready after {deadline:?}:\n{}", self.name, self.log_tail(20));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Asks the process to end, waits for it, and kills its group if it takes too long.
    pub async fn stop(mut self) -> Result<ExitStatus> {
        let _ = self.signal(Signal::SIGTERM);
        let start = Instant::now();
        while start.elapsed() < STOP_GRACE {
            if let Some(status) = self.exited() {
                return Ok(status);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.kill()
    }

    /// Kills the whole group at once and reaps the child.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        let _ = self.signal(Signal::SIGKILL);
        Ok(self.child.wait()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Spawns in a process group of its own, tied to the life of this program.
pub fn spawn(mut command: Command) -> io::Result<Child> {
    type Job = (Command, Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in queue {
                let _ = answer.send(command.spawn());
            }
        });
        jobs
    });
    command.process_group(0);
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
    let (answer, result) = channel();
    spawner.send((command, answer)).map_err(io::Error::other)?;
    result.recv().map_err(io::Error::other)?
}

/// Writes a program that can be run at once. Another process does the writing: were it this one, a thread that happens
/// to fork meanwhile would pass on the open file, and until its child has become another program nobody could run this
/// one ("Text file busy").
pub fn write_program(path: &Path, text: &str) -> io::Result<()> {
    let mut install = Command::new("install");
    install.args(["--mode=755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = install.spawn()?;
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(text.as_bytes()));
    let status = child.wait()?;
    written?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("install ended with {status}"))) }
}

/// A TCP port on loopback that was free a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Where the pinned tool lies (see `hack/tools.sh`), built or fetched first if the cache does not have it.
pub fn tool(name: &str) -> Result<PathBuf> {
    let script = concat!(env!("PADDOCK_SOURCE"), "/hack/tools.sh");
    let output = Command::new(script).arg(name).stderr(Stdio::inherit()).output().context(script)?;
    let text = String::from_utf8(output.stdout)?;
    match text.trim().strip_prefix(&format!("{name}=")) {
        Some(path) if output.status.success() => Ok(path.into()),
        _ => bail!("{name} is not to be had: see the message of hack/tools.sh above"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_early_exit_is_reported_with_the_end_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck; exit 3"]);
        let mut process = Process::spawn("luckless", command, dir.path()).unwrap();
        let error = process.until_ready(Duration::from_secs(10), async || false).await.unwrap_err().to_string();
        assert!(error.contains("luckless ended with exit status: 3") && error.contains("no such luck"), "{error}");
    }

    #[tokio::test]
    async fn dropping_kills_the_whole_group() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $!; wait"]);
        let mut process = Process::spawn("family", command, dir.path()).unwrap();
        let log = process.log().to_owned();
        let told = || !fs::read(&log).unwrap().is_empty();
        process.until_ready(Duration::from_secs(10), async || told()).await.unwrap();
        let grandchild = fs::read_to_string(&log).unwrap().trim().to_owned();
        drop(process);
        let gone = || match fs::read_to_string(format!("/proc/{grandchild}/stat")) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        let start = Instant::now();
        while !gone() {
            assert!(start.elapsed() < Duration::from_secs(10), "the grandchild {grandchild} still runs");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
