//! shutdown() and close() of a connection with a link or an attempt, and its hand-over to a holder that reads the
//! kernel's socket alone (P85).

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use crate::fabric::ring::EndMark;
use crate::ids::Nonce;
use crate::stream::connection::attempt::{end_attempt, feed};
use crate::stream::connection::directions::{
    Farewell, awaits_marker, end_on_link, flush, is_scanned, is_scanning, send_again, settle_if_plain, take,
};
use crate::stream::connection::io::{ControlOf, Half, RxOf, SocketIo, StreamLink, Task, Tcp};
use crate::stream::connection::scan::{Ahead, AtMark, look_ahead};
use crate::stream::connection::{Control, End, Then, ask_back, close_stream, scan, stay};
use crate::stream::handshake::{Handshake, Role};
use crate::stream::mode::{Mode, Move};
use crate::wire;
use crate::wire::marker::{Found, scan as scan_bytes};
use crate::wire::{MAX_MARKER, Marker, Message};

/// The most bytes that an end sets aside for a hand-over, or takes back from its peer (P85).
pub const MOST: usize = 16 * 1024 * 1024;

/// How long a hand-over waits before it takes data out of TCP to make room, ns. A peer that can write its marker does
/// so within this time. A peer that is blocked in a send can write it only when TCP has room.
const AT_ONCE: u64 = 10_000_000;

/// Shuts the sending direction, before the kernel's own shutdown(). If the direction is on a link within the host, this
/// puts the end mark FIN on the link and sets `farewell`, the notification that is due once the kernel has sent its
/// FIN.
///
/// Returns true if the library makes the kernel's shutdown of the direction itself, later: once TCP has taken the
/// pending bytes and, if the program shuts `both` directions, no marker may come any more (P101). Returns false if the
/// caller has to make the kernel's shutdown.
pub fn shut<S: SocketIo>(socket: &S, both: bool, farewell: &mut Farewell<S::Link>) -> bool {
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    if let Some(mut tx) = socket.tx.lock()
        && tx.end == End::Open
    {
        tx.end = End::Shut;
    }
    if both {
        socket.rx_shut.store(true, SeqCst);
    }
    if stay::shut(socket, &mut control) {
        return true;
    }
    if awaits_marker(socket) {
        end_attempt(socket, &mut control);
    }
    let waits = awaits_marker(socket) && socket.tx_inside.is_empty();
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    let was_on_link = socket.tx_mode.load(Acquire) == Mode::Link;
    if waits {
        // From now on sends put no byte on TCP or on the link.
        if was_on_link {
            tx.then = Then::Link;
        }
        socket.tx_mode.go(Move::Announced);
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
    if socket.tx_inside.is_empty() {
        tx.end = End::Due;
        drop(tx);
        flush(socket);
        return true;
    }
    // A thread is blocked in the kernel's send, and has been since before the marker was queued. The kernel's shutdown
    // has to follow now, so that this send fails with EPIPE. The marker is dropped.
    tx.marker.clear();
    tx.then.take_link();
    socket.tx_mode.go(Move::Abandoned);
    drop(tx);
    feed(socket, &mut control, |h| Ok(h.on_hello_unwritten()));
    false
}

/// Asks the peer to send the unread bytes of the ring a second time, over TCP. The program has closed the connection by
/// a system call that no hook saw, so the kernel sent no reset for these bytes. When they come by TCP, the kernel
/// answers them by a reset, as after any close. Returns true if there are unread bytes. The caller holds the control
/// lock.
pub fn return_unread<S: SocketIo>(socket: &S, control: &ControlOf<S>) -> bool {
    let stop = || {
        let mut rx = socket.rx.lock()?;
        // If the carry has bytes, the peer has left the link already: these bytes come after the bytes on the link.
        let is_next = socket.rx_mode.load(Acquire) == Mode::Link && !rx.stays() && rx.carry.is_empty();
        let consumer = rx.consumer.as_mut().filter(|_| is_next)?;
        consumer.available().ok().filter(|n| *n > 0)?;
        let wake = consumer.stop().ok()?;
        Some((consumer.position(), wake))
    };
    let stopped = control.pair().and_then(|pair| Some((pair, stop()?)));
    let Some(((link, yours), (from, wake))) = stopped else {
        return false;
    };
    socket.notify_peer(wake);
    ask_back(link, yours, Some(from));
    true
}

/// Markers that may be on their way to a socket that is being closed.
pub struct Awaited {
    /// The nonce that each of the markers starts with.
    pub nonce: Nonce,
    /// This end's FIN waits for these markers (P101).
    pub precede_end: bool,
    /// The ABORT with which this end answers a HELLO while its FIN waits. Empty if the FIN does not wait, because the
    /// end of TCP is the answer then. Also empty if no HELLO may come.
    pub answer: Vec<u8>,
    /// The first bytes of the next marker, as far as they have come.
    pub part: Vec<u8>,
}

/// Returns which markers may still be on their way from the peer when the program closes the socket. `None` if no
/// marker can come. The caller holds the control lock.
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
        // The carry has unread bytes. The kernel does not have them, so its close() would send no reset.
        Ahead::Payload { carry: 1.., .. } => {
            socket.reset_on_close();
            None
        }
        _ => None,
    }
}

