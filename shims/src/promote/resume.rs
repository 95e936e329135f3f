//! The way back from a link between hosts: carries out what core's `stream::resume` says (P70–P79).
//!
//! The caller of each function holds the control lock, and neither `rx` nor `tx`.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::stats::Path;
use rdmasock_core::stream::handshake::Handshake;
use rdmasock_core::stream::resume::{Resume, Step, Steps};
use rdmasock_core::wire::scan::{Found, scan};
use rdmasock_core::wire::{MAX_MARKER, Marker, Message};

use super::scan::Peeked;
use super::{flush, give_up, run};
use crate::library::Library;
use crate::ready;
use crate::service::Command;
use crate::socket::{Control, Mode, Receiving, Sending, Socket};

/// OPEN is about to go out on a link between hosts.
pub(super) fn begin(socket: &Socket, control: &mut Control) {
    let Some(handshake) = &control.handshake else {
        return;
    };
    control.nonces = handshake.theirs().map(|theirs| [handshake.mine(), theirs]);
    control.resume = Some(Resume::new());
    control.returns = true;
    if let Some(mut rx) = socket.rx.lock() {
        rx.stays = true;
        rx.read_on = false;
        rx.is_lost = false;
        rx.owed = 0;
    }
}

/// Whether the stream has a stay on a link between hosts that is not over.
pub fn is_staying(control: &Control) -> bool {
    control.resume.as_ref().is_some_and(|r| !r.is_over())
}

/// Our end of the link has failed.
pub fn link_failed(socket: &'static Socket, control: &mut Control) {
    close_attempt(socket, control);
    feed(socket, control, Resume::on_link_failed);
}

/// The peer asks on the link to leave it (P75).
pub fn on_asked(socket: &'static Socket, control: &mut Control) {
    control.returns = false;
    close_attempt(socket, control);
    feed(socket, control, Resume::on_asked);
}

/// The peer has all that we have given to the link, and the end mark.
pub fn confirmed(socket: &'static Socket, control: &mut Control) {
    feed(socket, control, Resume::on_confirmed);
}

/// The other's RESUME was found in TCP.
pub fn on_resume(socket: &'static Socket, control: &mut Control, received: u64, sent: u64) {
    close_attempt(socket, control);
    let steps = control.resume.as_mut().map(|r| r.on_resume(received, sent));
    // Unasked: its end of the link has failed.
    if let Some(remote) = control.opened.and_then(|o| o.link.remote())
        && control.returns
    {
        remote.doubt();
    }
    match steps {
        Some(Ok(steps)) => carry_out(socket, control, steps),
        _ => violation(socket, "RESUME out of turn"),
    }
}

/// TCP has ended in the other's direction.
pub fn on_end(socket: &'static Socket, control: &mut Control) {
    control.returns = false;
    let marked = socket
        .rx
        .lock()
        .and_then(|rx| rx.consumer.as_ref().map(|c| c.has_mark()))
        .unwrap_or(false);
    feed(socket, control, |r| r.on_end(marked));
}

/// The stream is to leave a link that works.
pub(super) fn leave(socket: &'static Socket, control: &mut Control) {
    control.returns = false;
    close_attempt(socket, control);
    feed(socket, control, Resume::leave);
}

/// For a new holder, who reads the kernel alone: what the program has not read comes through it
/// again. The socket can be handed over once [`is_staying`] says no.
pub(super) fn hand_over(socket: &'static Socket, control: &mut Control) {
    control.returns = false;
    close_attempt(socket, control);
    if let Some(mut rx) = socket.rx.lock()
        && let Some(consumer) = rx.consumer.as_mut()
    {
        // An error is met again when RESUME is written.
        let _ = consumer.freeze(0);
    }
    feed(socket, control, Resume::hand_over);
}

/// shutdown() of the sending direction. True: the kernel's follows by itself.
pub fn shut(socket: &'static Socket, control: &mut Control) -> bool {
    if !is_staying(control) {
        return false;
    }
    close_attempt(socket, control);
    let stays = is_staying(control);
    control.returns = false;
    feed(socket, control, Resume::shut);
    stays
}

/// The program has closed the socket.
pub fn close(socket: &'static Socket, control: &mut Control) {
    control.returns = false;
    close_attempt(socket, control);
    feed(socket, control, Resume::close);
}

