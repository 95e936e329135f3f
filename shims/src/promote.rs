//! Moving the directions of a socket between TCP and a link: carries out what the handshake's
//! state machine says (core's `stream::handshake`) and writes its markers. Finding them, the way
//! back to TCP and what a close leaves to be done are in the modules below.
//!
//! Runs on the service thread and, where a marker is met by a call of the program, on that
//! thread. Nothing here blocks. What needs an epoll set's lock or a new link is left to the
//! service thread ([`Command`]).

mod ahead;
mod aside;
mod close;
mod leave;
pub mod resume;
mod scan;

pub use ahead::{drop_unread, read_ahead};
pub use aside::{on_take_back, on_taken_back, press_on};
pub use close::{
    Awaited, Farewell, close_stream, close_tx, linger, refuse, return_unread, scan_left,
};
pub use leave::{
    end_on_link, leave, look_for_reset, prefer_tcp, resend, return_to_tcp, wait_for_tcp,
};
pub use scan::{
    Ahead, AtMark, hand_over_rest, is_scanning, look_ahead, readable, scan_taken, seen_ahead,
    start_scan, stop_scan,
};

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use rdmasock_core::fabric::ring::End;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::{Path, Reason, Why};
use rdmasock_core::stream::handshake::{Closing, Handshake, Role, Step, Steps};
use rdmasock_core::wire::{self, Capabilities, Hello, MAX_MARKER, Marker, Message};
use rustix::event::PollFlags;
use rustix::net::SendFlags;

use crate::library::Library;
use crate::link::{Link, NoProducer};
use crate::points::point;
use crate::ready;
use crate::service::Command;
use crate::socket::{Control, Mode, Opened, Receiving, Sending, Socket, Stage, Tx};

/// When a connection is tried again for the first time, ns, and how often that doubles: up to four minutes.
const RETRY_AFTER: u64 = 1_000_000_000;
const RETRY_DOUBLINGS: u32 = 8;
/// A connection that has gone so long without a failure, ns, since it might be promoted again, is as a new one.
const FORGIVEN_AFTER: u64 = 60_000_000_000;

/// Carries out steps. The caller holds the control lock.
pub fn run(socket: &'static Socket, control: &mut Control, steps: Steps) {
    let library = Library::get();
    for step in steps {
        tracing::trace!(target: "rdmasock::promote", slot = socket.slot, ?step);
        match step {
            // Done before the machine was made or fed (`start_scan`), because it can fail.
            Step::StartScan | Step::SendYes => {}
            Step::StopScan => {
                stop_scan(socket);
                resume::feed(socket, control, |r| r.on_got(Closing::Abort));
            }
            Step::WriteHello => {
                let Some(handshake) = &control.handshake else {
                    continue;
                };
                let hello = Hello {
                    instance: library.id,
                    capabilities: Capabilities::SHM
                        | Capabilities::VERBS
                        | Capabilities::TAKES_BACK,
                    link: control
                        .greeted_by
                        .filter(|_| handshake.role() == Role::Acceptor)
                        .and_then(|peer| library.service.offer_link(peer, control.reached_at)),
                };
                queue_marker(socket, control, &Marker::Hello(hello), false);
            }
            Step::NeedLink(peer) => {
                library
                    .service
                    .submit(Command::need_link(socket, peer, control.offer));
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
                resume::feed(socket, control, |r| r.on_sent(Closing::Switch));
            }
            Step::WriteAbort => {
                let abort = Marker::Abort(wire::Reason::Cancelled);
                queue_marker(socket, control, &abort, false);
                resume::feed(socket, control, |r| r.on_sent(Closing::Abort));
            }
            Step::ReceiveOnLink => {
                receive_on_link(socket, control);
                resume::feed(socket, control, |r| r.on_got(Closing::Switch));
                // RESUME may have come with it, and its edge have gone by.
                resume::look(socket, control);
            }
            Step::Demote => leave::demote_tx(socket),
            Step::Resume => {
                control.handshake = None;
                socket.set_stage(Stage::Pinned);
                resume::feed(socket, control, |r| r.on_got(Closing::Abort));
            }
            Step::Drain => {
                control.handshake = None;
                socket.set_stage(Stage::Pinned);
                library.service.submit(Command::settle(socket));
            }
            Step::Promoted => {
                control.handshake = None;
                socket.tries.store(0, Relaxed);
                set_why(socket, Reason::None);
                if !socket.shown.swap(true, Relaxed) {
                    crate::lifecycle::show_addresses(socket);
                }
                tracing::debug!(target: "rdmasock::promote", slot = socket.slot, "promoted");
                if socket.link().is_some_and(Link::is_remote)
                    && let Some(fd) = socket.anchor_fd()
                {
                    socket.keepalive.begin(fd);
                }
                if let Some(reason) = control.leave {
                    leave(socket, control, reason);
                }
                library.service.submit(Command::settle(socket));
            }
            Step::Abandoned => {
                control.handshake = None;
                close_stream(socket, control);
                if socket.stage() == Stage::Busy {
                    if control.leave.is_some() {
                        socket.set_stage(Stage::Pinned);
                    } else {
                        retry_later(socket);
                    }
                }
                library.service.submit(Command::settle(socket));
            }
        }
    }
}