/// Returns the bytes of the ABORT with which an acceptor answers a HELLO that has not come yet. Empty if this end waits
/// for no HELLO.
fn refusal<L, O>(control: &Control<L, O>) -> Vec<u8> {
    let mut buf = [0u8; MAX_MARKER];
    let is_unanswered = |h: &&Handshake| h.role == Role::Acceptor && control.hello.is_none();
    let theirs = control.handshake.as_ref().filter(is_unanswered).and_then(|h| h.theirs);
    let abort = Marker::Abort(wire::Reason::Cancelled);
    let bytes = theirs.and_then(|theirs| abort.encode(&theirs, &mut buf).ok());
    bytes.map(<[u8]>::to_vec).unwrap_or_default()
}

/// Ends the sending direction when the program closes the socket. Returns the bytes that have to be sent before the end
/// and that TCP has not taken yet, and the notification that is due once the kernel has sent its FIN. The caller holds
/// the control lock.
pub fn close_tx<S: SocketIo>(socket: &S) -> (Vec<u8>, Farewell<S::Link>) {
    let mut farewell = Farewell::NONE;
    if let Some(mut tx) = socket.tx.lock() {
        if socket.tx_mode.load(Acquire) == Mode::Link {
            farewell = Farewell::of(socket, end_on_link(socket, &mut tx, EndMark::Fin));
        } else if tx.then.take_link()
            && let Some(producer) = tx.producer.as_mut()
        {
            let _ = producer.end(EndMark::Fin);
        }
        tx.end = End::Shut;
    }
    flush(socket);
    let unsent = socket.tx.lock();
    let unsent = unsent.map(|mut tx| std::mem::take(&mut tx.marker));
    (unsent.unwrap_or_default(), farewell)
}

/// Gives the stream back to the link if both directions are on TCP, and no attempt and no stay is under way. Then the
/// caller can put the socket into the kernel's epoll sets again. Returns whether the connection may be promoted again;
/// `None` if the stream is still in use. The caller holds the control lock.
pub fn close_if_over<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> Option<bool> {
    let is_busy = control.handshake.is_some() || stay::is_staying(control);
    if is_busy || !socket.is_plain() {
        return None;
    }
    let returns = control.stay.as_ref().is_some_and(|stay| stay.returns) && control.leave.is_none();
    close_stream(socket, control);
    Some(returns)
}

// Hand-over of a connection to a new holder in the middle of an attempt (P85). The new holder would read a marker as
// data. So this end takes the data in front of the marker out of TCP and sets it aside, reads the marker, and lets the
// attempt go on to its end. Then the peer takes the data back, and sends it again in TCP before all other bytes.
//
// This works within a host only. Between hosts, and if the peer cannot take the data back, the connection is reset. A
// gap in the data would be worse than a reset.

/// Brings an attempt within the host nearer to its end, before a hand-over: handles all markers that have come. Returns
/// true if no marker may come any more. The caller repeats the call until then.
pub fn press_on<S: SocketIo>(socket: &S) -> bool {
    flush(socket);
    while let Some(mut control) = socket.control.lock() {
        let handshake = control.handshake.as_ref();
        if handshake.is_none_or(|h| h.is_between_hosts) {
            return true;
        }
        let Some(mut rx) = socket.rx.lock().filter(|rx| is_scanned(socket, rx)) else {
            return true;
        };
        let now = socket.now();
        let since = *control.handed_since.get_or_insert(now);
        let makes_room = now.saturating_sub(since) > AT_ONCE;
        match set_aside(socket, &mut rx, makes_room) {
            front @ (Front::Marker | Front::Part) => {
                // Handles the marker. A part of a marker moves to the carry: in the kernel it might keep the window
                // closed (P34).
                let _ = look_ahead(socket, &mut control, rx, AtMark::HandOver);
                if matches!(front, Front::Part) {
                    break;
                }
            }
            Front::Room => {}
            Front::LastData => {
                drop(rx);
                feed(socket, &mut control, |h| Ok(h.on_end()));
                return true;
            }
            Front::Unknown => {
                drop(rx);
                drop(control);
                scan::look(socket);
                break;
            }
        }
    }
    !is_scanning(socket)
}

/// The bytes at the front of TCP, behind data that has been set aside.
enum Front {
    Marker,
    /// The possible beginning of a marker.
    Part,
    /// Not known yet. Data was set aside to make room in TCP, so that the peer can send more, perhaps a marker.
    Room,
    /// Data and then the end of TCP, with no marker between. This data was not set aside.
    LastData,
    /// Data, or no bytes. A marker may still come.
    Unknown,
}

