//! Implements the plugin's functions on rdma-core.

use std::time::Duration;

use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Errno, Result};

use crate::conn::Conn;
use crate::listen::Listener;
use crate::sys::Context;
use crate::{connect, device};

/// The most attempts to connect. Each attempt uses another local port. siw needs more than one: the connection manager
/// chooses a port that RDMA does not use, but a TCP socket may have it.
const PORTS_TRIED: u32 = 16;

/// The plugin's functions, implemented by rdma-core.
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
                // The local port belongs to a TCP socket, or to a connection to the same address that has just ended.
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
