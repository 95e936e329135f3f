//! Markers in what TCP delivers: looking for them, and handing them to the handshake.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use rdmasock_core::ids::{ID_BYTES, Nonce};
use rdmasock_core::lock::Guard;
use rdmasock_core::stream::handshake::{Closing, Role};
use rdmasock_core::wire::scan::{Found, scan};
use rdmasock_core::wire::{Capabilities, MAX_MARKER, Marker};
use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use super::feed;
use crate::library::Library;
use crate::ready;
use crate::rx::carry::Carry;
use crate::scratch::Scratch;
use crate::service::Command;
use crate::socket::{Control, Mode, Receiving, Rx, Socket};
use crate::sockopt;

/// How far ahead of the program TCP is looked through for markers.
const PEEK: usize = 16 * 1024;

/// Begins to look for markers: what the kernel delivers from now on is scanned. False if the
/// socket is in a use that does not allow it.
pub fn start_scan(socket: &'static Socket, nonce: Nonce) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    let is_plain = socket.rx_mode.load(Acquire) == Mode::Tcp;
    let Some(fd) = socket.anchor_fd() else {
        return false;
    };
    if !is_plain || sockopt::is_beyond_links(fd) {
        return false;
    }
    // They may be the listener's. That they are not is for the program's own call to say, which may be under way.
    if sockopt::get(fd, sockopt::INQ) == Some(1) {
        socket.tells_more.store(true, Relaxed);
    }
    if let Some(ms @ 1..) = sockopt::get(fd, sockopt::USER_TIMEOUT) {
        socket.user_timeout.store(ms.cast_unsigned(), Release);
    }
    rx.scan = Some(nonce);
    rx.carry = Carry::default();
    rx.aside = Vec::new();
    rx.scanned = 0;
    socket.rx_mode.go(Receiving::Expected);
    // One call may be inside the kernel: it scans what it got when it comes back. With two there
    // would be no telling whose bytes come first.
    if socket.rx_inside.load(SeqCst) > 1 {
        rx.scan = None;
        socket.rx_mode.go(Receiving::Settled);
        return false;
    }
    true
}

/// Nothing more is to be looked for in TCP.
pub fn stop_scan(socket: &'static Socket) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    rx.scan = None;
    rx.scanned = 0;
    rx.restore_aside();
    if socket.rx_mode.load(Acquire) != Mode::Marked {
        return;
    }
    if rx.carry.is_empty() && !socket.lost_unread.load(SeqCst) {
        socket.rx_mode.go(Receiving::Settled);
    } else {
        // What was held back is data after all, of which nothing in the kernel tells.
        Library::get().service.submit(Command::notify(socket));
    }
}

/// For a new holder, who reads the kernel alone: no marker comes any more, so the rest is the kernel's. What
/// was held back cannot be given back to it, and a gap in the data would be worse than the end of the
/// connection. The caller holds the control lock.
pub fn hand_over_rest(socket: &'static Socket) {
    let held_back = {
        let Some(mut rx) = socket.rx.lock() else {
            return;
        };
        let is_over = rx.scan.is_none() && rx.aside.is_empty();
        if socket.rx_mode.load(Acquire) != Mode::Marked || !is_over {
            return;
        }
        rx.owed = 0;
        if rx.consumer.is_some() {
            Library::get().service.submit(Command::drained(socket));
        }
        socket.rx_mode.go(Receiving::Settled);
        rx.carry.take().len()
    };
    if held_back > 0 {
        tracing::warn!(target: "rdmasock", slot = socket.slot, held_back, "unread data cannot follow the socket: reset");
        crate::socket::reset(socket);
    }
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

/// What becomes of urgent data in front of a marker: whoever reads behind the mark takes the urgent byte from the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AtMark {
    /// The marker waits: the program may still ask for the byte.
    Stop,
    /// The program itself reads on, or has closed the socket.
    GoOn,
    /// As `GoOn`, where what is in front is set aside for the next holder: nobody else reads before that is settled.
    HandOver,
}

