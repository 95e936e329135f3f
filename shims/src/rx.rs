//! Receiving: from what the direction runs on into the program's buffers.

use std::ffi::c_int;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::ssize_t;
use rdmasock_core::fabric::ring::Consumer;
use rdmasock_core::stats::Path;
use rustix::net::RecvFlags;

use crate::errno;
use crate::iov::Iov;
use crate::library::Library;
use crate::link::Link;
use crate::promote::{self, Ahead};
use crate::ready;
use crate::socket::{Rx, Socket, Stage, mode};
use crate::table;
use crate::tx;
use crate::wait;

/// Flags that the link serves; any other takes the socket back to TCP.
const SERVED: c_int = libc::MSG_DONTWAIT
    | libc::MSG_NOSIGNAL
    | libc::MSG_PEEK
    | libc::MSG_WAITALL
    | libc::MSG_TRUNC
    | libc::MSG_CMSG_CLOEXEC
    | libc::MSG_WAITFORONE;

/// recv() and its kin. `real` is libc's own call with the program's arguments.
///
/// # Safety
/// The pieces of `iov` are writable.
#[inline]
pub unsafe fn recv(
    socket: &'static Socket,
    fd: c_int,
    mut iov: Iov,
    flags: c_int,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    let mut got = 0;
    if socket.rx_mode.load(Acquire) == mode::TCP && socket.enter_rx() {
        let n = real();
        if !socket.rx_was_marked() {
            socket.leave_rx();
            if n > 0 && flags & libc::MSG_PEEK == 0 {
                account(socket, n as u64);
            }
            return n;
        }
        // SAFETY: by this function's contract.
        match unsafe { scanned(socket, iov, flags, n) } {
            Break(n) => return n,
            Continue(n) => got = n,
        }
        iov.advance(got);
    }
    // SAFETY: by this function's contract.
    unsafe { recv_slow(socket, fd, iov, flags, got, real) }
}

/// Counts what TCP delivered, and begins a promotion at the threshold.
#[inline]
pub fn account(socket: &'static Socket, n: u64) {
    match socket.stats() {
        Some(stats) => stats.add_rx_tcp(n),
        None => crate::lifecycle::on_inherited(socket),
    }
    if socket.stage() == Stage::Watching {
        let library = Library::get();
        let first = !socket.progress.has_begun();
        if socket.progress.on_received(n, &library.threshold) {
            tx::worth_it(socket);
        }
        if first {
            tx::answer_if_asked(socket);
        }
    }
}

/// A scan began while the call was in the kernel: what it brought may hold markers. `Break`
/// is the result of the call; `Continue` if it has to go on because the markers have taken the place
/// of bytes for the program, with how many of those it has.
#[cold]
unsafe fn scanned(
    socket: &'static Socket,
    mut iov: Iov,
    flags: c_int,
    n: ssize_t,
) -> ControlFlow<ssize_t, usize> {
    let whole = iov.len() as ssize_t;
    let errno = errno::get();
    let peeked = flags & libc::MSG_PEEK != 0;
    let mut kept = n;
    if n > 0 && !peeked && flags & libc::MSG_TRUNC == 0 {
        // Gathers the pieces so that a marker across two of them is seen.
        let mut bytes = vec![0u8; n as usize];
        let mut from = iov;
        // SAFETY: the pieces hold the n bytes that the kernel has just written.
        unsafe {
            from.copy_to(bytes.as_mut_ptr(), n as usize);
            kept = promote::scan_taken(socket, bytes.as_mut_ptr(), n as usize) as ssize_t;
            iov.copy_from(bytes.as_ptr(), kept as usize);
        }
    }
    socket.leave_rx();
    promote::readable(socket);
    // Those who found the direction occupied meanwhile look again.
    ready::notify_local(socket);
    errno::set(errno);
    if n > 0 && peeked {
        // Peeked bytes are still there to be looked at in order.
        return Continue(0);
    }
    if kept > 0
        && let Some(stats) = socket.stats()
    {
        stats.add_rx_tcp(kept as u64);
    }
    let wants_all = flags & libc::MSG_WAITALL != 0 && n == whole;
    if kept < n && (kept == 0 || wants_all) {
        return Continue(kept as usize);
    }
    Break(kept)
}