/// The connection is on TCP after a failure, and may be promoted again in a while, which doubles each time.
pub fn retry_later(socket: &Socket) {
    let now = crate::time::now_ns();
    if now.saturating_sub(socket.retry_at.load(Relaxed)) > FORGIVEN_AFTER {
        socket.failures.store(0, Relaxed);
    }
    let failures = socket.failures.fetch_add(1, Relaxed).min(RETRY_DOUBLINGS);
    let after = RETRY_AFTER << failures;
    socket.retry_at.store(now + after, Relaxed);
    socket.set_stage(Stage::Watching);
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
pub fn set_why(socket: &Socket, why: impl Into<Why>) {
    if let Some(stats) = socket.stats() {
        stats.set_why(why);
    }
}

fn receive_on_link(socket: &'static Socket, control: &Control) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    rx.scan = None;
    if !rx.aside.is_empty() {
        drop(rx);
        return aside::give_back(socket, control);
    }
    if rx.consumer.is_some() {
        socket.rx_mode.go(Receiving::Switched);
        if let Some(stats) = socket.stats() {
            stats.set_rx_path(path_of(socket));
        }
        // Nobody has armed for what is in the ring already.
        Library::get().service.submit(Command::notify(socket));
    }
}

fn path_of(socket: &Socket) -> Path {
    socket.link().map_or(Path::Tcp, Link::path)
}

/// Makes our end of the stream and tells the peer.
fn send_open(socket: &'static Socket, control: &mut Control) -> Result<(), Reason> {
    let link = socket
        .link()
        .filter(|l| l.is_alive())
        .ok_or(Reason::LinkFailed)?;
    let Some((mine, theirs)) = control.handshake.as_ref().map(|h| (h.mine(), h.theirs())) else {
        return Err(Reason::LinkFailed);
    };
    if control
        .handshake
        .as_ref()
        .is_some_and(Handshake::is_between_hosts)
    {
        // P77.
        if socket.tx.lock().is_none_or(|tx| tx.is_shut) {
            return Err(Reason::LinkFailed);
        }
        resume::begin(socket, control);
    }
    let rdmasock_core::fabric::link::Opened {
        vqpn,
        ring,
        mut consumer,
    } = link.open(socket, crate::rx::first_ring(link))?;
    crate::rx::reserve(link, &mut consumer);
    // Looked at once the stream keeps the link what it is: the object may have become a link to somebody else.
    if control.greeted_by != Some(link.peer()) {
        link.close(vqpn, None, Some(consumer));
        return Err(Reason::LinkFailed);
    }
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
    if let Some(yours) = control.peer {
        link.pair(vqpn, yours);
    }
    link.send(&message, &[]).map_err(|_| Reason::LinkFailed)?;
    if let Some(opened) = control.opened.as_mut() {
        opened.asked = control.peer.is_none();
    }
    if let Some(stats) = socket.stats() {
        stats.set_link(Some(link.slot()));
    }
    Ok(())
}

/// Says that the peer's OPEN, if there was one, is not answered.
fn refuse_open(socket: &Socket, control: &mut Control) {
    if let (Some(yours), Some(link)) = (control.peer.take(), socket.link()) {
        if let Some(mut tx) = socket.tx.lock() {
            tx.producer = None;
        }
        link.done_with(yours);
        let _ = link.send(
            &Message::OpenRefuse {
                yours,
                reason: wire::Reason::Resources,
            },
            &[],
        );
    }
}

/// The peer's OPEN (or its answer to ours) has come: it receives under `vqpn`. An error if we cannot send there; then
/// nothing is done.
pub fn on_open(
    socket: &'static Socket,
    control: &mut Control,
    link: &'static Link,
    vqpn: Vqpn,
) -> Result<(), NoProducer> {
    let producer = link.producer(vqpn)?;
    control.peer = Some(vqpn);
    if let Some(opened) = control.opened.as_mut() {
        opened.asked = false;
        link.pair(opened.mine, vqpn);
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
    Ok(())
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
        tx.closing = if then_link { bytes.len() } else { 0 };
        tx.then_link |= then_link;
        socket.tx_mode.go(Sending::Announced);
    }
    if !flush(socket) {
        Library::get().service.submit(Command::flush(socket));
    }
}

/// Appends what the peer has not read on the link, behind the markers.
fn queue_again(socket: &Socket, tx: &mut Tx, bytes: &[u8]) {
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot, bytes = bytes.len(), "sends again on TCP");
    tx.marker.extend_from_slice(bytes);
    tx.again += bytes.len();
    if let Some(stats) = socket.stats() {
        stats.move_tx_to_tcp(bytes.len() as u64);
    }
}

