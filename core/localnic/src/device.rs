//! The device's functions by name. It has every address.

use std::time::Duration;

use rdmasock_core::fabric::plugin::serve::Provider;
use rdmasock_core::fabric::plugin::{Address, Result};

use crate::conn::Conn;
use crate::listen::Listener;
use crate::settings::Settings;
use crate::{contexts, domain, nic};

/// The device, as a [`Provider`].
#[derive(Debug)]
pub struct LocalNic;

impl Provider for LocalNic {
    type Listener = Listener;
    type Conn = Conn;

    fn device(_local: &Address) -> Result<()> {
        nic::check()
    }

    fn listen(local: &Address) -> Result<Listener> {
        nic::check()?;
        Listener::new(Settings::get(), local)
    }

    fn connect(
        _local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Conn>,
    ) -> Result<Conn> {
        Conn::connect(Settings::get(), remote, private, timeout, beside)
    }

    fn after_fork() {
        // SAFETY: a fork child has one thread.
        unsafe {
            contexts::forget();
            nic::forget();
            domain::forget();
        }
    }
}