enum Step {
    /// Look again.
    Again,
    /// The kernel's own call.
    Kernel,
    /// Nothing there.
    Empty,
    /// This many bytes came.
    Got(usize),
    /// The call fails.
    Fail(c_int),
}

unsafe fn recv_slow(
    socket: &'static Socket,
    fd: c_int,
    mut iov: Iov,
    flags: c_int,
    mut got: usize,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    crate::fork::reclaim(socket);
    if flags & !SERVED != 0 {
        tx::take_back(
            socket,
            if flags & libc::MSG_OOB != 0 {
                rdmasock_core::stats::Reason::OutOfBand
            } else {
                rdmasock_core::stats::Reason::Unsupported
            },
        );
        if flags & libc::MSG_OOB != 0 {
            return real();
        }
    }
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0;
    let whole = got + iov.len();
    let mut patience = wait::Patience::default();
    loop {
        let mode = socket.rx_mode.load(Acquire);
        // SAFETY: the pieces are writable by `recv`'s contract.
        let step = unsafe {
            match mode {
                mode::LINK => from_link(socket, fd, &mut iov, flags),
                mode::MARKED => from_marked(socket, fd, &mut iov, flags),
                _ => Step::Kernel,
            }
        };
        match step {
            Step::Again => {}
            Step::Got(0) => return got as ssize_t,
            Step::Got(n) => {
                got += n;
                if !all || got >= whole {
                    return got as ssize_t;
                }
                if peek {
                    // What is there was looked at; waiting for more would start over.
                    return got as ssize_t;
                }
            }
            Step::Fail(error) => {
                return if got > 0 {
                    got as ssize_t
                } else {
                    errno::fail(error)
                };
            }
            Step::Kernel => {
                if got > 0 {
                    // The rest of a MSG_WAITALL that began on the link.
                    // SAFETY: as above.
                    return unsafe { finish_on_tcp(socket, fd, iov, flags, got) };
                }
                if !table::still(fd, socket) {
                    return real();
                }
                if socket.lost_unread.swap(false, SeqCst) {
                    return errno::fail(libc::ECONNRESET);
                }
                if socket.enter_rx() {
                    let n = real();
                    if !socket.rx_was_marked() {
                        socket.leave_rx();
                        if n > 0 && !peek {
                            account(socket, n as u64);
                        }
                        return n;
                    }
                    // SAFETY: as above.
                    match unsafe { scanned(socket, iov, flags, n) } {
                        Break(n) => return n,
                        Continue(n) => got = n,
                    }
                    iov.advance(got);
                }
            }
            Step::Empty => {
                if flags & libc::MSG_DONTWAIT != 0 || socket.nonblocking.load(Relaxed) {
                    return if got > 0 {
                        got as ssize_t
                    } else {
                        errno::fail(libc::EAGAIN)
                    };
                }
                if let Err(error) = wait::for_data(socket, fd, &mut patience) {
                    return if got > 0 {
                        got as ssize_t
                    } else {
                        errno::fail(error)
                    };
                }
            }
        }
    }
}

/// Part of a MSG_WAITALL came over the link before the direction went back to TCP.
unsafe fn finish_on_tcp(
    socket: &'static Socket,
    fd: c_int,
    mut iov: Iov,
    flags: c_int,
    got: usize,
) -> ssize_t {
    let (to, len) = iov.head();
    if len == 0 || !socket.enter_rx() {
        return got as ssize_t;
    }
    // SAFETY: the piece is writable by the program's word.
    let n = unsafe { crate::real::recv()(fd, to.cast(), len, flags) };
    if n > 0 && socket.rx_was_marked() {
        // SAFETY: the kernel has written n bytes there.
        let kept = unsafe { promote::scan_taken(socket, to, n as usize) };
        socket.leave_rx();
        return (got + kept) as ssize_t;
    }
    socket.leave_rx();
    (got + n.max(0) as usize) as ssize_t
}

