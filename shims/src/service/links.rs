//! Links: making them, what peers say on their side channels, and their end.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::fabric::layout::{Layout, MAX_STREAMS};
use rdmasock_core::fabric::shm::Memory;
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::memfd;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::names;
use rdmasock_core::stats::{LinkInfo, LinkStats, Path, Reason};
use rdmasock_core::stream::handshake::{Handshake, Role};
use rdmasock_core::wire::{self, Geometry, LinkAddress, LinkOffer, MAX_MESSAGE, Message, ShmName};

use super::{ASK_TIMEOUT, Conn, LINK_TIMEOUT, Peer, Ref, Worker};
use crate::config::config;
use crate::link::{Identity, Link, NoProducer, Refused};
use crate::promote;
use crate::ready;
use crate::socket::{self, Mode, Sending, Socket};
use crate::wait::{FLAGS_BYTES, MAX_WAITERS, SERVICE, WaiterId};

/// A link that we have asked for.
pub struct Pending {
    waiting: Vec<Ref>,
    /// The arena that we receive in.
    mine: Option<(PrivateFd, Layout)>,
    /// Monotonic ns.
    pub deadline: u64,
}

/// After how long a dead link on which a thread still sleeps is looked at again, ns. What is under way on its queue pair
/// completes as failed, which wakes the thread.
const FREE_AGAIN: u64 = 100_000_000;

/// A stream whose peer's process has ended with bytes of ours unread, which TCP does not show yet. Until it does the stream stays
/// what it is: who is told before that finds the connection still standing.
pub(super) struct Dying {
    r: Ref,
    /// Monotonic ns.
    pub deadline: u64,
}

/// How long TCP has to show it, ns; where another process has the other end too, it never does.
const END_WITHIN: u64 = 1_000_000_000;

fn awaits_end(socket: &'static Socket) -> bool {
    let is_unread = socket.tx.lock().is_some_and(|tx| {
        let unread = tx.producer.as_ref().is_some_and(|p| p.is_unread());
        unread && !tx.is_shut && socket.tx_mode.load(Acquire) == Mode::Link
    });
    is_unread && !has_ended(socket)
}