/// What an earlier look has left, if that is all that the call wants.
pub fn seen_ahead(socket: &Socket, rx: &Rx, want: usize) -> Option<Ahead> {
    if rx.scanned < want || rx.scanned == 0 || socket.rx_mode.load(Acquire) != Mode::Marked {
        return None;
    }
    let carry = rx.scanned.min(rx.carry.len());
    Some(Ahead::Payload {
        carry,
        kernel: rx.scanned - carry,
    })
}

/// Looks at what TCP has for a scanning socket, and processes the markers at its front. The caller
/// holds `control`, and `rx` through `guard`.
pub fn look_ahead<'a>(
    socket: &'static Socket,
    control: &mut Control,
    mut guard: Guard<'a, Rx>,
    at_mark: AtMark,
    relock: impl Fn() -> Option<Guard<'a, Rx>>,
) -> Option<(Ahead, Guard<'a, Rx>)> {
    let mut buf = Scratch::new(MAX_MARKER + PEEK)?;
    let mut over = false;
    loop {
        if socket.rx_mode.load(Acquire) != Mode::Marked {
            return Some((Ahead::Changed, guard));
        }
        // A call that was in the kernel before the scan began has the first turn.
        let is_aside = !guard.aside.is_empty();
        let waits = is_aside && (guard.scan.is_none() || at_mark != AtMark::HandOver);
        if waits || socket.rx_inside.load(SeqCst) > 0 {
            return Some((Ahead::Nothing, guard));
        }
        let carried = guard.carry.len().min(PEEK);
        let (front, rest) = buf.split_at_mut(carried);
        front.copy_from_slice(guard.carry.as_slice().get(..carried)?);
        let Some(fd) = socket.anchor_fd() else {
            return Some((Ahead::Ended, guard));
        };
        let peeked = if guard.carry.len() > carried {
            // What TCP has is not what comes next.
            0
        } else {
            match peek(fd, rest, guard.stays) {
                Peeked::Bytes(n) => n,
                Peeked::Ended if carried == 0 => return ended(socket, control, guard, relock),
                Peeked::Shut if carried == 0 => return Some((Ahead::Ended, guard)),
                Peeked::Ended | Peeked::Shut | Peeked::Nothing => 0,
            }
        };
        let Some(nonce) = guard.scan else {
            // No longer scanning: only the carry is left to deliver, and what RESUME has announced, which is
            // counted (P78), or all that precedes the reset which we have to report.
            let resets = socket.lost_unread.load(SeqCst);
            if carried == 0 && guard.owed == 0 && !resets {
                socket.rx_mode.go(Receiving::Settled);
                if guard.consumer.is_some() {
                    // Perhaps the last that was still to be done of a way back.
                    Library::get().service.submit(Command::drained(socket));
                }
                return Some((Ahead::Changed, guard));
            }
            let owed = match usize::try_from(guard.owed) {
                Ok(owed) if !resets => owed,
                _ => usize::MAX,
            };
            let kernel = peeked.min(owed.saturating_sub(carried));
            if carried + kernel == 0 {
                return Some((Ahead::Nothing, guard));
            }
            return Some((
                Ahead::Payload {
                    carry: carried,
                    kernel,
                },
                guard,
            ));
        };
        let seen = scan(&nonce, buf.get(..carried + peeked)?);
        guard.scanned = seen.payload;
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
        if !matches!(seen.what, Found::Payload)
            && at_mark == AtMark::Stop
            && sockopt::is_at_mark(fd)
        {
            let behind = buf.get(carried..carried + peeked).unwrap_or_default();
            return Some((behind_mark(&nonce, behind), guard));
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
                let _ = take(&mut guard, fd, have);
                socket.ledger.received.add_ours(have);
                continue;
            }
            Found::PartialMarker { have } => {
                over = is_end(fd, ready::anchor(fd, PollFlags::RDHUP), guard.stays);
                if over {
                    continue;
                }
                // Not left in the kernel: a byte keeps all of the buffer that it came in, and with little
                // room TCP would close its window to what is to follow.
                let new = buf.get(carried..have).unwrap_or_default();
                let len = guard.carry.len();
                guard.carry.push(new);
                if !drop_from_kernel(fd, new.len()) {
                    guard.carry.truncate(len);
                }
                return Some((Ahead::Nothing, guard));
            }
            Found::Marker { marker, len } => (Some(marker), len),
            Found::Bad { error, len } => {
                tracing::warn!(target: "rdmasock::promote", slot = socket.slot, %error, "bad marker");
                (None, len)
            }
        };
        let _ = take(&mut guard, fd, len);
        socket.ledger.received.add_ours(len);
        drop(guard);
        on_marker(socket, control, marker);
        guard = relock()?;
    }
}

