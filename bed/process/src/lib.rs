//! Child processes, ports and tools for all parts of the test bed.
//!
//! A [`Process`] dies with the program that started it, even if that is killed: the kernel kills it when the spawning
//! thread ends, so all are spawned from one thread that lives as long as the program.

pub mod emulator;
pub mod wait;

use std::{
    collections::HashMap,
    fs::{self, File},
    future::Future,
    io::{self, Write},
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
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

/// How long a process may take to exit after SIGTERM before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(30);

/// A child in its own process group with its output in a log file; the group is killed on drop.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// Where its part of the log begins: an earlier process with the same name may have written to the file.
    log_start: usize,
}

impl Process {
    /// Starts `command` with its output in `<log_dir>/<name>.log`.
    pub fn spawn(name: &str, mut command: Command, log_dir: &Path) -> Result<Self> {
        fs::create_dir_all(log_dir)?;
        let log = log_dir.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let program = command.get_program().to_owned();
        let log_start = usize::try_from(fs::metadata(&log)?.len())?;
        let child = spawn(command).with_context(|| format!("cannot start {name} ({})", program.display()))?;
        Ok(Self { name: name.to_owned(), child, log, log_start })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The last lines of the log, for error messages.
    pub fn log_tail(&self, lines: usize) -> String {
        self.log_from(0, lines)
    }

    fn log_from(&self, start: usize, lines: usize) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(text.get(start..).unwrap_or_default());
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

    /// Waits until `probe` returns true; after an early exit or the deadline the error shows the end of the log.
    pub async fn until_ready<F, R>(&mut self, deadline: Duration, mut probe: F) -> Result<()>
    where
        F: FnMut() -> R,
        R: Future<Output = bool>,
    {
        let start = Instant::now();
        loop {
            let ready = probe().await;
            // After its exit, another program on the same port may answer.
            if let Some(status) = self.exited() {
                let log = self.log_from(self.log_start, 20);
                bail!("{} ended with {status} before it was ready:\n{log}", self.name);
            }
            if ready {
                return Ok(());
            }
            if start.elapsed() > deadline {
                let log = self.log_from(self.log_start, 20);
                bail!("{} was not ready after {deadline:?}:\n{log}", self.name);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sends SIGTERM, waits, and kills the group if it takes too long.
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

/// Spawns a child in its own process group that dies with this program.
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

/// Writes a program that can be run at once. Another process writes it, because a child forked here meanwhile would
/// inherit the open file and make exec fail ("Text file busy").
pub fn write_program(path: &Path, text: impl AsRef<[u8]>) -> io::Result<()> {
    let mut install = Command::new("install");
    install.args(["--mode=755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = install.spawn()?;
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(text.as_ref()));
    let status = child.wait()?;
    written?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("install ended with {status}"))) }
}

/// Writes a file atomically: readers see the old content or the new one.
pub fn write_atomically(path: &Path, contents: impl AsRef<[u8]>) -> io::Result<()> {
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(contents.as_ref())?;
    file.persist(path)?;
    Ok(())
}

/// The range of [`free_port`], below the kernel's ephemeral ports (from 32768): an outgoing connection could otherwise
/// take the port before the program listens on it.
const FREE_PORTS: std::ops::Range<u32> = 15_000..30_000;

/// A free TCP port on loopback that this program has not returned before.
pub fn free_port() -> Result<u16> {
    Ok(free_listener()?.local_addr()?.port())
}

/// The same, with the port already bound.
pub fn free_listener() -> Result<TcpListener> {
    // Programs that share a network start at different ports.
    static NEXT: OnceLock<AtomicU32> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU32::new(std::process::id().wrapping_mul(97)));
    for _ in FREE_PORTS {
        let offset = next.fetch_add(1, Ordering::Relaxed) % (FREE_PORTS.end - FREE_PORTS.start);
        let port = u16::try_from(FREE_PORTS.start + offset)?;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return Ok(listener);
        }
    }
    bail!("no port of {FREE_PORTS:?} is free")
}

/// The path of the pinned tool (see `hack/tools.sh`), built or downloaded first if it is not in the cache.
pub fn tool(name: &str) -> Result<PathBuf> {
    static FOUND: Mutex<Option<HashMap<String, PathBuf>>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    let found = found.get_or_insert_default();
    if let Some(path) = found.get(name) {
        return Ok(path.clone());
    }
    let script = concat!(env!("PADDOCK_SOURCE"), "/hack/tools.sh");
    let output = Command::new(script).arg(name).stderr(Stdio::inherit()).output().context(script)?;
    let text = String::from_utf8(output.stdout)?;
    match text.trim().strip_prefix(&format!("{name}=")) {
        Some(path) if output.status.success() => {
            found.insert(name.to_owned(), path.into());
            Ok(path.into())
        }
        _ => bail!("{name} is missing: see the message of hack/tools.sh above"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_port_is_given_twice() {
        let ports: HashSet<u16> = (0..100).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| FREE_PORTS.contains(&u32::from(*port))), "{ports:?}");
    }

    #[test]
    fn readers_never_see_half_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        let texts = ["a".repeat(100_000), "b".repeat(100_000)];
        write_atomically(&path, &texts[0]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..200).for_each(|i| write_atomically(&path, &texts[i % 2]).unwrap()));
            for _ in 0..200 {
                assert!(texts.contains(&fs::read_to_string(&path).unwrap()));
            }
        });
    }

    #[tokio::test]
    async fn an_early_exit_is_reported_with_the_end_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck; exit 3"]);
        fs::write(dir.path().join("luckless.log"), "from an earlier one\n").unwrap();
        let mut process = Process::spawn("luckless", command, dir.path()).unwrap();
        let error = process.until_ready(Duration::from_secs(60), async || false).await.unwrap_err().to_string();
        assert_eq!(error, "luckless ended with exit status: 3 before it was ready:\nno such luck");
    }

    #[tokio::test]
    async fn dropping_kills_the_whole_group() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $!; wait"]);
        let mut process = Process::spawn("family", command, dir.path()).unwrap();
        let log = process.log().to_owned();
        let has_output = || !fs::read(&log).unwrap().is_empty();
        process.until_ready(Duration::from_secs(60), async || has_output()).await.unwrap();
        let grandchild = fs::read_to_string(&log).unwrap().trim().to_owned();
        drop(process);
        let gone = || match fs::read_to_string(format!("/proc/{grandchild}/stat")) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        let start = Instant::now();
        while !gone() {
            assert!(start.elapsed() < Duration::from_secs(60), "the grandchild {grandchild} still runs");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
