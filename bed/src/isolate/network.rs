//! The loopback device of the bed's network namespace, with the addresses of a cluster on it.
//!
//! They are local addresses of the namespace, so pods reach them through any veth. The API server listens on all of
//! them and answers at the ClusterIP of its service without kube-proxy or packet filters. There is no route out.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use anyhow::Result;
use nix::{errno::Errno, libc};

/// The node's address, where pods reach the bed's servers.
pub const BED_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
/// The ClusterIP of the service `default/kubernetes`: always the first of [`SERVICE_RANGE`].
pub const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
pub const SERVICE_RANGE: &str = "10.96.0.0/16";
pub const POD_RANGE: &str = "10.89.0.0/16";

pub(super) fn configure() -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    bring_up(&socket)?;
    add_address(&socket, "lo:bed", BED_ADDRESS)?;
    add_address(&socket, "lo:kube", SERVICE_ADDRESS)
}

fn bring_up(socket: &UdpSocket) -> Result<()> {
    let mut request = interface("lo");
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    ioctl(socket, libc::SIOCSIFFLAGS, &request)
}

/// Adds a single `address`: without a /32 mask its whole class A network would be local.
fn add_address(socket: &UdpSocket, alias: &str, address: Ipv4Addr) -> Result<()> {
    let mut request = interface(alias);
    request.ifr_ifru.ifru_addr = socket_address(address);
    ioctl(socket, libc::SIOCSIFADDR, &request)?;
    request.ifr_ifru.ifru_netmask = socket_address(Ipv4Addr::BROADCAST);
    ioctl(socket, libc::SIOCSIFNETMASK, &request)
}

fn interface(name: &str) -> libc::ifreq {
    // SAFETY: all zeros is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}

fn ioctl(socket: &UdpSocket, call: libc::Ioctl, request: &libc::ifreq) -> Result<()> {
    // SAFETY: the call reads one ifreq, which `request` is.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), call, request) })?;
    Ok(())
}
