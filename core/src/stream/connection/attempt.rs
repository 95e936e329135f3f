//! One attempt to promote the connection: carries out what the handshake's machine says (`stream::handshake`), and what
//! the other's RESUME and the end of TCP mean for it.
//!
//! Runs on the service thread and, where a marker is met by a call of the program, on that thread.

use std::net::IpAddr;
use std::sync::atomic::Ordering::Acquire;

use super::aside;
use super::io::{ControlOf, Half, Peeked, SocketIo, StreamLink, Task, Tcp};
use super::object::{Control, Opened};
use super::receiving::{end_scan, stop_scan, take};
use super::sending::{demote_tx, flush_or_later};
use super::stay;
use super::streams::{close_stream, leave_link};
use crate::fabric::link;
use crate::ids::{InstanceId, Nonce};
use crate::stats::Reason;
use crate::stream::handshake::{Closing, Handshake, Misplaced, Role, Step, Steps};
use crate::stream::mode::{Mode, Receiving, Sending};
use crate::stream::resume::Resume;
use crate::wire::scan::{Found, scan};
use crate::wire::{self, Hello, MAX_MARKER, Marker, Message};

/// The connector asks, with the nonce `mine`. Nothing depends on it yet.
pub fn begin_asking<L, O>(control: &mut Control<L, O>, mine: Nonce, between_hosts: bool) {
    let mut handshake = Handshake::connector(mine);
    if between_hosts {
        handshake.between_hosts();
    }
    begin(control, handshake);
}

/// The acceptor says YES, with the nonce `mine`, to the ASK of `asker` with the nonce `theirs`, which has come from
/// another host if it has `reached_at` an address of ours. It looks for markers already ([`super::start_scan`]).
pub fn begin_offering<L, O>(
    control: &mut Control<L, O>,
    (mine, theirs): (Nonce, Nonce),
    asker: InstanceId,
    reached_at: Option<IpAddr>,
) {
    let (mut handshake, _steps) = Handshake::acceptor(mine, theirs);
    if reached_at.is_some() {
        handshake.between_hosts();
    }
    begin(control, handshake);
    control.asked_by = Some(asker);
    control.reached_at = reached_at;
}

fn begin<L, O>(control: &mut Control<L, O>, handshake: Handshake) {
    control.handshake = Some(handshake);
    control.greeted_by = None;
    control.offer = None;
}

/// Carries out steps. The caller holds the control lock.
fn run<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, steps: Steps) {
    for step in steps {
        tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), ?step);
        match step {
            // Done before the machine was made or fed (`start_scan`), because it can fail.
            Step::StartScan | Step::SendYes => {}
            Step::StopScan => {
                stop_scan(socket);
                stay::feed(socket, control, |r| r.on_got(Closing::Abort));
            }
            Step::WriteHello => write_hello(socket, control),
            Step::NeedLink(peer) => {
                socket.need_link(peer, control.offer);
            }
            Step::SendOpen => {
                if let Err(reason) = send_open(socket, control) {
                    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), %reason, "cannot open");
                    socket.set_why(reason.into());
                    refuse_open(socket, control);
                    feed(socket, control, |h| Ok(h.on_open_failed()));
                    return;
                }
            }
            Step::WriteSwitch => {
                queue_marker(socket, control, &Marker::Switch, true);
                stay::feed(socket, control, |r| r.on_sent(Closing::Switch));
            }
            Step::WriteAbort => {
                let abort = Marker::Abort(wire::Reason::Cancelled);
                queue_marker(socket, control, &abort, false);
                stay::feed(socket, control, |r| r.on_sent(Closing::Abort));
            }
            Step::ReceiveOnLink => {
                receive_on_link(socket, control);
                stay::feed(socket, control, |r| r.on_got(Closing::Switch));
                // RESUME may have come with it, and its edge have gone by.
                look_for_resume(socket, control);
            }
            Step::Demote => demote_tx(socket),
            Step::Resume => {
                control.handshake = None;
                socket.pin();
                stay::feed(socket, control, |r| r.on_got(Closing::Abort));
            }
            Step::Drain => {
                control.handshake = None;
                socket.pin();
                socket.later(Task::Settle);
            }
            Step::Promoted => {
                control.handshake = None;
                socket.promoted();
                tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), "promoted");
                if let Some(reason) = control.leave {
                    leave_link(socket, control, reason);
                }
                socket.later(Task::Settle);
            }
            Step::Abandoned => {
                control.handshake = None;
                close_stream(socket, control);
                socket.abandoned(control.leave.is_some());
                socket.later(Task::Settle);
            }
        }
    }
}

