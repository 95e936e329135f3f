//! Implements the plugin's functions on rdma-core.

use std::time::Duration;

use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Result};

use crate::conn::Conn;
use crate::listen::Listener;
use crate::sys::Context;
use crate::{connect, device};

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
        connect::connect(local, remote, private, timeout, beside)
    }

    fn after_fork() {
        Context::forget_all();
        // SAFETY: a fork child has one thread.
        unsafe { device::forget() };
    }
}
