//! Moving the directions of a socket between TCP and a link: carries out what the handshake's
//! state machine says (core's `stream::handshake`), writes and finds its markers, and takes a
//! socket back to TCP.
//!
//! Runs on the service thread and, where a marker is met by a call of the program, on that
//! thread. Nothing here blocks. What needs an epoll set's lock or a new link is left to the
//! service thread ([`Command`]).

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use rdmasock_core::fabric::ring::{End, Ended, RxFlags, Stopped, Wake};
use rdmasock_core::ids::{ID_BYTES, Nonce, Vqpn};
use rdmasock_core::lock::Guard;
use rdmasock_core::stats::{Path, Reason};
use rdmasock_core::stream::handshake::{Closing, Handshake, Role, Step, Steps};
use rdmasock_core::wire::scan::{Found, scan};
use rdmasock_core::wire::{self, Capabilities, Hello, MAX_MARKER, Marker, Message};
use rustix::net::{RecvFlags, SendFlags};

use crate::library::Library;
use crate::link::Link;
use crate::ready;
use crate::service::Command;
use crate::socket::{Control, Opened, Rx, Socket, Stage, Tx, mode};

/// How far ahead of the program TCP is looked through for markers.
const PEEK: usize = 16 * 1024;

/// Begins to look for markers: what the kernel delivers from now on is scanned. False if the
/// socket is in a use that does not allow it.
pub fn start_scan(socket: &'static Socket, nonce: Nonce) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    if socket.rx_mode.load(Acquire) != mode::TCP {
        return false;
    }
    rx.scan = Some(nonce);
    rx.carry.clear();
    socket.rx_mode.store(mode::MARKED, SeqCst);
    // One call may be inside the kernel: it scans what it got when it comes back. With two there
    // would be no telling whose bytes come first.
    if socket.rx_inside.load(SeqCst) > 1 {
        rx.scan = None;
        socket.rx_mode.store(mode::TCP, SeqCst);
        return false;
    }
    true
}

/// Carries out steps. The caller holds the control lock.
pub fn run(socket: &'static Socket, control: &mut Control, steps: Steps) {
    let library = Library::get();
    for step in steps {
        tracing::trace!(target: "rdmasock::promote", slot = socket.slot, ?step);
        match step {
            // Done before the machine was made or fed (`start_scan`), because it can fail.
            Step::StartScan | Step::SendYes => {}
            Step::StopScan => stop_scan(socket),
            Step::WriteHello => {
                let Some(handshake) = &control.handshake else {
                    continue;
                };
                let hello = Hello {
                    instance: library.id,
                    capabilities: Capabilities::SHM,
                    link: control
                        .greeted_by
                        .filter(|_| handshake.role() == Role::Acceptor)
                        .and_then(|peer| library.service.offer_link(peer)),
                };
                queue_marker(socket, control, &Marker::Hello(hello), false);
            }
            Step::NeedLink(peer) => {
                library
                    .service
                    .submit(Command::need_link(socket, peer, control.offer))
            }
            Step::SendOpen => {
                if let Err(reason) = send_open(socket, control) {
                    tracing::debug!(target: "rdmasock::promote", slot = socket.slot, %reason, "cannot open");
                    set_why(socket, reason);
                    refuse_open(socket, control);
                    feed(socket, control, |h| Ok(h.on_open_failed()));
                    return;
                }
            }
            Step::WriteSwitch => {
                queue_marker(socket, control, &Marker::Switch, true);
            }
            Step::WriteAbort => queue_marker(
                socket,
                control,
                &Marker::Abort(wire::Reason::Cancelled),
                false,
            ),
            Step::ReceiveOnLink => receive_on_link(socket),
            Step::Demote => demote_tx(socket),
            Step::Drain => {
                control.handshake = None;
                socket.set_stage(Stage::Pinned);
                library.service.submit(Command::settle(socket));
            }
            Step::Promoted => {
                control.handshake = None;
                set_why(socket, Reason::None);
                if !socket.shown.swap(true, Relaxed) {
                    crate::lifecycle::show_addresses(socket);
                }
                tracing::debug!(target: "rdmasock::promote", slot = socket.slot, "promoted");
                if let Some(reason) = control.leave {
                    leave(socket, control, reason);
                }
                library.service.submit(Command::settle(socket));
            }
            Step::Abandoned => {
                control.handshake = None;
                close_stream(socket, control);
                socket
                    .retry_at
                    .store(crate::time::now_ns() + 1_000_000_000, Relaxed);
                if socket.stage() == Stage::Busy {
                    socket.set_stage(if control.leave.is_some() {
                        Stage::Pinned
                    } else {
                        Stage::Watching
                    });
                }
                library.service.submit(Command::settle(socket));
            }
        }
    }
}

