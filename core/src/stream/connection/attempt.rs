//! One attempt to promote the connection: carries out the steps of the handshake's state machine (`stream::handshake`).
//! This file also handles the peer's RESUME and the end of TCP, when they are found in TCP.
//!
//! This code runs on the service thread, and on a thread of the program whose call finds a marker.

use std::net::IpAddr;
use std::sync::atomic::Ordering::Acquire;

use crate::ids::{InstanceId, Nonce, Vqpn};
use crate::region::Region;
use crate::stats::Reason;
use crate::stream::connection::directions::{demote_tx, end_scan, flush_or_later, stop_scan, take};
use crate::stream::connection::io::{ControlOf, Half, Peeked, SocketIo, StreamLink, Task, Tcp};
use crate::stream::connection::{Control, Opened, Theirs, Then, close, close_stream, leave_link, stay};
use crate::stream::handshake::{Closing, Handshake, Misplaced, Role, Step, Steps};
use crate::stream::mode::{Mode, Move};
use crate::wire::marker::{Found, scan};
use crate::wire::{Hello, MAX_MARKER, Marker, Message};
use crate::{fabric, wire};

/// Begins an attempt of the connector, which sends ASK with the nonce `mine`. TCP is not affected yet.
pub fn begin_asking<L, O>(control: &mut Control<L, O>, mine: Nonce, between_hosts: bool) {
    begin(control, Handshake::connector(mine), between_hosts);
}

/// Begins an attempt of the acceptor. The instance `asker` has sent ASK with the nonce `theirs`, and this end answers
/// YES with the nonce `mine`. `reached_at` is the address of this host that the ASK has reached; `None` if `asker` is
/// on this host. The caller has begun to scan for markers ([`crate::stream::connection::start_scan`]).
pub fn begin_offering<L, O>(
    control: &mut Control<L, O>,
    (mine, theirs): (Nonce, Nonce),
    asker: InstanceId,
    reached_at: Option<IpAddr>,
) {
    begin(control, Handshake::acceptor(mine, theirs), reached_at.is_some());
    control.asked_by = Some(asker);
    control.reached_at = reached_at;
}

fn begin<L, O>(control: &mut Control<L, O>, mut handshake: Handshake, between_hosts: bool) {
    handshake.is_between_hosts = between_hosts;
    control.handshake = Some(handshake);
    control.hello = None;
}

/// Carries out `steps` in order. The caller holds the control lock.
fn run<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, steps: Steps) {
    for step in steps {
        tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), ?step);
        match step {
            Step::StopScan => {
                stop_scan(socket);
                stay::feed(socket, control, |r| r.on_got(Closing::Abort));
            }
            Step::WriteHello => write_hello(socket, control),
            Step::NeedLink(peer) => {
                socket.need_link(peer, control.hello.and_then(|hello| hello.link));
            }
            Step::SendOpen => {
                let offered = control.offered.take();
                if let Err(reason) = send_open(socket, control, offered) {
                    tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), %reason, "cannot open");
                    socket.set_why(reason.into());
                    if let Some((yours, _)) = offered {
                        refuse_open(socket, control, yours);
                    }
                    feed(socket, control, |h| Ok(h.on_open_failed()));
                    return;
                }
            }
            Step::Write(closing) => {
                let marker = match closing {
                    Closing::Switch => Marker::Switch,
                    Closing::Abort => Marker::Abort(wire::Reason::Cancelled),
                };
                queue_marker(socket, control, &marker);
                stay::feed(socket, control, |r| r.on_sent(closing));
            }
            Step::ReceiveOnLink => {
                receive_on_link(socket, control);
                stay::feed(socket, control, |r| r.on_got(Closing::Switch));
                // RESUME may have come together with SWITCH. Then the socket's edge-triggered event has come already,
                // and no other event will report RESUME.
                look_for_resume(socket, control);
            }
            Step::Demote => demote_tx(socket),
            Step::Return => {
                control.handshake = None;
                socket.pin();
                stay::feed(socket, control, |r| r.on_got(Closing::Abort));
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
            .hello
            .filter(|_| handshake.role == Role::Acceptor)
            .and_then(|hello| socket.offer_link(hello.instance, control.reached_at)),
    };
    queue_marker(socket, control, &Marker::Hello(hello));
}

