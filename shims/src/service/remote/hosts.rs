//! Other hosts that are asked, and the questions to them.

use std::collections::HashMap;
use std::net::IpAddr;

use rdmasock_core::os::datagram::Asker;
use rdmasock_core::rendezvous::control::{QueryId, Stamp};
use rdmasock_core::rendezvous::guard::Memory;
use rdmasock_core::rendezvous::peers::DestinationCache;

/// A host's socket is closed after this time without a datagram in either direction, ns. Longer than a YES is repeated
/// (P67).
pub const QUIET: u64 = 150_000 * MS;
/// The most questions that are remembered, so that a repeated YES gets the same answer as the first.
pub const QUERIES: usize = 16_384;
pub const REMEMBERED: u64 = 300_000 * MS;
pub const NEVER: u64 = u64::MAX;
pub const MS: u64 = 1_000_000;

/// The state of the asker.
pub struct Hosts {
    pub by_address: HashMap<(IpAddr, IpAddr), u64>,
    pub hosts: HashMap<u64, Host>,
    pub queries: Memory<QueryId, Query>,
    pub absent: DestinationCache,
}

pub struct Host {
    pub socket: Asker,
    pub address: (IpAddr, IpAddr),
    /// The stamp of the host's last answer. `None` if the host has not answered yet, or not the last question.
    pub stamp: Option<Stamp>,
    /// Questions whose answer is outstanding.
    pub waiting: Vec<QueryId>,
    /// How many times in a row the kernel has reported that the port is closed.
    pub refused: u32,
    pub quiet_since: u64,
}

/// A question to another host.
pub struct Query {
    pub host: u64,
    pub request: u64,
    pub sent: usize,
    pub restamped: u32,
    /// When the question is sent next, monotonic ns.
    pub next: u64,
    pub fate: Fate,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Asked,
    /// The question's YES has led to a HELLO.
    Greeted,
    /// A YES to the question is not wanted, or not any more.
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

    /// Returns when a question is sent or a socket closed next, monotonic ns; `None` if nothing is due.
    pub fn next_timeout(&self) -> Option<u64> {
        let idle = self.hosts.values().filter(|h| h.waiting.is_empty());
        let quiet = idle.map(|h| h.quiet_since + QUIET);
        let waiting = self.hosts.values().flat_map(|h| &h.waiting);
        let sends = waiting.filter_map(|id| Some(self.queries.get(id)?.next));
        sends.chain(quiet).min().filter(|at| *at != NEVER)
    }
}
