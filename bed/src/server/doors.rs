//! Ports on the host's loopback that lead into the bed.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
};

use anyhow::{Result, anyhow};

use crate::{
    isolate::{Isolated, forward},
    kube::ControlPlane,
};

pub struct Doors {
    /// Ports that are the same inside the bed.
    pub aws: u16,
    pub github: u16,
    pub operator: u16,
    kubernetes: TcpListener,
    pub admin: TcpListener,
    pub kubeconfig: PathBuf,
}

impl Doors {
    /// How many listeners the bed needs.
    pub const COUNT: usize = 5;

    /// Takes the listeners. Connections are refused until the server listens.
    pub fn open(isolated: &mut Isolated) -> Result<Self> {
        let own_network = !isolated.address.is_loopback();
        let listeners = std::mem::take(&mut isolated.listeners);
        let [aws, github, operator, kubernetes, admin] =
            <[TcpListener; Self::COUNT]>::try_from(listeners).map_err(|_| anyhow!("a listener for each door"))?;
        Ok(Self {
            aws: share(aws, own_network)?,
            github: share(github, own_network)?,
            operator: share(operator, own_network)?,
            kubernetes,
            admin,
            kubeconfig: isolated.shared.join("kubeconfig"),
        })
    }

    pub fn address(port: u16) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, port).into()
    }

    /// Gives the host's kubectl access through the kubeconfig.
    pub fn admit_kubectl(&self, kube: &ControlPlane) -> Result<()> {
        kube.kubeconfig_for_host(&self.kubeconfig, self.kubernetes.local_addr()?.port())?;
        tokio::spawn(forward(self.kubernetes.try_clone()?, (kube.address(), kube.port()).into()));
        Ok(())
    }
}

/// Forwards a port on the host to the same port in the bed. Without a network namespace they are identical, so the
/// listener is closed for the server.
fn share(listener: TcpListener, own_network: bool) -> Result<u16> {
    let port = listener.local_addr()?.port();
    if own_network {
        tokio::spawn(forward(listener, Doors::address(port)));
    }
    Ok(port)
}
