//! The operations on a single direction. For the receiving direction: begin and end the scan for markers, shut the
//! direction, and leave the link. For the sending direction: send markers on TCP, send bytes again there, and leave the
//! link. `connection.rs` defines carry and holder. An *end mark*, FIN or DEMOTE, stands behind the last byte of a ring.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use crate::fabric::ring::{Consumer, EndMark, RingError, RxFlags, Stopped, Wake};
use crate::ids::{Nonce, Vqpn};
use crate::stream::connection::io::{Gone, Half, RxOf, SocketIo, StreamLink, Task, Tcp, TxOf, Unsent};
use crate::stream::connection::scan::Carry;
use crate::stream::connection::{Behind, End, Rx, Then};
use crate::stream::mode::{Mode, Move};

/// A notification of the peer that is due once the kernel has sent its FIN, on a link within the host. The peer counts
/// the end mark in the ring as the end of the stream only when FIN has come too. FIN also wakes the peer's waiter, but
/// too late: the peer would see data that this process sends on other connections afterwards before the end of this
/// one.
pub struct Farewell<L>(Option<(L, Wake, Vqpn)>);

impl<L: StreamLink> Farewell<L> {
    /// No notification is due.
    pub const NONE: Self = Self(None);

    /// Returns the notification of the waiter that `wake` names. `wake` is the result of the write of the end mark.
    pub fn of<S: SocketIo<Link = L>>(socket: &S, wake: Wake) -> Self {
        Self(socket.wakes_at_end(wake))
    }

    /// Notifies the waiter. The caller has closed or shut down the kernel's socket before.
    pub fn tell(self) {
        // The peer may have given its number to another stream meanwhile. Then the waiter checks that stream without
        // need.
        if let Some((link, wake, theirs)) = self.0 {
            link.notify(wake, theirs);
        }
    }
}

// The receiving direction.

/// Error: the socket is used in a way that rules out a scan for markers now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no scan for markers now")]
pub struct NoScan;

/// Begins to scan the bytes that the kernel delivers for markers that start with `nonce`.
pub fn start_scan<S: SocketIo>(socket: &S, nonce: Nonce) -> Result<(), NoScan> {
    let mut rx = socket.rx.lock().ok_or(NoScan)?;
    let is_plain = socket.rx_mode.load(Acquire) == Mode::Tcp;
    let tcp = socket.tcp().filter(|_| is_plain).ok_or(NoScan)?;
    // If both directions are shut, the kernel would answer a marker by a reset.
    if is_shut(socket) || !socket.may_scan(&tcp) {
        return Err(NoScan);
    }
    rx.scan = Some(nonce);
    rx.carry = Carry::default();
    rx.aside = Vec::new();
    rx.scanned = 0;
    socket.rx_mode.go(Move::Expected);
    // One call may be inside the kernel. When it returns it scans the bytes that it has received (`scan_taken`). With
    // two calls the order of their bytes would be unknown.
    if socket.rx_inside.count() > 1 {
        rx.scan = None;
        socket.rx_mode.go(Move::Settled);
        return Err(NoScan);
    }
    Ok(())
}

/// Ends the scan, because no marker is expected in TCP any more.
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
        socket.rx_mode.go(Move::Settled);
    } else {
        // Bytes that were held back have turned out to be data. The kernel reports no event for them, so this end
        // notifies its own threads.
        socket.later(Task::Notify);
    }
}

/// If no marker may come any more, leaves the receiving direction to the kernel, for a holder that reads the kernel's
/// socket alone. Bytes in the carry cannot be given back to the kernel. If there are any, resets the connection: a gap
/// in the data would be worse than a reset. The caller holds the control lock.
pub fn hand_over_rest<S: SocketIo>(socket: &S) {
    let mut held_back = 0;
    if let Some(mut rx) = socket.rx.lock()
        && socket.rx_mode.load(Acquire) == Mode::Marked
        && rx.scan.is_none()
        && rx.aside.is_empty()
    {
        rx.owed = 0;
        settle(socket, &rx);
        held_back = rx.carry.take().len();
    }
    if held_back > 0 {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), held_back, "unread data cannot follow the socket: reset");
        socket.reset();
    }
}