/// Gets pending marker bytes into TCP. True when none are left: the direction's mode says what
/// it runs on then.
pub fn flush(socket: &'static Socket) -> bool {
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    if socket.tx_mode.load(Acquire) != Mode::Marked {
        return true;
    }
    // A call that blocks inside the kernel could get its bytes between two parts of a marker.
    if !socket.is_tx_quiet() {
        return false;
    }
    let Some(fd) = socket.anchor_fd() else {
        return false;
    };
    // A send into a connection that has been reset would take the error from the socket, of which the program's own calls are to tell.
    if !tx.marker.is_empty() && ready::anchor(fd, PollFlags::empty()) & libc::EPOLLERR as u32 != 0 {
        tx.marker.clear();
        tx.then_link = false;
    }
    while !tx.marker.is_empty() {
        match rustix::net::send(fd, &tx.marker, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => {
                let ours = tx.marker.len().saturating_sub(tx.again);
                socket.ledger.sent.add_ours(n.min(ours));
                tx.marker.drain(..n);
                tx.again = tx.again.min(tx.marker.len());
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return false,
            Err(error) => {
                if error == rustix::io::Errno::CONNRESET {
                    // Only now, and taken: a receive is to tell.
                    socket.lost_unread.store(true, SeqCst);
                }
                // The connection is dead: what was to be said no longer matters.
                tx.marker.clear();
                tx.then_link = false;
            }
        }
    }
    push(fd);
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot, "markers are out");
    if tx.is_suspended {
        return false;
    }
    if std::mem::take(&mut tx.then_link) && tx.producer.is_some() {
        socket.tx_mode.go(Sending::Switched);
        crate::tx::on_link(socket, &mut tx);
        if let Some(stats) = socket.stats() {
            stats.set_tx_path(path_of(socket));
        }
    } else {
        socket.tx_mode.go(Sending::Flushed);
        if tx.producer.is_some() {
            // Perhaps the last that was still to be done of a way back.
            Library::get().service.submit(Command::drained(socket));
        }
    }
    if std::mem::take(&mut tx.then_shut) {
        let mut farewell = Farewell::NONE;
        if socket.tx_mode.load(Acquire) == Mode::Link {
            farewell = Farewell::of(socket, end_on_link(socket, &mut tx, End::Fin));
        }
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
        drop(tx);
        farewell.tell();
    }
    true
}

/// Sends what the kernel has: a marker that waits for the other end's delayed acknowledgement (Nagle)
/// would stop the direction for 40 ms. TCP_NODELAY flushes when it is set, corked or not (tcp(7)).
fn push(fd: BorrowedFd<'_>) {
    use rustix::net::sockopt::{set_tcp_nodelay, tcp_nodelay};
    if tcp_nodelay(fd) == Ok(false) {
        let _ = set_tcp_nodelay(fd, true);
        point!("flush: TCP_NODELAY is on for a moment");
        let _ = set_tcp_nodelay(fd, false);
    }
}

/// Markers and connections that are reset.
#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::service::tests::without_thread;
    use crate::socket::Sending;
    use crate::table::{self, Entry};

    /// A marker that can no longer be sent does not take the error from the socket: SO_ERROR, poll and each call of the program's tell of it.
    #[test]
    fn a_marker_leaves_the_error_of_a_reset_where_it_is() {
        without_thread();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        let socket = Socket::allocate(ours.as_raw_fd(), false).unwrap();
        table::insert(ours.as_raw_fd(), Entry::Socket(socket));
        // Closed with this unread, it is reset.
        ours.write_all(b"unread").unwrap();
        drop(theirs);
        let is_reset =
            || ready::anchor(ours.as_fd(), PollFlags::empty()) & libc::EPOLLERR as u32 != 0;
        while !is_reset() {
            std::thread::yield_now();
        }
        socket
            .tx
            .lock()
            .unwrap()
            .marker
            .extend_from_slice(b"marker");
        socket.tx_mode.go(Sending::Announced);
        assert!(flush(socket));
        assert!(is_reset());
        assert_eq!(
            rustix::net::sockopt::socket_error(&ours),
            Ok(Err(rustix::io::Errno::CONNRESET))
        );
        crate::lifecycle::before_close(ours.as_raw_fd());
    }
}
