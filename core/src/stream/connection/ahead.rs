//! Markers behind data that the program does not read. As on TCP, a program may read nothing before it has sent all
//! that it has to send. Its sending direction may wait for such a marker (`stream::resume`). Then this code moves bytes
//! from TCP to the carry until the marker is there. The program's later reads take them from the carry.

use std::sync::atomic::Ordering::Acquire;

use super::io::{ControlOf, Peeked, RxOf, SocketIo, Task, Tcp};
use super::object::Control;
use super::receiving::take;
use super::scan::{AtMark, look_ahead};
use super::{scan, stay};
use crate::scratch::Scratch;
use crate::stream::handshake::Closing;
use crate::stream::mode::Mode;
use crate::stream::resume::Ahead;
use crate::wire::Marker;

/// Bytes of one connection that are moved to the carry, at most; all connections have a bound too (`carry`). Between
/// two programs that both do not read, kernel TCP would not hold as much.
const MOST: usize = 16 * 1024 * 1024;
/// Bytes that are taken from TCP at a time.
const PIECE: usize = 16 * 1024;
/// Pieces that are dropped in one turn of the service thread, before it serves other connections.
const DROPS: usize = 64;

/// Reads markers behind unread data, if the sending direction waits for one, and does what they allow for that
/// direction. `is_blocked`: a send finds no room on the link, and the reader's head does not move. Returns whether the
/// kernel has less than before: then the caller wakes the threads that wait for data.
pub fn read_ahead<S: SocketIo>(socket: &S, is_blocked: bool) -> bool {
    let mut took = false;
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    while waits(&control, is_blocked) {
        let ahead = {
            let Some(mut rx) = socket.rx.lock() else {
                break;
            };
            match next(socket, &mut rx, &mut took) {
                Some(ahead) => ahead,
                None => break,
            }
        };
        match ahead {
            Seen::Marker(Marker::Switch) => on_ahead(socket, &mut control, Ahead::Closing(Closing::Switch)),
            Seen::Marker(Marker::Abort(_)) => on_ahead(socket, &mut control, Ahead::Closing(Closing::Abort)),
            Seen::Marker(Marker::Resume { received, sent }) => {
                on_ahead(socket, &mut control, Ahead::Resume { received, sent });
            }
            // The handshake gets it only when the program has read up to it.
            Seen::Marker(Marker::Hello(_)) => {}
            Seen::End => {
                on_ahead(socket, &mut control, Ahead::End);
                break;
            }
        }
    }
    took
}

fn waits<L, O>(control: &Control<L, O>, is_blocked: bool) -> bool {
    let resume = control.resume.as_ref();
    resume.is_some_and(|r| r.looks_ahead() || is_blocked && r.is_unanswered())
}

fn on_ahead<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, ahead: Ahead) {
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), ?ahead, "before its turn");
    match control.resume.as_mut().map(|r| r.on_ahead(ahead)) {
        // The state has not changed, so no thread is woken.
        Some(Ok(steps)) if steps.is_empty() => {}
        Some(Ok(steps)) => stay::carry_out(socket, control, steps),
        _ => stay::violation(socket, "a marker out of turn"),
    }
}

enum Seen {
    Marker(Marker),
    End,
}

/// Returns the next marker or the end, as far as TCP has brought it. Sets `took` if it takes bytes from the kernel.
/// `None` if neither is there, if the direction is not scanned, or if no more may be read ahead.
fn next<S: SocketIo>(socket: &S, rx: &mut RxOf<S>, took: &mut bool) -> Option<Seen> {
    loop {
        // The bytes of a call that was in the kernel before the scan began come first.
        if socket.rx_mode.load(Acquire) != Mode::Marked || !socket.rx_inside.is_empty() {
            return None;
        }
        let nonce = rx.scan?;
        if let Some(marker) = rx.carry.next_marker(&nonce) {
            return Some(Seen::Marker(marker));
        }
        if rx.carry.len() >= MOST || !rx.carry.charge(PIECE) {
            return None;
        }
        let mut piece = Scratch::new(PIECE)?;
        match socket.tcp()?.receive(&mut piece) {
            Peeked::Ended => return Some(Seen::End),
            Peeked::Bytes(n) => {
                rx.carry.push(piece.get(..n).unwrap_or_default());
                *took = true;
            }
            Peeked::Nothing | Peeked::Shut => return None,
        }
    }
}

/// Drops the data in front of the markers that this end waits for (P79). The program has closed the socket, which lives
/// on until the peer has all of its data.
pub fn drop_unread<S: SocketIo>(socket: &S) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    // Bounded: a peer that goes on sending does not occupy the service thread.
    for _ in 0..DROPS {
        let Some(rx) = socket.rx.lock() else {
            return;
        };
        match look_ahead(socket, &mut control, rx, AtMark::GoOn) {
            Some((scan::Ahead::Payload { carry, kernel }, mut rx)) => {
                rx.scanned = 0;
                let Some(tcp) = socket.tcp() else {
                    return;
                };
                if !take(&tcp, &mut rx, carry + kernel) {
                    return;
                }
            }
            _ => return,
        }
    }
    drop(control);
    socket.later(Task::Settle);
}