/// What the ring holds.
#[inline]
unsafe fn from_link(socket: &'static Socket, fd: c_int, iov: &mut Iov, flags: c_int) -> Step {
    let Some(mut rx) = socket.rx.lock() else {
        return Step::Fail(libc::EINTR);
    };
    if socket.rx_mode.load(Acquire) != mode::LINK {
        return Step::Again;
    }
    if !table::still(fd, socket) {
        return Step::Kernel;
    }
    // Before the look at the ring: what was sent before the end is in the ring when we see the end.
    let ended = is_over(socket);
    let Some(consumer) = rx.consumer.as_mut() else {
        return Step::Kernel;
    };
    if flags & libc::MSG_TRUNC == 0 && iov.is_implausible() && consumer.has_data().unwrap_or(true) {
        return Step::Fail(libc::EFAULT);
    }
    let discard = flags & libc::MSG_TRUNC != 0;
    let peek = flags & libc::MSG_PEEK != 0;
    let mut got = 0;
    let mut wake = rdmasock_core::fabric::ring::Wake::NONE;
    while iov.len() > 0 {
        let skip = if peek { got } else { 0 };
        let spans = if peek {
            consumer.peek(skip, iov.len())
        } else {
            consumer.spans(iov.len())
        };
        let spans = match spans {
            Ok(spans) => spans,
            Err(error) => {
                drop(rx);
                tx::violation(socket, &error);
                return Step::Fail(libc::ECONNRESET);
            }
        };
        let here = spans.len().min(iov.len());
        if here == 0 {
            break;
        }
        let mut done = 0;
        while done < here {
            let (to, n) = iov.head();
            if n == 0 {
                break;
            }
            let n = n.min(here - done);
            if !discard {
                // SAFETY: writable by the contract.
                unsafe { spans.copy_out(done, to, n) };
            }
            iov.advance(n);
            done += n;
        }
        got += done;
        if !peek {
            // At most one of the two is set: taking a word clears it.
            let w = consumer.consume(done);
            wake = if wake.is_none() { w } else { wake };
        }
    }
    if got > 0 {
        if !peek {
            if let Some(stats) = socket.stats() {
                stats.add_rx_link(got as u64);
            }
            if consumer.producer_limited() || consumer.is_switching() {
                fit_ring(socket, consumer);
            }
        }
        drop(rx);
        ready::notify_peer(socket, wake);
        return Step::Got(got);
    }
    let nothing_asked = iov.len() == 0;
    match consumer.end() {
        Ok(None) if nothing_asked && consumer.has_data().unwrap_or(true) => Step::Got(0),
        Ok(None) if socket.rx_shut.load(Acquire) => Step::Got(0),
        Ok(None) if !ended => Step::Empty,
        Ok(_) => {
            drop(rx);
            leave_link_at_end(socket);
            Step::Again
        }
        Err(error) => {
            drop(rx);
            tx::violation(socket, &error);
            Step::Fail(libc::ECONNRESET)
        }
    }
}

/// Nothing more will come over the link: the connection has ended, or the link has.
fn is_over(socket: &'static Socket) -> bool {
    // After a shutdown of our own the kernel says RDHUP whether or not the peer has ended.
    let ends = if socket.rx_shut.load(Acquire) {
        ready::ENDED & !(libc::EPOLLRDHUP as u32)
    } else {
        ready::ENDED
    };
    socket.anchor.load(Acquire) & ends != 0 || socket.link().is_none_or(|l| !l.is_alive())
}

/// What a ring grows to for a reader that keeps up: more no longer makes it faster.
const READING: u64 = 1024 * 1024;

/// Gives a sender that is limited by its window a larger ring, up to the bound; frees the old one.
#[cold]
fn fit_ring(socket: &'static Socket, consumer: &mut Consumer) {
    let Some(link) = socket.link() else { return };
    if let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
    }
    let now = consumer.ring_size();
    let max = Library::get().config.ring_max.bytes().min(READING);
    if now < max && !consumer.is_switching() {
        // In one step: until the reader has come to a new ring there cannot be a further one, and a
        // reader that stops in between (both ends may be sending) would leave the sender with that.
        offer_ring(socket, link, consumer, max);
    }
}

/// Offers a ring of `bytes`, a power of two. False if there is none.
fn offer_ring(
    socket: &'static Socket,
    link: &'static Link,
    consumer: &mut Consumer,
    bytes: u64,
) -> bool {
    let Some(region) = link.allocate(bytes.trailing_zeros() as u8) else {
        return false;
    };
    match consumer.offer(region) {
        Ok(wake) => {
            ready::notify_peer(socket, wake);
            Library::get()
                .service
                .submit(crate::service::Command::Grown);
        }
        Err(_) => link.free(region),
    }
    true
}