/// Feeds the handshake's state machine. If the input is not allowed in this phase, the attempt is given up.
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

// Not inlined, to save stack: this may run on the small stack of a signal handler, and a step's locals are to take room
// only while the step runs.
#[inline(never)]
fn receive_on_link<S: SocketIo>(socket: &S, control: &ControlOf<S>) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    end_scan(socket, &mut rx);
    if !rx.aside.is_empty() {
        drop(rx);
        return close::give_back(socket, control);
    }
    if rx.consumer.is_some() {
        socket.rx_mode.go(Move::Switched);
        socket.set_path(Half::Receiving, true);
        // The peer may have put bytes into the ring before this end has set the ring's wake-up word, so it has notified
        // no thread of these bytes. This end notifies its own threads.
        socket.later(Task::Notify);
    }
}

/// Opens this end's stream and sends OPEN. With `offered`, the stream and the ring of the peer's OPEN, sends OPEN-ACK
/// instead. The error says why the connection stays on TCP.
#[inline(never)]
fn send_open<S: SocketIo>(
    socket: &S,
    control: &mut ControlOf<S>,
    offered: Option<(Vqpn, Region)>,
) -> Result<(), Reason> {
    let link = socket.link().filter(|l| l.is_alive()).ok_or(Reason::LinkFailed)?;
    let handshake = control.handshake.as_ref().ok_or(Reason::LinkFailed)?;
    let (mine, theirs) = (handshake.mine, handshake.theirs);
    if handshake.is_between_hosts {
        // P77: an end whose sending direction is shut sends no OPEN.
        if socket.tx.lock().is_none_or(|tx| tx.end.is_shut()) {
            return Err(Reason::LinkFailed);
        }
        stay::begin(socket, control, mine, theirs.ok_or(Reason::LinkFailed)?);
    }
    let fabric::Opened { vqpn, ring, consumer } = link.open(socket.slot())?;
    // This check comes after the stream is open, because the object of a link with an open stream is not reused.
    // Before, the object could have been reused for a link to another instance.
    if control.hello.map(|hello| hello.instance) != Some(link.peer()) {
        link.close(vqpn, None, Some(consumer));
        return Err(Reason::LinkFailed);
    }
    control.opened = Some(Opened {
        link: link.clone(),
        mine: vqpn,
        theirs: offered.map_or(Theirs::None, |(yours, _)| Theirs::Open(yours)),
        asked_back: false,
    });
    socket.rx.lock().ok_or(Reason::Resources)?.consumer = Some(consumer);
    let message = match offered {
        None => Message::Open {
            nonce_mine: mine,
            nonce_yours: theirs.ok_or(Reason::LinkFailed)?,
            vqpn,
            ring,
        },
        Some((yours, first)) => {
            link.pair(vqpn, yours, first);
            Message::OpenAck {
                yours,
                mine: vqpn,
                ring,
            }
        }
    };
    link.send(&message).map_err(|_| Reason::LinkFailed)?;
    if let Some(opened) = control.opened.as_mut().filter(|_| offered.is_none()) {
        opened.theirs = Theirs::Awaited;
    }
    socket.show_link(Some(&link));
    Ok(())
}

/// Refuses the peer's OPEN, which named the peer's stream `yours`.
fn refuse_open<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, yours: Vqpn) {
    if let Some(opened) = control.opened.as_mut() {
        opened.theirs = Theirs::None;
    }
    if let Some(link) = socket.link() {
        if let Some(mut tx) = socket.tx.lock() {
            tx.producer = None;
        }
        link.done_with(yours);
        let _ = link.send(&Message::OpenRefuse {
            yours,
            reason: wire::Reason::Resources,
        });
    }
}

/// Continues the attempt that has waited for `link`: the link is up.
pub fn on_link_up<S: SocketIo>(socket: &S, link: &S::Link) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    socket.set_link(Some(link));
    feed(socket, &mut control, Handshake::on_link_up);
}

/// Gives up the attempt under way, unless this end has written its closing marker already. Causes are a missing answer,
/// no link, or a call of the program that rules out a promotion. The caller holds the control lock.
pub fn end_attempt<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    feed(socket, control, |h| Ok(h.give_up()));
}

