//! What can be done with the receiving direction: it is scanned for markers or not, and leaves the link.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use super::carry::Carry;
use super::io::{Half, RxOf, SocketIo, Task, Tcp};
use super::object::Rx;
use crate::fabric::ring::{Consumer, RxFlags, Wake};
use crate::ids::Nonce;
use crate::stream::mode::{Mode, Receiving};

/// Begins to look for markers: what the kernel delivers from now on is scanned. False if the
/// socket is in a use that does not allow it.
pub fn start_scan<S: SocketIo>(socket: &S, nonce: Nonce) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    let is_plain = socket.rx_mode.load(Acquire) == Mode::Tcp;
    let Some(tcp) = socket.tcp().filter(|_| is_plain) else {
        return false;
    };
    if is_shut(socket) {
        // A marker would be answered by a reset.
        return false;
    }
    if !socket.may_scan(&tcp) {
        return false;
    }
    rx.scan = Some(nonce);
    rx.carry = Carry::default();
    rx.aside = Vec::new();
    rx.scanned = 0;
    socket.rx_mode.go(Receiving::Expected);
    // One call may be inside the kernel: it scans what it got when it comes back. With two there
    // would be no telling whose bytes come first.
    if socket.rx_inside.count() > 1 {
        rx.scan = None;
        socket.rx_mode.go(Receiving::Settled);
        return false;
    }
    true
}

/// Nothing more is to be looked for in TCP.
pub fn stop_scan<S: SocketIo>(socket: &S) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    end_scan(socket, &mut rx);
    rx.scanned = 0;
    rx.restore_aside();
    if socket.rx_mode.load(Acquire) != Mode::Marked {
        return;
    }
    if rx.carry.is_empty() && !socket.has_untold() {
        socket.rx_mode.go(Receiving::Settled);
    } else {
        // What was held back is data after all, of which nothing in the kernel tells.
        socket.later(Task::Notify);
    }
}

/// For a new holder, who reads the kernel alone: no marker comes any more, so the rest is the kernel's. What
/// was held back cannot be given back to it, and a gap in the data would be worse than the end of the
/// connection. The caller holds the control lock.
pub fn hand_over_rest<S: SocketIo>(socket: &S) {
    let held_back = {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        let is_over = rx.scan.is_none() && rx.aside.is_empty();
        if socket.rx_mode.load(Acquire) != Mode::Marked || !is_over {
            return;
        }
        rx.owed = 0;
        if rx.consumer.is_some() {
            socket.later(Task::Drained);
        }
        socket.rx_mode.go(Receiving::Settled);
        rx.carry.take().len()
    };
    if held_back > 0 {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), held_back, "unread data cannot follow the socket: reset");
        socket.reset();
    }
}

/// No marker comes any more. The caller holds `rx`.
pub fn end_scan<S: SocketIo>(socket: &S, rx: &mut RxOf<S>) {
    rx.scan = None;
    if std::mem::take(&mut rx.then_shut)
        && let Some(tcp) = socket.tcp()
    {
        tcp.end_receiving();
    }
    if socket.rx_shut.load(SeqCst) {
        // The end of the other direction may wait for that.
        socket.later(Task::Flush);
    }
}

/// Whether the end in TCP has to wait: the program has shut the receiving direction, and a marker may still come. What
/// comes when both are shut the kernel answers by a reset, with which all would be lost that the peer has not been sent
/// yet (P101).
pub fn awaits_marker<S: SocketIo>(socket: &S) -> bool {
    // By the lock: a scan that does not see the shutdown has begun by then (`start_scan`).
    socket.rx_shut.load(SeqCst) && socket.rx.lock().is_some_and(|rx| is_scanned(socket, &rx))
}

/// Whether a marker may still come in the receiving direction.
pub fn is_scanning<S: SocketIo>(socket: &S) -> bool {
    socket.rx_mode.load(Acquire) == Mode::Marked && socket.rx.lock().is_some_and(|rx| is_scanned(socket, &rx))
}

fn is_scanned<S: SocketIo>(socket: &S, rx: &RxOf<S>) -> bool {
    socket.rx_mode.load(Acquire) == Mode::Marked && rx.scan.is_some()
}

/// Whether the program has shut both directions.
pub fn is_shut<S: SocketIo>(socket: &S) -> bool {
    socket.rx_shut.load(SeqCst) && socket.tx.lock().is_some_and(|tx| tx.is_shut)
}

/// shutdown() of the receiving direction. True: the kernel's follows by itself, once no marker may come, for the end of
/// the other direction is out. (Who is blocked in the kernel's receive is woken by that alone, and is not to wait.)
pub fn shut_receiving<S: SocketIo>(socket: &S) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    let is_out = socket.tx.lock().is_some_and(|tx| tx.is_shut && !tx.then_shut);
    // Under the lock: no scan begins after this.
    socket.rx_shut.store(true, SeqCst);
    rx.then_shut = is_out && is_scanned(socket, &rx) && socket.rx_inside.is_empty();
    rx.then_shut
}

