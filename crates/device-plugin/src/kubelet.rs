//! Registration with the kubelet. Its plugin directory contains the kubelet's own socket; a device plugin adds another
//! and registers it, and the kubelet lists the plugin's devices there.
//!
//! A restarted kubelet removes all sockets and forgets every registration. One that closes the stream does not
//! reconnect. In both cases the plugin creates a new socket and registers again.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use tokio::{net::UnixListener, sync::watch, time};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};

use crate::{
    slots::Slots,
    v1beta1::{
        DevicePluginOptions, RegisterRequest, device_plugin_server::DevicePluginServer,
        registration_client::RegistrationClient,
    },
};

const KUBELET_SOCKET: &str = "kubelet.sock";
const VERSION: &str = "v1beta1";

/// How often both sockets are checked with `stat`. Unlike an inotify watch, this also notices a directory that was
/// recreated or mounted over.
const SOCKET_POLL: Duration = Duration::from_millis(250);
/// Pause between two attempts to register.
const REGISTER_RETRY: Duration = Duration::from_secs(1);
/// How long the kubelet may take to answer a registration, and then to call `ListAndWatch`.
const KUBELET_TIMEOUT: Duration = Duration::from_secs(10);
/// How long open connections may last after shutdown begins.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

/// A device plugin that advertises slots of one resource to the kubelet of a plugin directory.
pub struct Plugin {
    dir: PathBuf,
    resource: String,
    slots: u32,
}

/// Why a registration ended.
enum End {
    Stopped,
    Lost(&'static str),
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.slots, self.resource)
    }
}

impl Plugin {
    pub fn new(dir: PathBuf, resource: String, slots: u32) -> Self {
        Self { dir, resource, slots }
    }

    /// The file name of the plugin's socket, unique per resource.
    pub fn endpoint(&self) -> String {
        format!("paddock-{}.sock", self.resource.replace('/', "-"))
    }

    /// Serves and registers until `stop`, retrying on failure. A repeated error is logged once.
    pub async fn serve(&self, stop: &CancellationToken) {
        let mut last_error = String::new();
        while !stop.is_cancelled() {
            match self.register_and_serve(stop).await {
                Ok(End::Stopped) => break,
                Ok(End::Lost(why)) => {
                    tracing::info!("{why}; registering again");
                    last_error.clear();
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    if error != last_error {
                        tracing::warn!(error, "not registered with the kubelet; retrying every {REGISTER_RETRY:?}");
                    }
                    last_error = error;
                    let _ = time::timeout(REGISTER_RETRY, stop.cancelled()).await;
                }
            }
        }
    }

    async fn register_and_serve(&self, stop: &CancellationToken) -> Result<End> {
        let kubelet = self.dir.join(KUBELET_SOCKET);
        let seen =
            identity(&kubelet).with_context(|| format!("the kubelet is not there yet: {}", kubelet.display()))?;
        let (socket, listener) = Socket::bind(self.dir.join(self.endpoint()))?;
        let (sender, mut listeners) = watch::channel(None);
        let end = stop.child_token();
        let slots = DevicePluginServer::new(Slots::new(self.slots, sender, end.clone()));
        let server = Server::builder()
            .add_service(slots)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), end.clone().cancelled_owned());
        let mut server = tokio::spawn(server);
        let registered = async {
            self.register(&kubelet).await?;
            let asked = time::timeout(KUBELET_TIMEOUT, listeners.wait_for(Option::is_some)).await;
            asked.with_context(|| format!("the kubelet did not ask for the slots within {KUBELET_TIMEOUT:?}"))??;
            tracing::info!(resource = self.resource, slots = self.slots, "registered with the kubelet");
            anyhow::Ok(tokio::select! {
                _ = listeners.wait_for(|open| *open == Some(0)) => End::Lost("the kubelet listens no longer"),
                why = changed(&kubelet, seen, &socket) => End::Lost(why),
            })
        };
        let outcome = tokio::select! {
            () = stop.cancelled() => Ok(End::Stopped),
            outcome = registered => outcome,
            ended = &mut server => bail!("the plugin's own server ended: {ended:?}"),
        };
        end.cancel();
        let _ = time::timeout(SHUTDOWN_GRACE, server).await;
        outcome
    }

    async fn register(&self, kubelet: &Path) -> Result<()> {
        let endpoint = Endpoint::from_shared(format!("unix:{}", kubelet.display()))?.timeout(KUBELET_TIMEOUT);
        let connected = time::timeout(KUBELET_TIMEOUT, endpoint.connect()).await.context("it does not answer");
        let channel = connected.and_then(|channel| Ok(channel?));
        let channel = channel.with_context(|| format!("the kubelet cannot be reached at {}", kubelet.display()))?;
        let request = RegisterRequest {
            version: VERSION.into(),
            endpoint: self.endpoint(),
            resource_name: self.resource.clone(),
            options: Some(DevicePluginOptions::default()),
        };
        match RegistrationClient::new(channel).register(request).await {
            Ok(_) => Ok(()),
            Err(status) => bail!("the kubelet refused {}: {}", self.resource, status.message()),
        }
    }
}

/// Waits until one of the sockets is replaced or removed, and returns which.
async fn changed(kubelet: &Path, seen: Identity, own: &Socket) -> &'static str {
    let mut ticks = time::interval(SOCKET_POLL);
    loop {
        ticks.tick().await;
        if identity(kubelet).ok() != Some(seen) {
            return "the kubelet was restarted";
        }
        if !own.is_there() {
            return "the plugin's socket was removed";
        }
    }
}

/// Tells a file from a replacement at the same path. Inode numbers are reused, so the change time is compared too.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

fn identity(path: &Path) -> io::Result<Identity> {
    let data = fs::symlink_metadata(path)?;
    Ok(Identity { device: data.dev(), inode: data.ino(), changed: (data.ctime(), data.ctime_nsec()) })
}

/// The plugin's socket, removed on drop unless it has been replaced.
struct Socket {
    path: PathBuf,
    identity: Identity,
}

impl Socket {
    /// Replaces a socket left by an earlier plugin.
    fn bind(path: PathBuf) -> Result<(Self, UnixListener)> {
        let bound = match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => UnixListener::bind(&path).and_then(|listener| Ok((identity(&path)?, listener))),
        };
        let (identity, listener) = bound.with_context(|| format!("cannot listen at {}", path.display()))?;
        Ok((Self { path, identity }, listener))
    }

    fn is_there(&self) -> bool {
        identity(&self.path).ok() == Some(self.identity)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}
