//! Implements the plugin's functions on rdma-core.

use std::time::Duration;

use rdmasock_core::fabric::plugin;
use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Device, Result};

use crate::conn::Conn;
use crate::listen::Listener;
use crate::sys::Context;
use crate::{connect, device};

/// The plugin's implementation; see the module.
pub struct Verbs;

impl Provider for Verbs {
    type Listener = Listener;
    type Conn = Conn;

    fn device(local: &Address) -> Result<Device> {
        device::find(local)
    }

    fn listen(local: &Address) -> Result<Listener> {
        Listener::new(local)
    }

    fn connect(
        local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Conn>,
    ) -> Result<Conn> {
        connect::connect(local, remote, private, timeout, beside)
    }

    fn after_fork() {
        plugin::take_all(|fd| {
            // SAFETY: the plugin owned this fd in the parent, and the child has closed no fd yet, as this is called
            // before anything else. A raw system call, as libc's may be hooked.
            unsafe { rustix::io::close(fd) };
        });
        Context::forget_all();
        // SAFETY: a fork child has one thread.
        unsafe { device::forget() };
    }
}