/// The process is about to end: as a close of a stream that is on a link between hosts.
pub fn end(socket: &'static Socket, control: &mut Control) {
    if is_staying(control) {
        close(socket, control);
        Library::get().service.submit(Command::settle(socket));
    }
}

/// The attempt under way, if it is not closed, is.
fn close_attempt(socket: &'static Socket, control: &mut Control) {
    let steps = give_up(control);
    run(socket, control, steps);
}

/// Feeds the machine.
pub(super) fn feed(
    socket: &'static Socket,
    control: &mut Control,
    input: impl FnOnce(&mut Resume) -> Steps,
) {
    if let Some(steps) = control.resume.as_mut().map(input) {
        carry_out(socket, control, steps);
    }
}

pub(super) fn carry_out(socket: &'static Socket, control: &mut Control, steps: Steps) {
    for step in steps {
        tracing::trace!(target: "rdmasock::promote", slot = socket.slot, ?step);
        match step {
            Step::Ask => {
                if let (Some(opened), Some(yours)) = (control.opened, control.peer) {
                    let resend_from = None;
                    let _ = opened
                        .link
                        .send(&Message::DemoteRequest { yours, resend_from }, &[]);
                }
            }
            Step::Mark => {
                let wake = socket.tx.lock().and_then(|mut tx| {
                    use rdmasock_core::fabric::ring::End;
                    let wake = tx.producer.as_mut()?.end(End::Fin).ok();
                    crate::tx::report_blocked_at_end(socket, &tx);
                    wake
                });
                if let Some(wake) = wake {
                    ready::notify_peer(socket, wake);
                }
            }
            Step::WriteResume => write_resume(socket, control),
            Step::SendFrom(from) => send_from(socket, from),
            Step::SendNothing => {
                if let Some(mut tx) = socket.tx.lock() {
                    tx.wake_delayed = false;
                    tx.is_suspended = false;
                    tx.then_link = false;
                    tx.marker.clear();
                    socket.tx_mode.go(Sending::Withdrawn);
                }
            }
            Step::ReadOn(sent) => read_on(socket, Some(sent)),
            Step::Lost => read_on(socket, None),
            Step::EndTcp => end_tcp(socket),
            Step::Done => {
                Library::get().service.submit(Command::settle(socket));
            }
        }
    }
    let service = &Library::get().service;
    // Not here: an epoll set's lock is not taken under the control lock.
    service.submit(Command::notify(socket));
    if control.resume.as_ref().is_some_and(Resume::looks_ahead) {
        service.submit(Command::read_ahead(socket));
    }
}

pub(super) fn violation(socket: &'static Socket, what: &str) {
    tracing::warn!(target: "rdmasock", slot = socket.slot, what, "resumption failed: reset");
    crate::socket::reset(socket);
    read_on(socket, None);
}

fn write_resume(socket: &'static Socket, control: &Control) {
    let Some([_, theirs]) = control.nonces else {
        return;
    };
    let received = socket
        .rx
        .lock()
        .map(|mut rx| rx.consumer.as_mut().map_or(Ok(0), |c| c.freeze(u64::MAX)));
    let Some(Ok(received)) = received else {
        return violation(socket, "bad ring");
    };
    // The other host may be gone. What the program has sent is TCP's to wait for as long as it does.
    let has_failed = control.opened.is_some_and(|o| !o.link.is_alive());
    if has_failed
        && !crate::tx::is_unread(socket)
        && let Some(fd) = socket.anchor_fd()
    {
        socket.keepalive.bound(fd);
    }
    if let Some(mut tx) = socket.tx.lock() {
        let waits = std::mem::take(&mut tx.then_link);
        let on_link = socket.tx_mode.load(Acquire) == Mode::Link || waits;
        let sent = match &tx.producer {
            Some(producer) if on_link => producer.position(),
            _ => 0,
        };
        let mut buf = [0u8; MAX_MARKER];
        if let Ok(bytes) = (Marker::Resume { received, sent }).encode(&theirs, &mut buf) {
            tx.marker.extend_from_slice(bytes);
        }
        tx.is_suspended |= on_link;
        tx.wake_delayed = false;
        socket.tx_mode.go(Sending::Announced);
        crate::tx::pass_cork(socket, &mut tx);
    }
    if !flush(socket) {
        Library::get().service.submit(Command::flush(socket));
    }
}