fn has_ended(socket: &'static Socket) -> bool {
    let Some(_control) = socket.control.lock() else {
        return true;
    };
    ready::kernel(socket, rustix::event::PollFlags::RDHUP) & ready::ENDED != 0
}

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
            max_ring: config().ring_max.bytes(),
        }
    }

    /// The file of an arena, as large as files may be here.
    fn make_arena(&self) -> Option<(PrivateFd, Layout)> {
        let layout = Layout::within(config().arena.bytes(), memfd::file_limit())?;
        let fd = memfd::create_file("rdmasock-arena", layout.file_len()).ok()?;
        Some((fd, layout))
    }

    fn dial(
        &mut self,
        peer: InstanceId,
        name: &ShmName,
        cookie: &Cookie,
    ) -> Option<(PrivateFd, Layout)> {
        let channel = names::connect_to(name.as_bytes()).ok()?;
        let (arena, layout) = self.make_arena()?;
        let message = Message::Link {
            cookie: *cookie,
            instance_c: self.library.id,
            pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
            geometry: self.geometry(&layout),
        };
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).ok()?;
        channel
            .send(bytes, &[arena.as_fd(), self.library.waiters.flags_fd()])
            .ok()?;
        self.register(channel, Peer::Linking { peer })?;
        Some((arena, layout))
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
        let made = self.make_arena().and_then(|(arena, layout)| {
            let memory = memory((&arena, layout), geometry, &fds)?;
            let link = self.make_link(peer, pid, geometry.max_ring, &memory)?;
            Some((arena, layout, link))
        });
        let Some((arena, layout, link)) = made else {
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
            geometry: self.geometry(&layout),
        };
        let mut buf = [0u8; MAX_MESSAGE];
        let sent = message.encode(&mut buf).is_ok_and(|bytes| {
            let fds = [arena.as_fd(), self.library.waiters.flags_fd()];
            channel.send(bytes, &fds).is_ok()
        });
        if !sent {
            self.conns.remove(&conn);
            self.give_up(link);
            return;
        }
        self.establish(conn, link, channel);
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
        let link = mine.filter(|_| instance == expected).and_then(|mine| {
            let memory = memory((&mine.0, mine.1), geometry, &fds)?;
            self.make_link(expected, pid, geometry.max_ring, &memory)
        });
        let Some(link) = link else {
            return self.hang_up(conn, Reason::LinkFailed);
        };
        let Some(channel) = self.conns.get_mut(&conn).and_then(|c| c.channel.take()) else {
            return self.give_up(link);
        };
        self.establish(conn, link, channel);
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

    fn make_link(
        &mut self,
        peer: InstanceId,
        pid: u32,
        max_ring: u64,
        memory: &Memory<'_>,
    ) -> Option<&'static Link> {
        let slot = self.free_slot();
        let stats = self.open_stats(slot, Path::Shm, peer, pid);
        let Some(link) = Link::new(Identity { slot, peer, stats }, memory) else {
            self.library.stats.close_link(slot);
            return None;
        };
        link.on_geometry(max_ring, memory.theirs.1.data_len() as u64);
        tracing::info!(target: "rdmasock", %peer, pid, slot, "link up");
        Some(link)
    }

    /// A link that has come to nothing.
    fn give_up(&mut self, link: &'static Link) {
        link.set_down(Reason::LinkFailed);
        self.dead_links.push(link);
        self.free_dead_links();
    }

    fn establish(&mut self, conn: u64, link: &'static Link, channel: Channel) {
        link.attach(channel);
        self.guests.on_gone(conn);
        // The registration in the epoll set goes with the fd, which the link has now.
        self.conns.insert(
            conn,
            Conn {
                channel: None,
                peer: Peer::Link(link),
            },
        );
        if let Some(mut links) = self.service.links.lock() {
            links.push(link);
        }
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
        let used = |s: &u32| links.iter().chain(&self.dead_links).any(|l| l.slot() == *s);
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
        tracing::trace!(target: "rdmasock::link", link = link.slot(), ?message, "received");
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
                        (matches && control.greeted_by == Some(link.peer()))
                            .then(|| promote::on_open(socket, &mut control, link, vqpn))
                    });
                match opened {
                    Some(Ok(())) => {
                        self.offered.remove(&nonce_yours);
                    }
                    Some(Err(NoProducer::NoSuch)) => self.break_off(link),
                    Some(Err(NoProducer::Limits)) | None => {
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
                    match promote::on_open(socket, &mut control, link, mine) {
                        Ok(()) => {}
                        Err(NoProducer::NoSuch) => {
                            drop(control);
                            self.break_off(link);
                        }
                        Err(NoProducer::Limits) => {
                            // As if we had left before the answer came.
                            let _ = link.send(&Message::Closed { yours: mine }, &[]);
                            let steps = promote::give_up(&mut control);
                            promote::run(socket, &mut control, steps);
                        }
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
                    // An end that has left by itself keeps its own reason.
                    let reason = control.leave.unwrap_or(Reason::PeerAsked);
                    promote::leave(socket, &mut control, reason);
                    drop(control);
                    self.settle(Ref::new(socket));
                }
            }
            Message::TakeBack { yours, bytes } => {
                if let Some(socket) = link.socket(yours)
                    && let Some(mut control) = socket.control.lock()
                    && let Some(file) = fds.pop()
                {
                    promote::on_take_back(socket, &mut control, bytes, &file);
                    promote::leave(socket, &mut control, Reason::PeerAsked);
                    drop(control);
                    self.settle(Ref::new(socket));
                }
            }
            Message::TakenBack { yours } => {
                if let Some(socket) = link.socket(yours) {
                    promote::on_taken_back(socket);
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
    pub(super) fn break_off(&mut self, link: &'static Link) {
        if let Some(conn) = self.conn_of(link) {
            self.violation(conn);
        }
    }

    /// Looks for the peer's sake find nothing. If that is all that comes of the link its streams go back to TCP, and
    /// nothing is lost should the suspicion be wrong; if it goes on after that, the link is closed.
    pub(super) fn look_for_noise(&mut self, link: &'static Link) {
        if !link.is_alive() || !link.is_idle() {
            return;
        }
        tracing::warn!(target: "rdmasock", link = link.slot(), "the peer wakes us for nothing, again and again: back to TCP");
        if link.is_left.swap(true, Relaxed) {
            self.library
                .stats
                .count(rdmasock_core::stats::Event::LinkViolation);
            return self.link_down(link, Reason::Violation);
        }
        for socket in link.sockets() {
            if let Some(mut control) = socket.control.lock() {
                promote::prefer_tcp(socket, &mut control, Reason::Violation);
            }
            self.settle(Ref::new(socket));
        }
    }

    /// The link carries nothing more: its streams go on over their anchors.
    pub(super) fn link_down(&mut self, link: &'static Link, why: Reason) {
        if !link.set_down(why) {
            return;
        }
        tracing::info!(target: "rdmasock", peer = %link.peer(), %why, "link down");
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
            if why == Reason::PeerGone && awaits_end(socket) {
                let deadline = crate::time::now_ns() + END_WITHIN;
                let r = Ref::new(socket);
                self.dying.push(Dying { r, deadline });
                continue;
            }
            self.leave_dead(socket, why);
        }
        self.dead_links.push(link);
        self.free_dead_links();
    }

    /// A stream goes on without its link.
    fn leave_dead(&mut self, socket: &'static Socket, why: Reason) {
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
            if socket.tx_mode.load(Acquire) == Mode::Link {
                let unread = tx.producer.take().is_some_and(|p| p.is_unread());
                if unread && why == Reason::PeerGone {
                    crate::socket::on_reader_died(socket, tx.is_shut);
                }
                socket.tx_mode.go(Sending::Left);
            }
        }
        // What the peer had written is still to be read; `leave_link_at_end` goes on from there.
        crate::rx::leave_link_at_end(socket);
        crate::ready::notify_local(socket);
        self.settle(Ref::new(socket));
    }

    /// TCP says how the peer of a link that has ended has ended itself, or it does not within the time.
    pub(super) fn leave_dying(&mut self, now: u64) {
        let is_over = |d: &mut Dying| d.deadline <= now || d.r.get().is_none_or(has_ended);
        let over: Vec<Dying> = self.dying.extract_if(.., is_over).collect();
        for socket in over.into_iter().filter_map(|d| d.r.get()) {
            self.leave_dead(socket, Reason::PeerGone);
        }
    }

    /// Gives the memory of dead links back once no socket uses them. Some time later again if a thread still sleeps on
    /// one: nobody says when it has gone on.
    pub(super) fn free_dead_links(&mut self) {
        self.free_links_at = 0;
        let now = crate::time::now_ns();
        self.dead_links.retain(|link| {
            if !link.close_channel() {
                // A thread is about to use it.
                self.free_links_at = now + FREE_AGAIN;
                return true;
            }
            // What pins it says when it no longer does; who sleeps on another host's does not.
            let is_released = link.release();
            if !is_released && link.is_remote() && link.streams() == 0 {
                self.free_links_at = now + FREE_AGAIN;
            }
            !is_released
        });
    }
}

/// The memory of a link, by what the peer says of its own. `None` if that is not what this version has.
fn memory<'a>(
    mine: (&'a PrivateFd, Layout),
    geometry: &Geometry,
    fds: &'a [PrivateFd],
) -> Option<Memory<'a>> {
    let [arena, flags] = fds else { return None };
    let is_known = geometry.waiter_bytes >= FLAGS_BYTES && geometry.queue_entries == MAX_STREAMS;
    let theirs = Layout::of_file(geometry.arena_bytes).filter(|_| is_known)?;
    Some(Memory {
        mine: (mine.0.as_fd(), mine.1),
        theirs: (arena.as_fd(), theirs),
        flags: flags.as_fd(),
    })
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