/// Ends the scan, and makes the kernel's shutdown() of the direction if it is due. The caller holds `rx`.
pub(super) fn end_scan<S: SocketIo>(socket: &S, rx: &mut RxOf<S>) {
    rx.scan = None;
    if std::mem::take(&mut rx.then_shut)
        && let Some(tcp) = socket.tcp()
    {
        tcp.end_receiving();
    }
    if socket.rx_shut.load(SeqCst) {
        // The end of the sending direction may have waited for the end of the scan (`awaits_marker`).
        socket.later(Task::Flush);
    }
}

/// Returns whether the end of TCP's sending direction has to wait, because the program has shut the receiving direction
/// and a marker may still come. If a marker came when both directions are shut, the kernel would answer it by a reset.
/// With the reset, bytes that the peer has not received yet would be lost (P101).
pub(super) fn awaits_marker<S: SocketIo>(socket: &S) -> bool {
    socket.rx_shut.load(SeqCst) && is_scanning(socket)
}

/// Returns whether a marker may still come in the receiving direction.
pub fn is_scanning<S: SocketIo>(socket: &S) -> bool {
    // The check is made under the lock. A `start_scan` that has not seen `rx_shut` has released the lock before, so its
    // scan is seen here.
    let rx = socket.rx.lock();
    rx.is_some_and(|rx| is_scanned(socket, &rx))
}

/// Returns whether a marker may still come in the receiving direction. The caller holds `rx`.
pub(super) fn is_scanned<S: SocketIo>(socket: &S, rx: &RxOf<S>) -> bool {
    socket.rx_mode.load(Acquire) == Mode::Marked && rx.scan.is_some()
}

/// Returns whether the program has shut both directions.
pub(super) fn is_shut<S: SocketIo>(socket: &S) -> bool {
    socket.rx_shut.load(SeqCst) && socket.tx.lock().is_some_and(|tx| tx.end.is_shut())
}

/// Shuts the receiving direction. Returns true if a marker may come, the program has ended the sending direction
/// before, and no thread is blocked in the kernel's receive. Then the library makes the kernel's shutdown() itself,
/// once no marker may come. Otherwise returns false, and the caller makes the kernel's shutdown() at once: nothing else
/// wakes a thread that is blocked in the kernel's receive.
pub fn shut_receiving<S: SocketIo>(socket: &S) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    let is_out = socket.tx.lock().is_some_and(|tx| tx.end == End::Shut);
    // The store is made under the lock, so no scan begins after it if both directions are shut.
    socket.rx_shut.store(true, SeqCst);
    rx.then_shut = is_out && is_scanned(socket, &rx) && socket.rx_inside.is_empty();
    rx.then_shut
}

/// Leaves the receiving direction to the kernel. A call of the program is about to return the end of the stream, which
/// a look has found ([`Ahead::Ended`](crate::stream::connection::Ahead::Ended)). The caller holds `rx`.
pub fn on_end_told<S: SocketIo>(socket: &S, rx: &mut RxOf<S>) {
    end_scan(socket, rx);
    settle(socket, rx);
}

/// Leaves the receiving direction to the kernel, because no marker comes any more. If the stream was on a link, this
/// may complete its way back.
pub(super) fn settle<S: SocketIo>(socket: &S, rx: &RxOf<S>) {
    socket.rx_mode.go(Move::Settled);
    if rx.consumer.is_some() {
        socket.later(Task::Drained);
    }
}