fn send_from(socket: &'static Socket, from: u64) {
    let rest = {
        let Some(mut tx) = socket.tx.lock() else {
            return;
        };
        let rest = tx.producer.as_mut().map(|p| p.rest(from));
        if let Some(Ok(bytes)) = &rest {
            super::queue_again(socket, &mut tx, bytes);
        }
        tx.is_suspended = false;
        socket.tx_mode.go(Sending::Announced);
        rest
    };
    if let Some(stats) = socket.stats() {
        stats.set_tx_path(Path::Tcp);
    }
    if let Some(Err(error)) = rest {
        violation(socket, &error.to_string());
    }
    if !flush(socket) {
        Library::get().service.submit(Command::flush(socket));
    }
}

/// What follows the ring is in TCP, which brings all up to `sent`; `None`: it is a reset.
fn read_on(socket: &'static Socket, sent: Option<u64>) {
    {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        rx.scan = None;
        rx.scanned = 0;
        rx.read_on = true;
        rx.is_lost |= sent.is_none();
        if socket.rx_mode.load(Acquire) == Mode::Link {
            let frozen = rx.consumer.as_mut().and_then(|c| c.freeze(u64::MAX).ok());
            rx.owed = sent.unwrap_or(0).saturating_sub(frozen.unwrap_or(0));
        } else if rx.carry.is_empty() && socket.rx_mode.load(Acquire) == Mode::Marked {
            socket.rx_mode.go(Receiving::Settled);
        }
    }
    crate::rx::leave_link_at_end(socket);
}

fn end_tcp(socket: &'static Socket) {
    let at_once = {
        let Some(mut tx) = socket.tx.lock() else {
            return;
        };
        let marked = socket.tx_mode.load(Acquire) == Mode::Marked;
        tx.then_shut |= marked;
        !marked
    };
    if !at_once {
        flush(socket);
    } else if let Some(fd) = socket.anchor_fd() {
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
    }
}

/// Something has come in TCP, or its end, for a direction that is on the link: RESUME, if it is
/// there as a whole.
pub fn look(socket: &'static Socket, control: &mut Control) {
    let next = control.resume.as_ref().is_some_and(Resume::is_next);
    let Some([mine, _]) = control.nonces.filter(|_| next) else {
        return;
    };
    let found = {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        if socket.rx_mode.load(Acquire) != Mode::Link || socket.rx_inside.load(SeqCst) > 0 {
            return;
        }
        let Some(fd) = socket.anchor_fd() else {
            return;
        };
        let mut over = false;
        loop {
            // What was read ahead comes first, and tells more than what has become of TCP since.
            let mut bytes = rx.carry.as_slice().to_vec();
            let mut buf = [0u8; MAX_MARKER];
            match super::scan::peek(fd, &mut buf, true) {
                Peeked::Bytes(n) => bytes.extend_from_slice(buf.get(..n).unwrap_or_default()),
                Peeked::Ended => over = true,
                Peeked::Nothing | Peeked::Shut => {}
            }
            let seen = scan(&mine, &bytes);
            break match seen.what {
                _ if seen.payload > 0 => Err("data in place of RESUME"),
                Found::Marker {
                    marker: Marker::Resume { received, sent },
                    len,
                } => {
                    let _ = super::scan::take(&mut rx, fd, len);
                    socket.ledger.received.add_ours(len);
                    Ok(Some((received, sent)))
                }
                // A part of it, and then the end, is the end.
                Found::Payload | Found::PartialMarker { .. } if over => Ok(None),
                // Looks again after having seen the end, so that all that precedes it is there.
                Found::PartialMarker { .. } if ready::has_peer_ended(fd) => {
                    over = true;
                    continue;
                }
                Found::Payload | Found::PartialMarker { .. } => return,
                Found::Marker { .. } | Found::Bad { .. } => {
                    Err("another marker in place of RESUME")
                }
            };
        }
    };
    match found {
        Ok(Some((received, sent))) => on_resume(socket, control, received, sent),
        Ok(None) => {
            super::feed(socket, control, |h| Ok(Handshake::on_end(h)));
            on_end(socket, control);
        }
        Err(what) => violation(socket, what),
    }
}