/// Ends the attempt under way, if that is possible now.
pub fn give_up(control: &mut Control) -> Steps {
    control
        .handshake
        .as_mut()
        .map(Handshake::give_up)
        .unwrap_or_default()
}

/// Feeds the machine; a peer that is out of turn ends the attempt.
pub fn feed(
    socket: &'static Socket,
    control: &mut Control,
    input: impl FnOnce(&mut Handshake) -> Result<Steps, rdmasock_core::stream::handshake::Misplaced>,
) {
    let Some(handshake) = control.handshake.as_mut() else {
        return;
    };
    let steps = match input(handshake) {
        Ok(steps) => steps,
        Err(error) => {
            tracing::warn!(target: "rdmasock::promote", slot = socket.slot, %error);
            handshake.give_up()
        }
    };
    run(socket, control, steps);
}

/// Why the socket is on TCP, for `rdmasock stat`.
pub fn set_why(socket: &Socket, reason: Reason) {
    if let Some(stats) = socket.stats() {
        stats.set_why(reason);
    }
}

/// Nothing more is to be looked for in TCP.
pub fn stop_scan(socket: &'static Socket) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    rx.scan = None;
    // What a call had taken and was held back is data after all; `receive` delivers it.
    if rx.carry.is_empty() && socket.rx_mode.load(Acquire) == mode::MARKED {
        socket.rx_mode.store(mode::TCP, SeqCst);
    }
}

fn receive_on_link(socket: &'static Socket) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    rx.scan = None;
    if rx.consumer.is_some() {
        socket.rx_mode.store(mode::LINK, SeqCst);
        if let Some(stats) = socket.stats() {
            stats.set_rx_path(Path::Shm);
        }
        // Nobody has armed for what is in the ring already.
        Library::get().service.submit(Command::notify(socket));
    }
}

/// Makes our end of the stream and tells the peer.
fn send_open(socket: &'static Socket, control: &mut Control) -> Result<(), Reason> {
    let library = Library::get();
    let link = socket
        .link()
        .filter(|l| l.is_alive())
        .ok_or(Reason::LinkFailed)?;
    let Some((mine, theirs)) = control.handshake.as_ref().map(|h| (h.mine(), h.theirs())) else {
        return Err(Reason::LinkFailed);
    };
    let log2 = library.config.ring_min.bytes().trailing_zeros() as u8;
    let rdmasock_core::fabric::Opened {
        vqpn,
        ring,
        consumer,
    } = link.open(socket, log2)?;
    control.opened = Some(Opened {
        link,
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
    link.send(&message, &[]).map_err(|_| Reason::LinkFailed)?;
    if let Some(opened) = control.opened.as_mut() {
        opened.asked = control.peer.is_none();
    }
    if let Some(stats) = socket.stats() {
        stats.set_link(Some(link.slot));
    }
    Ok(())
}

/// Says that the peer's OPEN, if there was one, is not answered.
fn refuse_open(socket: &Socket, control: &mut Control) {
    if let (Some(yours), Some(link)) = (control.peer.take(), socket.link()) {
        let _ = link.send(
            &Message::OpenRefuse {
                yours,
                reason: wire::Reason::Resources,
            },
            &[],
        );
    }
}

/// The peer's OPEN (or its answer to ours) has come: it receives under `vqpn`.
pub fn on_open(socket: &'static Socket, control: &mut Control, link: &'static Link, vqpn: Vqpn) {
    let Some(producer) = link.producer(vqpn) else {
        return;
    };
    control.peer = Some(vqpn);
    if let Some(opened) = control.opened.as_mut() {
        opened.asked = false;
    }
    socket.peer_vqpn.store(vqpn.0, Release);
    socket
        .link
        .store(std::ptr::from_ref(link).cast_mut(), Release);
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = Some(producer);
    }
    feed(socket, control, Handshake::on_open);
    // Arms for those who are interested now that there is a link.
    Library::get().service.submit(Command::settle(socket));
}

/// Appends a marker to what TCP is to take, and tries to get it out.
fn queue_marker(socket: &'static Socket, control: &Control, marker: &Marker, then_link: bool) {
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
        socket.tx_mode.store(mode::MARKED, SeqCst);
    }
    if !flush(socket) {
        Library::get().service.submit(Command::flush(socket));
    }
}