/// Appends `marker` to the pending bytes for TCP, and tries to send them.
fn queue_marker<S: SocketIo>(socket: &S, control: &ControlOf<S>, marker: &Marker) {
    let Some(reader) = control.handshake.as_ref().and_then(|h| h.theirs) else {
        return;
    };
    let mut buf = [0u8; MAX_MARKER];
    let Ok(bytes) = marker.encode(&reader, &mut buf) else {
        return;
    };
    if let Some(mut tx) = socket.tx.lock() {
        tx.marker.extend_from_slice(bytes);
        if matches!(marker, Marker::Switch) {
            tx.then = Then::Link;
        }
        socket.tx_mode.go(Move::Announced);
    }
    flush_or_later(socket);
}

/// Handles the peer's RESUME, which was found in TCP.
pub(super) fn on_resume<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, received: u64, sent: u64) {
    end_attempt(socket, control);
    let steps = control.stay.as_mut().map(|stay| stay.resume.on_resume(received, sent));
    // If `returns` is still true, this end has not made the stream leave the link. So the peer's end of the link may
    // have failed.
    if let Some(opened) = &control.opened
        && control.stay.as_ref().is_some_and(|stay| stay.returns)
    {
        opened.link.doubt();
    }
    match steps {
        Some(Ok(steps)) => stay::carry_out(socket, control, steps),
        _ => stay::violation(socket, "RESUME out of turn"),
    }
}

/// Handles the end of TCP in the peer's direction.
pub(super) fn on_end<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    feed(socket, control, |h| Ok(h.on_end()));
    if let Some(stay) = control.stay.as_mut() {
        stay.returns = false;
    }
    let rx = socket.rx.lock();
    let marked = rx.is_some_and(|rx| rx.consumer.as_ref().is_some_and(|c| c.has_mark()));
    stay::feed(socket, control, |r| r.on_end(marked));
}

/// Looks for RESUME at the front of TCP, if the receiving direction is on the link. Called when TCP has brought bytes
/// or its end. Handles RESUME if all of it has come, and the end of TCP. Other bytes at the front reset the connection.
pub fn look_for_resume<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    let stay = control.stay.as_ref().filter(|stay| stay.resume.is_next());
    let Some(mine) = stay.map(|stay| stay.mine) else {
        return;
    };
    let find = || {
        let mut rx = socket.rx.lock()?;
        if socket.rx_mode.load(Acquire) != Mode::Link || !socket.rx_inside.is_empty() {
            return None;
        }
        let tcp = socket.tcp()?;
        let mut over = false;
        loop {
            // Bytes that were read ahead come first. They remain valid even if TCP has failed since.
            let carried = rx.carry.as_slice();
            let mut bytes = carried.get(..MAX_MARKER).unwrap_or(carried).to_vec();
            let mut buf = [0u8; MAX_MARKER];
            match tcp.peek(&mut buf) {
                Peeked::Bytes(n) => bytes.extend_from_slice(buf.get(..n).unwrap_or_default()),
                Peeked::Ended => over = true,
                Peeked::Nothing | Peeked::Shut => {}
            }
            let seen = scan(&mine, &bytes);
            return match seen.what {
                _ if seen.payload > 0 => Some(Err("data in place of RESUME")),
                Found::Marker {
                    marker: Ok(Marker::Resume { received, sent }),
                    len,
                } => {
                    let _ = take(&tcp, &mut rx, len);
                    socket.count_ours(Half::Receiving, len);
                    Some(Ok(Some((received, sent))))
                }
                Found::Marker { .. } => Some(Err("another marker in place of RESUME")),
                // If TCP ends in the middle of RESUME, that counts as the end of TCP.
                Found::Payload | Found::PartialMarker { .. } if over => Some(Ok(None)),
                // The end of TCP has come, so all bytes that precede it have come too: the loop peeks once more.
                Found::PartialMarker { .. } if tcp.has_peer_ended() => {
                    over = true;
                    continue;
                }
                Found::Payload | Found::PartialMarker { .. } => None,
            };
        }
    };
    match find() {
        None => {}
        Some(Ok(Some((received, sent)))) => on_resume(socket, control, received, sent),
        Some(Ok(None)) => on_end(socket, control),
        Some(Err(what)) => stay::violation(socket, what),
    }
}
