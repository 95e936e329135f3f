//! The way back to TCP, of one direction or both, asked for by this end or by the peer.

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::fabric::ring::{Consumer, End, Stopped, Wake};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::{Path, Reason};
use rdmasock_core::wire::Message;

use super::{flush, give_up, hand_over_rest, resume, run, set_why};
use crate::library::Library;
use crate::link::Link;
use crate::ready;
use crate::service::Command;
use crate::socket::{Control, Mode, Receiving, Sending, Socket, Stage, Tx};

/// Takes the socket back to TCP: our sending direction now, the other's when the peer follows our
/// request. During a handshake: as soon as that is over.
pub fn leave(socket: &'static Socket, control: &mut Control, reason: Reason) {
    control.leave = Some(reason);
    if resume::is_staying(control) {
        set_why(socket, reason);
        socket.set_stage(Stage::Pinned);
        return resume::leave(socket, control);
    }
    if control.handshake.is_some() {
        let steps = give_up(control);
        run(socket, control, steps);
        // After our SWITCH the direction need not wait for the other's.
        demote_tx(socket);
        return;
    }
    set_why(socket, reason);
    demote_tx(socket);
    let Some(opened) = control.opened else {
        socket.set_stage(Stage::Pinned);
        return;
    };
    if socket.rx_mode.load(Acquire) == Mode::Link && !control.asked_back {
        control.asked_back = true;
        if let Some(yours) = control.peer {
            ask_back(opened.link, yours, None);
        }
    }
    socket.set_stage(Stage::Pinned);
}

/// What is sent next is for TCP alone, and the stream [leaves](leave) a link between hosts for it: until it has, sends wait.
pub fn wait_for_tcp(socket: &Socket) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    if tx.then_link || socket.tx_mode.load(Acquire) == Mode::Link {
        tx.then_link = true;
        tx.is_suspended = true;
        socket.tx_mode.go(Sending::Announced);
    }
}

/// Asks the peer to take its sending direction back to TCP; with `resend_from`, a position in what it has
/// sent, it sends again there what follows it.
pub(super) fn ask_back(link: &'static Link, yours: Vqpn, resend_from: Option<u64>) {
    let request = Message::DemoteRequest { yours, resend_from };
    let _ = link.send(&request, &[]);
}

/// As [`leave`], but what the program has not read yet comes through the kernel too: for a new
/// holder of the socket. Our receiving end is on TCP when this returns, unless a handshake is under
/// way.
pub fn return_to_tcp(socket: &'static Socket, control: &mut Control, reason: Reason) {
    if control.handshake.is_some() {
        return leave(socket, control, reason);
    }
    if resume::is_staying(control) {
        control.leave = Some(reason);
        set_why(socket, reason);
        socket.set_stage(Stage::Pinned);
        return resume::hand_over(socket, control);
    }
    hand_over_rest(socket);
    if !unread_returns_to_tcp(socket, control, reason) {
        // P28: the peer has left the link already, and TCP may have later bytes. A gap in the
        // data would be worse than the end of the connection.
        tracing::warn!(target: "rdmasock", slot = socket.slot, %reason, "unread data before its end cannot follow the socket: reset");
        crate::socket::reset(socket);
        socket.rx_mode.go(Receiving::Abandoned);
        on_tcp_again(socket);
    }
}

/// Both directions of a socket that is in no handshake go back to TCP with what was not read. False if the peer has left
/// the link already: what is unread stays there, and what follows it may be in TCP.
fn unread_returns_to_tcp(socket: &'static Socket, control: &mut Control, reason: Reason) -> bool {
    control.leave = Some(reason);
    set_why(socket, reason);
    socket.set_stage(Stage::Pinned);
    demote_tx(socket);
    let (Some(opened), Some(yours)) = (control.opened, control.peer) else {
        return true;
    };
    let stopped = {
        let Some(mut rx) = socket.rx.lock() else {
            return true;
        };
        if socket.rx_mode.load(Acquire) != Mode::Link {
            return true;
        }
        let is_clean = rx.carry.is_empty();
        let Some(consumer) = rx.consumer.as_mut() else {
            return true;
        };
        if !is_clean {
            return false;
        }
        consumer.stop().ok().map(|wake| {
            socket.rx_mode.go(Receiving::Left);
            (consumer.position(), wake)
        })
    };
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot, %reason, ?stopped, "goes back to TCP");
    if let Some((from, wake)) = stopped {
        ready::notify_peer(socket, wake);
        ask_back(opened.link, yours, Some(from));
    } else if !crate::rx::leave_link_at_end(socket) {
        return false;
    }
    on_tcp_again(socket);
    true
}