/// Gets pending marker bytes into TCP. True when none are left: the direction's mode says what
/// it runs on then.
pub fn flush(socket: &'static Socket) -> bool {
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    if socket.tx_mode.load(Acquire) != mode::MARKED {
        return true;
    }
    // A call that blocks inside the kernel could get its bytes between two parts of a marker.
    if !socket.is_tx_quiet() {
        return false;
    }
    let Some(fd) = socket.anchor_fd() else {
        return false;
    };
    while !tx.marker.is_empty() {
        match rustix::net::send(fd, &tx.marker, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => {
                tx.marker.drain(..n);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return false,
            Err(_) => {
                // The connection is dead: what was to be said no longer matters.
                tx.marker.clear();
                tx.then_link = false;
            }
        }
    }
    if std::mem::take(&mut tx.then_link) && tx.producer.is_some() {
        socket.tx_mode.store(mode::LINK, SeqCst);
        if let Some(stats) = socket.stats() {
            stats.set_tx_path(Path::Shm);
        }
    } else {
        socket.tx_mode.store(mode::TCP, SeqCst);
    }
    if std::mem::take(&mut tx.then_shut) {
        if socket.tx_mode.load(Acquire) == mode::LINK {
            // Nobody is woken for the mark: the kernel's FIN does that.
            let _ = end_on_link(socket, &mut tx, End::Fin);
        }
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
    }
    true
}

/// What a look at TCP found in front.
pub enum Ahead {
    /// This many bytes of payload can be taken from the carry (first) and from the kernel.
    Payload { carry: usize, kernel: usize },
    /// Nothing now.
    Nothing,
    /// The end, or an error: the kernel's own call tells which.
    Ended,
    /// The direction no longer scans.
    Changed,
}

/// Looks at what TCP has for a scanning socket, and processes the markers at its front. The caller
/// holds `control`, and `rx` through `guard`.
pub fn look_ahead<'a>(
    socket: &'static Socket,
    control: &mut Control,
    mut guard: Guard<'a, Rx>,
    relock: impl Fn() -> Option<Guard<'a, Rx>>,
) -> Option<(Ahead, Guard<'a, Rx>)> {
    let mut buf = [0u8; MAX_MARKER + PEEK];
    let mut over = false;
    loop {
        if socket.rx_mode.load(Acquire) != mode::MARKED {
            return Some((Ahead::Changed, guard));
        }
        // A call that was in the kernel before the scan began has the first turn.
        if socket.rx_inside.load(SeqCst) > 0 {
            return Some((Ahead::Nothing, guard));
        }
        let carried = guard.carry.len().min(MAX_MARKER);
        let (front, rest) = buf.split_at_mut(carried);
        front.copy_from_slice(guard.carry.get(..carried)?);
        let Some(fd) = socket.anchor_fd() else {
            return Some((Ahead::Ended, guard));
        };
        let peeked =
            match rustix::net::recv(fd, &mut rest[..PEEK], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((_, 0)) if carried == 0 => return ended(socket, control, guard, relock),
                Ok((_, n)) => n.min(PEEK),
                Err(rustix::io::Errno::AGAIN) => 0,
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return ended(socket, control, guard, relock),
            };
        let Some(nonce) = guard.scan else {
            // No longer scanning, only the carry is left to deliver.
            if carried == 0 {
                socket.rx_mode.store(mode::TCP, SeqCst);
                return Some((Ahead::Changed, guard));
            }
            return Some((
                Ahead::Payload {
                    carry: carried,
                    kernel: 0,
                },
                guard,
            ));
        };
        let seen = scan(&nonce, buf.get(..carried + peeked)?);
        if seen.payload > 0 {
            let carry = seen.payload.min(carried);
            return Some((
                Ahead::Payload {
                    carry,
                    kernel: seen.payload - carry,
                },
                guard,
            ));
        }
        let (marker, len) = match seen.what {
            Found::Payload => return Some((Ahead::Nothing, guard)),
            // P34: if TCP ends here it will not become a marker. Looks again after having seen the
            // end, so that all that precedes it is there.
            Found::PartialMarker { have } if over => {
                if have < ID_BYTES {
                    let carry = have.min(carried);
                    return Some((
                        Ahead::Payload {
                            carry,
                            kernel: have - carry,
                        },
                        guard,
                    ));
                }
                take(&mut guard, fd, have);
                continue;
            }
            Found::PartialMarker { .. } => {
                over = ready::kernel(socket, rustix::event::PollFlags::RDHUP) & ready::ENDED != 0;
                if over {
                    continue;
                }
                return Some((Ahead::Nothing, guard));
            }
            Found::Marker { marker, len } => (Some(marker), len),
            Found::Bad { error, len } => {
                tracing::warn!(target: "rdmasock::promote", slot = socket.slot, %error, "bad marker");
                (None, len)
            }
        };
        take(&mut guard, fd, len);
        drop(guard);
        on_marker(socket, control, marker);
        guard = relock()?;
    }
}

