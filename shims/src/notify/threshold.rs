//! Handles a connection that reaches the promotion threshold. The connector's end asks for a promotion. The acceptor's
//! end prepares to answer.
//!
//! Before a service thread exists, the calling thread checks whether the peer can have the library at all. If not, no
//! thread is started. Even an idle second thread costs a client of small requests some 5 %: once there are two threads,
//! the kernel counts each use of an fd, and libc's calls become cancellation points. Checks that could take long are
//! made by the service thread (`service/ask`).

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::rendezvous::{diag, names};
use rdmasock_core::stats::{Direction, Reason, Why};
use rdmasock_core::{os::heap, stream::handshake::Role};

use crate::objects::mailbox::{Command, Ref};
use crate::objects::socket::{Socket, Stage, tuple_of};
use crate::objects::{holders, library::Library};
use crate::signals::handler;
use crate::sys::errno;

/// Delay before the next attempt when a connection could not be promoted in a signal handler or for lack of memory, ns.
const NOT_NOW: u64 = 100_000_000;
/// Delay before the next attempt when no service thread can be started, ns.
const WITHOUT_THREAD: u64 = 1_000_000_000;

/// Delay before the next attempt when the connection is not established yet, ns.
const NOT_ESTABLISHED: u64 = 1_000_000;
/// Delay before the next attempt when the program [asks past the hooks](is_polled_unseen) for readiness, ns.
const POLLED_UNSEEN: u64 = 100_000_000;

/// Whether the connection is in use and non-blocking, and no hook has seen the program ask for its readiness. If such a
/// connection were on a link, the program would not notice new data.
pub(crate) fn is_polled_unseen(socket: &Socket) -> bool {
    socket.blocking.is_polled_unseen() && socket.promotion.progress.has_begun()
}

/// Handles a connection that has reached the threshold. A connector asks for a promotion; at an acceptor, the service
/// thread begins to answer for the listener.
#[cold]
pub(crate) fn worth_it(socket: &'static Socket) {
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
        // A fork child also answers for connections that its parent accepted.
        listener.on_accept();
        // After a fork several processes may answer on the listener's name, so this process records that it holds the
        // connection.
        if first
            && holders::epoch() > 1
            && let Some(tuple) = tuple_of(socket)
        {
            listener.enter_holder(&tuple, &Library::get().id);
        }
    }
    errno::set(errno);
}

/// Adds a connection of a fork child to the statistics of the child's instance, when the connection has reached the
/// threshold. Makes the instance if there is none yet. Returns false if none can be made.
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

/// Writes the connection's addresses into the statistics. To be called once the connection has proved to last.
pub(crate) fn show_addresses(socket: &Socket) {
    if let (Some(stats), Some(fd)) = (socket.told.stats(), socket.numbers.anchor_fd()) {
        let address = |any: rustix::net::SocketAddrAny| SocketAddr::try_from(any).ok();
        let local = rustix::net::getsockname(fd).ok().and_then(address);
        let peer = rustix::net::getpeername(fd).ok().flatten().and_then(address);
        stats.set_addrs(local, peer);
    }
}

/// Submits one request for a promotion to the service thread, unless the connection cannot be promoted now.
fn promote(library: &Library, socket: &'static Socket) {
    if socket.promotion.attempts.is_early() {
        return;
    }
    if tuple_of(socket).is_none() {
        // The connection is not established yet (TCP_FASTOPEN_CONNECT).
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
        // A signal handler does not start the thread. A later call may run outside of a handler.
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

/// Decides, without asking the peer, whether the connection has to stay on TCP for good. If it has to, keeps it on TCP
/// and returns true. Never blocks.
fn settle(library: &Library, socket: &'static Socket) -> bool {
    let Some(tuple) = tuple_of(socket) else {
        return false;
    };
    let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
    let refused = library.refuses(connector, acceptor, Direction::Connect);
    let reason = refused.or_else(|| match diag::is_here(connector, acceptor, tuple.device()) {
        _ if socket.promotion.holders.may_be_several() => None,
        true if names::is_served(acceptor.port()) => None,
        true => Some(Reason::PeerWithout),
        false if library.reach.verbs_ready() => None,
        false => Some(Reason::OtherHost),
    });
    if let Some(reason) = reason {
        stay(socket, reason.into());
    }
    reason.is_some()
}

/// Keeps the connection on TCP for good, and records the reason.
pub(crate) fn stay(socket: &'static Socket, why: Why) {
    if let Some(stats) = socket.told.stats() {
        stats.set_why(why);
    }
    let was_ever_ours = socket.is_watched() || !socket.is_plain();
    socket
        .promotion
        .set_stage(if was_ever_ours { Stage::Pinned } else { Stage::Plain });
}