#[inline(never)]
fn write_hello<S: SocketIo>(socket: &S, control: &ControlOf<S>) {
    let Some(handshake) = &control.handshake else {
        return;
    };
    let hello = Hello {
        instance: socket.instance(),
        link: control
            .greeted_by
            .filter(|_| handshake.role() == Role::Acceptor)
            .and_then(|peer| socket.offer_link(peer, control.reached_at)),
    };
    queue_marker(socket, control, &Marker::Hello(hello), false);
}

/// Feeds the machine; a peer that is out of turn ends the attempt.
pub fn feed<S: SocketIo>(
    socket: &S,
    control: &mut ControlOf<S>,
    input: impl FnOnce(&mut Handshake) -> Result<Steps, Misplaced>,
) {
    let Some(handshake) = control.handshake.as_mut() else {
        return;
    };
    let steps = match input(handshake) {
        Ok(steps) => steps,
        Err(error) => {
            tracing::warn!(target: "rdmasock::promote", slot = socket.slot(), %error);
            handshake.give_up()
        }
    };
    run(socket, control, steps);
}

// Not inlined: the stack may be a handler's, and each step has room of its own then.
#[inline(never)]
fn receive_on_link<S: SocketIo>(socket: &S, control: &ControlOf<S>) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    end_scan(socket, &mut rx);
    if !rx.aside.is_empty() {
        drop(rx);
        return aside::give_back(socket, control);
    }
    if rx.consumer.is_some() {
        socket.rx_mode.go(Receiving::Switched);
        socket.set_path(Half::Receiving, true);
        // Nobody has armed for what is in the ring already.
        socket.later(Task::Notify);
    }
}

/// Makes our end of the stream and tells the peer.
#[inline(never)]
fn send_open<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) -> Result<(), Reason> {
    let link = socket.link().filter(|l| l.is_alive()).ok_or(Reason::LinkFailed)?;
    let Some((mine, theirs)) = control.handshake.as_ref().map(|h| (h.mine(), h.theirs())) else {
        return Err(Reason::LinkFailed);
    };
    if control.handshake.as_ref().is_some_and(Handshake::is_between_hosts) {
        // P77.
        if socket.tx.lock().is_none_or(|tx| tx.is_shut) {
            return Err(Reason::LinkFailed);
        }
        stay::begin(socket, control);
    }
    let link::Opened { vqpn, ring, consumer } = link.open(socket.slot())?;
    // Looked at once the stream keeps the link what it is: the object may have become a link to somebody else.
    if control.greeted_by != Some(link.peer()) {
        link.close(vqpn, None, Some(consumer));
        return Err(Reason::LinkFailed);
    }
    control.opened = Some(Opened {
        link: link.clone(),
        mine: vqpn,
        asked: false,
    });
    socket.rx.lock().ok_or(Reason::Resources)?.consumer = Some(consumer);
    let message = match control.peer {
        None => Message::Open {
            nonce_mine: mine,
            nonce_yours: theirs.ok_or(Reason::LinkFailed)?,
            vqpn,
            ring,
        },
        Some(yours) => Message::OpenAck {
            yours,
            mine: vqpn,
            ring,
        },
    };
    if let (Some(yours), Some(first)) = (control.peer, control.first.take()) {
        link.pair(vqpn, yours, first);
    }
    if !link.send(&message) {
        return Err(Reason::LinkFailed);
    }
    if let Some(opened) = control.opened.as_mut() {
        opened.asked = control.peer.is_none();
    }
    socket.show_link(Some(&link));
    Ok(())
}

