//! What a call of the program's finds out by itself before there is a service thread: that nobody could answer for its connection. A
//! process that only talks to programs without the library then never has a second thread, which costs it even asleep: the kernel
//! counts each use of a number, and libc's calls become cancellation points, some 5 % of a client of small requests.
//! Not for what takes more than a moment: that is the thread's (`ask`).

use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::route::{Place, place_of};
use rdmasock_core::stats::{Direction, Reason};

use super::ask::stay;
use crate::library::Library;
use crate::socket::{Socket, tuple_of};

/// Whether the connection, which has reached its threshold, stays on TCP for good without a question. Never blocks.
pub(super) fn settle(library: &Library, socket: &'static Socket) -> bool {
    let Some(tuple) = tuple_of(socket) else {
        return false;
    };
    let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
    let reason = match library.refuses(connector, acceptor, Direction::Connect) {
        Some(reason) => Some(reason),
        None if crate::fork::is_shared(socket) => None,
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
