//! Sockets that are being promoted or are on a link: their anchors are watched, and they are put back into the
//! kernel's sets when both directions are on TCP again.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::fabric::ring::Wake;
use rdmasock_core::stats::Reason;
use rustix::event::epoll as kernel;

use super::{Ref, Worker, kind, tag};
use crate::link::Link;
use crate::promote;
use crate::ready;
use crate::socket::{self, Socket, mode};
use crate::tx;

/// A connection whose other end TCP says is over, though nothing on the link has said so.
pub(super) struct Unmarked {
    r: Ref,
    /// Monotonic ns.
    pub deadline: u64,
}

/// How long the other process may take to say so, or to be seen to have ended, ns.
const MARK_WITHIN: u64 = 100_000_000;

/// Whether a socket's receiving direction is on a link within the host, and its end mark has not come.
fn is_unmarked(socket: &'static Socket) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    socket.rx_mode.load(Acquire) == mode::LINK
        && !rx.stays
        && !socket.rx_shut.load(Acquire)
        && rx
            .consumer
            .as_mut()
            .is_some_and(|c| matches!(c.end(), Ok(None)))
}

/// Whether the library reports a socket's readiness.
#[derive(PartialEq, Eq)]
pub(super) enum Watch {
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
    pub(super) fn watch(&mut self, socket: &'static Socket) -> Watch {
        {
            let Some(_control) = socket.control.lock() else {
                return Watch::Impossible;
            };
            let Some(fd) = socket.anchor_fd() else {
                return Watch::Impossible;
            };
            if !self.add(fd, anchor_tag(socket), anchor_flags()) {
                return Watch::Impossible;
            }
            socket.watched.store(true, SeqCst);
        }
        let members = socket
            .interest
            .lock()
            .map(|i| i.members.clone())
            .unwrap_or_default();
        if members.iter().all(|m| m.epoll.take_over(m.item, socket)) {
            return Watch::Done;
        }
        self.unwatch(socket);
        Watch::AfterMod
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
        ready::hand_back(socket);
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
        if socket.tx_mode.load(Acquire) == mode::MARKED {
            promote::flush(socket);
        }
        if socket.rx_mode.load(Acquire) == mode::MARKED {
            // Meets markers even if the program does not read now.
            promote::readable(socket);
            if !socket.left_behind.load(Acquire) {
                promote::read_ahead(socket, tx::is_full(socket));
            }
        }
        if socket.rx_mode.load(Acquire) == mode::LINK
            && let Some(mut control) = socket.control.lock()
        {
            promote::resume::look(socket, &mut control);
        }
        if socket.anchor.load(Acquire) & libc::EPOLLRDHUP as u32 != 0 && is_unmarked(socket) {
            let deadline = crate::time::now_ns() + MARK_WITHIN;
            let r = Ref::new(socket);
            self.unmarked.push(Unmarked { r, deadline });
        }
        if socket.anchor.load(Acquire) & libc::EPOLLRDHUP as u32 != 0 && tx::is_full(socket) {
            // Whether there still is a reader the other process is to look.
            ready::notify_peer(socket, Wake(Link::service_bits()));
        }
        ready::notify_local(socket);
        if socket.left_behind.load(Acquire) {
            self.settle(Ref::new(socket));
        }
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
            if socket.rx_mode.load(Acquire) == mode::MARKED {
                promote::drop_unread(socket);
            }
            if crate::lifecycle::finish(socket) {
                self.bury();
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
