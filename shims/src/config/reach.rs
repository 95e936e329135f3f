//! Decides which other hosts are in reach: whether this host has an RDMA device that leads to a destination. Also has
//! the port and the secret by which hosts ask each other about connections.
//!
//! `service::hosts` sends these questions, and `service::control` answers them.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;
use rdmasock_core::ids::Tuple;
use rdmasock_core::rendezvous::control::Key;
use rdmasock_core::rendezvous::diag;

use crate::config::{Config, Fabrics};

/// The facts that decide which hosts are in reach. They are collected once; fork children inherit them.
pub(crate) struct Reach {
    /// The control port. 0: this process neither asks nor answers.
    port: u16,
    key: Option<Key>,
    pretend: Vec<IpNet>,
    /// Whether the configuration allows the fabric `verbs`.
    wanted: bool,
    /// For tests: whether `verbs` is also used within the host.
    is_here: bool,
}

impl Reach {
    /// Collects the facts from the configuration. If the secret cannot be used, writes one line to stderr and switches
    /// the control port off. So this host never asks other hosts without the configured secret.
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

    /// Returns whether connections of this process may move to an RDMA device: `verbs` is allowed, and there may be a
    /// device. If RDMASOCK_DEV_PRETEND_RDMA names a network, the result is true in any case. Does not check whether the
    /// plugin loads.
    pub(crate) fn verbs_ready(&self) -> bool {
        !self.pretend.is_empty() || self.wanted && crate::config::verbs::is_possible()
    }

    /// For tests: returns whether hosts ask and answer each other although no link can be made
    /// (RDMASOCK_DEV_PRETEND_RDMA).
    pub(crate) fn pretends(&self) -> bool {
        !self.pretend.is_empty()
    }

    /// For tests: returns whether links within the host are made like links between hosts.
    pub(crate) fn is_device_for_here(&self) -> bool {
        self.is_here
    }

    /// Returns whether a connection that this process has accepted gets a link between hosts.
    pub(crate) fn is_between_hosts(&self, tuple: &Tuple) -> bool {
        self.is_here || !diag::is_here(tuple.acceptor(), tuple.connector(), tuple.device())
    }

    /// Returns whether a connection from `local` to `remote` could move to a device: an RDMA device has the address
    /// `local`.
    pub(crate) fn is_candidate(&self, local: IpAddr, remote: IpAddr, devices: &mut Devices) -> bool {
        self.pretend.iter().any(|net| net.contains(&remote)) || self.wanted && devices.have(local)
    }
}

/// A cache of the local addresses that RDMA devices have. A lookup without it reads dozens of small files, more if a
/// device has a large table of GIDs, and opens a descriptor for each.
#[derive(Default)]
pub(crate) struct Devices {
    /// For each address, whether a device has it, and until when that answer is kept, monotonic ns.
    seen: HashMap<IpAddr, (bool, u64)>,
}

impl Devices {
    const GOOD_FOR: u64 = 2_000_000_000;
    /// The most addresses that are kept. Few hosts use as many.
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