/// The peer has asked for attention: if that is because the ring is full and the program does not
/// read, the sender gets the largest one. In one step, since a second switch of rings would wait
/// for the reader.
pub fn relieve(socket: &'static Socket, link: &'static Link) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    let Some(consumer) = rx.consumer.as_mut() else {
        return;
    };
    if let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
    }
    let now = consumer.ring_size();
    let is_full = consumer.available().is_ok_and(|n| n > now / 4 * 3);
    if !is_full || consumer.is_switching() {
        return;
    }
    let mut bytes = Library::get().config.ring_max.bytes();
    while bytes > now && !offer_ring(socket, link, consumer, bytes) {
        bytes /= 2;
    }
}

/// The ring is drained and what follows is on the anchor: its next byte or its end. False if that
/// is not so.
pub fn leave_link_at_end(socket: &'static Socket) -> bool {
    let Some(mut rx) = socket.rx.lock() else {
        return false;
    };
    if socket.rx_mode.load(Acquire) != mode::LINK {
        return false;
    }
    let ended = is_over(socket);
    let over = match rx.consumer.as_mut() {
        None => true,
        Some(c) => match (c.has_data(), c.end()) {
            (_, Ok(Some(_))) => true,
            (Ok(false), Ok(None)) => ended,
            (Err(_), _) | (_, Err(_)) => true,
            _ => false,
        },
    };
    if !over {
        return false;
    }
    // An end without a mark: the peer's process has ended. What it has not read TCP answers with a
    // reset.
    let marked = rx
        .consumer
        .as_mut()
        .is_some_and(|c| matches!(c.end(), Ok(Some(_))));
    if !marked
        && socket.tx_mode.load(Acquire) == mode::LINK
        && socket
            .tx
            .lock()
            .is_some_and(|tx| tx.producer.as_ref().is_some_and(|p| p.is_unread()))
    {
        socket.lost_unread.store(true, SeqCst);
    }
    // A call may have brought something from TCP that comes after what the link held.
    let next = if rx.carry.is_empty() {
        mode::TCP
    } else {
        mode::MARKED
    };
    socket.rx_mode.store(next, SeqCst);
    if let Some(stats) = socket.stats() {
        stats.set_rx_path(Path::Tcp);
    }
    drop(rx);
    Library::get()
        .service
        .submit(crate::service::Command::drained(socket));
    true
}

/// What a scanning socket has in TCP.
unsafe fn from_marked(socket: &'static Socket, fd: c_int, iov: &mut Iov, flags: c_int) -> Step {
    let Some(mut control) = socket.control.lock() else {
        return Step::Fail(libc::EINTR);
    };
    let Some(rx) = socket.rx.lock() else {
        return Step::Fail(libc::EINTR);
    };
    if !table::still(fd, socket) {
        return Step::Kernel;
    }
    let Some((ahead, mut rx)) = promote::look_ahead(socket, &mut control, rx, || socket.rx.lock())
    else {
        return Step::Fail(libc::EINTR);
    };
    match ahead {
        Ahead::Changed => Step::Again,
        Ahead::Nothing => Step::Empty,
        Ahead::Ended => {
            // Only the kernel's call tells how it ended; it does not block now.
            let Some(anchor) = socket.anchor_fd() else {
                return Step::Fail(libc::EBADF);
            };
            let mut byte = [0u8; 1];
            match rustix::net::recv(anchor, &mut byte, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
                Ok((_, 0)) => {
                    rx.scan = None;
                    socket.rx_mode.store(mode::TCP, SeqCst);
                    Step::Kernel
                }
                Err(error) if error != rustix::io::Errno::AGAIN => {
                    rx.scan = None;
                    socket.rx_mode.store(mode::TCP, SeqCst);
                    Step::Fail(error.raw_os_error())
                }
                _ => Step::Again,
            }
        }
        // SAFETY: by this function's contract.
        Ahead::Payload { carry, kernel } => unsafe {
            let step = take_payload(socket, &mut rx, iov, flags, carry, kernel);
            // A marker that was behind it has had its edge at the anchor already: who waits for
            // edges would not look again.
            let _ = promote::look_ahead(socket, &mut control, rx, || socket.rx.lock());
            step
        },
    }
}

