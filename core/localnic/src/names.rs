//! What the device is called, and its listeners.

use rdmasock_core::fabric::plugin::errno::{Errno, Result};
use rdmasock_core::fabric::plugin::{Address, Device};
use rustix::net::SocketAddrUnix;

use crate::settings::Settings;

/// The device as it is shown.
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

/// What a listener at this address is called: a name that this user's processes in this network namespace share.
pub fn name_of(address: &Address) -> Result<SocketAddrUnix> {
    let uid = rustix::process::geteuid().as_raw();
    let ip = address.ip.map(|byte| format!("{byte:02x}")).concat();
    let name = format!("rdmasock-localnic/{uid}/{ip}:{}", address.port);
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| Errno(libc::EINVAL))
}
