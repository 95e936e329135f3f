//! Sockets that are being promoted or are on a link: their anchors are watched, and they are put back into the
//! kernel's sets when both directions are on TCP again.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::stats::Reason;
use rustix::event::epoll as kernel;

use super::{Ref, Worker, kind, tag};
use crate::link::Link;
use crate::points::point;
use crate::promote;
use crate::ready;
use crate::socket::{self, Mode, Socket};
use crate::tx;

/// A connection whose other end TCP says is over, though nothing on the link has said so.
pub(super) struct Unmarked {
    r: Ref,
    /// Monotonic ns.
    pub deadline: u64,
}

/// How long the other process may take to say so, which it is asked to, or to be seen to have ended, ns.
const MARK_WITHIN: u64 = 1_000_000_000;

/// A connection on whose link is something to be read yet, or may be, by an end that TCP says has sent its last. If that closes it
/// where its library does not see it, TCP has nothing more to say, and its library is to look.
pub(super) struct OneWay {
    r: Ref,
    /// How far the other end had read when this was last looked at.
    reader_at: Option<u64>,
    /// How long it is between two looks, ns.
    every: u64,
    /// When the next look is, monotonic ns.
    pub deadline: u64,
}

/// How soon the first look is, ns, and how long it is between two at most: half closed connections may live for days.
const LOOK_FIRST: u64 = 100_000_000;
const LOOK_LAST: u64 = 1_000_000_000;

/// Whether a socket's receiving direction is on a link within the host, and no end mark has come.
fn is_unmarked(socket: &'static Socket) -> bool {
    let Some(rx) = socket.rx.lock() else {
        return false;
    };
    socket.rx_mode.load(Acquire) == Mode::Link
        && !rx.stays
        && !socket.rx_shut.load(Acquire)
        && rx
            .consumer
            .as_ref()
            .is_some_and(|c| !c.has_mark() && !c.has_left())
}

/// Whether a socket's sending direction is on a link within the host.
fn sends_on_link(socket: &'static Socket) -> bool {
    socket.tx_mode.load(Acquire) == Mode::Link
        && socket
            .link()
            .is_some_and(|l| l.is_alive() && !l.is_remote())
}

/// Whether the library reports a socket's readiness.
#[derive(PartialEq, Eq)]
pub(super) enum Watched {
    Done,
    /// Not before the program has used epoll_ctl(EPOLL_CTL_MOD) on it (see `Epoll::take_over`).
    AfterMod,
    Impossible,
}

/// By which events of the socket's anchor are known.
pub(super) fn anchor_tag(socket: &Socket) -> u64 {
    tag(
        kind::ANCHOR,
        u64::from(socket.slot) << 32 | socket.generation.load(Acquire) & 0xffff_ffff,
    )
}

/// What the anchor is watched for.
pub(super) fn anchor_flags() -> kernel::EventFlags {
    kernel::EventFlags::IN
        | kernel::EventFlags::OUT
        | kernel::EventFlags::RDHUP
        | kernel::EventFlags::PRI
        | kernel::EventFlags::ET
}

impl Worker {
    /// From now on this thread watches the anchor, and the library reports the socket's readiness.
    pub(super) fn watch(&mut self, socket: &'static Socket) -> Watched {
        {
            let Some(_control) = socket.control.lock() else {
                return Watched::Impossible;
            };
            let Some(fd) = socket.anchor_fd() else {
                return Watched::Impossible;
            };
            if !self.add(fd, anchor_tag(socket), anchor_flags()) {
                return Watched::Impossible;
            }
            socket.watched.swap(true, SeqCst);
        }
        point!("watch: the socket is ours, and nobody knows");
        ready::tell_onlookers(socket);
        point!("watch: pollers have been told");
        let members = socket
            .interest
            .lock()
            .map(|i| i.members.clone())
            .unwrap_or_default();
        if members.iter().all(|m| m.epoll.take_over(m.item, socket)) {
            return Watched::Done;
        }
        self.unwatch(socket);
        Watched::AfterMod
    }

    fn unwatch(&mut self, socket: &'static Socket) {
        {
            let Some(_control) = socket.control.lock() else {
                return;
            };
            if !socket.watched.swap(false, SeqCst) {
                return;
            }
            if let Some(fd) = socket.anchor_fd() {
                let _ = kernel::delete(&self.service.epoll, fd);
            }
            socket.anchor.store(0, SeqCst);
        }
        point!("unwatch: the socket is the kernel's, and nobody knows");
        ready::hand_back(socket);
        point!("unwatch: sets have been told");
        // Those who sleep on our doorbells sleep on the kernel's object from now on.
        ready::notify_local(socket);
    }

