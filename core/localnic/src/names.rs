//! The names of the device and of its listeners.

use rdmasock_core::fabric::plugin::{Address, Device, Errno, Result};
use rustix::net::SocketAddrUnix;

use crate::settings::Settings;

/// Returns the description of the device.
pub fn description(settings: &Settings) -> Device {
    let mut device = Device {
        name: [0; 64],
        is_iwarp: u8::from(settings.is_iwarp),
    };
    for (to, from) in device.name.iter_mut().zip(*b"localnic0") {
        *to = from;
    }
    device
}

/// Returns the name of a listener at this address, which is shared by this user's processes in this network namespace.
pub fn name_of(address: &Address) -> Result<SocketAddrUnix> {
    let uid = rustix::process::geteuid().as_raw();
    let ip = address.ip.map(|byte| format!("{byte:02x}")).concat();
    let name = format!("rdmasock-localnic/{uid}/{ip}:{}", address.port);
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| Errno(libc::EINVAL))
}
