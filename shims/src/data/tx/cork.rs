//! MSG_MORE and TCP_CORK: the wake-up that the peer gets later.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::socket::{Mode, Socket, Tx};

/// What the kernel would hold back as less than a full segment, because the program has said that more
/// follows (MSG_MORE, TCP_CORK; tcp(7)): the peer is not told yet.
#[inline]
pub(super) fn is_more_to_come(socket: &Socket, flags: c_int, n: usize) -> bool {
    /// More than this is worth a wake-up of its own.
    const SEGMENT: usize = 16 * 1024;
    (flags & libc::MSG_MORE != 0 || socket.options.corked.load(Relaxed)) && n < SEGMENT
}

/// The peer is told later, by the next send, or by the service thread ([`send_delayed_wake`]).
pub(super) fn delay_wake(tx: &mut Tx) {
    if !tx.wake_delayed {
        tx.wake_delayed = true;
        Library::get().service.delay_wake();
    }
}

/// Tells the peer of what was held back.
pub fn send_delayed_wake(socket: &'static Socket) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    if !std::mem::take(&mut tx.wake_delayed) {
        return;
    }
    let wake = tx.producer.as_mut().map(|p| p.wake());
    drop(tx);
    if let Some(wake) = wake {
        ready::notify_peer(socket, wake);
    }
}

/// setsockopt(TCP_CORK): true if that is all there is to be done. On the link it is the library's; the
/// kernel hears of it when the direction is back on TCP.
pub fn cork(socket: &'static Socket, on: bool) -> bool {
    let on_link = {
        let Some(mut tx) = socket.tx.lock() else {
            return false;
        };
        socket.options.corked.store(on, Relaxed);
        let on_link = socket.tx_mode.load(Acquire) == Mode::Link;
        if !on_link {
            tx.own.kernel_corked = on;
        }
        on_link
    };
    if !on {
        send_delayed_wake(socket);
    }
    on_link
}

/// The direction is back on TCP. The caller holds its lock.
pub fn pass_cork(socket: &Socket, tx: &mut Tx) {
    let corked = socket.options.corked.load(Relaxed);
    if tx.own.kernel_corked != corked
        && let Some(fd) = socket.numbers.anchor_fd()
    {
        tx.own.kernel_corked = corked;
        let _ = rustix::net::sockopt::set_tcp_cork(fd, corked);
    }
    tx.wake_delayed = false;
}