    pub(super) fn on_anchor(&mut self, id: u64) {
        let Some(socket) = socket::by_slot((id >> 32) as u32) else {
            return;
        };
        if socket.generation.load(Acquire) & 0xffff_ffff != id & 0xffff_ffff {
            return;
        }
        {
            let Some(_rx) = socket.rx.lock() else { return };
            use rustix::event::PollFlags;
            let now = ready::kernel(socket, PollFlags::IN | PollFlags::RDHUP | PollFlags::PRI);
            socket
                .anchor
                .fetch_or(now & (ready::ENDED | libc::EPOLLPRI as u32), SeqCst);
        }
        if !self.dying.is_empty() && socket.anchor.load(Acquire) & ready::ENDED != 0 {
            self.leave_dying(0);
        }
        if socket.tx_mode.load(Acquire) == Mode::Marked {
            promote::flush(socket);
        }
        if socket.rx_mode.load(Acquire) == Mode::Marked {
            // Meets markers even if the program does not read now.
            promote::readable(socket);
            if !socket.left_behind.load(Acquire) {
                promote::read_ahead(socket, tx::is_full(socket));
            }
        }
        if socket.rx_mode.load(Acquire) == Mode::Link
            && let Some(mut control) = socket.control.lock()
        {
            promote::resume::look(socket, &mut control);
        }
        if socket.anchor.load(Acquire) & libc::EPOLLRDHUP as u32 != 0 {
            self.on_end_of_tcp(socket);
        }
        ready::notify_local(socket);
        if socket.left_behind.load(Acquire) {
            self.settle(Ref::new(socket));
        }
    }

    /// TCP says that the other end has sent its last.
    fn on_end_of_tcp(&mut self, socket: &'static Socket) {
        let now = crate::time::now_ns();
        let r = Ref::new(socket);
        let is_unmarked = is_unmarked(socket);
        if is_unmarked {
            let deadline = now + MARK_WITHIN;
            self.unmarked.push(Unmarked { r, deadline });
        }
        if is_unmarked || tx::is_full(socket) {
            // Whether there still is a reader the other process is to look.
            ready::notify_peer(socket, Wake(Link::service_bits()));
        }
        if sends_on_link(socket) {
            let look = OneWay {
                r,
                reader_at: None,
                every: LOOK_FIRST,
                deadline: now + LOOK_FIRST,
            };
            self.one_way.insert(socket.slot, look);
        }
    }

    /// Has the other process look whether there still is a reader, where what was sent is not read.
    pub(super) fn look_for_readers(&mut self, now: u64) {
        self.one_way.retain(|_, look| {
            let Some(socket) = look.r.get().filter(|s| sends_on_link(s)) else {
                return false;
            };
            if look.deadline > now {
                return true;
            }
            let reader_at = tx::reader_at(socket);
            let has_read = std::mem::replace(&mut look.reader_at, reader_at) != reader_at;
            if tx::is_unread(socket) && !has_read {
                ready::notify_peer(socket, Wake(Link::service_bits()));
            }
            look.every = (look.every * 2).min(LOOK_LAST);
            look.deadline = now + look.every;
            true
        });
    }

    /// The other program has closed or shut down its socket where its library did not see it: what is sent now
    /// goes over TCP, which knows how to answer it.
    pub(super) fn leave_unmarked(&mut self, now: u64) {
        let late: Vec<Unmarked> = self
            .unmarked
            .extract_if(.., |u| u.deadline <= now)
            .collect();
        for socket in late.into_iter().filter_map(|u| u.r.get()) {
            if is_unmarked(socket) && socket.link().is_some_and(Link::is_alive) {
                if tx::is_unread(socket) {
                    promote::look_for_reset(socket);
                }
                tx::take_back(socket, Reason::Closed);
            }
        }
    }

    /// Puts a socket where its directions say that it belongs.
    pub(super) fn settle(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        if let Some(link) = socket.link() {
            self.look_for_confirmation(socket, link);
        }
        if socket.left_behind.load(Acquire) {
            if socket.rx_mode.load(Acquire) == Mode::Marked {
                promote::drop_unread(socket);
            }
            if crate::lifecycle::finish(socket) {
                self.free_dead_links();
            }
            return;
        }
        if !self.close_if_over(socket) {
            ready::change_interest(socket, |_| {});
            ready::notify_local(socket);
        }
    }

    /// With both directions on TCP and no handshake under way the kernel's sets have the socket
    /// again. False if that is not so.
    pub(super) fn close_if_over(&mut self, socket: &'static Socket) -> bool {
        {
            let Some(mut control) = socket.control.lock() else {
                return true;
            };
            let busy = control.handshake.is_some() || promote::resume::is_staying(&control);
            if busy || !socket.is_plain() {
                return false;
            }
            let returns = std::mem::take(&mut control.returns) && control.leave.is_none();
            promote::close_stream(socket, &mut control);
            if returns {
                promote::retry_later(socket);
            }
            if let Some(fd) = socket.anchor_fd() {
                socket.keepalive.end(fd);
            }
        }
        self.forget_asks(socket);
        self.unwatch(socket);
        crate::fork::returned(socket);
        true
    }
}
