//! A connection has proved worth a promotion: its connector asks for one, its acceptor says that it has it.
//!
//! What a call of the program's finds out by itself before there is a service thread: that nobody could answer for its
//! connection. A process that only talks to programs without the library then never has a second thread, which costs it
//! even asleep: the kernel counts each use of a number, and libc's calls become cancellation points, some 5 % of a
//! client of small requests. Not for what takes more than a moment: that is the thread's (`service/ask`).

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::os::heap;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::route::{Place, place_of};
use rdmasock_core::stats::{Direction, Reason, Why};
use rdmasock_core::stream::handshake::Role;

use crate::objects::library::Library;
use crate::objects::mailbox::{Command, Ref};
use crate::objects::socket::{Socket, Stage, tuple_of};
use crate::signals::handler;
use crate::sys::errno;

/// When a connection is looked at again that could not be promoted in a signal handler, or without memory, ns.
const NOT_NOW: u64 = 100_000_000;
/// The same where the process can have no service thread, ns.
const WITHOUT_THREAD: u64 = 1_000_000_000;

/// The same for a connection that is not established, or whose program [asks past the hooks](is_polled_unseen) when it is
/// ready, ns.
const NOT_ESTABLISHED: u64 = 1_000_000;
const POLLED_UNSEEN: u64 = 100_000_000;

/// Whether the connection is used, is non-blocking, and its readiness has not been asked for in any call that has a
/// hook. On a link the program would not notice what comes.
pub fn is_polled_unseen(socket: &Socket) -> bool {
    socket.blocking.is_polled_unseen() && socket.promotion.progress.has_begun()
}

/// The connection has reached the threshold: its connector asks, its acceptor says that it has it.
#[cold]
pub fn worth_it(socket: &'static Socket) {
    let errno = errno::get();
    if !heap::can_serve() {
        socket.promotion.attempts.put_off(NOT_NOW);
        return errno::set(errno);
    }
    if socket.told.stats().is_none() && !adopt(socket) {
        return errno::set(errno);
    }
    let first = socket.promotion.attempts.is_first() && !socket.told.shown.swap(true, Relaxed);
    if first {
        show_addresses(socket);
    }
    if socket.promotion.role() == Role::Connector {
        promote(Library::get(), socket);
    } else if let Some(listener) = socket.promotion.listener() {
        // A fork child answers for connections that its parent accepted.
        listener.on_accept();
        if first && listener.is_inherited() && !Library::get().service.submit(Command::Hold(socket.into())) {
            // The next call says it.
            socket.told.shown.store(false, Relaxed);
        }
    }
    errno::set(errno);
}

/// A connection of a fork child has proved worth an instance: it is in its statistics from now on, and where it was
/// accepted this instance answers too. False if there can be none.
#[cold]
fn adopt(socket: &'static Socket) -> bool {
    let Some(library) = Library::ensure() else {
        return false;
    };
    if !socket.promotion.adopted.swap(true, Relaxed) {
        let direction = match socket.promotion.role() {
            Role::Acceptor => Direction::Accept,
            Role::Connector => Direction::Connect,
        };
        socket.open_statistics(library.stats, direction);
    }
    true
}

/// Shows the addresses in the statistics, once the connection has proved to last.
pub fn show_addresses(socket: &Socket) {
    if let (Some(stats), Some(fd)) = (socket.told.stats(), socket.numbers.anchor_fd()) {
        let local = rustix::net::getsockname(fd)
            .ok()
            .and_then(|a| SocketAddr::try_from(a).ok());
        let peer = rustix::net::getpeername(fd)
            .ok()
            .flatten()
            .and_then(|a| SocketAddr::try_from(a).ok());
        stats.set_addrs(local, peer);
    }
}

/// Asks for a promotion, once.
fn promote(library: &Library, socket: &'static Socket) {
    if socket.promotion.attempts.is_early() {
        return;
    }
    if tuple_of(socket).is_none() {
        // Not established yet (TCP_FASTOPEN_CONNECT).
        socket.promotion.attempts.put_off(NOT_ESTABLISHED);
        return;
    }
    if is_polled_unseen(socket) {
        socket.told.set_why(Reason::UnknownEpoll);
        socket.promotion.attempts.put_off(POLLED_UNSEEN);
        return;
    }
    let service = &library.service;
    if !service.is_started() && handler::is_in_one() {
        // Later, perhaps by a request that is not a handler's.
        socket.promotion.attempts.put_off(NOT_NOW);
        return;
    }
    if socket.promotion.exchange_stage(Stage::Watching, Stage::Busy)
        && (service.is_started() || !settle(library, socket))
        && !service.submit(Command::Promote(Ref::new(socket)))
    {
        socket.told.set_why(Reason::Resources);
        socket.promotion.attempts.put_off(WITHOUT_THREAD);
        socket.promotion.exchange_stage(Stage::Busy, Stage::Watching);
    }
}

/// Whether the connection stays on TCP for good without a question. Never blocks.
fn settle(library: &Library, socket: &'static Socket) -> bool {
    let Some(tuple) = tuple_of(socket) else {
        return false;
    };
    let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
    let reason = match library.refuses(connector, acceptor, Direction::Connect) {
        Some(reason) => Some(reason),
        None if socket.promotion.holders.may_be_several() => None,
        None => match place_of(connector.ip(), acceptor.ip()) {
            Place::Here if names::is_served(acceptor.port()) => None,
            Place::Here => Some(Reason::PeerWithout),
            Place::There { .. } if library.reach.verbs_ready() => None,
            Place::There { .. } => Some(Reason::OtherHost),
        },
    };
    if let Some(reason) = reason {
        stay(socket, reason.into());
    }
    reason.is_some()
}

/// The connection stays on TCP for good.
pub fn stay(socket: &'static Socket, why: Why) {
    if let Some(stats) = socket.told.stats() {
        stats.set_why(why);
    }
    let was_ever_ours = socket.is_watched() || !socket.is_plain();
    socket
        .promotion
        .set_stage(if was_ever_ours { Stage::Pinned } else { Stage::Plain });
}
