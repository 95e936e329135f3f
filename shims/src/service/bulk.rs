//! Bulk queue pairs beside those of links to other hosts (docs/protocol.md, P85): when one is made, and what follows when
//! it is lost. Not what goes over it, which is the engine's business.
//!
//! Who has dialled the link dials this too. The other gives it a cookie for that, over the link. A link that has lost one
//! gets another one only when both ends have said that they have none, and some time later.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use rdmasock_core::ids::Cookie;
use rdmasock_core::stats::Event;
use rdmasock_core::wire::{Introduction, Message};
use rustix::io::Errno;

use super::pairs::{dial, introduce};
use super::signals::SignalsBlocked;
use super::state::Worker;
use crate::library::Library;
use crate::link::{Link, Remote, up};
use crate::mailbox::Command;
use crate::verbs::{Incoming, Pair};

/// Time from the loss of one to the next, ns; each time twice as long.
const AGAIN_AFTER: u64 = 1_000_000_000;
const DOUBLINGS: u32 = 6;

/// How long one may take to come about, ns.
const WITHIN: u64 = 40_000_000_000;

/// Where a link's is on its way.
enum Stage {
    /// There is none, and none is wanted before this time, monotonic ns.
    None { before: u64 },
    /// The other end was asked for a cookie; until then.
    Asked { until: u64 },
    /// The other end was given a cookie; until then.
    Offered { until: u64 },
    /// It is being connected.
    Connecting,
    /// Both ends have it, as far as this one knows.
    Up,
    /// It is lost. Who has said so: this end, the other.
    Lost { here: bool, there: bool },
}

struct Bulk {
    stage: Stage,
    /// What the other end was given last. A request may be repeated, as one for a link.
    cookie: Option<Cookie>,
    /// How many were lost.
    lost: u32,
    /// The other end has lost it before this one has it.
    is_lost_there: bool,
}

impl Bulk {
    fn new() -> Self {
        Self {
            stage: Stage::None { before: 0 },
            cookie: None,
            lost: 0,
            is_lost_there: false,
        }
    }

    /// Nothing is on its way, and something may be.
    fn may_begin(&self, now: u64) -> bool {
        match self.stage {
            Stage::None { before } => now >= before,
            Stage::Asked { until } | Stage::Offered { until } => now >= until,
            Stage::Connecting | Stage::Up | Stage::Lost { .. } => false,
        }
    }

    /// It has come to nothing, or is over.
    fn end(&mut self, now: u64) {
        let after = AGAIN_AFTER << self.lost.min(DOUBLINGS);
        self.lost = self.lost.saturating_add(1);
        self.cookie = None;
        self.is_lost_there = false;
        self.stage = Stage::None { before: now + after };
    }

    /// One of the ends has said that it has lost it.
    fn on_lost(&mut self, now: u64, is_here: bool) {
        let (here, there) = match self.stage {
            Stage::Lost { here, there } => (here || is_here, there || !is_here),
            _ => (is_here, !is_here),
        };
        if here && there {
            self.end(now);
        } else {
            self.stage = Stage::Lost { here, there };
        }
    }
}

/// By the link's slot.
#[derive(Default)]
pub struct Bulks(HashMap<u32, Bulk>);

impl Bulks {
    fn of(&mut self, link: &Link) -> &mut Bulk {
        self.0.entry(link.slot()).or_insert_with(Bulk::new)
    }

    /// The link is down.
    pub fn forget(&mut self, link: &Link) {
        self.0.remove(&link.slot());
    }

    /// The link for which this cookie was given out.
    fn offered(&self, introduction: &Introduction) -> Option<&'static Link> {
        let is_it = |link: &&'static Link| {
            let cookie = self.0.get(&link.slot()).and_then(|bulk| bulk.cookie.as_ref());
            cookie.is_some_and(|cookie| cookie.matches(&introduction.cookie)) && link.peer() == introduction.instance
        };
        up::all().into_iter().find(is_it)
    }
}

fn remote_at(slot: u32) -> Option<(&'static Link, &'static Remote)> {
    let link = up::all().into_iter().find(|link| link.slot() == slot)?;
    Some((link, link.remote()?))
}

impl Worker {
    /// Somebody would send or receive directly on this link.
    pub(super) fn want_bulk(&mut self, slot: u32) {
        let Some((link, remote)) = remote_at(slot) else { return };
        let now = crate::time::now_ns();
        if !remote.is_direct() || !self.bulks.of(link).may_begin(now) {
            return;
        }
        if remote.dialled().is_none() {
            return self.offer_bulk(link);
        }
        if link.send(&Message::BulkWanted, &[]).is_ok() {
            self.bulks.of(link).stage = Stage::Asked { until: now + WITHIN };
        }
    }

    fn offer_bulk(&mut self, link: &'static Link) {
        let now = crate::time::now_ns();
        let Ok(cookie) = Cookie::random() else { return };
        if link.send(&Message::Bulk { cookie }, &[]).is_ok() {
            let bulk = self.bulks.of(link);
            bulk.cookie = Some(cookie);
            bulk.stage = Stage::Offered { until: now + WITHIN };
        }
    }

