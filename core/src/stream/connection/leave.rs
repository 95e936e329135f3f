//! The way back to TCP that the program or its peer asks for.

use std::sync::atomic::Ordering::Acquire;

use super::attempt::end_attempt;
use super::io::{ControlOf, Half, SocketIo, Task};
use super::receiving::{hand_over_rest, leave_link_at_end};
use super::resume;
use super::sending::demote_tx;
use super::streams::{ask_back, leave_link};
use crate::stats::Reason;
use crate::stream::mode::{Mode, Receiving};

/// Takes the socket back to TCP: the sending direction now, the receiving one when the peer follows this end's request.
/// During a handshake it does so as soon as the handshake has ended.
pub fn leave<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    control.leave = Some(reason);
    let stays = resume::is_staying(control);
    if control.handshake.is_some() && !stays {
        end_attempt(socket, control);
        // After this end's SWITCH the direction need not wait for the peer's.
        return demote_tx(socket);
    }
    if stays {
        control.returns = false;
        end_attempt(socket, control);
    }
    leave_link(socket, control, reason);
}

/// As [`leave`], for a new holder of the socket: bytes that the program has not read yet come through the kernel too.
/// The receiving direction is on TCP when this returns, unless a handshake is under way.
pub fn return_to_tcp<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    if control.handshake.is_some() {
        return leave(socket, control, reason);
    }
    if resume::is_staying(control) {
        control.leave = Some(reason);
        socket.set_why(reason.into());
        socket.pin();
        return resume::hand_over(socket, control);
    }
    hand_over_rest(socket);
    if !unread_returns_to_tcp(socket, control, reason) {
        // P28: the peer has left the link already, and TCP may have later bytes. A gap in the data would be worse than
        // the end of the connection.
        tracing::warn!(target: "rdmasock", slot = socket.slot(), %reason, "unread data before its end cannot follow the socket: reset");
        socket.reset();
        socket.rx_mode.go(Receiving::Abandoned);
        on_tcp_again(socket);
    }
}

/// Takes both directions back to TCP, with the bytes that were not read. No handshake is under way. Returns false if
/// the peer has left the link already: then unread bytes stay there, and the bytes after them may be in TCP.
fn unread_returns_to_tcp<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) -> bool {
    control.leave = Some(reason);
    socket.set_why(reason.into());
    socket.pin();
    demote_tx(socket);
    let (Some(opened), Some(yours)) = (control.opened.clone(), control.peer) else {
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
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), %reason, ?stopped, "goes back to TCP");
    if let Some((from, wake)) = stopped {
        socket.notify_peer(wake);
        ask_back(&opened.link, yours, Some(from));
    } else if !leave_link_at_end(socket) {
        return false;
    }
    on_tcp_again(socket);
    true
}

fn on_tcp_again<S: SocketIo>(socket: &S) {
    socket.set_path(Half::Receiving, false);
    socket.later(Task::Settle);
}

/// As [`return_to_tcp`], for the same holder: bytes that cannot come through the kernel are read where they are.
pub fn prefer_tcp<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    if control.handshake.is_some() || resume::is_staying(control) {
        leave(socket, control, reason);
    } else {
        unread_returns_to_tcp(socket, control, reason);
    }
}
