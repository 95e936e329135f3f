//! Wake-ups that peers send to the service thread, because several sets or threads of this process wait on the socket.
//!
//! The service thread notifies all of them. A thread that checks such a set does the same first. Otherwise data would
//! be there before the set knows of it.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::ids::Vqpn;
use rdmasock_core::lock::Lock;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::resume::Resume;

use crate::data::rx;
use crate::notify::{closing, ready};
use crate::objects::link::{Link, up};
use crate::objects::socket::{self, Socket};
use crate::objects::waiters::SERVICE;
use crate::polling::readiness::{self, Arm};

/// Held while wake-ups are passed on. A thread that gets it next finds that all earlier wake-ups have been passed on.
static TURN: Lock<()> = Lock::new(());

/// Notifies the waiting sets and threads of all that the link's peer has queued for the service thread.
pub fn tell(link: &'static Link) {
    // In a signal handler above the lock's holder: the holder continues afterwards.
    let Some(_turn) = TURN.lock() else { return };
    let mut sockets = Vec::new();
    link.drain_ready(SERVICE, |slot, at| sockets.push((at, slot)));
    sockets.sort_by_key(|(at, _)| *at);
    for socket in sockets.into_iter().filter_map(|(_, slot)| socket::by_slot(slot)) {
        // The sender may wait for a reader that has closed its fd without a hook.
        closing::look_at_anchor(socket);
        link.judge(readiness::readable(socket, Arm::No) != 0);
        rx::relieve(socket, link);
        look_for_confirmation(socket, link);
        ready::notify_local(socket);
    }
}

/// Calls [`tell`] for each link that is up.
pub fn tell_all() {
    up::all().into_iter().for_each(tell);
}

/// Checks whether the peer has received all bytes that a stream between hosts has given to the link. If so, the
/// stream's way back to TCP continues.
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
