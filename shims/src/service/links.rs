//! Links: how they are made, the messages on their side channels, and their end. Also changes the sizes of the
//! rings on them.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::fabric::shm::Memory;
use rdmasock_core::fabric::waiter::{MAX_WAITERS, WaiterId};
use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::os::memfd;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::names;
use rdmasock_core::stats::{Event, Path, Reason};
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::{Broken, MOST_ASIDE, SocketIo as _};
use rdmasock_core::wire::{Geometry, LinkAddress, LinkOffer, Message};

use crate::config::config;
use crate::data::rx::Shrunk;
use crate::data::{rx, tx};
use crate::notify::epoll::Epoll;
use crate::notify::ready;
use crate::objects::link::{Identity, Link};
use crate::objects::mailbox::Ref;
use crate::objects::socket::{Mode, Move, Socket};
use crate::objects::waiters::SERVICE;
use crate::objects::{cgroup, link, socket};
use crate::service::ask::ASK_TIMEOUT;
use crate::service::channels::send;
use crate::service::{Conn, Peer, Worker, link_at};
use crate::sys::points::point;

/// Pause before a dead link that a thread still uses is checked again, ns. A thread that sleeps on the link's queue
/// pair is woken meanwhile: all work requests in flight complete as failed.
const FREE_AGAIN: u64 = 100_000_000;
/// How long connecting a link to another host may take; less than a cookie lives. No call waits for it: TCP carries the
/// data meanwhile.
pub(super) const LINK_TIMEOUT: Duration = Duration::from_secs(30);
/// A reader that has not read for this time, ns, stands still. Then the service thread at the reader's end is asked to
/// offer a larger ring, which the reader itself would do.
const STILL_FOR: u64 = 2_000_000;
/// The longest time between two checks of a sender whose reader stands still, ns.
const LONGEST: u64 = 1_000_000_000;
/// With TCP_USER_TIMEOUT, a stream leaves the link once the time between two checks of its sender has reached the
/// timeout divided by this number.
const PART: u64 = 4;
/// How often idle rings are searched for after a ring has grown, ns.
const SHRINK_EVERY: u64 = 1_000_000_000;

/// A link that this instance has asked for.
pub(super) struct Pending {
    pub peer: InstanceId,
    /// The connections whose handshakes need the link.
    waiting: Vec<Ref>,
    /// The arena (memory for rings) that this end receives in; `None` between hosts.
    pub mine: Option<(PrivateFd, Layout)>,
}

impl Pending {
    pub(super) fn new(peer: InstanceId, r: Ref, mine: Option<(PrivateFd, Layout)>) -> Self {
        let waiting = vec![r];
        Self { peer, waiting, mine }
    }

    /// Continues the handshakes that wait: on `link`, or without one.
    pub(super) fn end(self, link: Option<&'static Link>) {
        for r in self.waiting {
            match link {
                Some(link) => on_link(r, link),
                None => no_link(r),
            }
        }
    }
}

impl Worker {
    /// Gets the link to `peer` that a handshake needs, and makes one if there is none.
    pub(super) fn need_link(&mut self, r: Ref, peer: InstanceId, offer: Option<LinkOffer>) {
        if let Some(link) = link::to(&peer) {
            return on_link(r, link);
        }
        let pending = self.conns.values_mut().find_map(|conn| match &mut conn.peer {
            Peer::Linking(pending) if pending.peer == peer => Some(pending),
            _ => None,
        });
        if let Some(pending) = pending {
            return pending.waiting.push(r);
        }
        let offer = offer.filter(|_| self.can_begin());
        let is_asked = offer.and_then(|offer| match offer.address {
            LinkAddress::Shm => self.dial(r, peer, &offer.cookie),
            LinkAddress::Verbs(at) => self.dial_remote(r, peer, at, &offer.cookie),
        });
        if is_asked.is_none() {
            no_link(r);
        }
    }

    /// Makes the file of an arena, as large as files may be in this process. `None` if that fails.
    fn make_arena(&self) -> Option<(PrivateFd, Layout)> {
        let layout = Layout::within(config().arena.bytes(), memfd::file_limit())?;
        let fd = memfd::create_file("rdmasock-arena", layout.file_len()).ok()?;
        Some((fd, layout))
    }

