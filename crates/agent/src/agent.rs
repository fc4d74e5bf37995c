//! The loop: look, decide, act.

use std::{
    fmt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use jiff::{SignedDuration, Timestamp};
use nix::sys::signal::Signal as UnixSignal;
use paddock_record::{AgentConfig, Instance, KeyPair, SCRUB, SealError, Signal};
use tokio::{
    process::{Child, Command},
    sync::watch,
    task::JoinHandle,
};

use crate::{
    files::{Files, Memory, Said, Serving},
    limits,
    process::{Alive, run_script},
    runner::{Installation, Token},
    runner_log::RunnerLog,
    step::{Action, End, Facts, Record, Runner, Script, step},
    store::Store,
};

pub struct Agent {
    config: AgentConfig,
    instance_id: String,
    files: Files,
    memory: Memory,
    store: Store,
    key: KeyPair,
    first_start: Timestamp,
    reclaimed: watch::Receiver<bool>,
    runner: Installation,
    log: RunnerLog,
    /// The `run.sh` that this agent started, and not its predecessor.
    child: Option<Child>,
    runner_since: Instant,
    script: Option<JoinHandle<Result<()>>>,
    record: Record,
    attempts: Attempts,
    /// What went wrong last, for the operator when it is told of a failure.
    trouble: LastError,
    /// Whether the operator has yet to be told what `memory.said` holds.
    unsent: bool,
    shut_down: Option<Instant>,
}

/// What failed, where a signal does not tell, and why.
#[derive(Default)]
struct LastError {
    reason: &'static str,
    detail: String,
}

impl LastError {
    fn of(error: &anyhow::Error) -> Self {
        let reason = if error.is::<Unscrubbed>() { SCRUB } else { "" };
        Self { reason, detail: format!("{error:#}").chars().take(limits::DETAIL).collect() }
    }
}

/// In front of what went wrong between two runs.
#[derive(Debug)]
struct Unscrubbed;

impl fmt::Display for Unscrubbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the machine could not be scrubbed")
    }
}

/// Failures in a row of bringing the machine to what the record shows.
#[derive(Default)]
struct Attempts {
    run_id: String,
    sealed: String,
    failures: u32,
    retry_at: Timestamp,
}

impl Attempts {
    /// Another run starts from nothing; another token for the same run is tried at once.
    fn follow(&mut self, record: &Instance) {
        if self.run_id != record.run_id || self.sealed != record.sealed {
            let failures = if self.run_id == record.run_id { self.failures } else { 0 };
            let (run_id, sealed) = (record.run_id.clone(), record.sealed.clone());
            *self = Self { run_id, sealed, failures, ..Self::default() };
        }
    }

    fn count(&mut self, now: Timestamp) {
        self.failures += 1;
        self.retry_at = now + SignedDuration::try_from(limits::pause(self.failures)).expect("a pause is short");
    }
}

impl Agent {
    pub fn new(
        config: AgentConfig,
        instance_id: String,
        files: Files,
        store: Store,
        reclaimed: watch::Receiver<bool>,
    ) -> Result<Self> {
        let (key, first_start) = files.key()?;
        let memory = files.recall();
        let mut agent = Self {
            runner: Installation::new(files.runner_dir(), files.runner_log()),
            log: RunnerLog::default(),
            child: None,
            runner_since: Instant::now(),
            script: None,
            record: Record::Never,
            attempts: Attempts::default(),
            trouble: LastError::default(),
            unsent: memory.said.is_some(),
            shut_down: None,
            config,
            instance_id,
            files,
            memory,
            store,
            key,
            first_start,
            reclaimed,
        };
        if agent.memory.script == Some(Signal::ScriptFailed) && agent.memory.said.is_none() {
            tracing::error!("the pre-runner script was interrupted; it is not run again");
            agent.trouble.detail = "the pre-runner script was interrupted".into();
            agent.say(Signal::ScriptFailed, String::new())?;
        }
        Ok(agent)
    }

