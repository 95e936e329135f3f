//! Markers behind data that the program does not read. It may read nothing before it has sent all that it has to say, as
//! it may on TCP, and its sending direction may wait for such a marker (`stream::resume`): then what TCP has is
//! taken into the carry, where the program finds it when it reads, until the marker is there.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::stream::handshake::Closing;
use rdmasock_core::stream::resume::Ahead;
use rdmasock_core::wire::Marker;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::resume;
use super::scan::{self, AtMark, look_ahead};
use crate::library::Library;
use crate::rx::carry::Carry;
use crate::scratch::Scratch;
use crate::service::Command;
use crate::socket::{Control, Mode, Rx, Socket};

/// No more than this is taken, nor more than all connections may (`rx::carry`). Kernel TCP would not hold as much between two
/// programs of which neither reads.
const MOST: usize = 16 * 1024 * 1024;
/// Bytes taken at a time.
const PIECE: usize = 16 * 1024;
/// Pieces that are dropped before others have their turn.
const DROPS: usize = 64;

/// Does what the markers behind unread data allow for the sending direction, if that waits for one. `is_blocked`: it finds
/// no room on the link, and the reader does not move. True if the kernel has less than before: those who wait
/// for something to read are to be told.
pub fn read_ahead(socket: &'static Socket, is_blocked: bool) -> bool {
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
            Seen::Marker(Marker::Switch) => {
                on_ahead(socket, &mut control, Ahead::Closing(Closing::Switch))
            }
            Seen::Marker(Marker::Abort(_)) => {
                on_ahead(socket, &mut control, Ahead::Closing(Closing::Abort))
            }
            Seen::Marker(Marker::Resume { received, sent }) => {
                on_ahead(socket, &mut control, Ahead::Resume { received, sent });
            }
            // It has its turn only when the program has read up to it.
            Seen::Marker(Marker::Hello(_)) => {}
            Seen::End => {
                on_ahead(socket, &mut control, Ahead::End);
                break;
            }
        }
    }
    took
}

fn waits(control: &Control, is_blocked: bool) -> bool {
    let resume = control.resume.as_ref();
    resume.is_some_and(|r| r.looks_ahead() || is_blocked && r.is_unanswered())
}

fn on_ahead(socket: &'static Socket, control: &mut Control, ahead: Ahead) {
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot, ?ahead, "before its turn");
    match control.resume.as_mut().map(|r| r.on_ahead(ahead)) {
        // As before: nothing is to be told to anybody.
        Some(Ok(steps)) if steps.is_empty() => {}
        Some(Ok(steps)) => resume::carry_out(socket, control, steps),
        _ => resume::violation(socket, "a marker out of turn"),
    }
}

enum Seen {
    Marker(Marker),
    End,
}

/// The next marker or the end, as far as TCP has brought it.
fn next(socket: &'static Socket, rx: &mut Rx, took: &mut bool) -> Option<Seen> {
    loop {
        // A call that was in the kernel before the scan began has the first turn.
        if socket.rx_mode.load(Acquire) != Mode::Marked || socket.rx_inside.load(SeqCst) > 0 {
            return None;
        }
        let nonce = rx.scan?;
        if let Some(marker) = rx.carry.next_marker(&nonce) {
            return Some(Seen::Marker(marker));
        }
        if rx.carry.len() >= MOST || !rx.carry.charge(PIECE) {
            return None;
        }
        match fetch(socket.anchor_fd()?, &mut rx.carry) {
            Ok(0) => return Some(Seen::End),
            Ok(_) => *took = true,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

fn fetch(fd: BorrowedFd<'_>, carry: &mut Carry) -> rustix::io::Result<usize> {
    // Not where nothing is: that would take an error from the socket, of which others are to tell.
    if rustix::io::ioctl_fionread(fd)? == 0 {
        let has_ended = crate::ready::has_peer_ended(fd) && rustix::io::ioctl_fionread(fd)? == 0;
        return if has_ended { Ok(0) } else { Err(Errno::AGAIN) };
    }
    if crate::sockopt::is_at_mark(fd) {
        return Err(Errno::AGAIN);
    }
    let mut piece = Scratch::new(PIECE).ok_or(Errno::NOMEM)?;
    let (_, n) = rustix::net::recv(fd, &mut piece[..], RecvFlags::DONTWAIT)?;
    carry.push(piece.get(..n).unwrap_or_default());
    Ok(n)
}

/// The program has closed the socket, which lives on until the peer has all of it: what comes in front of the
/// markers that this waits for is nobody's (P79).
pub fn drop_unread(socket: &'static Socket) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    // Not for ever: a peer that goes on sending is not to keep the service thread.
    for _ in 0..DROPS {
        let Some(rx) = socket.rx.lock() else {
            return;
        };
        match look_ahead(socket, &mut control, rx, AtMark::GoOn, || socket.rx.lock()) {
            Some((scan::Ahead::Payload { carry, kernel }, mut rx)) => {
                let Some(fd) = socket.anchor_fd() else {
                    return;
                };
                rx.scanned = 0;
                if !scan::take(&mut rx, fd, carry + kernel) {
                    return;
                }
            }
            _ => return,
        }
    }
    drop(control);
    Library::get().service.submit(Command::settle(socket));
}

#[cfg(test)]
mod tests;
