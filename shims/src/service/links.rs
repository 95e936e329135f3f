//! Links: making them, what peers say on their side channels, and their end.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use rdmasock_core::fabric::layout::{HEADER_BYTES, Layout, MAX_STREAMS};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::FlagPage;
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::memfd::{self, Access};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::names;
use rdmasock_core::stats::{LinkInfo, LinkStats, Path, Reason};
use rdmasock_core::stream::handshake::{Handshake, Role};
use rdmasock_core::wire::{self, Geometry, LinkAddress, LinkOffer, MAX_MESSAGE, Message, ShmName};

use super::{ASK_TIMEOUT, Conn, LINK_TIMEOUT, Peer, Ref, Worker};
use crate::link::{Link, Refused};
use crate::promote;
use crate::ready;
use crate::socket::{self, mode};
use crate::wait::{FLAGS_BYTES, MAX_WAITERS, SERVICE, WaiterId};

/// A link that we have asked for.
pub struct Pending {
    waiting: Vec<Ref>,
    mine: Option<Side>,
    /// Monotonic ns.
    pub deadline: u64,
}

/// After how long a dead link on which a thread still sleeps is looked at again, ns. What is under way on its queue pair
/// completes as failed, which wakes the thread.
const BURY_AGAIN: u64 = 100_000_000;

impl Worker {
    /// A handshake has come to where it needs the link to `peer`.
    pub(super) fn need_link(&mut self, r: Ref, peer: InstanceId, offer: Option<LinkOffer>) {
        if let Some(link) = self.service.link_to(&peer) {
            return on_link(r, link);
        }
        if let Some(pending) = self.pending_links.get_mut(&peer) {
            pending.waiting.push(r);
            return;
        }
        let dialled = match offer {
            Some(offer) => match offer.address {
                LinkAddress::Shm(name) => self.dial(peer, &name, &offer.cookie).map(Some),
                LinkAddress::Verbs(at) => ends_of(r)
                    // Nowhere else than where the TCP connection leads.
                    .filter(|(_, remote)| *remote == at.ip())
                    .filter(|(local, _)| self.dial_remote(peer, *local, at, &offer.cookie))
                    .map(|_| None),
            },
            None => None,
        };
        let Some(mine) = dialled else {
            return no_link(r, Reason::LinkFailed);
        };
        let patience = if mine.is_some() {
            ASK_TIMEOUT
        } else {
            LINK_TIMEOUT
        };
        let deadline = crate::time::now_ns() + patience.as_nanos() as u64;
        self.pending_links.insert(
            peer,
            Pending {
                waiting: vec![r],
                mine,
                deadline,
            },
        );
    }

    fn geometry(&self, layout: &Layout) -> Geometry {
        Geometry {
            arena_bytes: layout.file_len(),
            waiter_bytes: FLAGS_BYTES,
            queue_entries: MAX_STREAMS,
            max_waiters: MAX_WAITERS.into(),
            max_ring: self.library.config.ring_max.bytes(),
        }
    }

    fn make_arena(&self) -> Option<(PrivateFd, Side)> {
        let layout = Layout::for_data(self.library.config.arena.bytes())?;
        let (fd, mapping) = memfd::create("rdmasock-arena", layout.file_len()).ok()?;
        let header = layout.header();
        // SAFETY: the file is longer than its header, and nobody else has it yet.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), mapping.as_ptr(), header.len()) };
        Some((fd, Side::new(mapping, layout)?))
    }