    /// Runs until it is dropped. Nothing ends it: what fails is tried again.
    pub async fn run(&mut self) {
        let poll = Duration::from_millis(self.config.poll_milliseconds.max(10));
        let mut pause = poll;
        loop {
            pause = if self.look().await { poll } else { (pause * 2).min(limits::BLIND_POLL.max(poll)) };
            let moved = self.act().await.unwrap_or_else(|error| {
                tracing::warn!("{error:#}");
                false
            });
            self.tell().await;
            if !moved {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Reads the record; false when the table cannot be reached.
    async fn look(&mut self) -> bool {
        let read_at = Timestamp::now();
        let found = match self.store.read().await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!("{error:#}");
                return false;
            }
        };
        self.record = match (found, &self.record) {
            (Some(instance), _) => Record::Seen { instance: Box::new(instance), read_at },
            (None, Record::Never) => Record::Never,
            (None, Record::Seen { .. } | Record::Gone) => Record::Gone,
        };
        true
    }

    /// Takes the next step; true when another may follow at once.
    async fn act(&mut self) -> Result<bool> {
        self.script_ended().await?;
        let runner = self.runner_phase()?;
        if let Record::Seen { instance, .. } = &self.record {
            self.attempts.follow(instance);
        }
        let (record, memory, now) = (self.record.clone(), self.memory.clone(), Timestamp::now());
        let facts = Facts {
            record: &record,
            script: match (&self.script, memory.script) {
                (Some(_), _) => Script::Running,
                (None, Some(Signal::ScriptOk)) => Script::Succeeded,
                (None, Some(_)) => Script::Failed,
                (None, None) => Script::NotRun,
            },
            serving: memory.serving.as_ref().map(|serving| serving.run_id.as_str()),
            runner,
            said: memory.said.as_ref().map(|said| (said.signal, said.run_id.as_str())),
            said_at: memory.said.as_ref().map_or(Timestamp::MIN, |said| said.at),
            reclaimed: *self.reclaimed.borrow(),
            failures: self.attempts.failures,
            retry_at: self.attempts.retry_at,
            first_start: self.first_start,
            created_lifetime: Duration::from_secs(self.config.created_lifetime_seconds),
        };
        let action = step(&facts, now);
        let moved = matches!(action, Action::Register(_) | Action::StopRunner | Action::Deregister { .. });
        let done = match action {
            Action::Wait => Ok(()),
            Action::Say(signal, run) => self.say(signal, run.to_owned()),
            Action::StopRunner => self.stop_runner().await,
            Action::ShutDown(end) => self.shut_down(end).await,
            Action::RunScript => self.run_script(),
            Action::StartRunner => {
                self.attempts.count(now);
                self.start_runner()
            }
            Action::Register(instance) => {
                self.register(&instance.run_id, &instance.github_url, &instance.sealed).await.inspect_err(|error| {
                    self.trouble = LastError::of(error);
                    self.attempts.count(Timestamp::now());
                })
            }
            Action::Deregister { run, sealed } => self.deregister(run, sealed).await.inspect_err(|error| {
                self.trouble = LastError::of(error);
                self.attempts.count(Timestamp::now());
            }),
        };
        done.context("will be tried again").map(|()| moved)
    }

    fn run_script(&mut self) -> Result<()> {
        self.memory.script = Some(Signal::ScriptFailed);
        self.files.remember(&self.memory)?;
        tracing::info!("running the pre-runner script");
        let path = self.files.script("pre-runner", &self.config.pre_runner_script)?;
        let (runner, version) = (self.runner.clone(), self.config.runner_version.clone());
        self.script = Some(tokio::spawn(async move {
            run_script(&path, Duration::MAX).await.context("the pre-runner script")?;
            runner.install(version.as_deref()).await
        }));
        Ok(())
    }

    async fn script_ended(&mut self) -> Result<()> {
        let Some(script) = self.script.take_if(|script| script.is_finished()) else { return Ok(()) };
        let signal = match script.await.map_err(anyhow::Error::from).flatten() {
            Ok(()) => Signal::ScriptOk,
            Err(error) => {
                tracing::error!("this instance cannot serve: {error:#}");
                self.trouble = LastError::of(&error);
                Signal::ScriptFailed
            }
        };
        self.memory.script = Some(signal);
        let run_id = match &self.record {
            Record::Seen { instance, .. } => instance.run_id.clone(),
            Record::Never | Record::Gone => String::new(),
        };
        self.say(signal, run_id)
    }

    async fn register(&mut self, run_id: &str, url: &str, sealed: &str) -> Result<()> {
        let token = self.open(sealed)?;
        tracing::info!(run_id, url, "registering");
        self.memory.serving = Some(Serving { run_id: run_id.to_owned(), configured: false });
        self.files.remember(&self.memory)?;
        self.runner.configure(url, &token, &self.instance_id, run_id).await?;
        self.memory.serving = Some(Serving { run_id: run_id.to_owned(), configured: true });
        self.attempts.failures = 0;
        self.files.remember(&self.memory)
    }

    async fn deregister(&mut self, run_id: &str, sealed: Option<&str>) -> Result<()> {
        tracing::info!(run_id, "deregistering");
        if let Some(sealed) = sealed {
            self.runner.remove(&self.open(sealed)?).await?;
        }
        self.runner.forget()?;
        self.memory.serving = Some(Serving { run_id: run_id.to_owned(), configured: false });
        self.files.remember(&self.memory)?;
        self.scrub().await.context(Unscrubbed)?;
        self.memory.serving = None;
        self.attempts = Attempts::default();
        self.say(Signal::Deregistered, run_id.to_owned())
    }

    async fn scrub(&self) -> Result<()> {
        self.runner.scrub().await?;
        if let Some(text) = &self.config.scrub_script {
            let path = self.files.script("scrub", text)?;
            run_script(&path, limits::SCRUB).await.context("the scrub script")?;
        }
        Ok(())
    }

    fn open(&self, sealed: &str) -> Result<Token> {
        self.key.open(sealed).map(Token).map_err(|error| match error {
            SealError::NotForUs => anyhow!("the token in the record is sealed to another instance's key"),
            SealError::Malformed => anyhow!("what the record holds is no sealed token"),
        })
    }

    fn start_runner(&mut self) -> Result<()> {
        let child = self.runner.start()?;
        self.memory.runner = child.id().and_then(Alive::of);
        self.child = Some(child);
        self.log = RunnerLog::default();
        self.runner_since = Instant::now();
        self.files.remember(&self.memory)
    }

    /// Where the runner stands. One that has ended is cleared away, with whatever is left of its group.
    fn runner_phase(&mut self) -> Result<Runner> {
        if let Some(child) = &mut self.child {
            let _ = child.try_wait(); // reaps it
        }
        match (&self.memory.serving, self.memory.runner) {
            (_, Some(process)) if process.runs() => Ok(self.log.phase(self.runner.log())),
            (_, Some(process)) => {
                tracing::info!(log = %self.runner.log().display(), "run.sh has ended");
                process.signal_group(UnixSignal::SIGKILL);
                if self.runner_since.elapsed() > limits::SETTLED {
                    self.attempts.failures = 0;
                }
                (self.memory.runner, self.child) = (None, None);
                self.files.remember(&self.memory)?;
                self.runner_phase()
            }
            (Some(Serving { configured: true, .. }), None) => Ok(Runner::Stopped),
            (Some(Serving { configured: false, .. }) | None, None) => Ok(Runner::Absent),
        }
    }

    /// Asks the runner to end, as Ctrl-C does, and kills it when it takes too long.
    async fn stop_runner(&mut self) -> Result<()> {
        let Some(process) = self.memory.runner else { return Ok(()) };
        tracing::info!("stopping the runner");
        process.signal_group(UnixSignal::SIGINT);
        let asked = Instant::now();
        while self.memory.runner.is_some() {
            if asked.elapsed() > limits::STOP_GRACE {
                tracing::warn!("the runner does not end by itself; killing it");
                process.signal_group(UnixSignal::SIGKILL);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.runner_phase()?;
        }
        Ok(())
    }

    /// Before the agent itself ends: an idle runner goes with it, a busy one is left to the next agent.
    pub async fn retire(&mut self) -> Result<()> {
        match self.runner_phase()? {
            Runner::Starting | Runner::Idle => self.stop_runner().await,
            Runner::Busy | Runner::Stopped | Runner::Absent => Ok(()),
        }
    }

    fn say(&mut self, signal: Signal, run_id: String) -> Result<()> {
        tracing::info!(%signal, run_id, "telling the operator");
        let trouble = match signal {
            Signal::ScriptFailed | Signal::RegistrationFailed | Signal::DeregistrationFailed => {
                if *self.reclaimed.borrow() {
                    self.trouble.detail = "EC2 takes the spot machine back".into();
                }
                std::mem::take(&mut self.trouble)
            }
            Signal::ScriptOk | Signal::Registered | Signal::Deregistered => LastError::default(),
        };
        let (reason, detail) = (trouble.reason.to_owned(), trouble.detail);
        self.memory.said = Some(Said { signal, run_id, at: Timestamp::now(), reason, detail });
        self.unsent = true;
        self.files.remember(&self.memory)
    }

    async fn tell(&mut self) {
        if let Some(said) = self.memory.said.as_ref().filter(|_| self.unsent) {
            match self.store.say(said, Timestamp::now()).await {
                Ok(()) => self.unsent = false,
                Err(error) => tracing::warn!("{error:#}; will be tried again"),
            }
        }
    }

    async fn shut_down(&mut self, end: End) -> Result<()> {
        if self.shut_down.is_some_and(|called| called.elapsed() < limits::SHUTDOWN_AGAIN) {
            return Ok(());
        }
        self.shut_down = Some(Instant::now());
        tracing::warn!("shutting down: {}", end.why());
        let status = Command::new("shutdown").args(["-h", "now"]).status().await.context("cannot call shutdown")?;
        if !status.success() {
            bail!("shutdown ended with {status}");
        }
        Ok(())
    }
}