/// TCP has ended in this direction: no marker comes any more.
fn ended<'a>(
    socket: &'static Socket,
    control: &mut Control,
    guard: Guard<'a, Rx>,
    relock: impl Fn() -> Option<Guard<'a, Rx>>,
) -> Option<(Ahead, Guard<'a, Rx>)> {
    drop(guard);
    feed(socket, control, |h| Ok(h.on_end()));
    let guard = relock()?;
    let scanning = socket.rx_mode.load(Acquire) == mode::MARKED;
    Some((
        if scanning {
            Ahead::Ended
        } else {
            Ahead::Changed
        },
        guard,
    ))
}

/// Takes `len` bytes of marker from the carry and the kernel.
fn take(rx: &mut Rx, fd: BorrowedFd<'_>, len: usize) {
    let carried = rx.carry.len().min(len);
    rx.carry.drain(..carried);
    let mut left = len - carried;
    let mut sink = [0u8; MAX_MARKER];
    while left > 0 {
        let want = left.min(MAX_MARKER);
        match sink
            .get_mut(..want)
            .map(|s| rustix::net::recv(fd, s, RecvFlags::DONTWAIT))
        {
            Some(Ok((_, n))) if n > 0 => left -= n.min(left),
            Some(Err(rustix::io::Errno::INTR)) => {}
            _ => return,
        }
    }
}

