//! MSG_MORE and TCP_CORK: delay the peer's wake-up, not the bytes.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::socket::{Mode, Socket, Tx};

/// Returns whether the peer's wake-up for these `n` bytes can wait. It can if the program has announced more (MSG_MORE,
/// TCP_CORK): the kernel too would hold back less than a full segment (tcp(7)).
#[inline]
pub(super) fn is_more_to_come(socket: &Socket, flags: c_int, n: usize) -> bool {
    /// Bytes. A send of this many or more wakes the peer at once.
    const SEGMENT: usize = 16 * 1024;
    (flags & libc::MSG_MORE != 0 || socket.options.corked.load(Relaxed)) && n < SEGMENT
}

/// Leaves the peer's wake-up to the next send, or to the service thread ([`send_delayed_wake`]).
pub(super) fn delay_wake(tx: &mut Tx) {
    if !tx.wake_delayed {
        tx.wake_delayed = true;
        Library::get().service.delay_wake();
    }
}

/// Wakes the peer for bytes whose wake-up was delayed.
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

/// Serves setsockopt(TCP_CORK). Returns true if the kernel need not be called: on the link the library itself holds
/// wake-ups back. The kernel gets the option when the direction is back on TCP ([`pass_cork`]).
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

/// Passes the program's TCP_CORK to the kernel when the direction is back on TCP. The caller holds the direction's
/// lock.
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
