//! The operations on the sending direction: it sends markers, and bytes that are sent again, on TCP, and leaves the
//! link.

use std::sync::atomic::Ordering::Acquire;

use super::io::{Half, SocketIo, StreamLink, Task, Tcp, TxOf, Unsent};
use super::receiving::{awaits_marker, look_for_reset};
use crate::fabric::ring::{EndMark, RingError, Stopped, Wake};
use crate::ids::Vqpn;
use crate::stream::mode::{Mode, Sending};

/// The waiter at the other end of a link within the host that is woken once the kernel has sent its FIN. Only then does
/// the end mark count as an end. The FIN wakes that waiter too, but too late: after data that is sent on other
/// connections next.
pub struct Farewell<L>(Option<(L, Wake, Vqpn)>);

impl<L: StreamLink> Farewell<L> {
    /// No waiter is to be woken.
    pub const NONE: Self = Self(None);

    /// Returns the farewell for the waiter that `wake` names, which the end mark has returned.
    pub fn of<S: SocketIo<Link = L>>(socket: &S, wake: Wake) -> Self {
        Self(socket.wakes_at_end(wake))
    }

    /// Wakes the waiter. The kernel's socket is closed or shut down by now.
    pub fn tell(self) {
        // The number may be another stream's by now. Then the waiter checks that stream in vain.
        if let Some((link, wake, theirs)) = self.0 {
            link.notify(wake, theirs);
        }
    }
}

/// Appends bytes that the peer has not read on the link, behind the markers. Returns an error without memory for them.
pub fn queue_again<S: SocketIo>(socket: &S, tx: &mut TxOf<S>, bytes: &[u8]) -> Result<(), RingError> {
    tx.marker.try_reserve(bytes.len()).map_err(|_| RingError::NoMemory)?;
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), bytes = bytes.len(), "sends again on TCP");
    tx.marker.extend_from_slice(bytes);
    tx.again += bytes.len();
    socket.count_again(bytes.len());
    Ok(())
}

/// Calls [`flush`]; the service thread sends later what TCP does not take now.
pub fn flush_or_later<S: SocketIo>(socket: &S) {
    if !flush(socket) {
        socket.later(Task::Flush);
    }
}

/// Sends the pending marker bytes on TCP. Returns true when none are left: then the mode says what the direction runs
/// on. The caller holds neither `rx` nor `tx`.
pub fn flush<S: SocketIo>(socket: &S) -> bool {
    let waits = awaits_marker(socket);
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    let mode = socket.tx_mode.load(Acquire);
    if mode != Mode::Marked {
        if tx.then_shut
            && !waits
            && mode != Mode::Foreign
            && let Some(tcp) = socket.tcp()
        {
            tx.then_shut = false;
            tcp.end();
        }
        return true;
    }
    // A call that blocks inside the kernel could send its bytes between two parts of a marker.
    if !socket.is_tx_quiet() {
        return false;
    }
    let Some(tcp) = socket.tcp() else {
        return false;
    };
    // A send into a connection that has been reset would take the error from the socket. The program's own calls are to
    // return that error.
    if !tx.marker.is_empty() && tcp.has_failed() {
        tx.marker.clear();
        tx.then_link = false;
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
                    // The connection has failed since the check above, and this send has taken the error.
                    socket.keep_error(error);
                }
                // The connection has ended: the pending bytes no longer matter.
                tx.marker.clear();
                tx.then_link = false;
            }
        }
    }
    tcp.push();
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), "markers are out");
    if tx.is_suspended || tx.then_shut && waits {
        return false;
    }
    if std::mem::take(&mut tx.then_link) && tx.producer.is_some() {
        socket.tx_mode.go(Sending::Switched);
        socket.on_link(&mut tx);
        socket.set_path(Half::Sending, true);
    } else {
        socket.tx_mode.go(Sending::Flushed);
        // This may complete a way back, even if the stream's OPEN was not answered.
        if tx.producer.is_some() || socket.link().is_some() {
            socket.later(Task::Drained);
        }
    }
    if std::mem::take(&mut tx.then_shut) {
        let mut farewell = Farewell::NONE;
        if socket.tx_mode.load(Acquire) == Mode::Link {
            farewell = Farewell::of(socket, end_on_link(socket, &mut tx, EndMark::Fin));
        }
        if socket.tx_mode.load(Acquire) == Mode::Marked {
            // The peer has stopped reading the link: the bytes that it has not read are sent first.
            tx.then_shut = true;
            drop(tx);
            return flush(socket);
        }
        tcp.end();
        drop(tx);
        farewell.tell();
        // The receiving direction may have left the link before the sending direction was on it.
        settle_if_plain(socket);
    }
    true
}

/// Ends the sending direction on the link with the mark `end`. The bytes that follow are sent on TCP, behind those that
/// the peer may want again. Returns the peer's waiter to wake.
pub fn end_on_link<S: SocketIo>(socket: &S, tx: &mut TxOf<S>, end: EndMark) -> Wake {
    let wake = match tx.producer.as_mut().map(|p| p.end(end)) {
        Some(Err(Stopped)) => {
            send_again(socket, tx);
            Wake::NONE
        }
        Some(Ok(wake)) => {
            socket.tx_mode.go(Sending::Left);
            wake
        }
        None => {
            socket.tx_mode.go(Sending::Left);
            Wake::NONE
        }
    };
    socket.off_link(tx);
    socket.set_path(Half::Sending, false);
    wake
}

/// Moves the sending direction from the link to TCP, where all that the peer has not read is sent again first.
pub fn send_again<S: SocketIo>(socket: &S, tx: &mut TxOf<S>) {
    let unread = tx.producer.as_mut().map_or(Ok(Vec::new()), |p| p.unread());
    if let Err(error) = unread.and_then(|bytes| queue_again(socket, tx, &bytes)) {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), %error, "cannot send again: reset");
        socket.reset();
    }
    tx.then_link = false;
    socket.tx_mode.go(Sending::Announced);
    socket.set_path(Half::Sending, false);
}

/// Moves the sending direction back to TCP. Bytes on the link stay there and come first. If SWITCH is still to be
/// written, it leads the peer to an empty link.
pub fn demote_tx<S: SocketIo>(socket: &S) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    let wake = if socket.tx_mode.load(Acquire) == Mode::Link {
        end_on_link(socket, &mut tx, EndMark::Demote)
    } else if std::mem::take(&mut tx.then_link) {
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

/// Called when the sending direction has left the link. If the receiving direction is on TCP already, this is the last
/// place that can notice the end of the way back.
pub fn settle_if_plain<S: SocketIo>(socket: &S) {
    if socket.is_plain() {
        socket.later(Task::Drained);
    }
}

/// Sends again on TCP what the peer has not read: the peer has stopped reading the link.
pub fn resend<S: SocketIo>(socket: &S) {
    look_for_reset(socket);
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    // A direction that has left the link meanwhile met the peer's mark then (`end_on_link`).
    if socket.tx_mode.load(Acquire) == Mode::Link {
        send_again(socket, &mut tx);
        drop(tx);
        flush(socket);
    }
}

/// Makes sends wait until the stream has [left](super::leave::leave) a link between hosts, because what is sent next is
/// for TCP alone.
pub fn wait_for_tcp<S: SocketIo>(socket: &S) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    if tx.then_link || socket.tx_mode.load(Acquire) == Mode::Link {
        tx.then_link = true;
        tx.is_suspended = true;
        socket.tx_mode.go(Sending::Announced);
    }
}
