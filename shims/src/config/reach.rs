//! Which other hosts are in reach: whether this one has an RDMA device, whether that leads to a
//! destination, and the port and secret by which hosts ask each other.
//!
//! Asking is `service::remote`'s business, answering
//! `service::control`'s.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;
use rdmasock_core::rendezvous::control::Key;
use rdmasock_core::rendezvous::route::{Place, place_of};

use crate::config::{Config, Fabrics};

/// See the module. Made once, survives forks.
pub struct Reach {
    /// 0: nobody is asked or answered.
    port: u16,
    key: Option<Key>,
    pretend: Vec<IpNet>,
    /// The fabric may be used.
    wanted: bool,
    /// For tests: it is used within the host.
    is_here: bool,
}

impl Reach {
    /// What the configuration says. A secret that cannot be used costs one line on stderr, and hosts are then
    /// not asked at all: never without the secret that was meant.
    pub fn new(config: &Config) -> Self {
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

    /// The control port; `None` if it is off.
    pub fn port(&self) -> Option<u16> {
        (self.port != 0).then_some(self.port)
    }

    /// What datagrams are signed with, if anything.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Whether connections of this process can be moved to an RDMA device at all: the fabric is wanted, the
    /// plugin could be loaded, and there is a device.
    pub fn verbs_ready(&self) -> bool {
        !self.pretend.is_empty() || self.wanted && crate::config::verbs::is_possible()
    }

    /// For tests: hosts ask and answer each other, though no link can be made.
    pub fn pretends(&self) -> bool {
        !self.pretend.is_empty()
    }

    /// For tests: links within the host are made as those between hosts.
    pub fn is_device_for_here(&self) -> bool {
        self.is_here
    }

    /// Whether a link for a connection between these addresses is one between hosts.
    pub fn is_between_hosts(&self, local: IpAddr, remote: IpAddr) -> bool {
        self.is_here || !matches!(place_of(local, remote), Place::Here)
    }

    /// Whether a connection from this local address to `remote` could be moved: an RDMA device has the
    /// address.
    pub fn is_candidate(&self, local: IpAddr, remote: IpAddr, devices: &mut Devices) -> bool {
        self.pretend.iter().any(|net| net.contains(&remote)) || self.wanted && devices.have(local)
    }
}

/// Which local addresses RDMA devices have, as last seen. To look takes dozens of small files, more where a device
/// has a large table of GIDs, and a descriptor for each.
#[derive(Default)]
pub struct Devices {
    /// What was seen, and until when that is good, monotonic ns.
    seen: HashMap<IpAddr, (bool, u64)>,
}

impl Devices {
    const GOOD_FOR: u64 = 2_000_000_000;
    /// More addresses of one host than are worth remembering.
    const MANY: usize = 256;

    /// Whether an RDMA device has this local address.
    pub fn have(&mut self, local: IpAddr) -> bool {
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