fn set_aside<S: SocketIo>(socket: &S, rx: &mut RxOf<S>, makes_room: bool) -> Front {
    // A call may have been inside the kernel since before the scan began. The bytes that it receives come first, so no
    // bytes are set aside before it has returned.
    let (Some(nonce), Some(tcp), true) = (rx.scan, socket.tcp(), socket.rx_inside.is_empty()) else {
        return Front::Unknown;
    };
    let has_ended = tcp.has_peer_ended();
    let waiting = tcp.unread();
    let carried = rx.carry.len();
    let mut seen = Vec::new();
    if carried + waiting > MOST || seen.try_reserve_exact(carried + waiting).is_err() {
        return Front::Unknown;
    }
    seen.extend_from_slice(rx.carry.as_slice());
    seen.resize(carried + waiting, 0);
    let room = seen.get_mut(carried..).unwrap_or_default();
    let peeked = tcp.peek_all(room).min(waiting);
    seen.truncate(carried + peeked);
    let found = scan_bytes(&nonce, &seen);
    let front = match found.what {
        Found::Payload if has_ended && found.payload > 0 => return Front::LastData,
        Found::PartialMarker { .. } if found.payload == 0 => return Front::Part,
        Found::Payload | Found::PartialMarker { .. } if makes_room && found.payload > 0 => Front::Room,
        Found::Payload | Found::PartialMarker { .. } => return Front::Unknown,
        Found::Marker { .. } => Front::Marker,
    };
    seen.truncate(found.payload);
    if rx.aside.len() + seen.len() > MOST || take(&tcp, rx, seen.len()).is_err() {
        return Front::Unknown;
    }
    rx.scanned = 0;
    rx.aside.append(&mut seen);
    socket.count_ours(Half::Receiving, found.payload);
    front
}

/// Handles TAKE-BACK: sends `bytes`, which the peer has taken out of TCP, in TCP again, and then all bytes that are on
/// the link. Resets the connection if `bytes` is `None`, because the peer's file cannot be read. The caller holds the
/// control lock.
pub fn on_take_back<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, bytes: Option<&[u8]>) {
    let done = bytes.is_some_and(|bytes| {
        let Some(mut tx) = socket.tx.lock() else {
            return false;
        };
        // If the program has ended the direction meanwhile, the bytes cannot be sent any more, and the connection is
        // reset.
        let is_on_link = socket.tx_mode.load(Acquire) == Mode::Link && tx.producer.is_some();
        if is_on_link {
            tx.marker.extend_from_slice(bytes);
            tx.again += bytes.len();
            // TCP carries these bytes for the second time, so they do not count as the program's again.
            socket.count_ours(Half::Sending, bytes.len());
            send_again(socket, &mut tx);
        }
        is_on_link
    });
    flush(socket);
    if let (true, Some((link, yours))) = (done, control.pair()) {
        let _ = link.send(&Message::TakenBack { yours });
    } else {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), "cannot send again what was not read: reset");
        socket.reset();
    }
}

/// Handles TAKEN-BACK: the peer has the bytes that were set aside. It sends them in TCP, and then all bytes that it has
/// sent on the link.
pub fn on_taken_back<S: SocketIo>(socket: &S) {
    if let Some(mut rx) = socket.rx.lock()
        && socket.rx_mode.load(Acquire) == Mode::Marked
        && rx.scan.is_none()
        && !rx.aside.is_empty()
    {
        if let Some(consumer) = rx.consumer.as_mut() {
            let _ = consumer.stop();
        }
        rx.aside = Vec::new();
        socket.rx_mode.go(Move::Settled);
        drop(rx);
        socket.set_path(Half::Receiving, false);
        socket.later(Task::Drained);
        socket.later(Task::Notify);
    }
}

/// Asks the peer to take the data back that is set aside. This end has read SWITCH. Resets the connection if the
/// request cannot be sent. The caller holds the control lock.
pub(super) fn give_back<S: SocketIo>(socket: &S, control: &ControlOf<S>) {
    if ask_peer(socket, control).is_none() {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), "the peer cannot take back what was not read: reset");
        socket.reset();
        if let Some(mut rx) = socket.rx.lock() {
            rx.aside = Vec::new();
            socket.rx_mode.go(Move::Abandoned);
        }
    }
}

fn ask_peer<S: SocketIo>(socket: &S, control: &ControlOf<S>) -> Option<()> {
    let (link, yours) = control.pair().filter(|(link, _)| !link.is_remote())?;
    let rx = socket.rx.lock()?;
    let bytes = u32::try_from(rx.aside.len()).ok()?;
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), bytes, "to be taken back");
    let message = Message::TakeBack { yours, bytes };
    link.send_with(&message, &rx.aside).ok()
}
