//! Data in front of a marker when the connection is handed to a new holder (P85). The new holder reads the kernel
//! alone, so the marker would be data to it. This code sets that data aside, so that the marker is read and the attempt
//! goes on to its end. Then the peer, which has sent the data, takes it back, and sends it again in TCP before all
//! other bytes.
//!
//! This works within a host only. Otherwise, and if the peer cannot take the data back, the connection is reset. A gap
//! in the data would be worse than the end of the connection.

use std::sync::atomic::Ordering::Acquire;

use super::aside::{MOST, end};
use super::attempt::feed;
use super::io::{ControlOf, Half, RxOf, SocketIo, StreamLink, Task, Tcp};
use super::receiving::{is_scanning, take};
use super::scan;
use super::scan::{AtMark, look_ahead};
use super::sending::{flush, send_again};
use crate::stream::handshake::Handshake;
use crate::stream::mode::{Mode, Receiving};
use crate::wire::Message;
use crate::wire::scan::{Found, scan as scan_bytes};

/// Time that a marker may take which the peer can write at once, ns. A marker behind a blocked send comes only when TCP
/// has room.
const AT_ONCE: u64 = 10_000_000;

/// Brings the attempt under way within the host nearer to its end. Returns true if no marker of an attempt may come any
/// more.
pub fn press_on<S: SocketIo>(socket: &S) -> bool {
    flush(socket);
    while let Some(mut control) = socket.control.lock() {
        let handshake = control.handshake.as_ref();
        if handshake.is_none_or(Handshake::is_between_hosts) {
            return true;
        }
        let Some(mut rx) = socket.rx.lock() else {
            return true;
        };
        if socket.rx_mode.load(Acquire) != Mode::Marked || rx.scan.is_none() {
            return true;
        }
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
        Found::Marker { .. } | Found::Bad { .. } => Front::Marker,
    };
    seen.truncate(found.payload);
    if rx.aside.len() + seen.len() > MOST || !take(&tcp, rx, seen.len()) {
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
    if let (true, Some(opened), Some(yours)) = (done, &control.opened, control.peer) {
        opened.link.send(&Message::TakenBack { yours });
    } else {
        tracing::warn!(target: "rdmasock", slot = socket.slot(), "cannot send again what was not read: reset");
        socket.reset();
    }
}

/// Handles TAKEN-BACK: the peer has the bytes that were set aside. It sends them, and all that it has sent on the link,
/// in TCP.
pub fn on_taken_back<S: SocketIo>(socket: &S) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    if socket.rx_mode.load(Acquire) == Mode::Marked && rx.scan.is_none() && !rx.aside.is_empty() {
        if let Some(consumer) = rx.consumer.as_mut() {
            let _ = consumer.stop();
        }
        end(socket, &mut rx, Receiving::Settled);
        drop(rx);
        socket.set_path(Half::Receiving, false);
        socket.later(Task::Drained);
        socket.later(Task::Notify);
    }
}
