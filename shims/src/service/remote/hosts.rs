//! Other hosts that are talked to, and what they were asked.

use std::collections::HashMap;
use std::net::IpAddr;

use rdmasock_core::os::datagram::Asker;
use rdmasock_core::rendezvous::control::{QueryId, Stamp};
use rdmasock_core::rendezvous::guard::Memory;
use rdmasock_core::rendezvous::peers::DestinationCache;

/// A host's socket is closed when nothing has been sent or heard for so long: longer than a YES is repeated (P67).
pub const QUIET: u64 = 150_000 * MS;
/// Questions that are remembered, so that a repeated YES gets the same answer as the first.
pub const QUERIES: usize = 16_384;
pub const REMEMBERED: u64 = 300_000 * MS;
pub const NEVER: u64 = u64::MAX;
pub const MS: u64 = 1_000_000;

/// What the asker knows.
pub struct Hosts {
    pub by_address: HashMap<(IpAddr, IpAddr), u64>,
    pub hosts: HashMap<u64, Host>,
    pub queries: Memory<QueryId, Query>,
    pub absent: DestinationCache,
}

pub struct Host {
    pub socket: Asker,
    pub address: (IpAddr, IpAddr),
    /// From its last answer; `None`: none has come, or the last one did not.
    pub stamp: Option<Stamp>,
    /// Questions whose answer is to come.
    pub waiting: Vec<QueryId>,
    /// How often in a row the kernel has said that nobody listens there.
    pub refused: u32,
    pub quiet_since: u64,
}

/// A question to another host.
pub struct Query {
    pub host: u64,
    pub request: u64,
    pub sent: usize,
    pub restamped: u32,
    /// When it is to be sent next, monotonic ns.
    pub next: u64,
    pub fate: Fate,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Asked,
    /// Its YES has led to a HELLO.
    Greeted,
    /// A YES is not wanted (any more).
    Unwanted,
}

impl Hosts {
    pub fn new() -> Self {
        Self {
            by_address: HashMap::new(),
            hosts: HashMap::new(),
            queries: Memory::new(QUERIES, REMEMBERED),
            absent: DestinationCache::new(4096),
        }
    }

    /// When there is something to do next, monotonic ns.
    pub fn next_timeout(&self) -> Option<u64> {
        let idle = self.hosts.values().filter(|h| h.waiting.is_empty());
        let quiet = idle.map(|h| h.quiet_since + QUIET);
        let waiting = self.hosts.values().flat_map(|h| &h.waiting);
        let sends = waiting.filter_map(|id| Some(self.queries.get(id)?.next));
        sends.chain(quiet).min().filter(|at| *at != NEVER)
    }
}
