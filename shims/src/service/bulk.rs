//! Bulk queue pairs beside the queue pairs of links to other hosts (docs/protocol.md, P90): when one is made, and what
//! follows when it is lost. The transfers over it are the engine's.
//!
//! The end that has connected the link connects the bulk queue pair too, with a cookie that the other end sends over
//! the link. A link that has lost one gets another only after both ends have reported the loss, and some time later.

use std::net::{IpAddr, SocketAddr};

use rdmasock_core::ids::Cookie;
use rdmasock_core::stats::Event;
use rdmasock_core::wire::{Introduction, Message};
use rustix::io::Errno;

use super::bulks::Stage;
use super::pairs::{dial, introduce};
use super::signals::{SignalsBlocked, spawn};
use super::state::Worker;
use crate::config::verbs::{Incoming, Pair};
use crate::objects::library::Library;
use crate::objects::link::{Link, Remote, up};
use crate::objects::mailbox::Command;

/// How long making a bulk queue pair may take, ns.
const WITHIN: u64 = 40_000_000_000;

fn remote_at(slot: u32) -> Option<(&'static Link, &'static Remote)> {
    let link = up::all().into_iter().find(|link| link.slot() == slot)?;
    Some((link, link.remote()?))
}

impl Worker {
    /// Gets a bulk queue pair for this link, on which a call would transfer directly, if none is there or being made.
    pub(super) fn want_bulk(&mut self, slot: u32) {
        let Some((link, remote)) = remote_at(slot) else { return };
        let now = crate::sys::time::now_ns();
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
        let now = crate::sys::time::now_ns();
        let Ok(fresh) = Cookie::random() else { return };
        let cookie = self.bulks.of(link).to_offer(now, fresh);
        if link.send(&Message::Bulk { cookie }, &[]).is_ok() {
            self.bulks.of(link).on_offered(cookie, now + WITHIN);
        }
    }

    /// Handles a message about the link's bulk queue pair. Returns false if the message does not belong there.
    pub(super) fn on_bulk_message(&mut self, link: &'static Link, message: &Message) -> bool {
        let Some(remote) = link.remote().filter(|remote| remote.is_direct()) else {
            return false;
        };
        let now = crate::sys::time::now_ns();
        match (message, remote.dialled()) {
            (Message::BulkWanted, None) => {
                // The asker may not have received the earlier cookie yet.
                let bulk = self.bulks.of(link);
                if bulk.may_begin(now) || matches!(bulk.stage, Stage::Offered { .. }) {
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
                    // This end has never had one.
                    Stage::None { .. } | Stage::Asked { .. } | Stage::Offered { .. } => {
                        let _ = link.send(&Message::BulkGone, &[]);
                    }
                }
            }
            _ => return false,
        }
        true
    }

    pub(super) fn on_bulk_dialled(&mut self, serial: u64, dialled: Result<Pair, Errno>) {
        let link = up::all().into_iter().find(|link| link.serial() == serial);
        let Some((link, remote)) = link.and_then(|link| Some((link, link.remote()?))) else {
            return;
        };
        match dialled {
            Ok(pair) => self.attach_bulk(link, remote, pair),
            Err(error) => {
                tracing::debug!(target: "rdmasock::link", peer = %link.peer(), %error, "no bulk queue pair");
                self.bulks.of(link).end(crate::sys::time::now_ns());
            }
        }
    }

    /// Accepts a bulk queue pair beside the link that has offered it. `Err(Some)` gives the connection back if no link
    /// has; `Err(None)` if accepting has failed.
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
        // The other end has given up its last request, and does not know of a queue pair that came of it.
        self.forget_arriving_beside(link);
        remote.drop_bulk();
        remote.end_retired();
        let answer = introduce(self.library.id, Introduction::NO_COOKIE, true);
        let accepted = remote.with_pair(|pair| incoming.accept(&answer, Some(pair)));
        let bulk = self.bulks.of(link);
        match accepted {
            Some(Ok(pair)) => {
                bulk.stage = Stage::Connecting;
                Ok((link, pair))
            }
            _ => {
                bulk.end(crate::sys::time::now_ns());
                Err(None)
            }
        }
    }

    /// Handles the end of an accepted connection's set-up: `pair` if the bulk queue pair is up, `None` if not.
    pub(super) fn on_bulk_arrived(&mut self, link: &'static Link, pair: Option<Pair>) {
        match (pair, link.remote().filter(|_| link.is_alive())) {
            (Some(pair), Some(remote)) => self.attach_bulk(link, remote, pair),
            (None, Some(_)) => self.bulks.of(link).end(crate::sys::time::now_ns()),
            (_, None) => {}
        }
    }

    fn attach_bulk(&mut self, link: &'static Link, remote: &'static Remote, pair: Pair) {
        let bulk = self.bulks.of(link);
        bulk.stage = Stage::Up;
        let is_lost_there = std::mem::take(&mut bulk.is_lost_there);
        tracing::debug!(target: "rdmasock::link", peer = %link.peer(), "bulk queue pair up");
        drop(remote.attach_bulk(pair));
        if is_lost_there {
            self.bulks.of(link).on_lost(crate::sys::time::now_ns(), false);
            remote.drop_bulk();
        }
        self.retire_bulk(link, remote);
    }

    /// Ends the bulk queue pairs that were lost, and reports each to the peer.
    pub(super) fn retire_bulk(&mut self, link: &'static Link, remote: &'static Remote) {
        for _ in 0..remote.end_retired() {
            self.library.stats.count(Event::BulkLost);
            tracing::debug!(target: "rdmasock::link", peer = %link.peer(), "bulk queue pair lost");
            let _ = link.send(&Message::BulkGone, &[]);
            self.bulks.of(link).on_lost(crate::sys::time::now_ns(), true);
        }
    }
}

/// Connects a bulk queue pair beside a link, in a new thread. Returns false if no thread can be made.
fn dial_beside(
    link: &'static Link,
    remote: &'static Remote,
    (local, address): (IpAddr, SocketAddr),
    me: rdmasock_core::ids::InstanceId,
    cookie: Cookie,
) -> bool {
    let greeting = introduce(me, cookie, true);
    let (peer, serial) = (link.peer(), link.serial());
    let blocked = SignalsBlocked::new();
    let spawned = spawn(c"rdmasock-dial", 256 * 1024, move || {
        let dialled = remote.with_pair(|pair| dial(peer, local, address, &greeting, Some(pair)));
        let dialled = dialled.unwrap_or(Err(Errno::NOTCONN)).map(|dialled| dialled.pair);
        Library::get().service.submit(Command::BulkDialled(serial, dialled));
    });
    drop(blocked);
    spawned.is_ok()
}
