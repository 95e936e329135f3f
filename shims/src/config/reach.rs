//! Which other hosts are in reach: whether this host has an RDMA device that leads to a destination. Also the port and
//! the secret by which hosts ask each other.
//!
//! `service::hosts` asks, and `service::control` answers.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;
use rdmasock_core::ids::Tuple;
use rdmasock_core::rendezvous::control::Key;
use rdmasock_core::rendezvous::diag;

use crate::config::{Config, Fabrics};

/// The facts that decide which hosts are in reach. Made once; fork children inherit it.
pub(crate) struct Reach {
    /// The control port. 0: this process neither asks nor answers.
    port: u16,
    key: Option<Key>,
    pretend: Vec<IpNet>,
    /// Whether the configuration allows the fabric between hosts.
    wanted: bool,
    /// For tests: whether that fabric is used within the host.
    is_here: bool,
}

impl Reach {
    /// Returns the facts from the configuration. A secret that cannot be used costs one line on stderr and switches the
    /// control port off. So hosts are never asked without the secret that was configured.
    pub(crate) fn new(config: &Config) -> Self {
        let mut reach = Self {
            port: config.control_port,
            key: None,
            pretend: config.pretend_rdma.clone(),
            wanted: config.fabrics.contains(Fabrics::VERBS),
            is_here: config.fabrics.contains(Fabrics::VERBS) && config.local_device.is_some(),
        };
        if let Some(path) = &config.secret_file {
            match Key::load(path) {
                Ok(key) => reach.key = Some(key),
                Err(problem) => {
                    reach.port = 0;
                    crate::config::warn(&format!(
                        "secret file {path:?}: {problem}; no connection moves between hosts; correct the \
                         file or unset RDMASOCK_SECRET_FILE"
                    ));
                }
            }
        }
        reach
    }

    /// Returns the control port; `None` if it is off.
    pub(crate) fn port(&self) -> Option<u16> {
        (self.port != 0).then_some(self.port)
    }

    /// Returns the key that signs datagrams; `None` if they are not signed.
    pub(crate) fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Returns whether connections of this process may move to an RDMA device: the fabric is allowed, and there may be
    /// a device. Pretended networks count as a device. Does not check whether the plugin loads.
    pub(crate) fn verbs_ready(&self) -> bool {
        !self.pretend.is_empty() || self.wanted && crate::config::verbs::is_possible()
    }

    /// For tests: returns whether hosts ask and answer each other though no link can be made.
    pub(crate) fn pretends(&self) -> bool {
        !self.pretend.is_empty()
    }

    /// For tests: returns whether links within the host are made like links between hosts.
    pub(crate) fn is_device_for_here(&self) -> bool {
        self.is_here
    }

    /// Returns whether a link for a connection that this process has accepted is one between hosts.
    pub(crate) fn is_between_hosts(&self, tuple: &Tuple) -> bool {
        self.is_here || !diag::is_here(tuple.acceptor(), tuple.connector(), tuple.device())
    }

    /// Returns whether a connection from this local address to `remote` could move: an RDMA device has the address.
    pub(crate) fn is_candidate(&self, local: IpAddr, remote: IpAddr, devices: &mut Devices) -> bool {
        self.pretend.iter().any(|net| net.contains(&remote)) || self.wanted && devices.have(local)
    }
}

/// Which local addresses RDMA devices have, as last seen. A lookup reads dozens of small files, more if a device has a
/// large table of GIDs, and takes a descriptor for each.
#[derive(Default)]
pub(crate) struct Devices {
    /// By address: whether a device has it, and until when that answer holds, monotonic ns.
    seen: HashMap<IpAddr, (bool, u64)>,
}

impl Devices {
    const GOOD_FOR: u64 = 2_000_000_000;
    /// The most addresses that are remembered. One host seldom has more that matter.
    const MANY: usize = 256;

    /// Returns whether an RDMA device has this local address.
    pub(crate) fn have(&mut self, local: IpAddr) -> bool {
        self.have_at(local, crate::sys::time::now_ns(), crate::config::verbs::has_device)
    }

    fn have_at(&mut self, local: IpAddr, now: u64, look: impl FnOnce(IpAddr) -> bool) -> bool {
        if let Some((has, until)) = self.seen.get(&local)
            && now < *until
        {
            return *has;
        }
        let has = look(local);
        if self.seen.len() >= Self::MANY {
            self.seen.clear();
        }
        self.seen.insert(local, (has, now + Self::GOOD_FOR));
        has
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_looked_for_seldom_and_again() {
        let mut devices = Devices::default();
        let at = |n: u8| IpAddr::from([10, 0, 0, n]);
        let never = |_| unreachable!();
        assert!(devices.have_at(at(1), 0, |_| true));
        assert!(!devices.have_at(at(2), 1, |_| false));
        assert!(devices.have_at(at(1), Devices::GOOD_FOR - 1, never));
        assert!(!devices.have_at(at(2), Devices::GOOD_FOR, never));
        assert!(!devices.have_at(at(1), Devices::GOOD_FOR, |_| false));
        assert!(devices.have_at(at(2), Devices::GOOD_FOR + 1, |_| true));
        for n in 0..=255 {
            devices.have_at(at(n), u64::MAX / 2, |_| true);
        }
        assert!(devices.seen.len() <= Devices::MANY);
    }
}