/// The program is told of the end that a look has found ([`Ahead::Ended`](super::scan::Ahead::Ended)): what follows is
/// the kernel's to say. The caller holds `rx`.
pub fn on_end_told<S: SocketIo>(socket: &S, rx: &mut RxOf<S>) {
    end_scan(socket, rx);
    socket.rx_mode.go(Receiving::Settled);
    if rx.consumer.is_some() {
        socket.later(Task::Drained);
    }
}

/// Takes `len` bytes that were seen from the carry and the kernel. False if they are not there any more.
pub fn take<O>(tcp: &impl Tcp, rx: &mut Rx<O>, len: usize) -> bool {
    let carried = rx.carry.len().min(len);
    rx.carry.consume(carried);
    tcp.take(len - carried)
}

/// Nothing more will come over the link: the connection has ended, or the link has. The caller holds `rx`.
pub fn is_over<S: SocketIo>(socket: &S, rx: &RxOf<S>) -> bool {
    if rx.stays { rx.read_on } else { socket.is_link_over() }
}

/// The ring is drained and what follows is on the anchor: its next byte or its end. False if that
/// is not so.
pub fn leave_link_at_end<S: SocketIo>(socket: &S) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    if socket.rx_mode.load(Acquire) != Mode::Link {
        return false;
    }
    let stays = rx.stays;
    let ended = is_over(socket, &rx);
    let over = match rx.consumer.as_mut() {
        None => true,
        // Whatever the ring's end: RESUME may still come (P73).
        Some(c) if stays => ended && !c.available().is_ok_and(|n| n > 0),
        Some(c) => match (c.has_data(), c.end()) {
            (_, Ok(Some(_))) => true,
            (Ok(false), Ok(None)) => ended,
            (Err(_), _) | (_, Err(_)) => true,
            _ => false,
        },
    };
    if !over {
        return false;
    }
    // An end without a mark: the peer's process has ended. What it has not read TCP answers with a
    // reset.
    let marked = rx.consumer.as_mut().is_some_and(|c| matches!(c.end(), Ok(Some(_))));
    // The connection is over here, and the peer may go on sending (after a shutdown of both directions here): as in TCP
    // that is answered by a reset, which is the kernel's to send (RFC 9293, 3.10.7.4). It sends there from now on.
    let refused = match rx.consumer.as_ref() {
        Some(c) if !marked && !stays => c.set_flags(RxFlags::RX_CLOSED),
        _ => Wake::NONE,
    };
    let tx = socket.tx.lock();
    let unread = socket.tx_mode.load(Acquire) == Mode::Link
        && tx
            .as_ref()
            .is_some_and(|tx| tx.producer.as_ref().is_some_and(|p| p.is_unread()));
    let is_shut = tx.is_none_or(|tx| tx.is_shut);
    if rx.is_lost || unread && !marked && !stays {
        socket.report_reset(is_shut);
    }
    // A call may have brought something from TCP that comes after what the link held; and of a reset that we
    // have to report a call straight to the kernel would not learn.
    let is_rest = rx.carry.is_empty() && rx.owed == 0 && !socket.has_untold();
    socket.rx_mode.go(match is_rest {
        true => Receiving::Left,
        false => Receiving::Retained,
    });
    socket.set_path(Half::Receiving, false);
    drop(rx);
    socket.notify_peer(refused);
    socket.later(Task::Drained);
    true
}

/// Where TCP has ended without an end mark the peer has closed the connection where its library did not see it, and has
/// left bytes unread. A receive is to say that: to TCP, which has seen an end, the reset that follows is none (RFC
/// 9293, 3.10.7.4).
pub fn look_for_reset<S: SocketIo>(socket: &S) {
    let Some(rx) = socket.rx.lock() else { return };
    let is_unmarked = |c: &Consumer| !c.has_mark() && !c.has_left();
    if socket.rx_mode.load(Acquire) == Mode::Link
        && !socket.rx_shut.load(Acquire)
        && rx.consumer.as_ref().is_some_and(is_unmarked)
        && socket.tcp().is_some_and(|tcp| tcp.has_peer_ended())
    {
        socket.keep_error(libc::ECONNRESET);
    }
}

/// The program has closed the socket: nobody will read what comes over the link. (Not for a direction that goes back to
/// TCP: the peer would send there before it has sent again what we have not read.) Gives whom the peer has waiting for
/// room: nobody, in a ring that has been read; else the reset of the kernel's socket tells, if there still is one.
pub fn refuse<S: SocketIo>(socket: &S) -> Wake {
    let rx = socket.rx.lock();
    let consumer = rx.as_ref().and_then(|rx| rx.consumer.as_ref());
    consumer.map_or(Wake::NONE, |c| c.set_flags(RxFlags::RX_CLOSED))
}
