//! The operator as a process, and a supervisor that restarts it.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use crate::{
    process::{Process, Signal},
    stage::{Stage, binary},
};

/// Far longer than a start takes, even on a slow machine.
const DEADLINE: Duration = Duration::from_secs(180);

/// The minimum time between two starts, so that an operator that exits at once does not use all CPU or fill the log.
const RESTART_PERIOD: Duration = Duration::from_secs(1);

/// How often a supervisor checks whether its operator is still running.
const WATCH_PERIOD: Duration = Duration::from_millis(200);

/// The chart's memory settings of the operator.
pub const MEMORY: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "1"), ("MALLOC_MMAP_THRESHOLD_", "131072"), ("MALLOC_TRIM_THRESHOLD_", "1048576")];

/// `paddock run`, with the environment that the chart gives every operator.
pub fn command() -> Result<Command> {
    let mut command = Command::new(binary("paddock")?);
    command.arg("run").envs(MEMORY);
    Ok(command)
}

/// A running `paddock run`, killed on drop.
pub struct Operator {
    process: Process,
    address: SocketAddr,
}

impl Operator {
    /// Starts a [`command`] that listens at `address`.
    pub fn spawn(name: &str, command: Command, log_dir: &Path, address: SocketAddr) -> Result<Self> {
        Ok(Self { process: Process::spawn(name, command, log_dir)?, address })
    }

    /// Starts it and waits until it answers.
    pub async fn start(name: &str, command: Command, log_dir: &Path, address: SocketAddr) -> Result<Self> {
        let mut operator = Self::spawn(name, command, log_dir, address)?;
        operator.until_ready().await?;
        Ok(operator)
    }

    pub async fn until_ready(&mut self) -> Result<()> {
        let url = format!("{}/readyz", self.url());
        let ready = async || reqwest::get(&url).await.is_ok_and(|answer| answer.status().is_success());
        self.process.until_ready(DEADLINE, ready).await
    }

    /// Its resident memory in KiB: all, and without the mapped program file.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid()))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            kib.with_context(|| format!("no {name} among\n{status}"))
        };
        Ok((field("VmRSS:")?, field("RssAnon:")?))
    }

    /// Its CPU time.
    pub fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.pid()))?;
        // After the name, which may contain anything: user and system time in hundredths of a second.
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
        let ticks = fields.map(str::parse::<u64>).sum::<Result<u64, _>>()?;
        Ok(Duration::from_millis(10 * ticks))
    }

    /// Where its pages are.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn exited(&mut self) -> bool {
        self.process.exited().is_some()
    }

    pub fn log(&self) -> String {
        self.process.log_tail(usize::MAX)
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// `kill -9`.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill().map(drop)
    }

    /// Sends SIGTERM; it must exit cleanly.
    pub async fn stop(self) -> Result<()> {
        let log = self.process.log().to_owned();
        let status = self.process.stop().await?;
        ensure!(status.success(), "the operator ended with {status}; its log is\n{}", std::fs::read_to_string(log)?);
        Ok(())
    }
}

/// Additional settings of an operator; they override those of the stage.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Additions {
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
}

impl From<&[&str]> for Additions {
    fn from(args: &[&str]) -> Self {
        Self { args: args.iter().map(|&arg| arg.to_owned()).collect(), env: BTreeMap::new() }
    }
}

/// Keeps one operator running at one address.
pub struct Supervisor {
    stage: Arc<Stage>,
    address: SocketAddr,
    log: PathBuf,
    running: Mutex<Running>,
    /// Held while the operator is stopped or started.
    start_lock: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Running {
    /// `None` if it was stopped on purpose.
    operator: Option<Operator>,
    additions: Additions,
    started: Option<Instant>,
}

impl Supervisor {
    const NAME: &str = "operator";

    /// No operator runs until [`Self::start`].
    pub fn new(stage: Arc<Stage>, address: SocketAddr) -> Self {
        let log = stage.operator_logs().join(format!("{}.log", Self::NAME));
        Self { stage, address, log, running: Mutex::default(), start_lock: tokio::sync::Mutex::default() }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where its pages are.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Starts an operator; one that is already running gets `kill -9`.
    pub async fn start(&self, additions: Additions) -> Result<()> {
        let _lock = self.start_lock.lock().await;
        self.launch(additions).await
    }

    /// Stops the operator, cleanly if the signal is SIGTERM, and starts it with these additions. If that fails, it is
    /// started with the previous ones and the error says why.
    pub async fn restart(&self, additions: Additions, signal: Signal) -> Result<()> {
        let _lock = self.start_lock.lock().await;
        let Running { operator, additions: former, .. } = std::mem::take(&mut *self.running());
        let ran = operator.is_some();
        match operator {
            Some(operator) if signal == Signal::SIGTERM => drop(operator.stop().await),
            other => drop(other),
        }
        let Err(error) = self.launch(additions).await else { return Ok(()) };
        if !ran {
            self.running().operator = None;
        } else if let Err(again) = self.launch(former).await {
            bail!("{error:#}; nor does it start as it was before: {again:#}");
        }
        Err(error)
    }

    /// Sends SIGTERM to the operator, which must exit cleanly; it is not restarted automatically.
    pub async fn stop(&self) -> Result<()> {
        let operator = self.running().operator.take().context("no operator runs")?;
        operator.stop().await
    }

    /// Kills the operator with `kill -9`; it is not restarted automatically.
    pub fn kill(&self) -> Result<()> {
        let operator = self.running().operator.take().context("no operator runs")?;
        operator.kill()
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.running().operator.as_ref().context("no operator runs")?.signal(signal)
    }

    /// Restarts an operator that exited by itself, as a kubelet would; returns whether it did.
    pub async fn revive(&self) -> Result<bool> {
        let _lock = self.start_lock.lock().await;
        let additions = {
            let mut running = self.running();
            let due = running.started.is_none_or(|started| started.elapsed() >= RESTART_PERIOD);
            let ended = running.operator.as_mut().is_some_and(Operator::exited);
            (ended && due).then(|| running.additions.clone())
        };
        let Some(additions) = additions else { return Ok(false) };
        self.launch(additions).await.context("the operator ended and does not start again")?;
        Ok(true)
    }

    /// Restarts the operator whenever it exits, and calls `report`.
    pub async fn watch(&self, report: impl Fn(&str)) -> ! {
        loop {
            tokio::time::sleep(WATCH_PERIOD).await;
            match self.revive().await {
                Ok(false) => {}
                Ok(true) => report("the operator ended and was started again"),
                Err(error) => report(&error.to_string()), // the log has the rest
            }
        }
    }

    /// The log of all operators started here.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
    }

    async fn launch(&self, additions: Additions) -> Result<()> {
        self.running().operator = None; // dropped first: the next one needs its port
        let started = Some(Instant::now());
        let mut operator = self.stage.spawn_operator(Self::NAME, self.address, &additions)?;
        let outcome = operator.until_ready().await;
        *self.running() = Running { operator: Some(operator), additions, started };
        outcome
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().expect("nothing panics while it is held")
    }
}
