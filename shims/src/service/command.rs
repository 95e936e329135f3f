//! What calls of the program leave to the service thread, and who carries it out.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::ids::InstanceId;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::wire::LinkOffer;

use rustix::io::Errno;

use super::{Dialled, Worker};
use crate::link::Link;
use crate::listener::Listener;
use crate::promote::{self, Awaited};
use crate::ready;
use crate::socket::Socket;

/// How long a peer is not told of bytes that more is to follow, ns: as TCP_CORK (tcp(7)).
const DELAYED_FOR: u64 = 200_000_000;

/// A socket as it was when something was asked for it.
#[derive(Clone, Copy)]
pub struct Ref {
    socket: &'static Socket,
    generation: u64,
}

impl Ref {
    pub(super) fn new(socket: &'static Socket) -> Self {
        Self {
            socket,
            generation: socket.generation.load(Acquire),
        }
    }

    pub(super) fn is_same(self, other: Self) -> bool {
        std::ptr::eq(self.socket, other.socket) && self.generation == other.generation
    }

    /// The socket, if it is still the same connection.
    pub(super) fn get(self) -> Option<&'static Socket> {
        (self.socket.generation.load(Acquire) == self.generation).then_some(self.socket)
    }
}

/// What calls of the program leave to the service thread.
pub enum Command {
    /// The connection has reached the threshold (connector).
    Promote(Ref),
    /// Tell those who wait on the socket.
    Notify(Ref),
    /// Marker bytes wait for TCP to take them.
    Flush(Ref),
    /// The sending direction waits for what may be behind unread data in TCP.
    ReadAhead(Ref),
    /// A direction has changed: put the socket where it belongs.
    Settle(Ref),
    /// A direction is back on TCP; who waits has been told, or is the one who saw it.
    Drained(Ref),
    /// An ASK waited for the program's first use of the connection, or for its close.
    Used(Ref),
    /// One of several processes that accept on a name holds the connection.
    Hold(Ref),
    /// The handshake needs a link.
    NeedLink(Ref, InstanceId, Option<LinkOffer>),
    /// The thread that connects to another host has come to an end.
    Dialled(InstanceId, Result<Dialled, Errno>),
    /// The link's side channel is full.
    AwaitRoom(&'static Link),
    /// The link's peer does not read what it is told.
    Overfull(&'static Link),
    /// The peer broke the protocol in the memory of the socket's stream.
    Violation(Ref),
    /// Nothing pins a link any more that is down.
    FreeLinks,
    /// Looks for the peer's sake find nothing.
    Vain(&'static Link),
    /// A listener has accepted its first connection in this process.
    Listen(&'static Listener),
    /// A connection that was closed in the middle of a promotion: the markers that are awaited, and
    /// what is to be sent yet.
    Linger(PrivateFd, Option<Awaited>, Vec<u8>),
    /// A ring has grown: shrink it when it is idle.
    Grown,
    /// A sender finds no room.
    Blocked(Ref),
    /// A sender finds no room, and does not wait for ever (`TCP_USER_TIMEOUT`).
    Standing(Ref),
    /// The anchor's number stands for something else, it seems.
    Lost(Ref),
    /// A sender holds something back of which the peer is to be told in a while.
    DelayedWakes,
    /// Links to other hosts are to be maintained in a while.
    Maintain,
}

impl Command {
    /// See [`Command::Notify`].
    pub fn notify(socket: &'static Socket) -> Self {
        Self::Notify(Ref::new(socket))
    }

    /// See [`Command::Flush`].
    pub fn flush(socket: &'static Socket) -> Self {
        Self::Flush(Ref::new(socket))
    }

    /// See [`Command::ReadAhead`].
    pub fn read_ahead(socket: &'static Socket) -> Self {
        Self::ReadAhead(Ref::new(socket))
    }

    /// See [`Command::Settle`].
    pub fn settle(socket: &'static Socket) -> Self {
        Self::Settle(Ref::new(socket))
    }

    /// See [`Command::Used`].
    pub fn used(socket: &'static Socket) -> Self {
        Self::Used(Ref::new(socket))
    }

    /// See [`Command::Hold`].
    pub fn hold(socket: &'static Socket) -> Self {
        Self::Hold(Ref::new(socket))
    }

    /// See [`Command::Drained`].
    pub fn drained(socket: &'static Socket) -> Self {
        Self::Drained(Ref::new(socket))
    }

    /// See [`Command::Violation`].
    pub fn violation(socket: &'static Socket) -> Self {
        Self::Violation(Ref::new(socket))
    }

    /// See [`Command::Blocked`].
    pub fn blocked(socket: &'static Socket) -> Self {
        Self::Blocked(Ref::new(socket))
    }

    /// See [`Command::Standing`].
    pub fn standing(socket: &'static Socket) -> Self {
        Self::Standing(Ref::new(socket))
    }

    /// See [`Command::Lost`].
    pub fn lost(socket: &'static Socket) -> Self {
        Self::Lost(Ref::new(socket))
    }

    /// See [`Command::NeedLink`].
    pub fn need_link(socket: &'static Socket, peer: InstanceId, offer: Option<LinkOffer>) -> Self {
        Self::NeedLink(Ref::new(socket), peer, offer)
    }
}

impl Worker {
    pub(super) fn on_command(&mut self, command: Command) {
        match command {
            Command::Promote(r) => self.ask(r),
            Command::Notify(r) => {
                if let Some(socket) = r.get() {
                    ready::notify_local(socket);
                }
            }
            Command::Flush(r) => {
                if let Some(socket) = r.get()
                    && promote::flush(socket)
                {
                    ready::notify_local(socket);
                }
            }
            Command::ReadAhead(r) => {
                if let Some(socket) = r.get()
                    && promote::read_ahead(socket, false)
                {
                    ready::notify_local(socket);
                }
            }
            Command::Settle(r) => self.settle(r),
            Command::Used(r) => self.answer_deferred(r),
            Command::Hold(r) => self.hold(r),
            Command::Drained(r) => {
                // No notification: an edge-triggered set would report what it has reported.
                if let Some(socket) = r.get() {
                    self.close_if_over(socket);
                }
            }
            Command::NeedLink(r, peer, offer) => self.need_link(r, peer, offer),
            Command::Dialled(peer, dialled) => self.on_dialled(peer, dialled),
            // The object may be another link by now, or none.
            Command::AwaitRoom(link) => {
                if link.has_outbox() {
                    self.await_room(link, true);
                }
            }
            Command::Overfull(link) => {
                if link.is_overfull() {
                    self.break_off(link);
                }
            }
            Command::Violation(r) => {
                let opened = r.get().and_then(|socket| socket.control.lock()?.opened);
                if let Some(opened) = opened {
                    self.library.stats.count(Event::LinkViolation);
                    self.link_down(opened.link, Reason::Violation);
                }
            }
            Command::FreeLinks => self.free_dead_links(),
            Command::Vain(link) => self.look_for_noise(link),
            Command::Linger(fd, awaited, unsent) => self.linger(fd, awaited, unsent),
            Command::Listen(listener) => self.listen(listener),
            Command::Blocked(r) => self.on_blocked(r),
            Command::Standing(r) => self.on_standing(r),
            Command::Lost(r) => {
                if let Some(socket) = r.get() {
                    crate::lifecycle::look_at_anchor(socket);
                }
            }
            Command::DelayedWakes => self.delayed_until = crate::time::now_ns() + DELAYED_FOR,
            Command::Grown => self.on_grown(),
            Command::Maintain => self.maintain_at = crate::time::now_ns() + self.maintain_after(),
        }
    }
}
