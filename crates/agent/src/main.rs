//! The agent on an EC2 instance: keeps the machine's GitHub runner in the state its record asks for, and writes signals
//! and heartbeats to the same table for the operator.

mod agent;
mod aws;
mod files;
mod firewall;
mod limits;
mod metadata;
mod process;
mod runner;
mod runner_log;
mod step;
mod store;
mod uptime;
mod version;
mod wake;
mod words;

use std::{io::IsTerminal, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use jiff::Timestamp;
use paddock_record::{AgentConfig, PublicKey};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tracing_subscriber::EnvFilter;

use crate::{
    agent::{Agent, Links},
    files::Files,
    metadata::{Identity, Metadata},
    runner::Installation,
    store::{Beat, Store},
    wake::{Told, WakeQueue},
};

/// Runs on an EC2 instance of a Paddock pool and keeps its GitHub runner registered for the run that owns it.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The configuration that the operator put into the instance's user data.
    #[arg(long)]
    config: PathBuf,
    /// Keep everything below this directory instead of `/`.
    #[arg(long, env = "PADDOCK_ROOT", default_value = "/")]
    root: PathBuf,
    #[arg(long, env = "PADDOCK_LOG_FORMAT", default_value = "human")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Human,
    Json,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Human => logs.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => logs.json().init(),
    }
    // Two threads, so that a blocking step never delays a heartbeat.
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run(args))
}

async fn run(args: Args) -> Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let shutdown_requested = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::pin!(shutdown_requested);

    let mut agent = tokio::select! {
        agent = start(args) => agent?,
        () = &mut shutdown_requested => return Ok(()),
    };
    tokio::select! {
        () = agent.run() => {}
        () = &mut shutdown_requested => {}
    }
    tracing::info!("termination requested");
    agent.retire().await
}

async fn start(args: Args) -> Result<Agent> {
    let path = args.config.display();
    let config = std::fs::read(&args.config).with_context(|| format!("cannot read {path}"))?;
    let config: AgentConfig = serde_json::from_slice(&config).with_context(|| format!("cannot understand {path}"))?;
    let files = Files::new(args.root)?;
    let (key, _) = files.key()?;

    let metadata = Metadata::new();
    let Identity { instance_id, arns } = metadata.identity().await;
    tracing::info!(instance_id, pool = config.pool, table = config.table, "started");
    let aws = aws::connect(config.region.clone()).await;
    let store = Store::new(&aws, config.table.clone(), instance_id.clone(), arns);
    let (tell, told) = watch::channel(Told::default());
    tokio::spawn(WakeQueue::new(&aws, &config.cluster, &instance_id).listen(tell));
    let (signalled, signalled_at) = watch::channel(None);
    let warning = if config.runner_metadata_access { String::new() } else { guard_metadata(&files).await };
    let (interrupted, reclaimed) = watch::channel(false);
    let period = Duration::from_secs(config.heartbeat_seconds.max(1));
    tokio::spawn(beat(store.clone(), key.public(), warning, period, signalled_at, reclaimed.clone()));
    tokio::spawn(watch_spot(metadata, interrupted));
    Agent::new(config, instance_id, files, store, Links { told, signalled, reclaimed })
}

/// Keeps jobs away from the metadata service; returns why it cannot. The machine serves all the same.
async fn guard_metadata(files: &Files) -> String {
    let why = match Installation::of(files).uid() {
        Some(uid) => firewall::keep_away(uid).await.err().map(|error| format!("{error:#}")),
        None => Some("the runner has the agent's own user, because the image has no user called runner".to_owned()),
    };
    let why = why.map(|why| format!("jobs can reach the metadata service: {why}")).unwrap_or_default();
    if !why.is_empty() {
        tracing::warn!("{why}");
    }
    why.chars().take(limits::WARNING_MAX_CHARS).collect()
}

/// Writes heartbeats independently of the agent's loop; one at once when EC2 takes the machine back. They say when it sent its
/// last signal.
async fn beat(
    store: Store,
    key: PublicKey,
    warning: String,
    period: Duration,
    signalled_at: watch::Receiver<Option<Timestamp>>,
    mut reclaimed: watch::Receiver<bool>,
) {
    let mut ticks = tokio::time::interval(period);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            Ok(()) = reclaimed.changed() => {}
        }
        let beat = Beat {
            public_key: &key,
            reclaimed: *reclaimed.borrow_and_update(),
            signalled_at: *signalled_at.borrow(),
            warning: &warning,
        };
        if let Err(error) = store.beat(beat, Timestamp::now()).await {
            tracing::warn!("{error:#}");
        }
    }
}

async fn watch_spot(metadata: Metadata, interrupted: watch::Sender<bool>) {
    let mut ticks = tokio::time::interval(limits::SPOT_POLL);
    loop {
        ticks.tick().await;
        if let Some(notice) = metadata.spot_interruption().await {
            tracing::warn!(notice, "EC2 takes this spot instance back; no more jobs are taken");
            let _ = interrupted.send(true);
            return;
        }
    }
}