    /// Asks an instance of this host for a link. `None` if that fails.
    fn dial(&mut self, r: Ref, peer: InstanceId, cookie: &Cookie) -> Option<()> {
        let channel = names::connect_to(names::instance(&peer).as_bytes()).ok()?;
        let (arena, layout) = self.make_arena()?;
        let message = Message::Link {
            cookie: *cookie,
            instance_c: self.library.id,
            pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
            geometry: own_geometry(&layout),
        };
        if !send(&channel, &message, &[arena.as_fd(), self.library.waiters.flags_fd()]) {
            return None;
        }
        let pending = Pending::new(peer, r, Some((arena, layout)));
        self.register(channel, Peer::Linking(pending), ASK_TIMEOUT)?;
        Some(())
    }

    /// Handles LINK: a connector presents the cookie that it has read in TCP.
    pub(super) fn on_link(
        &mut self,
        conn: u64,
        cookie: Cookie,
        peer: InstanceId,
        pid: u32,
        geometry: &Geometry,
        fds: Vec<PrivateFd>,
    ) {
        if !self.library.offers.redeem(&cookie, &peer) {
            return self.hang_up(conn, Reason::Violation);
        }
        let mine = self.can_begin().then(|| self.make_arena()).flatten();
        let link = mine
            .as_ref()
            .and_then(|mine| self.make_link((peer, pid), mine, geometry, &fds));
        let (Some((arena, layout)), Some(link)) = (mine, link) else {
            return self.hang_up(conn, Reason::Resources);
        };
        let message = Message::LinkAccept {
            instance_s: self.library.id,
            pid: rustix::process::getpid().as_raw_nonzero().get() as u32,
            geometry: own_geometry(&layout),
        };
        let fds = [arena.as_fd(), self.library.waiters.flags_fd()];
        if self.with_channel(conn, |channel| send(channel, &message, &fds)) != Some(true) {
            self.hang_up(conn, Reason::LinkFailed);
            return self.give_up(link);
        }
        self.establish(conn, link);
    }

    /// Handles LINK-ACCEPT: the link that this instance has asked for is up.
    pub(super) fn on_link_accept(
        &mut self,
        conn: u64,
        instance: InstanceId,
        pid: u32,
        geometry: &Geometry,
        fds: Vec<PrivateFd>,
    ) {
        let Some(Peer::Linking(pending)) = self.conns.get_mut(&conn).map(|c| &mut c.peer) else {
            return self.hang_up(conn, Reason::Violation);
        };
        let (expected, mine) = (pending.peer, pending.mine.take());
        let mine = mine.filter(|_| instance == expected);
        let link = mine.and_then(|mine| self.make_link((expected, pid), &mine, geometry, &fds));
        let Some(link) = link else {
            return self.hang_up(conn, Reason::LinkFailed);
        };
        if let Some(Peer::Linking(pending)) = self.establish(conn, link) {
            pending.end(Some(link));
        }
    }

