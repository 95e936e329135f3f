//! The work that shutdown() and close() leave to be done.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use super::attempt::{end_attempt, feed};
use super::io::{ControlOf, SocketIo};
use super::object::Control;
use super::receiving::awaits_marker;
use super::resume;
use super::scan::{Ahead, AtMark, look_ahead};
use super::sending::{Farewell, end_on_link, flush, settle_if_plain};
use super::streams::{ask_back, close_stream};
use crate::fabric::ring::EndMark;
use crate::ids::Nonce;
use crate::stream::handshake::{Handshake, Role};
use crate::stream::mode::{Mode, Sending};
use crate::wire;
use crate::wire::{MAX_MARKER, Marker};

/// Shuts the sending direction, before the kernel's own shutdown(). The end mark says that the end follows the last
/// byte, in TCP. Sets `farewell` to the waiter that is woken once the kernel has sent its FIN.
///
/// Returns true if the kernel's shutdown of the direction follows by itself. It does once TCP has taken the bytes that
/// precede it. If the program shuts `both` directions, it also waits for the markers that may still come (P101).
pub fn shut<S: SocketIo>(socket: &S, both: bool, farewell: &mut Farewell<S::Link>) -> bool {
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    if let Some(mut tx) = socket.tx.lock() {
        tx.is_shut = true;
    }
    if both {
        socket.rx_shut.store(true, SeqCst);
    }
    if resume::shut(socket, &mut control) {
        return true;
    }
    if awaits_marker(socket) {
        end_attempt(socket, &mut control);
    }
    let waits = awaits_marker(socket) && socket.is_tx_quiet();
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    let was_on_link = socket.tx_mode.load(Acquire) == Mode::Link;
    if waits {
        // No byte is sent from now on, neither on TCP nor on the link.
        tx.then_link |= was_on_link;
        socket.tx_mode.go(Sending::Announced);
    } else if was_on_link {
        let wake = end_on_link(socket, &mut tx, EndMark::Fin);
        *farewell = Farewell::of(socket, wake);
    }
    if socket.tx_mode.load(Acquire) != Mode::Marked {
        drop(tx);
        if was_on_link {
            settle_if_plain(socket);
        }
        return false;
    }
    if socket.is_tx_quiet() {
        tx.then_shut = true;
        drop(tx);
        flush(socket);
        return true;
    }
    // A thread has been blocked in the kernel's send since before there was a marker. It is to get EPIPE.
    tx.marker.clear();
    tx.then_link = false;
    socket.tx_mode.go(Sending::Withdrawn);
    drop(tx);
    feed(socket, &mut control, |h| Ok(h.on_hello_unwritten()));
    false
}

/// Asks the peer to send the unread bytes of the link again over TCP. The connection was closed where no hook saw it,
/// so the kernel does not know of these bytes. TCP answers them as after any close: by a reset. Returns true if there
/// are any. The caller holds the control lock.
pub fn return_unread<S: SocketIo>(socket: &S, control: &ControlOf<S>) -> bool {
    let (Some(opened), Some(yours)) = (&control.opened, control.peer) else {
        return false;
    };
    let (from, wake) = {
        let Some(mut rx) = socket.rx.lock() else {
            return false;
        };
        // Bytes that TCP has brought already come after those on the link.
        if socket.rx_mode.load(Acquire) != Mode::Link || rx.stays || !rx.carry.is_empty() {
            return false;
        }
        let Some(consumer) = rx.consumer.as_mut() else {
            return false;
        };
        if !consumer.available().is_ok_and(|n| n > 0) {
            return false;
        }
        let Ok(wake) = consumer.stop() else {
            return false;
        };
        (consumer.position(), wake)
    };
    socket.notify_peer(wake);
    ask_back(&opened.link, yours, Some(from));
    true
}

/// Markers that may be on their way to a socket that is being closed.
pub struct Awaited {
    /// The nonce that each of the markers starts with.
    pub nonce: Nonce,
    /// This end's FIN waits for these markers (P101).
    pub precede_end: bool,
    /// The marker that answers a HELLO while this end's FIN waits. Empty if the FIN does not wait: then the end of TCP
    /// is the answer.
    pub answer: Vec<u8>,
    /// The part of the next marker that has come.
    pub part: Vec<u8>,
}

/// Returns the markers that may be on their way from the peer, when the program closes the socket. `None` if no marker
/// is to come. The caller holds the control lock.
pub fn scan_left<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> Option<Awaited> {
    let rx = socket.rx.lock()?;
    let (ahead, mut rx) = look_ahead(socket, control, rx, AtMark::GoOn)?;
    match ahead {
        Ahead::Nothing | Ahead::Shut => rx.scan.map(|nonce| {
            let precede_end = socket.rx_shut.load(SeqCst);
            Awaited {
                nonce,
                precede_end,
                answer: if precede_end { refusal(control) } else { Vec::new() },
                part: rx.carry.take(),
            }
        }),
        // The kernel does not hold these unread bytes, so its close() would not reset.
        Ahead::Payload { carry: 1.., .. } => {
            socket.reset_on_close();
            None
        }
        _ => None,
    }
}

/// Returns the ABORT that answers a HELLO which has not come. Empty if no such answer is due.
fn refusal<L, O>(control: &Control<L, O>) -> Vec<u8> {
    let mut buf = [0u8; MAX_MARKER];
    let is_unanswered = |h: &&Handshake| h.role() == Role::Acceptor && control.greeted_by.is_none();
    let theirs = control
        .handshake
        .as_ref()
        .filter(is_unanswered)
        .and_then(Handshake::theirs);
    let abort = Marker::Abort(wire::Reason::Cancelled);
    let bytes = theirs.and_then(|theirs| abort.encode(&theirs, &mut buf).ok());
    bytes.map(<[u8]>::to_vec).unwrap_or_default()
}

/// Ends the sending direction when the program closes the socket. Returns the bytes that have to precede the end and
/// that TCP has not taken yet, and the stream's farewell. The caller holds the control lock.
pub fn close_tx<S: SocketIo>(socket: &S) -> (Vec<u8>, Farewell<S::Link>) {
    let mut farewell = Farewell::NONE;
    {
        let Some(mut tx) = socket.tx.lock() else {
            return (Vec::new(), farewell);
        };
        if socket.tx_mode.load(Acquire) == Mode::Link {
            farewell = Farewell::of(socket, end_on_link(socket, &mut tx, EndMark::Fin));
        } else if std::mem::take(&mut tx.then_link)
            && let Some(producer) = tx.producer.as_mut()
        {
            let _ = producer.end(EndMark::Fin);
        }
        tx.then_shut = false;
    }
    flush(socket);
    let unsent = socket.tx.lock();
    let unsent = unsent.map(|mut tx| std::mem::take(&mut tx.marker));
    (unsent.unwrap_or_default(), farewell)
}

/// Gives the stream back if both directions are on TCP and nothing is under way. Then the kernel's epoll sets can have
/// the socket again. Returns whether the connection may be promoted again; `None` if the stream is still in use. The
/// caller holds the control lock.
pub fn close_if_over<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> Option<bool> {
    let is_busy = control.handshake.is_some() || resume::is_staying(control);
    if is_busy || !socket.is_plain() {
        return None;
    }
    let returns = std::mem::take(&mut control.returns) && control.leave.is_none();
    close_stream(socket, control);
    Some(returns)
}
