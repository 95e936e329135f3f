//! What peers tell the service thread of sockets, because more than one set or thread of this process waits on them: it
//! tells all of those. A thread that looks at such a set does the same first, or what has come would be there before
//! the set knows it.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::ids::Vqpn;
use rdmasock_core::lock::Lock;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::resume::Resume;

use crate::data::rx;
use crate::notify::closing;
use crate::notify::ready;
use crate::objects::link::{Link, up};
use crate::objects::socket::{self, Socket};
use crate::objects::waiters::SERVICE;
use crate::polling::readiness::{self, Arm};

/// Who has it tells: whoever comes after that finds all told that had been said before.
static TURN: Lock<()> = Lock::new(());

/// Tells those who wait of what the link's peer has said.
pub fn tell(link: &'static Link) {
    // A signal handler above its holder: that goes on.
    let Some(_turn) = TURN.lock() else { return };
    let mut sockets = Vec::new();
    link.drain_ready(SERVICE, |slot, at| sockets.push((at, slot)));
    sockets.sort_by_key(|(at, _)| *at);
    for socket in sockets.into_iter().filter_map(|(_, slot)| socket::by_slot(slot)) {
        // Its sender may wait for a reader that has closed the number past the hooks.
        closing::look_at_anchor(socket);
        link.judge(readiness::readable(socket, Arm::No) != 0);
        rx::relieve(socket, link);
        look_for_confirmation(socket, link);
        ready::notify_local(socket);
    }
}

/// The same, of all peers.
pub fn tell_all() {
    up::all().into_iter().for_each(tell);
}

/// Whether the peer has all that a stream between hosts has given to the link.
pub fn look_for_confirmation(socket: &'static Socket, link: &Link) {
    let Some(remote) = link.remote() else {
        return;
    };
    let theirs = Vqpn(socket.peer_vqpn.load(Acquire));
    if let Some(mut control) = socket.control.lock()
        && control.resume.as_ref().is_some_and(Resume::is_marked)
        && remote.is_confirmed(theirs)
    {
        connection::resume::confirmed(socket, &mut control);
    }
}