    /// Makes a link to an instance of this host. `geometry` and `fds` describe the peer's part of the memory. `None` if
    /// that fails, or if this version has no layout of this size.
    fn make_link(
        &mut self,
        (peer, pid): (InstanceId, u32),
        (arena, layout): &(PrivateFd, Layout),
        geometry: &Geometry,
        fds: &[PrivateFd],
    ) -> Option<&'static Link> {
        let [theirs, flags] = fds else { return None };
        let memory = Memory {
            mine: (arena.as_fd(), *layout),
            theirs: (theirs.as_fd(), Layout::of_file(geometry.arena_bytes)?),
            flags: flags.as_fd(),
        };
        let link = self.new_link(Path::Shm, peer, pid, |identity| Link::new(identity, &memory))?;
        link.on_geometry(geometry.max_ring);
        tracing::info!(target: "rdmasock", %peer, pid, slot = link.slot(), "link up");
        Some(link)
    }

    /// Gives up a link that was made and could not be put to use.
    pub(super) fn give_up(&mut self, link: &'static Link) {
        link.set_down(Reason::LinkFailed);
        self.dead_links.push(link);
        self.free_dead_links();
    }

    /// Makes the channel `id` the side channel of `link`. Returns the channel's earlier purpose.
    fn establish(&mut self, id: u64, link: &'static Link) -> Option<Peer> {
        let before = self.conns.insert(id, Conn::new(None, Peer::Link(link), None))?;
        // The fd's registration in the epoll set stays. The fd belongs to the link now.
        link.attach(before.channel?);
        link::add(link);
        Some(before.peer)
    }

    /// Returns the lowest slot that no link has.
    fn free_slot(&self) -> u32 {
        let links = link::all();
        let used = |s: &u32| links.iter().chain(&self.dead_links).any(|l| l.slot() == *s);
        (0..).find(|s| !used(s)).unwrap_or(u32::MAX)
    }

    /// Makes a link in a free slot by `make`, with its statistics. `None` if that fails.
    pub(super) fn new_link(
        &self,
        fabric: Path,
        peer: InstanceId,
        peer_pid: u32,
        make: impl FnOnce(Identity) -> Option<&'static Link>,
    ) -> Option<&'static Link> {
        let slot = self.free_slot();
        let stats = self.library.stats.open_link(slot, fabric, *peer.as_bytes(), peer_pid);
        let link = make(Identity { slot, peer, stats });
        if link.is_none() {
            self.library.stats.close_link(slot);
        }
        link
    }

    pub(super) fn on_link_message(&mut self, link: &'static Link, message: Message, mut fds: Vec<PrivateFd>) {
        tracing::trace!(target: "rdmasock::link", link = link.slot(), ?message, "received");
        match message {
            Message::Waiter { id } => {
                if fds.pop().is_some_and(|fd| link.on_waiter(id, fd).is_err()) {
                    self.break_off(link);
                }
            }
            Message::Ring { id } => match u16::try_from(id).map(WaiterId) {
                // This thread checks for work before it sleeps again.
                Ok(SERVICE) => {}
                Ok(waiter) if waiter.0 < MAX_WAITERS => self.library.waiters.ring(waiter),
                _ => self.break_off(link),
            },
            Message::Open {
                nonce_mine,
                nonce_yours,
                vqpn,
                ring,
            } => {
                let socket = self.handshakes.by_nonce(&nonce_yours);
                match connection::on_open(socket, &link, (nonce_mine, nonce_yours), vqpn, ring) {
                    Ok(true) => {
                        self.handshakes.remove(&nonce_yours);
                    }
                    Ok(false) => {}
                    Err(Broken) => self.break_off(link),
                }
            }
            Message::OpenAck { yours, mine, ring } => {
                point!("opened: the peer's number is not known");
                if connection::on_open_ack(link.socket(yours), &link, yours, mine, ring).is_err() {
                    self.break_off(link);
                }
            }
            Message::OpenRefuse { yours, .. } => {
                let is_told = |socket: &Socket| connection::on_open_refused(socket, yours).is_ok();
                if !link.socket(yours).is_some_and(is_told) {
                    link.on_closed(yours);
                }
            }
            Message::DemoteRequest { yours, resend_from } => {
                if let Some(socket) = link.socket(yours) {
                    connection::on_demote_request(socket, &link, resend_from);
                    if !link.is_remote() {
                        self.settle(Ref::new(socket));
                    }
                }
            }
            Message::TakeBack { yours, bytes } => {
                if let Some(socket) = link.socket(yours)
                    && let Some(mut control) = socket.control.lock()
                    && let Some(file) = fds.pop()
                {
                    let bytes = read_given_back(bytes, &file);
                    connection::on_take_back(socket, &mut control, bytes.as_deref());
                    connection::leave(socket, &mut control, Reason::PeerAsked);
                    drop(control);
                    self.settle(Ref::new(socket));
                }
            }
            Message::TakenBack { yours } => {
                if let Some(socket) = link.socket(yours) {
                    connection::on_taken_back(socket);
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
            message if self.on_bulk_message(link, &message) => {}
            _ => {
                self.library.stats.count(Event::LinkViolation);
                self.link_down(link, Reason::Violation);
            }
        }
    }

    /// Closes the link, since its peer breaks the protocol.
    pub(super) fn break_off(&mut self, link: &'static Link) {
        if let Some(conn) = self.conn_of(link) {
            self.violation(conn);
        }
    }

    /// Checks a link whose peer has woken threads for nothing many times. If the link carries hardly any bytes, its
    /// streams go back to TCP. No byte is lost if the suspicion is wrong. If the wake-ups go on after that, the link is
    /// closed.
    pub(super) fn look_for_noise(&mut self, slot: u32) {
        let Some(link) = link_at(slot).filter(|link| link.is_alive() && link.is_idle(moved_on(link))) else {
            return;
        };
        tracing::warn!(target: "rdmasock", link = link.slot(), "the peer wakes us for nothing, again and again: back to TCP");
        if link.is_left.swap(true, Relaxed) {
            self.library.stats.count(Event::LinkViolation);
            return self.link_down(link, Reason::Violation);
        }
        self.prefer_tcp(link, Reason::Violation);
    }

    /// Takes all streams of a working link back to TCP.
    pub(super) fn prefer_tcp(&mut self, link: &'static Link, why: Reason) {
        for socket in link.sockets() {
            if let Some(mut control) = socket.control.lock() {
                connection::prefer_tcp(socket, &mut control, why);
            }
            self.settle(Ref::new(socket));
        }
    }

    /// Takes a link out of use: its streams go on over their TCP sockets.
    pub(super) fn link_down(&mut self, link: &'static Link, why: Reason) {
        if !link.set_down(why) {
            return;
        }
        tracing::info!(target: "rdmasock", peer = %link.peer(), %why, "link down");
        link::remove(link);
        self.bulks.remove(&link.slot());
        if link.is_remote() {
            self.forget_arriving_beside(link);
            Epoll::drop_dead_links();
            forget_unopened(link);
        }
        self.forget_link_fds(link);
        if let Some(id) = self.conn_of(link) {
            self.conns.remove(&id);
        }
        for socket in link.sockets() {
            if link.is_remote() && why != Reason::Violation {
                // The stream goes on over TCP.
                if let Some(mut control) = socket.control.lock() {
                    socket.told.set_why(why);
                    connection::stay::link_failed(socket, &mut control);
                }
                ready::notify_local(socket);
                self.settle(Ref::new(socket));
                continue;
            }
            if why == Reason::PeerGone && self.ends.on_peer_gone(socket) {
                continue;
            }
            self.leave_dead(socket, why);
        }
        self.dead_links.push(link);
        self.free_dead_links();
    }

    /// Makes a stream go on without its link, which is dead.
    fn leave_dead(&mut self, socket: &'static Socket, why: Reason) {
        if let Some(mut control) = socket.control.lock() {
            if why == Reason::Violation {
                // The bytes in the ring cannot be trusted, so the connection is reset.
                crate::notify::reset::reset(socket);
            }
            if control.handshake.is_some() {
                connection::end_attempt(socket, &mut control);
            }
            socket.told.set_why(why);
        }
        if let Some(mut tx) = socket.tx.lock() {
            // A SWITCH that is still unsent would lead the peer to a dead link.
            tx.then.take_link();
            if socket.tx_mode.load(Acquire) == Mode::Link {
                let unread = tx.producer.take().is_some_and(|p| p.is_unread());
                if unread && why == Reason::PeerGone {
                    crate::notify::reset::on_reader_died(socket, tx.end.is_shut());
                }
                socket.tx_mode.go(Move::Left);
            }
        }
        // The program can still read the bytes in the ring. If the ring is empty, the direction leaves the link here;
        // else the receive that empties the ring makes it leave.
        connection::leave_link_at_end(socket);
        crate::notify::ready::notify_local(socket);
        self.settle(Ref::new(socket));
    }

    /// Takes the streams whose peer's process has ended off their dead links, once TCP shows that end too, or once the
    /// time for that is over (`Ends`).
    pub(super) fn leave_dying(&mut self, now: u64) {
        for socket in self.ends.over(now) {
            self.leave_dead(socket, Reason::PeerGone);
        }
    }

    /// Frees the memory of dead links that no socket uses any more. If a thread still sleeps on a link, checks again
    /// after `FREE_AGAIN`: such a thread does not notify this one when it leaves the link.
    pub(super) fn free_dead_links(&mut self) {
        let alarm = &mut self.alarms.free_links;
        *alarm = None;
        let now = crate::sys::time::now_ns();
        self.dead_links.retain(|link| {
            if !link.close_channel() {
                // A thread is about to use the channel.
                *alarm = Some(now + FREE_AGAIN);
                return true;
            }
            // When the last pin on a link is removed, this thread is notified. A thread that sleeps on a link to
            // another host does not notify this thread when it leaves.
            let is_released = link.release();
            if !is_released && link.is_remote() && link.streams() == 0 {
                *alarm = Some(now + FREE_AGAIN);
            }
            !is_released
        });
    }
}

/// Detaches the sockets whose attempts have been given this link and have opened no stream on it. The peer gives up
/// such attempts, so they fail here too. Otherwise they could go on when the object has become another link to the same
/// peer.
fn forget_unopened(link: &'static Link) {
    for socket in socket::all().filter(|socket| socket.link() == Some(link)) {
        // A stream that was opened pins the link, so the object still stands for this link.
        if let Some(control) = socket.control.lock()
            && control.opened.is_none()
        {
            socket.set_link(None);
        }
    }
}

/// Returns the sizes of this end's memory, for the peer.
fn own_geometry(layout: &Layout) -> Geometry {
    Geometry {
        arena_bytes: layout.file_len(),
        max_ring: config().ring_max.bytes(),
    }
}

/// Returns the sum of the positions of all streams on a link, in bytes: how much they have carried.
fn moved_on(link: &Link) -> u64 {
    let moved = link.sockets().into_iter().map(|socket| {
        let received = socket.rx.lock().and_then(|rx| Some(rx.consumer.as_ref()?.position()));
        let sent = socket.tx.lock().and_then(|tx| Some(tx.producer.as_ref()?.position()));
        received.unwrap_or(0) + sent.unwrap_or(0)
    });
    moved.fold(0, u64::wrapping_add)
}

/// Continues a handshake on this link.
fn on_link(r: Ref, link: &'static Link) {
    if let Some(socket) = r.get() {
        connection::on_link_up(socket, &link);
    }
}

/// Ends a handshake for which no link can be made.
fn no_link(r: Ref) {
    let Some(socket) = r.get() else { return };
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    socket.told.set_why(Reason::LinkFailed);
    connection::end_attempt(socket, &mut control);
}

/// Reads the data that a peer gives back after having taken it out of TCP (P85). `None` if the file is not a sealed
/// memfd of at least `bytes` bytes, or if `bytes` exceeds `MOST_ASIDE`.
fn read_given_back(bytes: u32, file: &PrivateFd) -> Option<Vec<u8>> {
    // Refuses a file that could make this thread wait, or that could shrink.
    memfd::check_received(file.as_fd(), bytes.into(), memfd::Access::ReadOnly).ok()?;
    let len = usize::try_from(bytes).ok().filter(|n| *n <= MOST_ASIDE)?;
    let mut read = Vec::new();
    read.try_reserve_exact(len).ok()?;
    read.resize(len, 0);
    let mut at = 0;
    while let Some(rest) = read.get_mut(at..).filter(|rest| !rest.is_empty()) {
        at += rustix::io::pread(file, rest, at as u64).ok().filter(|n| *n > 0)?;
    }
    Some(read)
}

/// A sender that found no room, with its reader's position at that time.
pub(super) struct Blocked {
    r: Ref,
    reader_at: u64,
    /// Time between two checks of the sender, ns.
    every: u64,
    /// The time of the next check, monotonic ns.
    pub deadline: u64,
}

// The rings whose size may have to change: too small for a sender whose reader stands still, or large and idle.

impl Worker {
    /// Begins to check a sender that has found no room.
    pub(super) fn on_blocked(&mut self, r: Ref) {
        if let Some(socket) = r.get()
            && let Some(reader_at) = tx::reader_at(socket)
        {
            self.blocked.push(Blocked {
                r,
                reader_at,
                every: STILL_FOR,
                deadline: crate::sys::time::now_ns() + STILL_FOR,
            });
        }
    }

    /// Helps senders that have found no room for a while.
    pub(super) fn relieve(&mut self, now: u64) {
        let late: Vec<Blocked> = self.blocked.extract_if(.., |p| p.deadline <= now).collect();
        for blocked in late {
            let Some(socket) = blocked.r.get() else {
                continue;
            };
            let again = tx::ask_for_room(socket, blocked.reader_at);
            let times_out = again.is_some_and(|(_, times_out)| times_out);
            if (again.is_none() || times_out) && connection::read_ahead(socket, true) {
                ready::notify_local(socket);
            }
            let timeout = u64::from(socket.options.user_timeout.load(Acquire)) * 1_000_000;
            if times_out && blocked.every >= LONGEST.min(timeout / PART) {
                // On TCP the kernel applies the timeout, once TCP has no room either.
                tx::take_back(socket, Reason::Unsupported);
                ready::notify_local(socket);
            } else if let Some((reader_at, _)) = again {
                let every = match reader_at == blocked.reader_at {
                    true => (blocked.every * 2).min(LONGEST),
                    false => STILL_FOR,
                };
                self.blocked.push(Blocked {
                    reader_at,
                    every,
                    deadline: now + every,
                    ..blocked
                });
            }
        }
    }

    /// Schedules a search for idle rings, after a ring has grown.
    pub(super) fn on_grown(&mut self) {
        self.alarms.shrink.get_or_insert_with(|| {
            cgroup::look();
            crate::sys::time::now_ns() + SHRINK_EVERY
        });
    }

    /// Gives idle rings their first size, and searches again later if some are in use.
    pub(super) fn shrink_rings(&mut self, now: u64) {
        cgroup::look();
        let mut again = false;
        for socket in socket::all() {
            again |= !tx::give_back(socket);
            if socket.rx_mode.load(Acquire) != Mode::Link {
                continue;
            }
            let Some(link) = socket.link() else { continue };
            match rx::shrink(socket, link) {
                Shrunk::Small => {}
                Shrunk::Busy => again = true,
                Shrunk::Offered => {
                    again = true;
                    let yours = socket.control.lock().and_then(|c| Some(c.pair()?.1));
                    if let Some(yours) = yours {
                        let _ = link.send(&Message::Adopt { yours }, &[]);
                    }
                }
            }
        }
        if again {
            self.alarms.shrink = Some(now + SHRINK_EVERY);
        }
    }
}

/// Tests that a peer's file is only read as data, and only if it is a sealed memfd.
#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};

    use super::*;

    fn file(bytes: &[u8]) -> PrivateFd {
        let file = memfd::create_file("test-back", bytes.len() as u64).unwrap();
        assert_eq!(rustix::io::write(&file, bytes), Ok(bytes.len()));
        file
    }

    #[test]
    fn a_file_is_read_from_its_beginning_wherever_the_peer_has_left_it() {
        assert_eq!(read_given_back(4, &file(b"unread")), Some(b"unre".to_vec()));
    }

    /// Reading another file than a memfd might block the service thread, and one that is not sealed could shrink.
    #[test]
    fn nothing_but_a_sealed_file_of_that_size_is_read() {
        let device = PrivateFd::open(|| open("/dev/zero", OFlags::RDONLY, Mode::empty()));
        assert_eq!(read_given_back(1, &device.unwrap()), None);
        let unsealed = PrivateFd::open(|| memfd_create("test-back", MemfdFlags::ALLOW_SEALING));
        let unsealed = unsealed.unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert_eq!(read_given_back(1, &unsealed), None);
        assert_eq!(read_given_back(7, &file(b"unread")), None);
        assert_eq!(read_given_back(0, &file(b"unread")), None);
        let large = memfd::create_file("test-back", MOST_ASIDE as u64 + 1).unwrap();
        assert_eq!(read_given_back(MOST_ASIDE as u32 + 1, &large), None);
    }
}
