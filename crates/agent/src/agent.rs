//! The agent's loop: read the record, decide, act, report.

mod last_error;
mod supervise;

use std::{
    process::ExitStatus,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use jiff::{SignedDuration, Timestamp};
use paddock_record::{AgentConfig, Instance, KeyPair, RECORD_REFRESH, SealError, Signal};
use tokio::{
    process::{Child, Command},
    sync::watch,
    task::JoinHandle,
};

use self::last_error::{LastError, Unscrubbed};
use crate::{
    files::{Files, Lifetime, Memory, Report, Serving},
    limits,
    process::run_script,
    runner::{Installation, Token},
    runner_log::RunnerLog,
    step::{Action, End, Facts, Record, Script, step},
    store::Store,
    uptime,
    wake::Told,
};

pub struct Agent {
    config: AgentConfig,
    instance_id: String,
    files: Files,
    memory: Memory,
    store: Store,
    key: KeyPair,
    first_start: Timestamp,
    links: Links,
    runner: Installation,
    log: RunnerLog,
    /// The `run.sh` that this agent started, and not its predecessor.
    child: Option<Child>,
    /// How that ended.
    status: Option<ExitStatus>,
    runner_since: Instant,
    script: Option<JoinHandle<Result<()>>>,
    record: Record,
    attempts: Attempts,
    /// The last error, sent with the next failure signal.
    last_error: LastError,
    /// Whether `memory.reported` is not yet in the table.
    unsent: bool,
    /// Whether `memory.lifetime` is not yet on disk. It is written after the step, which a claim waits for.
    unsaved: bool,
    shut_down: Option<Instant>,
}

/// What the agent shares with the tasks beside it.
pub struct Links {
    /// Changes of the record.
    pub told: watch::Receiver<Told>,
    /// When the last signal was sent, for the heartbeats.
    pub signalled: watch::Sender<Option<Timestamp>>,
    /// EC2 takes the machine back.
    pub reclaimed: watch::Receiver<bool>,
}

/// Consecutive failures to bring the machine to the state its record asks for.
#[derive(Default)]
struct Attempts {
    run_id: String,
    sealed: String,
    failures: u32,
    retry_at: Timestamp,
}

impl Attempts {
    /// Another run resets everything. A new token for the same run resets only the backoff.
    fn follow(&mut self, record: &Instance) {
        if self.run_id != record.run_id || self.sealed != record.sealed {
            let failures = if self.run_id == record.run_id { self.failures } else { 0 };
            let (run_id, sealed) = (record.run_id.clone(), record.sealed.clone());
            *self = Self { run_id, sealed, failures, ..Self::default() };
        }
    }

    fn count(&mut self, now: Timestamp) {
        self.failures += 1;
        self.retry_at = now + SignedDuration::try_from(limits::backoff(self.failures)).expect("a backoff is short");
    }
}

impl Agent {
    pub fn new(config: AgentConfig, instance_id: String, files: Files, store: Store, links: Links) -> Result<Self> {
        let (key, first_start) = files.key()?;
        let memory = files.recall();
        let mut agent = Self {
            runner: Installation::of(&files),
            log: RunnerLog::default(),
            child: None,
            status: None,
            runner_since: Instant::now(),
            script: None,
            record: Record::Never,
            attempts: Attempts::default(),
            last_error: LastError::default(),
            unsent: memory.reported.is_some(),
            unsaved: false,
            shut_down: None,
            config,
            instance_id,
            files,
            memory,
            store,
            key,
            first_start,
            links,
        };
        if agent.memory.script == Some(Signal::ScriptFailed) && agent.memory.reported.is_none() {
            tracing::error!("pre-runner script was interrupted; not running it again");
            agent.last_error.detail = "the pre-runner script was interrupted".into();
            agent.report(Signal::ScriptFailed, String::new())?;
        }
        Ok(agent)
    }

    /// Runs until dropped. Failures are logged and retried.
    pub async fn run(&mut self) {
        let poll = Duration::from_millis(self.config.poll_milliseconds.max(10));
        let (mut pause, mut read_at, mut read) = (poll, None, true);
        loop {
            // What changes from here on is told once more.
            let connected = self.links.told.borrow_and_update().connected;
            if read {
                let started = Instant::now();
                let found = self.read_record().await;
                read_at = found.then_some(started);
                pause = if found { poll } else { (pause * 2).min(limits::READ_RETRY_MAX.max(poll)) };
            }
            let moved = self.act().await.unwrap_or_else(|error| {
                tracing::warn!("{error:#}");
                false
            });
            self.send_report().await;
            if std::mem::take(&mut self.unsaved)
                && let Err(error) = self.files.remember(&self.memory)
            {
                tracing::warn!("{error:#}");
            }
            let told = !moved
                && tokio::select! {
                    Ok(()) = self.links.told.changed() => true,
                    () = tokio::time::sleep(pause) => false,
                };
            let is_current = connected
                && matches!(self.record, Record::Seen { .. })
                && read_at.is_some_and(|at| at.elapsed() < RECORD_REFRESH);
            read = moved || told || !is_current;
        }
    }

    /// Reads the record; returns false if the table cannot be reached.
    async fn read_record(&mut self) -> bool {
        let read_at = uptime::now();
        let found = match self.store.read().await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!("{error:#}");
                return false;
            }
        };
        self.record = match (found, &self.record) {
            (Some(instance), _) => {
                let lifetime = Lifetime::of(&instance, self.memory.lifetime, read_at);
                self.unsaved |= self.memory.lifetime.replace(lifetime) != Some(lifetime);
                Record::Seen { instance: Box::new(instance), read_at, since: lifetime.since }
            }
            (None, Record::Never) => Record::Never,
            (None, Record::Seen { .. } | Record::Gone) => Record::Gone,
        };
        true
    }

    /// Takes the next step; returns true if the next one may follow without a pause.
    async fn act(&mut self) -> Result<bool> {
        self.script_ended().await?;
        let runner = self.follow_runner().await?;
        if let Record::Seen { instance, .. } = &self.record {
            self.attempts.follow(instance);
        }
        let (record, memory, now) = (self.record.clone(), self.memory.clone(), uptime::now());
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
            reported: memory.reported.as_ref().map(|report| (report.signal, report.run_id.as_str(), report.claims)),
            reclaimed: *self.links.reclaimed.borrow(),
            failures: self.attempts.failures,
            retry_at: self.attempts.retry_at,
            first_start: self.first_start,
            created_lifetime: Duration::from_secs(self.config.created_lifetime_seconds),
        };
        let action = step(&facts, now);
        let moved = matches!(action, Action::Register(_) | Action::StopRunner | Action::Deregister { .. });
        let done = match action {
            Action::Wait => Ok(()),
            Action::Report(signal, run) => self.report(signal, run.to_owned()),
            Action::StopRunner => self.stop_runner().await,
            Action::ShutDown(end) => self.shut_down(end).await,
            Action::RunScript => self.run_script(),
            Action::StartRunner => {
                self.attempts.count(now);
                let started = self.start_runner();
                started.inspect_err(|error| self.last_error = LastError::of(error))
            }
            Action::Register(instance) => {
                let done = self.register(instance).await;
                self.note_attempt(done).await
            }
            Action::Deregister { run, sealed } => {
                let done = self.deregister(run, sealed).await;
                self.note_attempt(done).await
            }
        };
        done.context("will retry").map(|()| moved)
    }

    /// Counts a failed attempt, with what is known of its cause.
    async fn note_attempt(&mut self, done: Result<()>) -> Result<()> {
        if let Err(error) = &done {
            let diagnostics = self.runner.diagnostics().await;
            self.last_error = LastError::of(error).with_diagnostics(&diagnostics);
            self.attempts.count(uptime::now());
        }
        done
    }

    fn run_script(&mut self) -> Result<()> {
        self.memory.script = Some(Signal::ScriptFailed);
        self.files.remember(&self.memory)?;
        tracing::info!("running the pre-runner script");
        let path = self.files.script("pre-runner", &self.config.pre_runner_script)?;
        let (runner, archives) = (self.runner.clone(), self.config.runner_archives.clone());
        let log = self.files.script_log("pre-runner");
        // A claim that waits for the machine warms it up by its use.
        let awaited = matches!(&self.record, Record::Seen { instance, .. } if !instance.run_id.is_empty());
        self.script = Some(tokio::spawn(async move {
            run_script(&path, &log, Duration::MAX).await.context("the pre-runner script")?;
            runner.install(&archives).await?;
            runner.check().await?;
            if !awaited {
                runner.warm_up().await;
            }
            Ok(())
        }));
        Ok(())
    }

    async fn script_ended(&mut self) -> Result<()> {
        let Some(script) = self.script.take_if(|script| script.is_finished()) else { return Ok(()) };
        let signal = match script.await.map_err(anyhow::Error::from).flatten() {
            Ok(()) => Signal::ScriptOk,
            Err(error) => {
                tracing::error!("instance setup failed: {error:#}");
                self.last_error = LastError::of(&error);
                Signal::ScriptFailed
            }
        };
        self.memory.script = Some(signal);
        let run_id = match &self.record {
            Record::Seen { instance, .. } => instance.run_id.clone(),
            Record::Never | Record::Gone => String::new(),
        };
        self.report(signal, run_id)
    }

    async fn register(&mut self, record: &Instance) -> Result<()> {
        let Instance { run_id, github_url: url, runner_group: group, sealed, .. } = record;
        let token = self.open(sealed)?;
        tracing::info!(run_id, url, "registering");
        self.memory.serving = Some(Serving::new(run_id, false));
        self.files.remember(&self.memory)?;
        self.runner.configure(url, group, &token, &self.instance_id, run_id).await?;
        self.memory.serving = Some(Serving::new(run_id, true));
        self.attempts.failures = 0;
        self.files.remember(&self.memory)
    }

    async fn deregister(&mut self, run_id: &str, sealed: Option<&str>) -> Result<()> {
        tracing::info!(run_id, "deregistering");
        if let Some(sealed) = sealed {
            self.runner.remove(&self.open(sealed)?).await?;
        }
        self.runner.forget()?;
        self.memory.serving = Some(Serving::new(run_id, false));
        self.files.remember(&self.memory)?;
        self.scrub().await.context(Unscrubbed)?;
        self.memory.serving = None;
        self.attempts = Attempts::default();
        self.report(Signal::Deregistered, run_id.to_owned())
    }

    async fn scrub(&self) -> Result<()> {
        self.runner.scrub().await?;
        if let Some(text) = &self.config.scrub_script {
            let path = self.files.script("scrub", text)?;
            run_script(&path, &self.files.script_log("scrub"), limits::SCRUB_TIMEOUT)
                .await
                .context("the scrub script")?;
        }
        Ok(())
    }

    fn open(&self, sealed: &str) -> Result<Token> {
        self.key.open(sealed).map(Token).map_err(|error| match error {
            SealError::NotForUs => anyhow!("the token in the record is sealed to another instance's key"),
            SealError::Malformed => anyhow!("what the record holds is no sealed token"),
        })
    }

    /// Stores the signal on disk; `send_report` writes it to the table.
    fn report(&mut self, signal: Signal, run_id: String) -> Result<()> {
        tracing::info!(%signal, run_id, "reporting signal");
        let error = match signal {
            Signal::ScriptFailed | Signal::RegistrationFailed | Signal::DeregistrationFailed => {
                if *self.links.reclaimed.borrow() {
                    self.last_error.detail = "EC2 takes the spot machine back".into();
                }
                std::mem::take(&mut self.last_error)
            }
            Signal::ScriptOk | Signal::Registered | Signal::Deregistered => LastError::default(),
        };
        let LastError { reason, detail, log } = error;
        let claims = match &self.record {
            Record::Seen { instance, .. } => instance.claims,
            Record::Never | Record::Gone => 0,
        };
        self.memory.reported = Some(Report { signal, run_id, claims, reason: reason.to_owned(), detail, log });
        self.unsent = true;
        self.files.remember(&self.memory)
    }

    async fn send_report(&mut self) {
        if let Some(report) = self.memory.reported.as_ref().filter(|_| self.unsent) {
            let now = Timestamp::now();
            match self.store.write_signal(report, now).await {
                Ok(()) => {
                    self.unsent = false;
                    self.links.signalled.send_replace(Some(now));
                }
                Err(error) => tracing::warn!("{error:#}; will retry"),
            }
        }
    }

    async fn shut_down(&mut self, end: End) -> Result<()> {
        if self.shut_down.is_some_and(|called| called.elapsed() < limits::SHUTDOWN_RETRY) {
            return Ok(());
        }
        self.shut_down = Some(Instant::now());
        tracing::warn!("shutting down: {}", end.reason());
        let status = Command::new("shutdown").args(["-h", "now"]).status().await.context("cannot call shutdown")?;
        if !status.success() {
            bail!("shutdown ended with {status}");
        }
        Ok(())
    }
}
