//! The work that shutdown() and close() leave to be done, and the hand-over of a connection to a holder that reads the
//! kernel alone (P85).

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

/// Bytes that are set aside, or taken back, at most (P85).
pub const MOST: usize = 16 * 1024 * 1024;

/// Time that a marker may take which the peer can write at once, ns. A marker behind a blocked send comes only when TCP
/// has room.
const AT_ONCE: u64 = 10_000_000;

/// Shuts the sending direction, before the kernel's own shutdown(). The end mark says that the end follows the last
/// byte, in TCP. Sets `farewell` to the waiter that is woken once the kernel has sent its FIN.
///
/// Returns true if the kernel's shutdown of the direction follows by itself. It does once TCP has taken the bytes that
/// precede it. If the program shuts `both` directions, it also waits for the markers that may still come (P101).
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
        // No byte is sent from now on, neither on TCP nor on the link.
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
    // A thread has been blocked in the kernel's send since before there was a marker. It is to get EPIPE.
    tx.marker.clear();
    tx.then.take_link();
    socket.tx_mode.go(Move::Abandoned);
    drop(tx);
    feed(socket, &mut control, |h| Ok(h.on_hello_unwritten()));
    false
}

/// Asks the peer to send the unread bytes of the link again over TCP. The connection was closed where no hook saw it,
/// so the kernel does not know of these bytes. TCP answers them as after any close: by a reset. Returns true if there
/// are any. The caller holds the control lock.
pub fn return_unread<S: SocketIo>(socket: &S, control: &ControlOf<S>) -> bool {
    let stop = || {
        let mut rx = socket.rx.lock()?;
        // Bytes that TCP has brought already come after those on the link.
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
    let is_unanswered = |h: &&Handshake| h.role == Role::Acceptor && control.hello.is_none();
    let theirs = control.handshake.as_ref().filter(is_unanswered).and_then(|h| h.theirs);
    let abort = Marker::Abort(wire::Reason::Cancelled);
    let bytes = theirs.and_then(|theirs| abort.encode(&theirs, &mut buf).ok());
    bytes.map(<[u8]>::to_vec).unwrap_or_default()
}

/// Ends the sending direction when the program closes the socket. Returns the bytes that have to precede the end and
/// that TCP has not taken yet, and the stream's farewell. The caller holds the control lock.
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

/// Gives the stream back if both directions are on TCP and nothing is under way. Then the kernel's epoll sets can have
/// the socket again. Returns whether the connection may be promoted again; `None` if the stream is still in use. The
/// caller holds the control lock.
pub fn close_if_over<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> Option<bool> {
    let is_busy = control.handshake.is_some() || stay::is_staying(control);
    if is_busy || !socket.is_plain() {
        return None;
    }
    let returns = control.stay.as_ref().is_some_and(|stay| stay.returns) && control.leave.is_none();
    close_stream(socket, control);
    Some(returns)
}

// Data in front of a marker when the connection is handed to a new holder (P85). The new holder would read the marker
// as data. So the data in front is set aside, so that the marker is read and the attempt goes on to its end. Then the
// peer takes the data back, and sends it again in TCP before all other bytes.
//
// This works within a host only. Otherwise, and if the peer cannot take the data back, the connection is reset. A gap
// in the data would be worse than the end of the connection.

/// Brings the attempt under way within the host nearer to its end. Returns true if no marker of an attempt may come any
/// more.
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
                // The marker is handled. A part does not stay in the kernel, where it might keep the window closed
                // (P34).
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

/// The front of TCP once data has been set aside.
enum Front {
    Marker,
    /// The possible beginning of a marker.
    Part,
    /// TCP has room for more data.
    Room,
    /// TCP holds data and then its end, with no marker between. This data was not set aside.
    LastData,
    /// Data or nothing, and a marker may come.
    Unknown,
}

fn set_aside<S: SocketIo>(socket: &S, rx: &mut RxOf<S>, makes_room: bool) -> Front {
    // The bytes of a call that was in the kernel before the scan began come first.
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

/// Sends in TCP again what the peer has taken out of TCP, and then what is on the link. `bytes` is `None` if the peer's
/// file cannot be read: then this function resets the connection. The caller holds the control lock.
pub fn on_take_back<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, bytes: Option<&[u8]>) {
    let done = bytes.is_some_and(|bytes| {
        let Some(mut tx) = socket.tx.lock() else {
            return false;
        };
        // If the program has ended the direction meanwhile, it is too late.
        let is_on_link = socket.tx_mode.load(Acquire) == Mode::Link && tx.producer.is_some();
        if is_on_link {
            tx.marker.extend_from_slice(bytes);
            tx.again += bytes.len();
            // The program has sent these bytes once, and they count once.
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

/// Handles TAKEN-BACK: the peer has the bytes that were set aside. It sends them, and all that it has sent on the link,
/// in TCP.
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

/// Asks the peer to take the data back that is set aside, once SWITCH has been read. Resets the connection if that
/// cannot be asked. The caller holds the control lock.
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