    /// What the peer says about it. False if it does not belong there.
    pub(super) fn on_bulk_message(&mut self, link: &'static Link, message: &Message) -> bool {
        let Some(remote) = link.remote().filter(|remote| remote.is_direct()) else {
            return false;
        };
        let now = crate::time::now_ns();
        match (message, remote.dialled()) {
            (Message::BulkWanted, None) => {
                if self.bulks.of(link).may_begin(now) {
                    self.offer_bulk(link);
                }
            }
            (Message::Bulk { cookie }, Some(place)) => {
                let bulk = self.bulks.of(link);
                if matches!(bulk.stage, Stage::None { .. } | Stage::Asked { .. }) {
                    bulk.stage = Stage::Connecting;
                    if !dial_beside(link, remote, place, self.library.id, *cookie) {
                        self.bulks.of(link).end(now);
                    }
                }
            }
            (Message::BulkGone, _) => {
                let bulk = self.bulks.of(link);
                match bulk.stage {
                    Stage::Connecting => bulk.is_lost_there = true,
                    Stage::Up | Stage::Lost { .. } => {
                        bulk.on_lost(now, false);
                        remote.drop_bulk();
                        self.retire_bulk(link, remote);
                    }
                    // This end has never had it.
                    Stage::None { .. } | Stage::Asked { .. } | Stage::Offered { .. } => {
                        let _ = link.send(&Message::BulkGone, &[]);
                    }
                }
            }
            _ => return false,
        }
        true
    }

    pub(super) fn on_bulk_dialled(&mut self, slot: u32, dialled: Result<Pair, Errno>) {
        let Some((link, remote)) = remote_at(slot) else { return };
        match dialled {
            Ok(pair) => self.attach_bulk(link, remote, pair),
            Err(error) => {
                tracing::debug!(target: "rdmasock::link", peer = %link.peer(), %error, "no bulk queue pair");
                self.bulks.of(link).end(crate::time::now_ns());
            }
        }
    }

    /// Somebody connects beside a link. `Err` if no link has offered that.
    pub(super) fn accept_bulk(
        &mut self,
        incoming: Incoming,
        introduction: &Introduction,
    ) -> Result<(&'static Link, Pair), Option<Incoming>> {
        let Some(link) = self.bulks.offered(introduction) else {
            return Err(Some(incoming));
        };
        let Some(remote) = link.remote() else {
            return Err(Some(incoming));
        };
        // The other end has given its last request up, and does not know what that has led to.
        self.forget_arriving_beside(link);
        remote.drop_bulk();
        drop(remote.take_retired());
        let answer = introduce(self.library.id, Introduction::NO_COOKIE, true);
        let accepted = remote.with_pair(|pair| incoming.accept(&answer, Some(pair)));
        let bulk = self.bulks.of(link);
        match accepted {
            Some(Ok(pair)) => {
                bulk.stage = Stage::Connecting;
                Ok((link, pair))
            }
            _ => {
                bulk.end(crate::time::now_ns());
                Err(None)
            }
        }
    }

    /// An accepted one is up, or did not come up.
    pub(super) fn on_bulk_arrived(&mut self, link: &'static Link, pair: Option<Pair>) {
        match (pair, link.remote().filter(|_| link.is_alive())) {
            (Some(pair), Some(remote)) => self.attach_bulk(link, remote, pair),
            _ => self.bulks.of(link).end(crate::time::now_ns()),
        }
    }

    fn attach_bulk(&mut self, link: &'static Link, remote: &'static Remote, pair: Pair) {
        let bulk = self.bulks.of(link);
        bulk.stage = Stage::Up;
        let is_lost_there = std::mem::take(&mut bulk.is_lost_there);
        tracing::debug!(target: "rdmasock::link", peer = %link.peer(), "bulk queue pair up");
        drop(remote.attach_bulk(pair));
        if is_lost_there {
            self.bulks.of(link).on_lost(crate::time::now_ns(), false);
            remote.drop_bulk();
        }
        self.retire_bulk(link, remote);
    }

    /// Ends what was lost, and says so.
    pub(super) fn retire_bulk(&mut self, link: &'static Link, remote: &'static Remote) {
        for pair in remote.take_retired() {
            drop(pair);
            self.library.stats.count(Event::BulkLost);
            tracing::debug!(target: "rdmasock::link", peer = %link.peer(), "bulk queue pair lost");
            let _ = link.send(&Message::BulkGone, &[]);
            self.bulks.of(link).on_lost(crate::time::now_ns(), true);
        }
    }
}

/// Connects beside a link, by a thread of its own. False if there is none to be had.
fn dial_beside(
    link: &'static Link,
    remote: &'static Remote,
    (local, address): (IpAddr, SocketAddr),
    me: rdmasock_core::ids::InstanceId,
    cookie: Cookie,
) -> bool {
    let greeting = introduce(me, cookie, true);
    let (peer, slot) = (link.peer(), link.slot());
    let blocked = SignalsBlocked::new();
    let spawned = std::thread::Builder::new()
        .name("rdmasock-dial".into())
        .stack_size(256 * 1024)
        .spawn(move || {
            let dialled = remote.with_pair(|pair| dial(peer, local, address, &greeting, Some(pair)));
            let dialled = dialled.unwrap_or(Err(Errno::NOTCONN)).map(|dialled| dialled.pair);
            Library::get().service.submit(Command::BulkDialled(slot, dialled));
        });
    drop(blocked);
    spawned.is_ok()
}