/// Whether the program has something to read behind a mark and the markers that follow that.
fn behind_mark(nonce: &Nonce, mut bytes: &[u8]) -> Ahead {
    loop {
        let seen = scan(nonce, bytes);
        if seen.payload > 0 {
            return Ahead::Payload {
                carry: 0,
                kernel: seen.payload,
            };
        }
        match seen.what {
            Found::Marker { len, .. } | Found::Bad { len, .. } if len < bytes.len() => {
                bytes = bytes.get(len..).unwrap_or_default();
            }
            _ => return Ahead::Nothing,
        }
    }
}

/// What TCP has in front.
pub(super) enum Peeked {
    Bytes(usize),
    Nothing,
    /// The end, or an error.
    Ended,
    /// Nothing, and the program has shut its receiving direction: to it this is the end, but markers may come.
    Shut,
}

/// Whether poll(2) says that no marker can come any more. On a stream that has no stay on a link between hosts an end of
/// our own counts as well: nobody there waits for RESUME.
fn is_end(fd: BorrowedFd<'_>, events: u32, stays: bool) -> bool {
    if stays {
        ready::is_peers_end(fd, events)
    } else {
        events & ready::ENDED != 0
    }
}

/// Looks without receiving where nothing is: that would take an error from the socket (`sk_err`), and SO_ERROR, poll
/// and send are to tell of it as well.
pub(super) fn peek(fd: BorrowedFd<'_>, buf: &mut [u8], stays: bool) -> Peeked {
    let mut is_over = false;
    loop {
        let is_empty = rustix::io::ioctl_fionread(fd).is_ok_and(|n| n == 0);
        if is_empty && is_over {
            return Peeked::Ended;
        }
        if is_empty {
            let events = ready::anchor(fd, PollFlags::IN | PollFlags::RDHUP);
            // All that precedes the end is there when it is: counts once more.
            is_over = is_end(fd, events, stays);
            if is_over {
                continue;
            }
            if events & ready::ENDED != 0 {
                return Peeked::Shut;
            }
            // FIONREAD leaves out what is behind urgent data.
            if events & libc::EPOLLIN as u32 == 0 {
                return Peeked::Nothing;
            }
        }
        match rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) if stays && !ready::has_peer_ended(fd) => return Peeked::Shut,
            Ok((_, 0)) => return Peeked::Ended,
            Ok((_, n)) => return Peeked::Bytes(n.min(buf.len())),
            Err(rustix::io::Errno::AGAIN) => return Peeked::Nothing,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Peeked::Ended,
        }
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
    super::resume::on_end(socket, control);
    let mut guard = relock()?;
    if std::mem::take(&mut guard.owed) > 0 {
        let is_shut = socket.tx.lock().is_none_or(|tx| tx.is_shut);
        crate::socket::report_reset(socket, is_shut);
    }
    let scanning = socket.rx_mode.load(Acquire) == Mode::Marked;
    Some((
        if scanning {
            Ahead::Ended
        } else {
            Ahead::Changed
        },
        guard,
    ))
}