fn on_marker(socket: &'static Socket, control: &mut Control, marker: Option<Marker>) {
    match marker {
        Some(Marker::Hello(hello)) => {
            // P32: a HELLO of somebody else than the asker is not followed.
            let expected = control
                .handshake
                .as_ref()
                .is_some_and(|h| h.role() == Role::Connector);
            if !expected && control.asked_by != Some(hello.instance) {
                tracing::warn!(target: "rdmasock::promote", slot = socket.slot, peer = %hello.instance, "greeted by another than the asker");
                return feed(socket, control, |h| Ok(h.on_bad_marker()));
            }
            control.offer = hello.link;
            control.greeted_by = Some(hello.instance);
            feed(socket, control, |h| h.on_hello(hello.instance));
        }
        Some(Marker::Switch) => feed(socket, control, |h| h.on_closing(Closing::Switch)),
        Some(Marker::Abort(reason)) => {
            tracing::debug!(target: "rdmasock::promote", slot = socket.slot, %reason, "peer aborts");
            feed(socket, control, |h| h.on_closing(Closing::Abort));
        }
        None => feed(socket, control, |h| Ok(h.on_bad_marker())),
    }
}

/// Scans what a call that was inside the kernel when the scan began has brought: keeps the
/// payload at the front of `buf`, processes markers, holds back what may become one. Gives the
/// payload's length. The call is still counted in `rx_inside`.
///
/// # Safety
/// `buf` holds `len` bytes.
pub unsafe fn scan_taken(socket: &'static Socket, buf: *mut u8, len: usize) -> usize {
    let Some(mut control) = socket.control.lock() else {
        return len;
    };
    let mut kept = 0;
    let mut at = 0;
    // SAFETY: by the contract; nobody else looks at the program's buffer during the call.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buf, len) };
    while at < len {
        let Some(mut rx) = socket.rx.lock() else {
            break;
        };
        let Some(nonce) = rx.scan else {
            if socket.rx_mode.load(Acquire) == mode::LINK {
                // The direction has been to the link and back meanwhile: what it has there comes first.
                rx.carry
                    .extend_from_slice(bytes.get(at..len).unwrap_or_default());
                break;
            }
            drop(rx);
            bytes.copy_within(at..len, kept);
            kept += len - at;
            break;
        };
        let Some(rest) = bytes.get(at..len) else {
            break;
        };
        let seen = scan(&nonce, rest);
        bytes.copy_within(at..at + seen.payload, kept);
        kept += seen.payload;
        at += seen.payload;
        match seen.what {
            Found::Payload => break,
            Found::PartialMarker { have } => {
                rx.carry
                    .extend_from_slice(bytes.get(at..at + have).unwrap_or_default());
                break;
            }
            Found::Marker { marker, len: n } => {
                at += n;
                drop(rx);
                on_marker(socket, &mut control, Some(marker));
            }
            Found::Bad { len: n, .. } => {
                at = (at + n).min(len);
                drop(rx);
                on_marker(socket, &mut control, None);
            }
        }
    }
    kept
}

/// For `ready`: whether a scanning socket has payload to read (EPOLL* bits).
pub fn readable(socket: &'static Socket) -> u32 {
    let Some(mut control) = socket.control.lock() else {
        return 0;
    };
    let Some(rx) = socket.rx.lock() else { return 0 };
    let Some((ahead, rx)) = look_ahead(socket, &mut control, rx, || socket.rx.lock()) else {
        return 0;
    };
    drop(rx);
    drop(control);
    match ahead {
        Ahead::Payload { .. } => libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32,
        Ahead::Nothing => 0,
        Ahead::Ended => {
            let Some(_rx) = socket.rx.lock() else {
                return 0;
            };
            ready::kernel(
                socket,
                rustix::event::PollFlags::IN | rustix::event::PollFlags::RDHUP,
            )
        }
        Ahead::Changed => ready::evaluate(socket, libc::EPOLLIN as u32, ready::Arm::IfNotReady),
    }
}

