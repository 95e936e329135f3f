//! Implements the plugin's functions on rdma-core.

use std::time::Duration;

use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Errno, Result};

use crate::conn::Conn;
use crate::listen::Listener;
use crate::sys::Context;
use crate::{connect, device};

/// The number of ports to try, one for each attempt. With siw this is needed: it uses the port that the connection
/// manager has chosen among those that RDMA does not use, even if TCP uses it.
const PORTS_TRIED: u32 = 16;

/// The plugin's implementation; see the module.
pub(crate) struct Verbs;

impl Provider for Verbs {
    type Listener = Listener;
    type Conn = Conn;

    fn device(local: &Address) -> Result<()> {
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
        let mut tried = 1;
        loop {
            match connect::connect(local, remote, private, timeout, beside) {
                // A TCP socket has the port, or a connection to the same address that has just ended.
                Err(Errno(libc::EADDRINUSE | libc::EADDRNOTAVAIL)) if tried < PORTS_TRIED => tried += 1,
                result => return result,
            }
        }
    }

    fn after_fork() {
        Context::forget_all();
        // SAFETY: a fork child has one thread.
        unsafe { device::forget() };
    }
}
