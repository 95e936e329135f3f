//! A stay on a link between hosts: this file carries out the steps of the state machine in `stream::resume` (P70–P79),
//! and feeds it the events that make a stream leave such a link. An attempt in which this end has not written SWITCH or
//! ABORT is *not closed*, and is given up first. The file also takes a connection back to TCP from any link, if the
//! program or its peer asks for that.
//!
//! The caller of each function holds the control lock, and neither `rx` nor `tx`.

use std::sync::atomic::Ordering::Acquire;

use crate::fabric::ring::{Consumer, EndMark};
use crate::ids::Nonce;
use crate::stats::Reason;
use crate::stream::connection::attempt::{end_attempt, look_for_resume};
use crate::stream::connection::directions::{
    awaits_marker, demote_tx, end_scan, flush, flush_or_later, hand_over_rest, leave_link_at_end, queue_again,
};
use crate::stream::connection::io::{ControlOf, Half, RxOf, SocketIo, StreamLink, Task};
use crate::stream::connection::{Behind, Control, End, Then, ask_back, leave_link};
use crate::stream::mode::{Mode, Move};
use crate::stream::resume::{Resume, Step, Steps};
use crate::wire::{MAX_MARKER, Marker};

/// A stream's stay on a link between hosts: from this end's OPEN or OPEN-ACK until both directions have left the link.
#[derive(Debug)]
pub struct Stay {
    /// The state machine.
    pub resume: Resume,
    /// The nonce that RESUME to this end starts with.
    pub mine: Nonce,
    /// The nonce that RESUME to the peer starts with.
    pub theirs: Nonce,
    /// True until an event rules out another promotion. If the stay ends while this is true, a failure of the link is
    /// the cause, and the connection may be promoted again.
    pub returns: bool,
}

/// Begins the stay: this end is about to send OPEN or OPEN-ACK on a link between hosts. Markers to this end start with
/// the nonce `mine`, markers to the peer with `theirs`.
pub fn begin<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, mine: Nonce, theirs: Nonce) {
    control.stay = Some(Stay {
        resume: Resume::default(),
        mine,
        theirs,
        returns: true,
    });
    if let Some(mut rx) = socket.rx.lock() {
        rx.behind = Behind::Link;
        rx.is_lost = false;
        rx.owed = 0;
    }
}

/// Returns whether the stream has a stay on a link between hosts that has not ended.
pub fn is_staying<L, O>(control: &Control<L, O>) -> bool {
    control.stay.as_ref().is_some_and(|stay| !stay.resume.is_over())
}

/// Feeds `input` to the state machine, and carries out its steps.
pub fn feed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, input: impl FnOnce(&mut Resume) -> Steps) {
    if let Some(stay) = control.stay.as_mut() {
        let steps = input(&mut stay.resume);
        carry_out(socket, control, steps);
    }
}

/// Gives up an attempt that is not closed, then feeds `input`, which ends the stay. The connection is not promoted
/// again.
pub fn end_by<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, input: impl FnOnce(&mut Resume) -> Steps) {
    end_attempt(socket, control);
    if let Some(stay) = control.stay.as_mut() {
        stay.returns = false;
    }
    feed(socket, control, input);
}

/// Carries out `steps` in order.
pub fn carry_out<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, steps: Steps) {
    for step in steps {
        tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), ?step);
        match step {
            Step::Ask => {
                if let Some((link, yours)) = control.pair() {
                    ask_back(link, yours, None);
                }
            }
            Step::Mark => {
                let wake = socket.tx.lock().and_then(|mut tx| {
                    let wake = tx.producer.as_mut()?.end(EndMark::Fin).ok();
                    socket.on_marked(&tx);
                    wake
                });
                if let Some(wake) = wake {
                    socket.notify_peer(wake);
                }
            }
            Step::WriteResume => write_resume(socket, control),
            Step::SendFrom(from) => send_from(socket, from),
            Step::SendNothing => {
                if let Some(mut tx) = socket.tx.lock() {
                    tx.wake_delayed = false;
                    tx.then = Then::Tcp;
                    tx.marker.clear();
                    socket.tx_mode.go(Move::Abandoned);
                }
            }
            Step::ReadOn(sent) => read_on(socket, Some(sent)),
            Step::Lost => {
                // The link may have brought bytes that are not in the ring yet. The program reads them before the
                // reset, because the peer cannot send them again.
                if let Some(opened) = &control.opened {
                    opened.link.take_in();
                }
                read_on(socket, None);
            }
            Step::EndTcp => end_tcp(socket),
            Step::Done => socket.later(Task::Settle),
        }
    }
    // The service thread notifies, because a notification may take the lock of an epoll set, which must not be taken
    // under the control lock.
    socket.later(Task::Notify);
    if control.stay.as_ref().is_some_and(|stay| stay.resume.looks_ahead()) {
        socket.later(Task::ReadAhead);
    }
}