/// Takes the socket back to TCP: our sending direction now, the other's when the peer follows our
/// request. During a handshake: as soon as that is over.
pub fn leave(socket: &'static Socket, control: &mut Control, reason: Reason) {
    control.leave = Some(reason);
    if control.handshake.is_some() {
        let steps = give_up(control);
        run(socket, control, steps);
        return;
    }
    set_why(socket, reason);
    demote_tx(socket);
    let Some(opened) = control.opened else {
        socket.set_stage(Stage::Pinned);
        return;
    };
    if socket.rx_mode.load(Acquire) == mode::LINK && !control.asked_back {
        control.asked_back = true;
        if let Some(yours) = control.peer {
            let _ = opened.link.send(
                &Message::DemoteRequest {
                    yours,
                    resend_from: None,
                },
                &[],
            );
        }
    }
    socket.set_stage(Stage::Pinned);
}

/// As [`leave`], but what the program has not read yet comes through the kernel too: for a new
/// holder of the socket. Our receiving end is on TCP when this returns, unless a handshake is under
/// way.
pub fn return_to_tcp(socket: &'static Socket, control: &mut Control, reason: Reason) {
    if control.handshake.is_some() {
        return leave(socket, control, reason);
    }
    control.leave = Some(reason);
    set_why(socket, reason);
    socket.set_stage(Stage::Pinned);
    demote_tx(socket);
    let (Some(opened), Some(yours)) = (control.opened, control.peer) else {
        return;
    };
    let (stopped, clean) = {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        let clean = rx.carry.is_empty();
        if socket.rx_mode.load(Acquire) != mode::LINK {
            return;
        }
        let Some(consumer) = rx.consumer.as_mut() else {
            return;
        };
        match consumer.stop() {
            Ok(wake) if clean => {
                socket.rx_mode.store(mode::TCP, SeqCst);
                (Some((consumer.position(), wake)), clean)
            }
            Ok(_) | Err(Ended) => (None, clean),
        }
    };
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot, %reason, ?stopped, "goes back to TCP");
    match stopped {
        Some((from, wake)) => {
            ready::notify_peer(socket, wake);
            let _ = opened.link.send(
                &Message::DemoteRequest {
                    yours,
                    resend_from: Some(from),
                },
                &[],
            );
        }
        None if clean && crate::rx::leave_link_at_end(socket) => {}
        None => {
            // P28: the peer has left the link already, and TCP may have later bytes. A gap in the
            // data would be worse than the end of the connection.
            tracing::warn!(target: "rdmasock", slot = socket.slot, %reason, "unread data before its end cannot follow the socket: reset");
            crate::socket::reset(socket);
            socket.rx_mode.store(mode::TCP, SeqCst);
        }
    }
    if let Some(stats) = socket.stats() {
        stats.set_rx_path(Path::Tcp);
    }
    Library::get().service.submit(Command::settle(socket));
}

/// The peer has stopped reading the link: what it has not read goes over TCP again.
pub fn resend(socket: &'static Socket) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    // If it has left the link meanwhile it met the peer's mark then (`end_on_link`).
    if socket.tx_mode.load(Acquire) == mode::LINK {
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
            socket.tx_mode.store(mode::TCP, SeqCst);
            wake
        }
        None => {
            socket.tx_mode.store(mode::TCP, SeqCst);
            Wake::NONE
        }
    };
    crate::tx::pass_cork(socket, tx);
    if let Some(stats) = socket.stats() {
        stats.set_tx_path(Path::Tcp);
    }
    wake
}

fn send_again(socket: &'static Socket, tx: &mut Tx) {
    match tx.producer.as_mut().map(|p| p.unread()) {
        Some(Ok(bytes)) => {
            tracing::debug!(target: "rdmasock::promote", slot = socket.slot, bytes = bytes.len(), "sends again on TCP");
            tx.marker.extend_from_slice(&bytes);
        }
        Some(Err(error)) => {
            tracing::warn!(target: "rdmasock", slot = socket.slot, %error, "cannot send again: reset");
            crate::socket::reset(socket);
        }
        None => {}
    }
    tx.then_link = false;
    socket.tx_mode.store(mode::MARKED, SeqCst);
    if let Some(stats) = socket.stats() {
        stats.set_tx_path(Path::Tcp);
    }
}