fn on_tcp_again(socket: &'static Socket) {
    if let Some(stats) = socket.stats() {
        stats.set_rx_path(Path::Tcp);
    }
    Library::get().service.submit(Command::settle(socket));
}

/// As [`return_to_tcp`], for the same holder: what cannot come through the kernel is read where it is.
pub fn prefer_tcp(socket: &'static Socket, control: &mut Control, reason: Reason) {
    if control.handshake.is_some() || resume::is_staying(control) {
        leave(socket, control, reason);
    } else {
        unread_returns_to_tcp(socket, control, reason);
    }
}

/// The peer has stopped reading the link: what it has not read goes over TCP again.
pub fn resend(socket: &'static Socket) {
    look_for_reset(socket);
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    // If it has left the link meanwhile it met the peer's mark then (`end_on_link`).
    if socket.tx_mode.load(Acquire) == Mode::Link {
        send_again(socket, &mut tx);
        drop(tx);
        flush(socket);
    }
}

/// Ends our sending direction, which is on the link: what follows goes over TCP, after what the
/// peer may want to be sent again.
pub fn end_on_link(socket: &'static Socket, tx: &mut Tx, end: End) -> Wake {
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
    crate::tx::pass_cork(socket, tx);
    if let Some(stats) = socket.stats() {
        stats.set_tx_path(Path::Tcp);
    }
    wake
}

/// Where TCP has ended without an end mark the peer has closed the connection where its library did not see it, and has left
/// bytes unread. A receive is to say that: to TCP, which has seen an end, the reset that follows is none (RFC 9293, 3.10.7.4).
pub fn look_for_reset(socket: &'static Socket) {
    let Some(rx) = socket.rx.lock() else { return };
    let is_unmarked = |c: &Consumer| !c.has_mark() && !c.has_left();
    if socket.rx_mode.load(Acquire) == Mode::Link
        && !socket.rx_shut.load(Acquire)
        && rx.consumer.as_ref().is_some_and(is_unmarked)
        && socket.anchor_fd().is_some_and(ready::has_peer_ended)
    {
        socket.lost_unread.store(true, SeqCst);
    }
}

pub(super) fn send_again(socket: &'static Socket, tx: &mut Tx) {
    match tx.producer.as_mut().map(|p| p.unread()) {
        Some(Ok(bytes)) => super::queue_again(socket, tx, &bytes),
        Some(Err(error)) => {
            tracing::warn!(target: "rdmasock", slot = socket.slot, %error, "cannot send again: reset");
            crate::socket::reset(socket);
        }
        None => {}
    }
    tx.then_link = false;
    socket.tx_mode.go(Sending::Announced);
    if let Some(stats) = socket.stats() {
        stats.set_tx_path(Path::Tcp);
    }
}

/// Moves our sending direction back to TCP: what is on the link stays there and comes first. If
/// its SWITCH is still to be written, that leads the peer to an empty link.
pub(super) fn demote_tx(socket: &'static Socket) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    let wake = if socket.tx_mode.load(Acquire) == Mode::Link {
        end_on_link(socket, &mut tx, End::Demote)
    } else if std::mem::take(&mut tx.then_link) {
        let wake = tx.producer.as_mut().map(|p| p.end(End::Demote));
        wake.and_then(Result::ok).unwrap_or(Wake::NONE)
    } else {
        return;
    };
    drop(tx);
    flush(socket);
    ready::notify_peer(socket, wake);
}