    fn dial(&mut self, peer: InstanceId, name: &ShmName, cookie: &Cookie) -> Option<Side> {
        let channel = names::connect_to(name.as_bytes()).ok()?;
        let (arena, mine) = self.make_arena()?;
        let message = Message::Link {
            cookie: *cookie,
            instance_c: self.library.id,
            pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
            geometry: self.geometry(mine.layout()),
        };
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).ok()?;
        channel
            .send(bytes, &[arena.as_fd(), self.library.waiters.flags_fd()])
            .ok()?;
        self.register(channel, Peer::Linking { peer })?;
        Some(mine)
    }

    /// LINK: a connector presents the cookie that it read in TCP.
    pub(super) fn on_link(
        &mut self,
        conn: u64,
        cookie: Cookie,
        peer: InstanceId,
        pid: u32,
        geometry: &Geometry,
        fds: Vec<PrivateFd>,
    ) {
        if !self.service.offers.redeem(&cookie, &peer) {
            self.reply(
                conn,
                &Message::LinkRefuse {
                    reason: wire::Reason::Secret,
                },
            );
            return self.hang_up(conn, Reason::Violation);
        }
        let made = self.make_arena().and_then(|(fd, mine)| {
            let theirs = map_peer(geometry, &fds)?;
            Some((fd, mine, theirs))
        });
        let Some((arena, mine, (theirs, flags))) = made else {
            self.reply(
                conn,
                &Message::LinkRefuse {
                    reason: wire::Reason::Resources,
                },
            );
            return self.hang_up(conn, Reason::Resources);
        };
        let Some(channel) = self.conns.get_mut(&conn).and_then(|c| c.channel.take()) else {
            return;
        };
        let message = Message::LinkAccept {
            instance_s: self.library.id,
            pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
            geometry: self.geometry(mine.layout()),
        };
        let mut buf = [0u8; MAX_MESSAGE];
        let Ok(bytes) = message.encode(&mut buf) else {
            return;
        };
        if channel
            .send(bytes, &[arena.as_fd(), self.library.waiters.flags_fd()])
            .is_err()
        {
            self.conns.remove(&conn);
            return;
        }
        self.establish(
            conn,
            peer,
            pid,
            channel,
            mine,
            theirs,
            flags,
            geometry.max_ring,
        );
    }

    /// LINK-ACCEPT: the link that we asked for stands.
    pub(super) fn on_link_accept(
        &mut self,
        conn: u64,
        instance: InstanceId,
        pid: u32,
        geometry: &Geometry,
        fds: Vec<PrivateFd>,
    ) {
        let expected = match self.conns.get(&conn).map(|c| &c.peer) {
            Some(Peer::Linking { peer }) => *peer,
            _ => return self.hang_up(conn, Reason::Violation),
        };
        let mine = self
            .pending_links
            .get_mut(&expected)
            .and_then(|p| p.mine.take());
        let (Some(mine), true, Some((theirs, flags))) =
            (mine, instance == expected, map_peer(geometry, &fds))
        else {
            return self.hang_up(conn, Reason::LinkFailed);
        };
        let Some(channel) = self.conns.get_mut(&conn).and_then(|c| c.channel.take()) else {
            return;
        };
        let Some(link) = self.establish(
            conn,
            expected,
            pid,
            channel,
            mine,
            theirs,
            flags,
            geometry.max_ring,
        ) else {
            return;
        };
        self.link_made(expected, link);
    }

    /// The handshakes that wait for a link to `peer` go on.
    pub(super) fn link_made(&mut self, peer: InstanceId, link: &'static Link) {
        if let Some(pending) = self.pending_links.remove(&peer) {
            for r in pending.waiting {
                on_link(r, link);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn establish(
        &mut self,
        conn: u64,
        peer: InstanceId,
        pid: u32,
        channel: Channel,
        mine: Side,
        theirs: Side,
        flags: FlagPage,
        max_ring: u64,
    ) -> Option<&'static Link> {
        let slot = self.free_slot();
        let stats = self.open_stats(slot, Path::Shm, peer, pid);
        let data_bytes = theirs.layout().data_len() as u64;
        let link = Link::new(slot, peer, channel, mine, theirs, flags, stats);
        link.on_geometry(max_ring, data_bytes);
        self.guests.on_gone(conn);
        // The registration in the epoll set goes with the fd, which the link has now.
        self.conns.insert(
            conn,
            Conn {
                channel: None,
                peer: Peer::Link(link),
            },
        );
        self.service.links.lock()?.push(link);
        tracing::info!(target: "rdmasock", %peer, pid, slot, "link up");
        Some(link)
    }

    pub(super) fn open_stats(
        &self,
        slot: u32,
        fabric: Path,
        peer: InstanceId,
        peer_pid: u32,
    ) -> Option<&'static LinkStats> {
        let info = LinkInfo {
            fabric,
            peer: *peer.as_bytes(),
            peer_pid,
        };
        let stats = self.library.stats.open_link(slot, &info);
        if let Some(stats) = stats {
            stats.set_up();
        }
        stats
    }

    pub(super) fn free_slot(&self) -> u32 {
        let links = self.service.all_links();
        let used = |s: &u32| links.iter().chain(&self.dead_links).any(|l| l.slot == *s);
        (0..).find(|s| !used(s)).unwrap_or(u32::MAX)
    }

    pub(super) fn link_failed(&mut self, peer: InstanceId) {
        if let Some(pending) = self.pending_links.remove(&peer) {
            for r in pending.waiting {
                no_link(r, Reason::LinkFailed);
            }
        }
    }

    pub(super) fn expire_links(&mut self, now: u64) {
        let late: Vec<InstanceId> = self
            .pending_links
            .iter()
            .filter(|(_, p)| p.deadline <= now)
            .map(|(i, _)| *i)
            .collect();
        for peer in late {
            let conn = self
                .conns
                .iter()
                .find(|(_, c)| matches!(c.peer, Peer::Linking { peer: p } if p == peer));
            match conn.map(|(id, _)| *id) {
                Some(id) => self.hang_up(id, Reason::TimedOut),
                None => self.link_failed(peer),
            }
        }
    }

    pub(super) fn on_link_message(
        &mut self,
        link: &'static Link,
        message: Message,
        mut fds: Vec<PrivateFd>,
    ) {
        tracing::trace!(target: "rdmasock::link", link = link.slot, ?message, "received");
        match message {
            Message::Waiter { id } => match fds.pop().map(|fd| link.on_waiter(id, fd)) {
                Some(Err(Refused::TooMany)) => {
                    let _ = link.send(&Message::WaiterGone { id }, &[]);
                }
                Some(Err(Refused::Violation)) => self.break_off(link),
                Some(Ok(())) | None => {}
            },
            Message::WaiterGone { id } => {
                if let Ok(waiter) = u16::try_from(id).map(WaiterId) {
                    // The service thread is told in its place.
                    link.on_waiter_refused(waiter);
                    for socket in link.sockets() {
                        ready::change_interest(socket, |_| {});
                        ready::notify_local(socket);
                    }
                }
            }
            Message::Ring { id } => match u16::try_from(id).map(WaiterId) {
                // This thread looks before it sleeps again.
                Ok(SERVICE) => {}
                Ok(waiter) if waiter.0 < MAX_WAITERS => self.library.waiters.ring(waiter),
                _ => self.break_off(link),
            },
            Message::Open {
                nonce_mine,
                nonce_yours,
                vqpn,
                ring: _,
            } => {
                let opened = self
                    .offered
                    .get(&nonce_yours)
                    .and_then(|r| r.get())
                    .and_then(|socket| {
                        let mut control = socket.control.lock()?;
                        // P25: the nonces of this attempt, from the instance that the TCP connection leads to.
                        let matches = control.handshake.as_ref().is_some_and(|h| {
                            h.is_opening()
                                && h.mine() == nonce_yours
                                && h.theirs() == Some(nonce_mine)
                        });
                        (matches && control.greeted_by == Some(link.peer))
                            .then(|| promote::on_open(socket, &mut control, link, vqpn))
                    });
                match opened {
                    Some(true) => {
                        self.offered.remove(&nonce_yours);
                    }
                    Some(false) => self.break_off(link),
                    None => {
                        let _ = link.send(
                            &Message::OpenRefuse {
                                yours: vqpn,
                                reason: wire::Reason::Cancelled,
                            },
                            &[],
                        );
                    }
                }
            }
            Message::OpenAck {
                yours,
                mine,
                ring: _,
            } => {
                if let Some(socket) = link.socket(yours)
                    && let Some(mut control) = socket.control.lock()
                    && control
                        .opened
                        .is_some_and(|o| o.asked && o.mine == yours && std::ptr::eq(o.link, link))
                    && control.peer.is_none()
                {
                    if !promote::on_open(socket, &mut control, link, mine) {
                        drop(control);
                        self.break_off(link);
                    }
                } else {
                    // We have left since: the peer's number is free once it has heard so.
                    let _ = link.send(&Message::Closed { yours: mine }, &[]);
                }
            }
            Message::OpenRefuse { yours, .. } => {
                if let Some(socket) = link.socket(yours)
                    && let Some(mut control) = socket.control.lock()
                {
                    if let Some(opened) = control.opened.as_mut().filter(|o| o.mine == yours) {
                        opened.asked = false;
                    }
                    let steps = promote::give_up(&mut control);
                    promote::run(socket, &mut control, steps);
                } else {
                    link.on_closed(yours);
                }
            }
            Message::DemoteRequest { yours, resend_from } => {
                if let Some(socket) = link.socket(yours)
                    && let Some(mut control) = socket.control.lock()
                {
                    if link.is_remote() {
                        return promote::resume::on_asked(socket, &mut control);
                    }
                    if resend_from.is_some() {
                        promote::resend(socket);
                    }
                    promote::leave(socket, &mut control, Reason::PeerAsked);
                    drop(control);
                    self.settle(Ref::new(socket));
                }
            }
            Message::Adopt { yours } => {
                if let Some(socket) = link.socket(yours)
                    && let Some(mut tx) = socket.tx.lock()
                    && let Some(producer) = tx.producer.as_mut()
                {
                    let _ = producer.adopt();
                }
            }
            Message::Closed { yours } => link.on_closed(yours),
            _ => {
                self.library
                    .stats
                    .count(rdmasock_core::stats::Event::LinkViolation);
                self.link_down(link, Reason::Violation);
            }
        }
    }

    /// The peer breaks the protocol on this link.
    fn break_off(&mut self, link: &'static Link) {
        if let Some(conn) = self.conn_of(link) {
            self.violation(conn);
        }
    }

    /// The link carries nothing more: its streams go on over their anchors.
    pub(super) fn link_down(&mut self, link: &'static Link, why: Reason) {
        if !link.set_down(why) {
            return;
        }
        tracing::info!(target: "rdmasock", peer = %link.peer, %why, "link down");
        if let Some(mut links) = self.service.links.lock() {
            links.retain(|l| !std::ptr::eq(*l, link));
        }
        let conn = self
            .conns
            .iter()
            .find(|(_, c)| matches!(c.peer, Peer::Link(l) if std::ptr::eq(l, link)));
        if let Some(id) = conn.map(|(id, _)| *id) {
            self.forget_link_fds(link);
            self.conns.remove(&id);
        }
        for socket in link.sockets() {
            if link.is_remote() && why != Reason::Violation {
                // It goes on over TCP.
                if let Some(mut control) = socket.control.lock() {
                    promote::set_why(socket, why);
                    promote::resume::link_failed(socket, &mut control);
                }
                ready::notify_local(socket);
                self.settle(Ref::new(socket));
                continue;
            }
            if let Some(mut control) = socket.control.lock() {
                if why == Reason::Violation {
                    // What is in the ring cannot be trusted: the connection is over.
                    crate::socket::reset(socket);
                }
                if control.handshake.is_some() {
                    let steps = promote::give_up(&mut control);
                    promote::run(socket, &mut control, steps);
                }
                promote::set_why(socket, why);
            }
            if let Some(mut tx) = socket.tx.lock() {
                // A SWITCH that is still to be written leads the peer to a link that is over.
                tx.then_link = false;
                if socket.tx_mode.load(Acquire) == mode::LINK {
                    let unread = tx.producer.take().is_some_and(|p| p.is_unread());
                    if unread && why == Reason::PeerGone {
                        crate::socket::report_reset(socket, tx.is_shut);
                    }
                    socket.tx_mode.store(mode::TCP, SeqCst);
                }
            }
            // What the peer had written is still to be read; `leave_link_at_end` goes on from there.
            crate::rx::leave_link_at_end(socket);
            crate::ready::notify_local(socket);
            self.settle(Ref::new(socket));
        }
        self.dead_links.push(link);
        self.bury();
    }

    /// Gives the memory of dead links back once no socket uses them. Some time later again if a thread still sleeps on
    /// one: nobody says when it has gone on.
    pub(super) fn bury(&mut self) {
        self.bury_at = 0;
        let now = crate::time::now_ns();
        self.dead_links.retain(|link| {
            let is_closed = link.close_channel();
            if is_closed && link.streams() > 0 {
                return true;
            }
            let is_released = is_closed && link.release();
            if !is_released {
                self.bury_at = now + BURY_AGAIN;
            }
            !is_released
        });
    }
}

