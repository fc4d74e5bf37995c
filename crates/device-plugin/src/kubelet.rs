//! The kubelet's side door: a directory of sockets, one of which is its own. A device plugin makes another, says so to the
//! kubelet, and is asked for its devices there.
//!
//! A kubelet that starts removes every socket and knows nobody. One that stops listening never asks again by itself. So
//! whatever happens, the plugin makes a new socket and registers anew.

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

/// How often the two sockets are looked at: two calls of `stat`, which also see a directory that was made anew or mounted
/// over, where a watch would wait for ever.
const LOOK: Duration = Duration::from_millis(250);
/// Between two tries.
const RETRY: Duration = Duration::from_secs(1);
/// How long the kubelet may take to answer, and then to ask for the slots.
const ANSWER: Duration = Duration::from_secs(10);
/// How long open connections may go on at the end.
const GRACE: Duration = Duration::from_secs(1);

/// Slots under a resource's name, for the kubelet of a directory.
pub struct Plugin {
    dir: PathBuf,
    resource: String,
    slots: u32,
}

/// Why a registration is over.
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

    /// The name of our socket: another resource's plugin has another.
    pub fn endpoint(&self) -> String {
        format!("paddock-{}.sock", self.resource.replace('/', "-"))
    }

    /// Serves and registers, again and again, until `stop`. Each trouble is said once.
    pub async fn serve(&self, stop: &CancellationToken) {
        let mut said = String::new();
        while !stop.is_cancelled() {
            match self.register_and_serve(stop).await {
                Ok(End::Stopped) => break,
                Ok(End::Lost(why)) => {
                    tracing::info!("{why}; registering anew");
                    said.clear();
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    if error != said {
                        tracing::warn!(error, "not registered with the kubelet; trying again every {RETRY:?}");
                    }
                    said = error;
                    let _ = time::timeout(RETRY, stop.cancelled()).await;
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
            let asked = time::timeout(ANSWER, listeners.wait_for(Option::is_some)).await;
            asked.with_context(|| format!("the kubelet did not ask for the slots within {ANSWER:?}"))??;
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
        let _ = time::timeout(GRACE, server).await;
        outcome
    }

    async fn register(&self, kubelet: &Path) -> Result<()> {
        let endpoint = Endpoint::from_shared(format!("unix:{}", kubelet.display()))?.timeout(ANSWER);
        let connected = time::timeout(ANSWER, endpoint.connect()).await.context("it does not answer");
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

/// Waits until one of the sockets is another than before, and says which.
async fn changed(kubelet: &Path, seen: Identity, own: &Socket) -> &'static str {
    let mut look = time::interval(LOOK);
    loop {
        look.tick().await;
        if identity(kubelet).ok() != Some(seen) {
            return "the kubelet was restarted";
        }
        if !own.is_there() {
            return "the plugin's socket was removed";
        }
    }
}

/// What tells a file from another that came in its place: a number is given again, but not at the same moment.
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

/// The plugin's socket; removed at the end, unless another has come in its place.
struct Socket {
    path: PathBuf,
    identity: Identity,
}

impl Socket {
    /// In the place of one that an earlier plugin may have left.
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
