//! The names of listeners.

use rdmasock_core::fabric::plugin::{Address, Errno, Result};
use rustix::net::SocketAddrUnix;

/// Returns the name of a listener at this address, which is shared by this user's processes in this network namespace.
pub fn name_of(address: &Address) -> Result<SocketAddrUnix> {
    let uid = rustix::process::geteuid().as_raw();
    let ip = address.ip.map(|byte| format!("{byte:02x}")).concat();
    let name = format!("rdmasock-localnic/{uid}/{ip}:{}", address.port);
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| Errno(libc::EINVAL))
}