fn map_peer(geometry: &Geometry, fds: &[PrivateFd]) -> Option<(Side, FlagPage)> {
    let [arena, flags] = fds else { return None };
    let mapping =
        memfd::map_received(arena.as_fd(), geometry.arena_bytes, Access::ReadWrite).ok()?;
    if mapping.bytes() < HEADER_BYTES || geometry.waiter_bytes < FLAGS_BYTES {
        return None;
    }
    let mut header = [0u8; HEADER_BYTES];
    // SAFETY: within the mapping; copied before it is looked at, because the peer may change it.
    unsafe { std::ptr::copy_nonoverlapping(mapping.as_ptr(), header.as_mut_ptr(), HEADER_BYTES) };
    let layout = Layout::from_header(&header, geometry.arena_bytes).ok()?;
    let flags = memfd::map_received(flags.as_fd(), FLAGS_BYTES, Access::ReadOnly).ok()?;
    Some((Side::new(mapping, layout)?, FlagPage::new(flags)?))
}

/// The two addresses of a connection, ours first.
fn ends_of(r: Ref) -> Option<(IpAddr, IpAddr)> {
    let socket = r.get()?;
    let tuple = socket::tuple_of(socket)?;
    let (connector, acceptor) = (tuple.connector().ip(), tuple.acceptor().ip());
    Some(match socket.role() {
        Role::Connector => (connector, acceptor),
        Role::Acceptor => (acceptor, connector),
    })
}

/// The handshake goes on over this link.
fn on_link(r: Ref, link: &'static Link) {
    let Some(socket) = r.get() else { return };
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    socket
        .link
        .store(std::ptr::from_ref(link).cast_mut(), Release);
    promote::feed(socket, &mut control, Handshake::on_link_up);
}

fn no_link(r: Ref, reason: Reason) {
    let Some(socket) = r.get() else { return };
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    promote::set_why(socket, reason);
    let steps = promote::give_up(&mut control);
    promote::run(socket, &mut control, steps);
}