unsafe fn take_payload(
    socket: &'static Socket,
    rx: &mut Rx,
    iov: &mut Iov,
    flags: c_int,
    carry: usize,
    kernel: usize,
) -> Step {
    let peek = flags & libc::MSG_PEEK != 0;
    let discard = flags & libc::MSG_TRUNC != 0;
    let mut got = 0;
    if carry > 0 {
        let n = carry.min(iov.len()).min(rx.carry.len());
        if !discard {
            // SAFETY: the carry holds n bytes.
            unsafe { iov.copy_from(rx.carry.as_ptr(), n) };
        }
        if !peek {
            rx.carry.drain(..n);
        }
        got += n;
    }
    let Some(anchor) = socket.anchor_fd() else {
        return Step::Fail(libc::EBADF);
    };
    let mut buf = [0u8; 4096];
    let mut skip = 0;
    while got < carry + kernel && iov.len() > 0 && !(peek && skip > 0) {
        let want = (carry + kernel - got).min(iov.len()).min(buf.len());
        let Some(piece) = buf.get_mut(..want) else {
            break;
        };
        let flags = RecvFlags::DONTWAIT
            | if peek {
                RecvFlags::PEEK
            } else {
                RecvFlags::empty()
            };
        match rustix::net::recv(anchor, piece, flags) {
            Ok((_, n)) if n > 0 => {
                if discard {
                    iov.advance(n);
                } else {
                    // SAFETY: the buffer holds n bytes.
                    unsafe { iov.copy_from(buf.as_ptr(), n) };
                }
                got += n;
                skip += n;
            }
            Err(rustix::io::Errno::INTR) => {}
            _ => break,
        }
    }
    if got == 0 {
        return Step::Empty;
    }
    if !peek && let Some(stats) = socket.stats() {
        stats.add_rx_tcp(got as u64);
    }
    Step::Got(got)
}

/// Bytes that can be read now, for FIONREAD; `None` where the kernel knows.
pub fn available(socket: &'static Socket) -> Option<usize> {
    crate::fork::reclaim(socket);
    match socket.rx_mode.load(Acquire) {
        mode::LINK => {
            let mut rx = socket.rx.lock()?;
            let n = rx.consumer.as_mut()?.available().ok()?;
            drop(rx);
            (n > 0 || !leave_link_at_end(socket)).then_some(n as usize)
        }
        mode::MARKED => {
            let mut control = socket.control.lock()?;
            let rx = socket.rx.lock()?;
            match promote::look_ahead(socket, &mut control, rx, || socket.rx.lock())?.0 {
                Ahead::Payload { carry, kernel } => Some(carry + kernel),
                Ahead::Nothing => Some(0),
                Ahead::Ended | Ahead::Changed => None,
            }
        }
        _ => None,
    }
}

/// Whether bytes have come that the program has not read: then a close resets the connection.
pub fn has_unread(socket: &'static Socket) -> bool {
    socket.rx_mode.load(Acquire) == mode::LINK
        && socket
            .rx
            .lock()
            .and_then(|mut rx| rx.consumer.as_mut()?.available().ok())
            .is_some_and(|n| n > 0)
}

/// What a look at an idle direction's ring came to.
pub enum Shrunk {
    /// Its ring has its first size.
    Small,
    /// Not now.
    Busy,
    /// A smaller ring is on offer.
    Offered,
}

/// For shrinking: an idle direction's ring goes back to its first size.
pub fn shrink(socket: &'static Socket, link: &'static Link) -> Shrunk {
    let Some(mut rx) = socket.rx.lock() else {
        return Shrunk::Busy;
    };
    let Some(consumer) = rx.consumer.as_mut() else {
        return Shrunk::Small;
    };
    if let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
    }
    let min = Library::get().config.ring_min.bytes();
    if !consumer.is_switching() && consumer.ring_size() <= min {
        return Shrunk::Small;
    }
    let position = consumer.position();
    let idle = std::mem::replace(&mut rx.seen_at, position) == position;
    let Some(consumer) = rx.consumer.as_mut() else {
        return Shrunk::Small;
    };
    if !idle || consumer.is_switching() || consumer.has_data().unwrap_or(true) {
        return Shrunk::Busy;
    }
    let Some(region) = link.allocate(min.trailing_zeros() as u8) else {
        return Shrunk::Busy;
    };
    match consumer.offer(region) {
        Ok(wake) => {
            drop(rx);
            ready::notify_peer(socket, wake);
            Shrunk::Offered
        }
        Err(_) => {
            link.free(region);
            Shrunk::Busy
        }
    }
}

