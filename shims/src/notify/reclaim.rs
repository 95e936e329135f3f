//! Takes a stream back to TCP before this process uses it, if another holder of the socket has it on a link.

use std::sync::atomic::Ordering::Acquire;

use crate::notify::reset;
use crate::objects::socket::{self, Mode, Receiving, Sending, Socket};

/// Returns when no other process has the stream on a link. Waits until the owner has taken it back to TCP; if the owner
/// does not answer, resets the connection.
#[inline]
pub fn reclaim(socket: &'static Socket) {
    if socket.tx_mode.load(Acquire) == Mode::Foreign {
        reclaim_slow(socket);
    }
}

#[cold]
fn reclaim_slow(socket: &'static Socket) {
    let errno = crate::sys::errno::get();
    if !socket.promotion.holders.await_return() {
        // The owner may still write a marker, or data may be on the link. A gap in the data would be worse than a
        // reset.
        tracing::warn!(target: "rdmasock", slot = socket.slot, "the process that has it on a link does not answer, or was killed: reset");
        reset::reset_after_unsent(socket);
    }
    socket.tx_mode.go(Sending::Reclaimed);
    socket.rx_mode.go(Receiving::Reclaimed);
    crate::sys::errno::set(errno);
}

/// Calls [`reclaim`] for all connections of this process, which a fork child has inherited.
pub fn reclaim_all() {
    socket::in_use().for_each(reclaim);
}
