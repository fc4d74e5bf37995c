//! `paddock run` and `paddock device-plugin`: start the components and shut them down.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use kube::{Client, Config};
use paddock_effects::{
    fence::Fence,
    kube::{client, lanes::Lanes, leader::Election, stores::Stores},
    metrics::Metrics,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    controllers::{self, Shared, ec2::Ec2Context},
    settings::Settings,
    web::{self, server},
    webhook::{intake::Intake, receiver::Hooks},
};

/// How long running reconciliations may continue after a signal; Kubernetes kills a pod after 30 s.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(20);
/// How long open connections may take to close after that.
const SERVER_GRACE: Duration = Duration::from_secs(2);

const NO_CLUSTER: &str = "no Kubernetes cluster: set KUBECONFIG, or run in a pod";

pub fn run(settings: Settings) -> Result<()> {
    use_one_crypto_provider()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(operate(settings));
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// Runs on one thread, to leave the board's CPUs to its jobs.
pub fn device_plugin(settings: paddock_device_plugin::settings::Settings) -> Result<()> {
    use_one_crypto_provider()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = Client::try_from(Config::infer().await.context(NO_CLUSTER)?)?;
        let stop = CancellationToken::new();
        tokio::spawn(stop_on_signal(stop.clone())?);
        paddock_device_plugin::run(settings, client, stop).await
    })
}

fn use_one_crypto_provider() -> Result<()> {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.install_default().map_err(|_| anyhow::anyhow!("another cryptography provider was installed before ours"))
}

async fn operate(settings: Settings) -> Result<()> {
    let config = Config::infer().await.context(NO_CLUSTER)?;
    let namespace = config.default_namespace.clone();
    let client = Client::try_from(config.clone())?;
    let fence = Fence::default();
    let lanes = Lanes::default();
    let webhook_client = client::webhook(config.clone(), &lanes)?;
    let leader_clients = client::leader(config, &fence, &lanes)?;

    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone())?);
    let metrics = Metrics::default();
    let stores = Stores::start(&client, settings.namespace.as_deref());
    let listener = tokio::net::TcpListener::bind(settings.listen)
        .await
        .with_context(|| format!("cannot listen on {}; choose another address with --listen", settings.listen))?;
    tracing::info!(address = %listener.local_addr()?, version = env!("CARGO_PKG_VERSION"), "serving");
    let intake = Intake::start(webhook_client, stores.clone());
    let hooks = Hooks::new(settings.webhook_secret_file.clone(), intake.clone(), metrics.clone());
    let pages = web::router(stores.clone(), metrics.clone(), hooks);
    let server = tokio::spawn(server::serve(listener, pages, server::Limits::default(), stop.clone()));

    tokio::select! {
        () = stores.ready() => {}
        () = stop.cancelled() => return Ok(()),
    }
    let election =
        Election { client, namespace, identity: identity(), duration: settings.lease_duration, fence: fence.clone() };
    let shared = Arc::new(Shared::new(settings, leader_clients, lanes, &fence, stores, metrics.clone()));
    let ec2 = Arc::new(Ec2Context::new(shared, &fence).await);
    let (work_tx, work_rx) = tokio::sync::oneshot::channel();
    let elected = || {
        metrics.leading.set(1.0);
        let _ = work_tx.send(tokio::spawn(controllers::run(ec2, intake, stop.clone())));
    };
    // Hold the lease until the controllers have ended, so that the fence does not refuse their last writes.
    let resign = CancellationToken::new();
    let finish = async {
        let work = tokio::select! {
            () = stop.cancelled() => None,
            work = work_rx => work.ok(),
        };
        if let Some(mut work) = work {
            tokio::select! {
                // After `stop`, the controllers may end before this is polled.
                biased;
                () = stop.cancelled() => {}
                // A leader that does nothing must not keep the lease.
                ended = &mut work => bail!("the controllers ended by themselves: {ended:?}"),
            }
            if tokio::time::timeout(SHUTDOWN_GRACE, work).await.is_err() {
                tracing::warn!("shutdown grace period exceeded; the next leader finishes the remaining work");
            }
        }
        resign.cancel();
        std::future::pending().await
    };
    let outcome = tokio::select! {
        outcome = election.run(elected, resign.clone()) => outcome.map_err(Into::into),
        outcome = finish => outcome,
    };
    metrics.leading.set(0.0);
    // The fence refuses the writes of tasks that still run. The process exits and restarts as a follower.
    outcome?;
    let _ = tokio::time::timeout(SERVER_GRACE, server).await;
    Ok(())
}

/// Unique among replicas and restarts. It starts with the pod's name, so that the Lease shows which pod leads.
fn identity() -> String {
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "paddock".into());
    let start = jiff::Timestamp::now().as_nanosecond();
    format!("{host}_{:x}", start ^ i128::from(std::process::id()))
}

fn stop_on_signal(stop: CancellationToken) -> Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stop.cancel();
    })
}
