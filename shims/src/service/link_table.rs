//! Links on their way up, and those that are over and not free yet. Those that are up are in `link::up`.

use std::collections::HashMap;
use std::time::Duration;

use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::wire::Introduction;

use crate::config::verbs::{Acceptor, Pair};
use crate::objects::link::{Link, up};
use crate::objects::mailbox::Ref;

/// How long a link to another host may take; less than a cookie lives. Nobody waits: TCP carries what is sent
/// meanwhile.
pub const LINK_TIMEOUT: Duration = Duration::from_secs(30);

/// A link that we have asked for.
pub struct Pending {
    pub waiting: Vec<Ref>,
    /// The arena that we receive in.
    pub mine: Option<(PrivateFd, Layout)>,
    /// Monotonic ns.
    pub deadline: u64,
}

/// An accepted connection that is not up yet.
pub struct Arriving {
    pub pair: Pair,
    /// What its other end has said.
    pub introduction: Introduction,
    /// The link that it is to be beside.
    pub bulk: Option<&'static Link>,
    /// Monotonic ns.
    pub deadline: u64,
}

/// A link that was accepted and on which nothing has come yet. Its other end may not know of it: on iWARP it is up as
/// soon as the answer has been sent.
pub struct HalfOpen {
    pub peer: InstanceId,
    /// What it was asked for with.
    pub cookie: Cookie,
    /// Monotonic ns.
    pub deadline: u64,
}

/// See the module.
#[derive(Default)]
pub struct LinkTable {
    /// What we have asked for, by whom.
    pub pending: HashMap<InstanceId, Pending>,
    /// Where other hosts connect.
    pub acceptors: HashMap<u64, Acceptor>,
    pub arriving: HashMap<u64, Arriving>,
    pub half_open: HashMap<u64, HalfOpen>,
    /// Those that are over.
    pub dead: Vec<&'static Link>,
}

impl LinkTable {
    /// The lowest slot that no link has.
    pub fn free_slot(&self) -> u32 {
        let links = up::all();
        let used = |s: &u32| links.iter().chain(&self.dead).any(|l| l.slot() == *s);
        (0..).find(|s| !used(s)).unwrap_or(u32::MAX)
    }

    /// When one has taken too long, monotonic ns.
    pub fn next_timeout(&self) -> Option<u64> {
        let pending = self.pending.values().map(|pending| pending.deadline);
        let arriving = self.arriving.values().map(|arriving| arriving.deadline);
        let half_open = self.half_open.values().map(|half_open| half_open.deadline);
        pending.chain(arriving).chain(half_open).min()
    }
}
