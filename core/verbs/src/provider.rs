//! The plugin's functions over rdma-core, by name.

use std::time::Duration;

use rdmasock_core::fabric::plugin::errno::Result;
use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Device, fds};

use crate::conn::Conn;
use crate::connect;
use crate::device;
use crate::listen::Listener;
use crate::sys::Context;

/// See the module.
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
        fds::take_all(|fd| {
            // SAFETY: the number is of an fd that this plugin had in the parent, and the child has closed none yet
            // ("before anything else"). By the raw system call: libc's may be hooked.
            unsafe { rustix::io::close(fd) };
        });
        Context::forget_all();
        // SAFETY: a fork child has one thread.
        unsafe { device::forget() };
    }
}
