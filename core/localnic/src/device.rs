//! The device: which addresses it has (all), what its listeners are called, and its functions by name.

use std::time::Duration;

use rdmasock_core::fabric::plugin::errno::{Errno, Result};
use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Device, fds};
use rustix::net::SocketAddrUnix;

use crate::conn::Conn;
use crate::listen::Listener;
use crate::settings::Settings;
use crate::{domain, nic};

/// As a [`Provider`].
#[derive(Debug)]
pub struct LocalNic;

impl Provider for LocalNic {
    type Listener = Listener;
    type Conn = Conn;

    fn device(_local: &Address) -> Result<Device> {
        nic::check()?;
        Ok(description(&Settings::get()))
    }

    fn listen(local: &Address) -> Result<Listener> {
        nic::check()?;
        Listener::new(Settings::get(), local)
    }

    fn connect(_local: &Address, remote: &Address, private: &[u8], timeout: Duration) -> Result<Conn> {
        Conn::connect(Settings::get(), remote, private, timeout)
    }

    fn after_fork() {
        fds::take_all(|fd| {
            // SAFETY: a number of this plugin's in the parent, and the child has closed none yet.
            unsafe { rustix::io::close(fd) };
        });
        // SAFETY: a fork child has one thread.
        unsafe {
            nic::forget();
            domain::forget();
        }
    }
}

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