/// Whether a blocked receive should look again.
pub fn is_worth_a_look(socket: &'static Socket) -> bool {
    match socket.rx_mode.load(Acquire) {
        mode::LINK => {
            is_over(socket)
                || socket.rx_shut.load(Acquire)
                || socket.rx.lock().is_none_or(|mut rx| {
                    rx.consumer
                        .as_mut()
                        .is_none_or(|c| c.has_data().unwrap_or(true))
                })
        }
        mode::MARKED => promote::readable(socket) != 0,
        _ => true,
    }
}

/// splice() from a socket that is on its way back to TCP: `real` is libc's own call, for what comes
/// from there. What is on the link, or among markers, is copied to the pipe `to`, of at most `len`
/// bytes.
// Not inlined: the forced unwind of pthread_cancel runs the destructors here (see `calls`).
#[inline(never)]
pub fn splice(
    socket: &'static Socket,
    fd: c_int,
    to: c_int,
    len: usize,
    nonblocking: bool,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    crate::fork::reclaim(socket);
    loop {
        if socket.rx_mode.load(Acquire) == mode::TCP && socket.enter_rx() {
            // Should a scan begin while the call waits, its markers are in the pipe: so the socket is
            // pinned to TCP before (`splice_on`).
            let n = real();
            socket.leave_rx();
            if n > 0 {
                account(socket, n as u64);
            }
            return n;
        }
        let room = match pipe_room(to, nonblocking) {
            Ok(room) => room.min(len),
            Err(error) => return errno::fail(error),
        };
        let mut buf = vec![0u8; room];
        let flags = if nonblocking { libc::MSG_DONTWAIT } else { 0 };
        let iov = Iov::one(buf.as_mut_ptr().cast(), room);
        // SAFETY: the buffer has `room` bytes. The call is not reached: only the link and what
        // precedes a marker are read here.
        let n = unsafe { recv_slow(socket, fd, iov, flags, 0, || LEFT) };
        if n == LEFT {
            continue;
        }
        if n > 0 {
            write_all(to, buf.get(..n as usize).unwrap_or_default());
        }
        return n;
    }
}

/// In place of libc's call: the direction is on TCP.
const LEFT: ssize_t = -2;

/// How much a pipe surely takes at once: nobody writes into it between a poll and our write, or the
/// write waits.
fn pipe_room(pipe: c_int, nonblocking: bool) -> Result<usize, c_int> {
    /// One page, the unit of a pipe's room.
    const PAGE: usize = 4096;
    let mut set = libc::pollfd {
        fd: pipe,
        events: libc::POLLOUT,
        revents: 0,
    };
    let timeout = if nonblocking { 0 } else { -1 };
    use crate::real::Cancellable;
    // SAFETY: one entry.
    match unsafe { crate::real::poll().cancellable()(&raw mut set, 1, timeout) } {
        0 => Err(libc::EAGAIN),
        n if n < 0 => Err(errno::get()),
        _ => Ok(PAGE),
    }
}

/// Writes what was taken from the socket for the pipe.
fn write_all(pipe: c_int, mut bytes: &[u8]) {
    use crate::real::Cancellable;
    while !bytes.is_empty() {
        // SAFETY: the slice is readable.
        let n =
            unsafe { crate::real::write().cancellable()(pipe, bytes.as_ptr().cast(), bytes.len()) };
        match n {
            n if n > 0 => bytes = bytes.get(n as usize..).unwrap_or_default(),
            _ if errno::get() == libc::EINTR => {}
            _ if errno::get() == libc::EAGAIN => {
                let _ = pipe_room(pipe, false);
            }
            // Its reader is gone.
            _ => return,
        }
    }
}

/// shutdown() of the receiving direction: what has come can still be read, then it is at its end.
pub fn shut(socket: &'static Socket) {
    if ready::is_watched(socket) {
        socket.rx_shut.store(true, SeqCst);
        socket.anchor.fetch_or(libc::EPOLLRDHUP as u32, SeqCst);
        ready::notify_local(socket);
    }
}