/// Moves our sending direction back to TCP: what is on the link stays there and comes first. If
/// its SWITCH is still to be written, that leads the peer to an empty link.
pub fn demote_tx(socket: &'static Socket) {
    let Some(mut tx) = socket.tx.lock() else {
        return;
    };
    let wake = if socket.tx_mode.load(Acquire) == mode::LINK {
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

/// The program has closed the socket: nobody will read what comes over the link. (Not for a
/// direction that goes back to TCP: the peer would send there before it has sent again what we
/// have not read.)
pub fn refuse(socket: &'static Socket) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    if let Some(consumer) = rx.consumer.as_mut() {
        // Nobody waits for room in a ring that has been read.
        let _ = consumer.set_flags(RxFlags::RX_CLOSED);
    }
}

/// The program closes the socket: what markers to it start with, if there may be some on their way
/// from the other end. The caller holds the control lock.
pub fn scan_left(socket: &'static Socket, control: &mut Control) -> Option<Nonce> {
    let rx = socket.rx.lock()?;
    let (ahead, rx) = look_ahead(socket, control, rx, || socket.rx.lock())?;
    match ahead {
        Ahead::Nothing => rx.scan,
        _ => None,
    }
}

/// The program closes the socket: ends the sending direction, and gives what TCP has not taken yet
/// of what has to precede its end. The caller holds the control lock.
pub fn close_tx(socket: &'static Socket) -> Vec<u8> {
    {
        let Some(mut tx) = socket.tx.lock() else {
            return Vec::new();
        };
        // Nobody is woken for the mark: the peer is told of the end when the kernel's FIN arrives.
        if socket.tx_mode.load(Acquire) == mode::LINK {
            let _ = end_on_link(socket, &mut tx, End::Fin);
        } else if std::mem::take(&mut tx.then_link)
            && let Some(producer) = tx.producer.as_mut()
        {
            let _ = producer.end(End::Fin);
        }
        tx.then_shut = false;
    }
    flush(socket);
    socket
        .tx
        .lock()
        .map(|mut tx| std::mem::take(&mut tx.marker))
        .unwrap_or_default()
}

/// The program closes the socket before all of `unsent` is in TCP, or while markers that start with
/// `nonce` may be on their way: see `service::linger`. The caller holds the control lock.
pub fn linger(socket: &'static Socket, nonce: Option<Nonce>, unsent: Vec<u8>) {
    let Some(anchor) = socket.anchor_fd() else {
        return;
    };
    // A program that asked for a reset gets it.
    let hard = rustix::net::sockopt::socket_linger(anchor)
        .is_ok_and(|l| l == Some(std::time::Duration::ZERO));
    if hard || (nonce.is_none() && unsent.is_empty()) {
        return;
    }
    if let Ok(copy) = rdmasock_core::os::privatefd::PrivateFd::duplicate(anchor) {
        if unsent.is_empty() {
            let _ = rustix::net::shutdown(&copy, rustix::net::Shutdown::Write);
        }
        Library::get()
            .service
            .submit(Command::Linger(copy, nonce, unsent));
    }
}

/// Gives our end of the stream on the link back. The directions are on TCP, or the socket is
/// being closed.
pub fn close_stream(socket: &'static Socket, control: &mut Control) {
    let consumer = socket.rx.lock().and_then(|mut rx| rx.consumer.take());
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = None;
    }
    let peer = control.peer.take();
    match control.opened.take() {
        Some(Opened {
            link,
            mine,
            asked: true,
        }) => link.close_unanswered(mine, consumer),
        Some(Opened { link, mine, .. }) => link.close(mine, peer, consumer),
        None => {}
    }
    socket.link.store(std::ptr::null_mut(), Relaxed);
    control.asked_back = false;
    if let Some(stats) = socket.stats() {
        stats.set_link(None);
    }
}
