//! Before a fork's child uses a stream that another process has on a link.

use std::sync::atomic::Ordering::Acquire;

use crate::notify::reset;
use crate::objects::socket::{self, Mode, Receiving, Sending, Socket};

/// Waits until the process that has the stream on a link, if one has, has taken it back to TCP.
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
        // A marker may come yet, or data be on the link: a gap would be worse than the end of the connection.
        tracing::warn!(target: "rdmasock", slot = socket.slot, "the process that has it on a link does not answer, or was killed: reset");
        reset::reset_after_unsent(socket);
    }
    socket.tx_mode.go(Sending::Reclaimed);
    socket.rx_mode.go(Receiving::Reclaimed);
    crate::sys::errno::set(errno);
}

/// [`reclaim`] for all streams that were inherited.
pub fn reclaim_all() {
    socket::in_use().for_each(reclaim);
}