/// Says that the peer's OPEN, if there was one, is not answered.
fn refuse_open<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    if let (Some(yours), Some(link)) = (control.peer.take(), socket.link()) {
        if let Some(mut tx) = socket.tx.lock() {
            tx.producer = None;
        }
        link.done_with(yours);
        link.send(&Message::OpenRefuse {
            yours,
            reason: wire::Reason::Resources,
        });
    }
}

/// The link that the attempt needs is there.
pub fn on_link_up<S: SocketIo>(socket: &S, link: &S::Link) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    socket.set_link(Some(link));
    feed(socket, &mut control, Handshake::on_link_up);
}

/// The attempt under way, if it is not closed, comes to an end: nobody has answered, there is no link for it, or the
/// program has no use for it any more. The caller holds the control lock.
pub fn end_attempt<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    let steps = control.handshake.as_mut().map(Handshake::give_up).unwrap_or_default();
    run(socket, control, steps);
}

/// Appends a marker to what TCP is to take, and tries to get it out.
fn queue_marker<S: SocketIo>(socket: &S, control: &ControlOf<S>, marker: &Marker, then_link: bool) {
    let Some(reader) = control.handshake.as_ref().and_then(Handshake::theirs) else {
        return;
    };
    let mut buf = [0u8; MAX_MARKER];
    let Ok(bytes) = marker.encode(&reader, &mut buf) else {
        return;
    };
    if let Some(mut tx) = socket.tx.lock() {
        tx.marker.extend_from_slice(bytes);
        tx.then_link |= then_link;
        socket.tx_mode.go(Sending::Announced);
    }
    flush_or_later(socket);
}

/// The other's RESUME was found in TCP.
pub fn on_resume<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, received: u64, sent: u64) {
    end_attempt(socket, control);
    let steps = control.resume.as_mut().map(|r| r.on_resume(received, sent));
    // Unasked: its end of the link has failed.
    if let Some(opened) = &control.opened
        && control.returns
    {
        opened.link.doubt();
    }
    match steps {
        Some(Ok(steps)) => stay::carry_out(socket, control, steps),
        _ => stay::violation(socket, "RESUME out of turn"),
    }
}

/// TCP has ended in the other's direction.
pub fn on_end<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    control.returns = false;
    let marked = socket
        .rx
        .lock()
        .and_then(|rx| rx.consumer.as_ref().map(|c| c.has_mark()))
        .unwrap_or(false);
    stay::feed(socket, control, |r| r.on_end(marked));
}

/// Something has come in TCP, or its end, for a direction that is on the link: RESUME, if it is
/// there as a whole.
pub fn look_for_resume<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    let next = control.resume.as_ref().is_some_and(Resume::is_next);
    let Some([mine, _]) = control.nonces.filter(|_| next) else {
        return;
    };
    let found = {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        if socket.rx_mode.load(Acquire) != Mode::Link || !socket.rx_inside.is_empty() {
            return;
        }
        let Some(tcp) = socket.tcp() else {
            return;
        };
        let mut over = false;
        loop {
            // What was read ahead comes first, and tells more than what has become of TCP since.
            let carried = rx.carry.as_slice();
            let mut bytes = carried.get(..MAX_MARKER).unwrap_or(carried).to_vec();
            let mut buf = [0u8; MAX_MARKER];
            match tcp.peek(&mut buf) {
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
                    let _ = take(&tcp, &mut rx, len);
                    socket.count_ours(Half::Receiving, len);
                    Ok(Some((received, sent)))
                }
                // A part of it, and then the end, is the end.
                Found::Payload | Found::PartialMarker { .. } if over => Ok(None),
                // Looks again after having seen the end, so that all that precedes it is there.
                Found::PartialMarker { .. } if tcp.has_peer_ended() => {
                    over = true;
                    continue;
                }
                Found::Payload | Found::PartialMarker { .. } => return,
                Found::Marker { .. } | Found::Bad { .. } => Err("another marker in place of RESUME"),
            };
        }
    };
    match found {
        Ok(Some((received, sent))) => on_resume(socket, control, received, sent),
        Ok(None) => {
            feed(socket, control, |h| Ok(Handshake::on_end(h)));
            on_end(socket, control);
        }
        Err(what) => stay::violation(socket, what),
    }
}
