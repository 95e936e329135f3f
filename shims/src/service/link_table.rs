//! Links that are being made, and dead ones that are not freed yet. Live links are in `link::up`.

use std::collections::HashMap;
use std::time::Duration;

use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::wire::Introduction;

use crate::config::verbs::{Acceptor, Pair};
use crate::objects::link::{Link, up};
use crate::objects::mailbox::Ref;

/// How long connecting a link to another host may take; less than a cookie lives. No call waits for it: TCP carries the
/// data meanwhile.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(30);

/// A link that this instance has asked for.
pub struct Pending {
    pub waiting: Vec<Ref>,
    /// The arena that this end receives in; `None` between hosts.
    pub mine: Option<(PrivateFd, Layout)>,
    /// When the attempt is given up, monotonic ns.
    pub deadline: u64,
}

/// An accepted connection that is not up yet.
pub struct Arriving {
    pub pair: Pair,
    /// The introduction that the other end has sent.
    pub introduction: Introduction,
    /// The link that the connection is to be a bulk queue pair of; `None` for a link of its own.
    pub bulk: Option<&'static Link>,
    /// When the connection is given up, monotonic ns.
    pub deadline: u64,
}

/// An accepted link over which nothing has come yet. The other end may not know of it: on iWARP the link is up here as
/// soon as the answer has been sent.
pub struct HalfOpen {
    pub peer: InstanceId,
    /// The cookie of the other end's request.
    pub cookie: Cookie,
    /// When the link is given up, monotonic ns.
    pub deadline: u64,
}

/// Links that are being made, accepted links over which nothing has come yet, and dead links.
#[derive(Default)]
pub struct LinkTable {
    /// Links that this instance has asked for, by their peers.
    pub pending: HashMap<InstanceId, Pending>,
    /// The listeners for connections of other hosts.
    pub acceptors: HashMap<u64, Acceptor>,
    pub arriving: HashMap<u64, Arriving>,
    pub half_open: HashMap<u64, HalfOpen>,
    /// Dead links that are not freed yet.
    pub dead: Vec<&'static Link>,
}

impl LinkTable {
    /// Returns the lowest slot that no link has.
    pub fn free_slot(&self) -> u32 {
        let links = up::all();
        let used = |s: &u32| links.iter().chain(&self.dead).any(|l| l.slot() == *s);
        (0..).find(|s| !used(s)).unwrap_or(u32::MAX)
    }

    /// Returns the earliest deadline of a link that is being made, or over which nothing has come yet, monotonic ns.
    /// `None` if there is no such link.
    pub fn next_timeout(&self) -> Option<u64> {
        let pending = self.pending.values().map(|pending| pending.deadline);
        let arriving = self.arriving.values().map(|arriving| arriving.deadline);
        let half_open = self.half_open.values().map(|half_open| half_open.deadline);
        pending.chain(arriving).chain(half_open).min()
    }
}
