//! Which other hosts are in reach: whether this one has an RDMA device, whether that leads to a
//! destination, and the port and secret by which hosts ask each other.
//!
//! Asking is `service::remote`'s business, answering
//! `service::control`'s.

use std::net::IpAddr;

use ipnet::IpNet;
use rdmasock_core::rendezvous::control::Key;

use crate::config::{Config, Fabrics};

/// See the module. Made once, survives forks.
pub struct Reach {
    /// 0: nobody is asked or answered.
    port: u16,
    key: Option<Key>,
    pretend: Vec<IpNet>,
    /// The fabric may be used.
    wanted: bool,
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
        !self.pretend.is_empty() || self.wanted && crate::verbs::is_possible()
    }

    /// For tests: hosts ask and answer each other, though no link can be made.
    pub fn pretends(&self) -> bool {
        !self.pretend.is_empty()
    }

    /// Whether a connection from this local address to `remote` could be moved: an RDMA device has the
    /// address.
    pub fn is_candidate(&self, local: IpAddr, remote: IpAddr) -> bool {
        self.pretend.iter().any(|net| net.contains(&remote))
            || self.wanted && crate::verbs::has_device(local)
    }
}