/// Resets the connection at both ends, because the peer has broken the protocol. `what` is for the log.
pub fn violation<S: SocketIo>(socket: &S, what: &str) {
    tracing::warn!(target: "rdmasock", slot = socket.slot(), what, "resumption failed: reset");
    socket.reset();
    read_on(socket, None);
}

fn write_resume<S: SocketIo>(socket: &S, control: &ControlOf<S>) {
    let Some(theirs) = control.stay.as_ref().map(|stay| stay.theirs) else {
        return;
    };
    let received = socket
        .rx
        .lock()
        .map(|mut rx| rx.consumer.as_mut().map_or(Ok(0), |c| c.freeze(u64::MAX)));
    let Some(Ok(received)) = received else {
        return violation(socket, "bad ring");
    };
    // The other host may be gone, so the time that the kernel waits for acknowledgements is bounded. The bound is left
    // out if the link holds bytes that the peer has not read: TCP carries them next, and waits for their
    // acknowledgement as long as for any data.
    let has_failed = control.opened.as_ref().is_some_and(|o| !o.link.is_alive());
    if has_failed && !is_unread(socket) {
        socket.bound_wait();
    }
    if let Some(mut tx) = socket.tx.lock() {
        let waits = tx.then.take_link();
        let on_link = socket.tx_mode.load(Acquire) == Mode::Link || waits;
        let sent = match &tx.producer {
            Some(producer) if on_link => producer.position(),
            _ => 0,
        };
        let mut buf = [0u8; MAX_MARKER];
        if let Ok(bytes) = (Marker::Resume { received, sent }).encode(&theirs, &mut buf) {
            tx.marker.extend_from_slice(bytes);
        }
        if on_link {
            tx.then = Then::Resume;
        }
        tx.wake_delayed = false;
        socket.tx_mode.go(Move::Announced);
        socket.off_link(&mut tx);
    }
    flush_or_later(socket);
}

fn send_from<S: SocketIo>(socket: &S, from: u64) {
    let rest = {
        let Some(mut tx) = socket.tx.lock() else {
            return;
        };
        socket.fill_ring(&tx);
        let rest = tx.producer.as_mut().map(|p| p.rest(from));
        let rest = rest.map(|rest| rest.and_then(|bytes| queue_again(socket, &mut tx, &bytes)));
        tx.then = Then::Tcp;
        socket.tx_mode.go(Move::Announced);
        rest
    };
    socket.set_path(Half::Sending, false);
    if let Some(Err(error)) = rest {
        violation(socket, &error.to_string());
    }
    flush_or_later(socket);
}

/// Lets reads continue in TCP once the program has read the ring. With `sent`, TCP has to bring all bytes up to that
/// position. With `None`, the program gets ECONNRESET behind the bytes of the ring.
fn read_on<S: SocketIo>(socket: &S, sent: Option<u64>) {
    {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        end_scan(socket, &mut rx);
        rx.scanned = 0;
        if rx.stays() {
            rx.behind = Behind::Tcp;
        }
        rx.is_lost |= sent.is_none();
        if socket.rx_mode.load(Acquire) == Mode::Link {
            let frozen = rx.consumer.as_mut().and_then(|c| c.freeze(u64::MAX).ok());
            rx.owed = sent.unwrap_or(0).saturating_sub(frozen.unwrap_or(0));
        } else if rx.carry.is_empty() && socket.rx_mode.load(Acquire) == Mode::Marked {
            socket.rx_mode.go(Move::Settled);
        }
    }
    leave_link_at_end(socket);
}

fn end_tcp<S: SocketIo>(socket: &S) {
    let waits = awaits_marker(socket);
    if let Some(mut tx) = socket.tx.lock() {
        if waits && socket.tx_mode.load(Acquire) == Mode::Tcp {
            socket.tx_mode.go(Move::Announced);
        }
        tx.end = End::Due;
    }
    flush(socket);
}

/// Returns whether the link holds bytes of the sending direction that the peer has not read.
fn is_unread<S: SocketIo>(socket: &S) -> bool {
    let is_unread = || Some(socket.tx.lock()?.producer.as_mut()?.used().is_ok_and(|n| n > 0));
    socket.tx_mode.load(Acquire) == Mode::Link && is_unread() == Some(true)
}

// Events that make a stream leave a link between hosts.

/// Handles a failure of this end of the link.
pub fn link_failed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    end_attempt(socket, control);
    let is_marked = is_staying(control) && is_marked(socket);
    if is_marked {
        // The peer may have received the confirmation of its mark, and closed its socket. Then the end of TCP has to be
        // handled before RESUME is written, because the peer's kernel would answer RESUME by a reset.
        look_for_resume(socket, control);
    }
    feed(socket, control, |r| r.on_link_failed(is_marked));
}

/// Returns whether all of the peer's direction has come over the link, with its end mark, so that this end may have
/// confirmed it. Freezes the ring: a mark that comes later is neither accepted nor confirmed.
fn is_marked<S: SocketIo>(socket: &S) -> bool {
    let is_whole = |c: &mut Consumer| c.freeze(u64::MAX).is_ok() && c.has_mark();
    let rx = socket.rx.lock();
    rx.is_some_and(|mut rx| rx.consumer.as_mut().is_some_and(is_whole))
}