/// Removes `len` bytes that a look has seen: first from the carry, the others from the kernel.
pub(super) fn take<O>(tcp: &impl Tcp, rx: &mut Rx<O>, len: usize) -> Result<(), Gone> {
    let carried = rx.carry.len().min(len);
    rx.carry.consume(carried);
    tcp.take(len - carried)
}

/// Returns whether the link brings no more bytes: the connection or the link has ended, or the direction goes on in
/// TCP. The caller holds `rx`.
pub fn is_over<S: SocketIo>(socket: &S, rx: &RxOf<S>) -> bool {
    match rx.behind {
        Behind::Mark => socket.is_link_over(),
        Behind::Link => false,
        Behind::Tcp => true,
    }
}

/// Takes the receiving direction off the link if the program has read the ring and the next byte, or the end, comes by
/// TCP. Returns false if the direction stays on the link, or was not on it.
pub fn leave_link_at_end<S: SocketIo>(socket: &S) -> bool {
    let is_on_link = |_: &_| socket.rx_mode.load(Acquire) == Mode::Link;
    let Some(mut rx) = socket.rx.lock().filter(is_on_link) else {
        return false;
    };
    let stays = rx.stays();
    let ended = is_over(socket, &rx);
    let over = match rx.consumer.as_mut() {
        None => true,
        // Between hosts an end mark in the ring does not suffice, because RESUME may still come (P73).
        Some(c) if stays => ended && !c.available().is_ok_and(|n| n > 0),
        Some(c) => match (c.has_data(), c.end()) {
            (Ok(true), Ok(None)) => false,
            (Ok(false), Ok(None)) => ended,
            _ => true,
        },
    };
    if !over {
        return false;
    }
    // If there is no end mark, the peer's process has died. On TCP the program would then get a reset if that process
    // had left bytes unread.
    let marked = rx.consumer.as_mut().is_some_and(|c| matches!(c.end(), Ok(Some(_))));
    // The connection has ended at this end, but the peer may go on sending (if the program has shut both directions).
    // On TCP the kernel would answer these bytes by a reset (RFC 9293, 3.10.7.4). With this flag the peer sends over
    // TCP from now on, so the kernel does.
    let refused = match rx.consumer.as_ref() {
        Some(c) if !marked && !stays => c.set_flags(RxFlags::RX_CLOSED),
        _ => Wake::NONE,
    };
    let tx = socket.tx.lock();
    let unread = socket.tx_mode.load(Acquire) == Mode::Link
        && tx
            .as_ref()
            .is_some_and(|tx| tx.producer.as_ref().is_some_and(|p| p.is_unread()));
    let is_shut = tx.is_none_or(|tx| tx.end.is_shut());
    if rx.is_lost || unread && !marked && !stays {
        socket.report_reset(is_shut);
    }
    // The library may hold bytes that a call has received from TCP and that come after the bytes on the link. Or it may
    // hold a reset to report. A call that goes straight to the kernel would see neither, so the mode stays MARKED then.
    let is_rest = rx.carry.is_empty() && rx.owed == 0 && !socket.has_untold();
    socket.rx_mode.go(match is_rest {
        true => Move::Left,
        false => Move::Retained,
    });
    socket.set_path(Half::Receiving, false);
    drop(rx);
    socket.notify_peer(refused);
    socket.later(Task::Drained);
    true
}

/// Keeps ECONNRESET for the program's next call if TCP has ended and the link has no end mark. Then the peer has closed
/// the connection by a system call that its library did not see, and has left bytes unread. The kernel will not report
/// the reset that follows, because it has seen a FIN before (RFC 9293, 3.10.7.4).
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

/// Sets the flag by which the peer sees that no call reads the link any more, because the program has closed the
/// socket. Not for a direction that goes back to TCP: the peer would send new bytes there before it has sent the unread
/// bytes again.
///
/// Returns the peer's waiter that waits for room in the ring. The caller wakes it only if the kernel's socket does not
/// exist any more; otherwise the reset of the socket wakes it. If the ring has been read, no waiter waits.
pub fn refuse<S: SocketIo>(socket: &S) -> Wake {
    let rx = socket.rx.lock();
    let consumer = rx.as_ref().and_then(|rx| rx.consumer.as_ref());
    consumer.map_or(Wake::NONE, |c| c.set_flags(RxFlags::RX_CLOSED))
}