/// Takes `len` bytes that were seen from the carry and the kernel. False if they are not there any more.
pub(super) fn take(rx: &mut Rx, fd: BorrowedFd<'_>, len: usize) -> bool {
    let carried = rx.carry.len().min(len);
    rx.carry.consume(carried);
    drop_from_kernel(fd, len - carried)
}

/// Takes `left` bytes that were seen in the kernel out of it. False if they are not there any more.
fn drop_from_kernel(fd: BorrowedFd<'_>, mut left: usize) -> bool {
    let mut sink = [0u8; 512];
    while left > 0 {
        let want = left.min(sink.len());
        match sink
            .get_mut(..want)
            .map(|s| rustix::net::recv(fd, s, RecvFlags::DONTWAIT))
        {
            Some(Ok((_, n))) if n > 0 => left -= n.min(left),
            Some(Err(rustix::io::Errno::INTR)) => {}
            _ => return false,
        }
    }
    true
}

fn on_marker(socket: &'static Socket, control: &mut Control, marker: Option<Marker>) {
    match marker {
        Some(Marker::Hello(hello)) => {
            // P32: a HELLO of somebody else than the asker is not followed.
            let expected = control
                .handshake
                .as_ref()
                .is_some_and(|h| h.role() == Role::Connector);
            if !expected && control.leave.is_some() {
                // The program has put the socket to a use since our YES that forbids it: ABORT is owed, and no more.
                return feed(socket, control, |h| Ok(h.on_bad_marker()));
            }
            if !expected && control.asked_by != Some(hello.instance) {
                tracing::warn!(target: "rdmasock::promote", slot = socket.slot, peer = %hello.instance, "greeted by another than the asker");
                return feed(socket, control, |h| Ok(h.on_bad_marker()));
            }
            control.offer = hello.link;
            control.takes_back = hello.capabilities.contains(Capabilities::TAKES_BACK);
            control.greeted_by = Some(hello.instance);
            feed(socket, control, |h| h.on_hello(hello.instance));
        }
        Some(Marker::Switch) => feed(socket, control, |h| h.on_closing(Closing::Switch)),
        Some(Marker::Resume { received, sent }) => {
            super::resume::on_resume(socket, control, received, sent);
        }
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
            if socket.rx_mode.load(Acquire) == Mode::Link {
                // The direction has been to the link and back meanwhile: what it has there comes first.
                rx.carry.push(bytes.get(at..len).unwrap_or_default());
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
                rx.carry.push(bytes.get(at..at + have).unwrap_or_default());
                break;
            }
            Found::Marker { marker, len: n } => {
                at += n;
                socket.ledger.received.add_ours(n);
                drop(rx);
                on_marker(socket, &mut control, Some(marker));
            }
            Found::Bad { len: n, .. } => {
                socket.ledger.received.add_ours(n.min(len - at));
                at = (at + n).min(len);
                drop(rx);
                on_marker(socket, &mut control, None);
            }
        }
    }
    kept
}

/// Whether a marker may still come in the receiving direction.
pub fn is_scanning(socket: &Socket) -> bool {
    socket.rx_mode.load(Acquire) == Mode::Marked
        && socket.rx.lock().is_some_and(|rx| rx.scan.is_some())
}

/// For `ready`: whether a scanning socket has payload to read (EPOLL* bits).
pub fn readable(socket: &'static Socket) -> u32 {
    let Some(mut control) = socket.control.lock() else {
        return 0;
    };
    let Some(rx) = socket.rx.lock() else { return 0 };
    if seen_ahead(socket, &rx, 1).is_some() {
        return libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
    }
    let Some((ahead, rx)) = look_ahead(socket, &mut control, rx, AtMark::Stop, || socket.rx.lock())
    else {
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
            ready::kernel(socket, PollFlags::IN | PollFlags::RDHUP)
        }
        Ahead::Changed => ready::evaluate(socket, libc::EPOLLIN as u32, ready::Arm::IfNotReady),
    }
}