/// Handles the peer's confirmation that it has all bytes which this end has given to the link, and the end mark.
pub fn confirmed<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    feed(socket, control, Resume::on_confirmed);
}

/// Leaves the link for a new holder of the socket, which reads the kernel alone. So the peer sends unread bytes a
/// second time, over TCP. The socket can be handed over once [`is_staying`] returns false.
fn hand_over<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    end_attempt(socket, control);
    if let Some(mut rx) = socket.rx.lock()
        && let Some(consumer) = rx.consumer.as_mut()
    {
        // An error is handled when RESUME is written, where `freeze` returns it again.
        let _ = consumer.freeze(0);
    }
    end_by(socket, control, Resume::leave_at_once);
}

/// Shuts the sending direction. Returns true if the library makes the kernel's shutdown() itself, later; false if the
/// stream is not on a link between hosts.
pub fn shut<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> bool {
    if !is_staying(control) {
        return false;
    }
    end_attempt(socket, control);
    let stays = is_staying(control);
    end_by(socket, control, Resume::shut);
    stays
}

/// Handles the program's close().
pub fn close<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    end_by(socket, control, Resume::close);
}

/// Handles the end of the process, for a stream on a link between hosts, in the same way as a close.
pub fn end<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    if is_staying(control) {
        close(socket, control);
        socket.later(Task::Settle);
    }
}

// The way back to TCP from any link.

/// Takes the socket back to TCP, in the way of `leave_link`. If a handshake is under way, the way back begins when
/// the handshake has ended.
pub fn leave<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    control.leave = Some(reason);
    let is_attempt = control.handshake.is_some() && !is_staying(control);
    end_attempt(socket, control);
    if is_attempt {
        // If this end has queued SWITCH, the sending direction goes back now, before the peer's closing marker has
        // come.
        return demote_tx(socket);
    }
    leave_link(socket, control, reason);
}

/// Takes the socket back to TCP for a new holder of the socket: as [`leave`], but the peer also sends unread bytes a
/// second time, over TCP. Within a host the receiving direction is on TCP when this returns, unless a handshake is
/// under way.
pub fn return_to_tcp<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    if control.handshake.is_some() {
        return leave(socket, control, reason);
    }
    if is_staying(control) {
        control.leave = Some(reason);
        socket.set_why(reason.into());
        socket.pin();
        return hand_over(socket, control);
    }
    hand_over_rest(socket);
    if unread_returns_to_tcp(socket, control, reason).is_err() {
        // P28: the peer has left the link already, so it cannot send the unread bytes again, and TCP may have later
        // bytes. A gap in the data would be worse than a reset.
        tracing::warn!(target: "rdmasock", slot = socket.slot(), %reason, "unread data before its end cannot follow the socket: reset");
        socket.reset();
        socket.rx_mode.go(Move::Abandoned);
        socket.set_path(Half::Receiving, false);
        socket.later(Task::Settle);
    }
}

/// Error: the peer has left the link already, so it cannot send the unread bytes of the ring again. Later bytes may be
/// in TCP.
struct PeerLeft;

/// Takes both directions back to TCP, and asks the peer to send the unread bytes of the ring a second time, over TCP.
/// No handshake is under way.
fn unread_returns_to_tcp<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) -> Result<(), PeerLeft> {
    control.leave = Some(reason);
    socket.set_why(reason.into());
    socket.pin();
    demote_tx(socket);
    let Some((link, yours)) = control.pair() else {
        return Ok(());
    };
    let stopped = {
        let is_on_link = |rx: &RxOf<S>| socket.rx_mode.load(Acquire) == Mode::Link && rx.consumer.is_some();
        let Some(mut rx) = socket.rx.lock().filter(|rx| is_on_link(rx)) else {
            return Ok(());
        };
        if !rx.carry.is_empty() {
            return Err(PeerLeft);
        }
        rx.consumer.as_mut().and_then(|consumer| {
            let wake = consumer.stop().ok()?;
            socket.rx_mode.go(Move::Left);
            Some((consumer.position(), wake))
        })
    };
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), %reason, ?stopped, "goes back to TCP");
    if let Some((from, wake)) = stopped {
        socket.notify_peer(wake);
        ask_back(link, yours, Some(from));
    } else if !leave_link_at_end(socket) {
        return Err(PeerLeft);
    }
    socket.set_path(Half::Receiving, false);
    socket.later(Task::Settle);
    Ok(())
}

/// Takes the socket back to TCP for the same holder: as [`return_to_tcp`], but if the peer cannot send unread bytes
/// again, the program reads them from the ring.
pub fn prefer_tcp<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    if control.handshake.is_some() || is_staying(control) {
        leave(socket, control, reason);
    } else {
        let _ = unread_returns_to_tcp(socket, control, reason);
    }
}