// The sending direction.

/// Appends `bytes`, which the peer has not read on the link, to the pending bytes for TCP. Fails if there is no memory.
pub(super) fn queue_again<S: SocketIo>(socket: &S, tx: &mut TxOf<S>, bytes: &[u8]) -> Result<(), RingError> {
    tx.marker.try_reserve(bytes.len()).map_err(|_| RingError::NoMemory)?;
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), bytes = bytes.len(), "sends again on TCP");
    tx.marker.extend_from_slice(bytes);
    tx.again += bytes.len();
    socket.count_again(bytes.len());
    Ok(())
}

/// Calls [`flush`]. If bytes are left, the service thread sends them later.
pub(super) fn flush_or_later<S: SocketIo>(socket: &S) {
    if !flush(socket) {
        socket.later(Task::Flush);
    }
}

/// Sends the pending bytes on TCP: markers, and bytes that are sent again. Returns true if none are left and the
/// direction has its final mode. The caller holds neither `rx` nor `tx`.
pub fn flush<S: SocketIo>(socket: &S) -> bool {
    let waits = awaits_marker(socket);
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    let mode = socket.tx_mode.load(Acquire);
    if mode != Mode::Marked {
        if tx.end == End::Due
            && !waits
            && mode != Mode::Foreign
            && let Some(tcp) = socket.tcp()
        {
            tx.end = End::Shut;
            tcp.end();
        }
        return true;
    }
    // A call that is blocked inside the kernel could send its bytes between two parts of a marker, so the marker waits.
    if !socket.tx_inside.is_empty() {
        return false;
    }
    let Some(tcp) = socket.tcp() else {
        return false;
    };
    // If the connection has been reset, a send here would remove the error from the socket. The program's own calls
    // have to return that error.
    if !tx.marker.is_empty() && tcp.has_failed() {
        tx.marker.clear();
        tx.then.take_link();
    }
    while !tx.marker.is_empty() {
        match tcp.send(&tx.marker) {
            Ok(n) => {
                let ours = tx.marker.len().saturating_sub(tx.again).min(n);
                socket.count_ours(Half::Sending, ours);
                if let Some(written) = tcp.written() {
                    tx.on_marker_taken(written, n, ours);
                }
                tx.marker.drain(..n);
                tx.again = tx.again.min(tx.marker.len());
            }
            Err(Unsent::Full) => return false,
            Err(error) => {
                if let Unsent::Failed(error) = error {
                    // The connection has failed since the check above, and this send has removed the error from the
                    // socket.
                    socket.keep_error(error);
                }
                // The connection has ended, so the pending bytes are dropped.
                tx.marker.clear();
                tx.then.take_link();
            }
        }
    }
    tcp.push();
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), "markers are out");
    if tx.then.waits() || tx.end == End::Due && waits {
        return false;
    }
    if tx.then.take_link() && tx.producer.is_some() {
        socket.tx_mode.go(Move::Switched);
        socket.on_link(&mut tx);
        socket.set_path(Half::Sending, true);
    } else {
        socket.tx_mode.go(Move::Settled);
        // This may complete a way back, also of a stream whose OPEN was not answered.
        if tx.producer.is_some() || socket.link().is_some() {
            socket.later(Task::Drained);
        }
    }
    if tx.end == End::Due {
        tx.end = End::Shut;
        let mut farewell = Farewell::NONE;
        if socket.tx_mode.load(Acquire) == Mode::Link {
            farewell = Farewell::of(socket, end_on_link(socket, &mut tx, EndMark::Fin));
        }
        if socket.tx_mode.load(Acquire) == Mode::Marked {
            // The peer has stopped reading the link. The bytes that it has not read are sent again before the end.
            tx.end = End::Due;
            drop(tx);
            return flush(socket);
        }
        tcp.end();
        drop(tx);
        farewell.tell();
        // The receiving direction may have left the link already, so this may complete the way back.
        settle_if_plain(socket);
    }
    true
}

/// Ends the sending direction on the link with the mark `end`. Later bytes go on TCP. If the peer has stopped reading
/// the ring, the bytes that it has not read are first sent again on TCP. Returns the peer's waiter to wake.
pub(super) fn end_on_link<S: SocketIo>(socket: &S, tx: &mut TxOf<S>, end: EndMark) -> Wake {
    let wake = match tx.producer.as_mut().map_or(Ok(Wake::NONE), |p| p.end(end)) {
        Err(Stopped) => {
            send_again(socket, tx);
            Wake::NONE
        }
        Ok(wake) => {
            socket.tx_mode.go(Move::Left);
            wake
        }
    };
    socket.off_link(tx);
    socket.set_path(Half::Sending, false);
    wake
}

/// Moves the sending direction from the link to TCP, because the peer has stopped reading the ring. The unread bytes of
/// the ring are sent again on TCP, before all later bytes.
pub(super) fn send_again<S: SocketIo>(socket: &S, tx: &mut TxOf<S>) {
    let unread = tx.producer.as_mut().map_or(Ok(Vec::new()), |p| p.unread());
    if let Err(error) = unread.and_then(|bytes| queue_again(socket, tx, &bytes)) {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), %error, "cannot send again: reset");
        socket.reset();
    }
    tx.then.take_link();
    socket.tx_mode.go(Move::Announced);
    socket.set_path(Half::Sending, false);
}

/// Moves the sending direction back to TCP. Bytes on the link stay there, and the peer reads them first. If SWITCH is
/// still to be written, it leads the peer to a ring that has nothing but the end mark.
pub(super) fn demote_tx<S: SocketIo>(socket: &S) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    let wake = if socket.tx_mode.load(Acquire) == Mode::Link {
        end_on_link(socket, &mut tx, EndMark::Demote)
    } else if tx.then.take_link() {
        let wake = tx.producer.as_mut().map(|p| p.end(EndMark::Demote));
        wake.and_then(Result::ok).unwrap_or(Wake::NONE)
    } else {
        return;
    };
    drop(tx);
    flush(socket);
    socket.notify_peer(wake);
    settle_if_plain(socket);
}

/// Called when the sending direction has left the link. If the receiving direction is on TCP already, the way back is
/// complete, and no other code would notice that.
pub(super) fn settle_if_plain<S: SocketIo>(socket: &S) {
    if socket.is_plain() {
        socket.later(Task::Drained);
    }
}

/// Sends the unread bytes of the ring again, on TCP, because the peer has stopped reading the ring. Has no effect if
/// the direction is not on the link.
pub fn resend<S: SocketIo>(socket: &S) {
    look_for_reset(socket);
    // If the direction has left the link meanwhile, `end_on_link` has found that the peer stopped, and has sent the
    // bytes again.
    if let Some(mut tx) = socket.tx.lock()
        && socket.tx_mode.load(Acquire) == Mode::Link
    {
        send_again(socket, &mut tx);
        drop(tx);
        flush(socket);
    }
}

/// Makes sends wait until the stream has [left](crate::stream::connection::leave) a link between hosts, because the
/// next send has to go over TCP.
pub fn wait_for_tcp<S: SocketIo>(socket: &S) {
    if let Some(mut tx) = socket.tx.lock()
        && (tx.then.take_link() || socket.tx_mode.load(Acquire) == Mode::Link)
    {
        tx.then = Then::Leave;
        socket.tx_mode.go(Move::Announced);
    }
}
