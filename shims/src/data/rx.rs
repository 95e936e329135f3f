//! Receiving: moves bytes from what the direction runs on, TCP or a link, into the program's buffers. This file has the
//! call itself, the receive from a link, the pause of a reader that keeps up, and the count of the bytes that can be
//! read. [`scanning`](crate::data::scanning) receives from TCP that may hold markers.
//!
//! Words of this file:
//!
//! - *piece*: one buffer of the program. `iov` is a cursor over the pieces of a call.
//! - *to enter* and *to leave* the kernel's receive: to count the call in before, and out afterwards. A scan for
//!   markers does not read from TCP while a call is inside.
//! - *to hold* the connection: a call that has waited keeps the connection, even if the fd is closed (`notify/call`).
//! - *carry*: bytes that a scan has taken out of TCP, and that the program has not read.
//! - *landing*: the wait of a receive that has advertised its buffer, so that a device may write into it.
//! - *kept error*: an error for the program's next call, which the kernel does not report.

use std::ffi::c_int;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::ssize_t;
use rdmasock_core::cycles;
use rdmasock_core::fabric::ring::{Consumer, RingError, Wake};
use rdmasock_core::lock::Guard;
use rdmasock_core::os::thread;
use rdmasock_core::scratch;
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection::{self, Ahead, AtMark, SocketIo as _, Tcp as _};
use rdmasock_core::wire::marker::payload_in;

pub(crate) use crate::data::backpressure::{Shrunk, relieve, shrink};
use crate::data::scanning::{enter, finish_on_tcp, from_marked, go_on, is_at_mark, leave, leave_scanned, scanned};
use crate::data::stop::{self, Stop, check_place};
use crate::data::zero_copy::Landing;
use crate::data::{backpressure, tx};
use crate::notify::call::{Began, Call, Direction, Place, on_its_file};
use crate::notify::ready::{ENDED, has_peer_ended};
use crate::notify::{ready, reset, table, wait};
use crate::objects::socket::{Mode, Rx, RxOwn, Socket, Stage};
use crate::signals::jump::{cancellation_point, or_if_cancelled, quick_or_if_cancelled, within};
use crate::sys::errno;
use crate::sys::iov::{Iov, is_plausible};
use crate::sys::points::point;
use crate::sys::time::{self, wait_until};

/// The flags that a link serves. Any other flag takes the socket back to TCP.
const SERVED: c_int = libc::MSG_DONTWAIT
    | libc::MSG_NOSIGNAL
    | libc::MSG_PEEK
    | libc::MSG_WAITALL
    | libc::MSG_TRUNC
    | libc::MSG_CMSG_CLOEXEC
    | libc::MSG_WAITFORONE;

/// The flags with which a receive can go the short way ([`quick`]).
const QUICK: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_WAITALL | libc::MSG_CMSG_CLOEXEC;

/// How long a reader that keeps up with a writer of small messages pauses before it looks for data again, in
/// [cycles](rdmasock_core::cycles): 100 to 500 ns. That is longer than several cache misses, and shorter than any
/// wake-up.
const REST: u64 = 512;

/// The outcome of one attempt of a receive.
pub(crate) enum RecvStep {
    /// Try again.
    Again,
    /// Only the kernel can serve the receive: make its call.
    Kernel,
    /// There is nothing to receive now.
    Empty,
    /// The call has advertised its buffer to a device ([`Landing`]). It has to withdraw the buffer before it continues.
    Leave,
    /// The attempt has received this many bytes. If the second value is true, more may be in TCP or on the link.
    Got(usize, bool),
}

/// Serves recv() and its kin. `real(fd)` is libc's own call with the program's other arguments. Returns what recv(2)
/// returns, and sets errno as recv(2) does.
///
/// # Safety
/// The pieces of `iov` are writable.
#[inline(always)]
pub(crate) unsafe fn recv(
    socket: &'static Socket,
    fd: c_int,
    iov: &mut Iov,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    if let Some((to, want)) = iov.only()
        // SAFETY: the piece is writable by this function's contract.
        && let n @ 1.. = unsafe { quick(socket, fd, to, want, flags) }
    {
        return n as ssize_t;
    }
    // SAFETY: by this function's contract.
    unsafe { recv_unless_quick(socket, fd, iov, flags, real) }
}

/// Receives at most `want` bytes from a link by the short way, which is no more than a copy. Returns the number of
/// bytes. If one of these conditions does not hold, returns 0, and does nothing else but a short pause if one is due
/// ([rest]):
///
/// - no other thread holds the direction's lock, and no receive waits for a direct transfer;
/// - the fd was checked at this tick of the clock;
/// - the bytes lie in one span of the ring, and fill the buffer or are all that have come;
/// - the thread was not cancelled, and `flags` allow it.
///
/// # Safety
/// `to` is writable for `want` bytes.
#[inline]
unsafe fn quick(socket: &'static Socket, fd: c_int, to: *mut u8, want: usize, flags: c_int) -> usize {
    if socket.rx_mode.load(Relaxed) != Mode::Link {
        return 0;
    }
    rest(socket, flags);
    if flags & !QUICK != 0 || !is_plausible(to) || thread::current().is_cancelled() {
        return 0;
    }
    let Some(mut guard) = socket.rx.try_lock() else {
        return 0;
    };
    let rx = &mut *guard;
    if socket.rx_mode.load(Acquire) != Mode::Link || !table::still(fd, socket) || !rx.own.seen.is_at(fd, time::tick()) {
        return 0;
    }
    let Some(consumer) = rx.consumer.as_mut() else {
        return 0;
    };
    let [(_, first), _] = match consumer.spans(want) {
        Ok(spans) => spans.pieces(),
        Err(_) => return 0,
    };
    let n = first.min(want);
    // `is_waiting` is read only after the ring's tail, for the reason given in `from_link`.
    if n == 0 || rx.own.direct.is_waiting {
        return 0;
    }
    if n < want && (consumer.known() > n as u64 || flags & libc::MSG_WAITALL != 0 || rx.goes_on_in_tcp()) {
        return 0;
    }
    let stays = rx.stays();
    let Some(consumer) = rx.consumer.as_mut() else {
        return 0;
    };
    let n = match consumer.spans(n) {
        // SAFETY: `to` is writable for `want` bytes by this function's contract.
        Ok(spans) => unsafe { spans.copy_out(0, to, n) },
        Err(_) => return 0,
    };
    let wake = consumer.consume(n);
    on_read(socket, stays, consumer, &mut rx.own, n);
    let section = guard.unlock();
    ready::notify_peer(socket, wake);
    drop(section);
    n
}

/// Does what [`recv`] does, if the short way is not possible.
///
/// # Safety
/// The pieces of `iov` are writable.
#[inline(never)]
unsafe fn recv_unless_quick(
    socket: &'static Socket,
    fd: c_int,
    iov: &mut Iov,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    let began = Began::now(socket, fd);
    let handlers = thread::current().handlers_at_call();
    let mut taken = None;
    if socket.rx_mode.load(Acquire) == Mode::Tcp {
        if socket.promotion.stage() == Stage::Plain {
            let n = real(fd);
            if n > 0 && flags & libc::MSG_PEEK == 0 && began.is_named() {
                socket.told.count(|stats| stats.rx.add_tcp(n as u64));
            }
            return n;
        }
        if enter(socket) {
            if began.is_named() {
                // SAFETY: the pieces of `iov` are writable by this function's contract.
                match unsafe { plain(socket, fd, iov, flags, real) } {
                    Break(n) => return n,
                    Continue(n) => taken = Some(n),
                }
            } else {
                leave(socket);
            }
        }
    }
    // SAFETY: the pieces of `iov` are writable by this function's contract.
    unsafe { recv_slow(began, iov, flags, (taken, handlers), real) }
}

/// Makes the kernel's call on a direction that is on TCP and was not scanned when the caller entered it (`enter`).
/// Returns `Break` with the call's result, and leaves the kernel's receive.
///
/// Returns `Continue` if the call has to go on: a scan has begun during the call, and the call has peeked, or markers
/// were removed from the program's buffer. The value is the number of bytes that the program has. The call is still
/// counted as inside the kernel's receive, until the caller leaves by [`go_on`].
///
/// # Safety
/// The pieces of `iov` are writable.
#[inline]
unsafe fn plain(
    socket: &'static Socket,
    fd: c_int,
    iov: &mut Iov,
    flags: c_int,
    real: &impl Fn(c_int) -> ssize_t,
) -> ControlFlow<ssize_t, usize> {
    point!("receive: is about to sleep in the kernel");
    let n = if wait::is_quick(socket, flags) {
        quick_or_if_cancelled(|| real(fd), || leave(socket))
    } else {
        or_if_cancelled(|| real(fd), || leave(socket))
    };
    point!("receive: is awake");
    if socket.rx_was_marked() {
        // SAFETY: the pieces of `iov` are writable by this function's contract.
        let went = unsafe { scanned(socket, iov, flags, n) };
        if went.is_break() {
            leave_scanned(socket);
        }
        return went;
    }
    if n > 0 && flags & libc::MSG_PEEK == 0 {
        account(socket, n as u64);
    } else if n == 0 || n < 0 && socket.has_untold() {
        let n = at_end(socket, n);
        leave(socket);
        return Break(n);
    }
    leave(socket);
    Break(n)
}

/// Returns the result of a receive for which the kernel has returned 0 or -1. If there is a kept error, the receive
/// fails with it in place of the end.
#[cold]
fn at_end(socket: &'static Socket, n: ssize_t) -> ssize_t {
    if n == 0 {
        // A thread that sends a marker may have taken the error from the TCP socket. The kernel then returns 0 in place
        // of the error. That thread keeps the error under this lock, so the error can be seen once the lock is free.
        drop(socket.tx.lock());
        return reset::take_untold(socket).map_or(0, errno::fail);
    }
    if reset::is_end(errno::get()) {
        // The kernel has just reported this error, so the kept copy must not be reported again.
        socket.take_untold();
    }
    n
}

/// Counts `n` bytes that TCP has delivered, and begins a promotion at the threshold.
#[inline]
pub(crate) fn account(socket: &'static Socket, n: u64) {
    socket.told.count(|stats| stats.rx.add_tcp(n));
    tx::advance(socket, |progress, threshold| progress.on_received(n, threshold));
}

/// Serves a receive on a direction that is not on plain TCP, or in which markers have come. `taken` is `Some(n)` if the
/// call has got `n` bytes from the kernel's receive, and is still counted as inside it ([`plain`]). `handlers` is the
/// thread's count of signal handlers when the call began.
// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
pub(super) unsafe fn recv_slow(
    began: Began,
    iov: &mut Iov,
    flags: c_int,
    (taken, handlers): (Option<usize>, u32),
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    cancellation_point();
    let mut patience = wait::Patience::since(handlers);
    let mut call = Call::new(began, Direction::Receive);
    let socket = call.socket;
    if taken.is_some() {
        go_on(&mut call);
    }
    let mut got = taken.unwrap_or(0);
    crate::notify::fork::reclaim(socket);
    if flags & !SERVED != 0 {
        let reason = if flags & libc::MSG_OOB != 0 {
            Reason::OutOfBand
        } else {
            Reason::Unsupported
        };
        within(|| tx::take_back(socket, reason));
        if flags & libc::MSG_OOB != 0 {
            return real(call.fd);
        }
    }
    let mut landing = None;
    // SAFETY: the pieces of `iov` are writable by this function's contract.
    let went = unsafe { recv_loop(&mut call, iov, flags, &mut got, real, (&mut landing, &mut patience)) };
    if let Err(Stop::Failed(error)) = went
        && got > 0
        && call.hold_now() == Place::Here
    {
        // The error is not kept if another thread has closed the socket meanwhile. Its object may stand for another
        // connection by now.
        reset::keep(socket, error);
    }
    let result = Stop::result(went, &call, got);
    match landing.map_or(0, Landing::leave) {
        0 => result.unwrap_or_else(|| {
            let fd = call.fd;
            drop(call);
            match table::socket(fd) {
                // SAFETY: the pieces of `iov` are writable by this function's contract.
                Some(socket) => unsafe { recv(socket, fd, iov, flags, real) },
                None => real(fd),
            }
        }),
        // Before the advert was withdrawn, a device has put `landed` bytes into the buffer. They are added to the bytes
        // that the call had moved before. If the call was to fail, its error is kept for the next call instead.
        landed => {
            if result == Some(-1) {
                reset::keep(socket, errno::get());
            }
            (result.unwrap_or(0).max(0) as usize + landed) as ssize_t
        }
    }
}

/// Receives and waits until the call has enough bytes. `got` counts them.
///
/// # Safety
/// The pieces of `iov` are writable.
#[inline]
unsafe fn recv_loop(
    call: &mut Call,
    iov: &mut Iov,
    flags: c_int,
    got: &mut usize,
    real: &impl Fn(c_int) -> ssize_t,
    (landing, patience): (&mut Option<Landing>, &mut wait::Patience),
) -> Result<(), Stop> {
    let socket = call.socket;
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0;
    let whole = *got + iov.len();
    let mut has_returned = false;
    loop {
        let mode = socket.rx_mode.load(Acquire);
        // SAFETY: the pieces are writable by `recv`'s contract.
        let step = unsafe {
            match mode {
                Mode::Link => from_link(call, iov, flags, landing)?,
                _ if landing.is_some() => RecvStep::Leave,
                Mode::Marked => within(|| from_marked(call, iov, flags, *got > 0 && !all))?,
                _ => RecvStep::Kernel,
            }
        };
        match step {
            RecvStep::Again => {}
            RecvStep::Got(0, _) => return Ok(()),
            // An edge-triggered reader takes a short read for the end of the available bytes (epoll(7), question 9). So
            // the call checks for more, without waiting. A peek does not: it has seen all that is available, and would
            // return the same bytes again.
            RecvStep::Got(n, part) => {
                *got += n;
                let more = all || part;
                if !more || *got >= whole || peek || part && is_at_mark(socket) {
                    return Ok(());
                }
            }
            RecvStep::Kernel if *got > 0 => {
                // All bytes of a call belong to one connection. So the call ends if its fd stands for another file by
                // now.
                if call.hold_now() != Place::Here {
                    return Ok(());
                }
                let flags = if all { flags } else { flags | libc::MSG_DONTWAIT };
                let (before, errno) = (*got, errno::get());
                // Receives the rest of a read whose first bytes came from the link or from among markers.
                // SAFETY: the pieces of `iov` are writable by this function's contract.
                let rest = on_its_file(call, |fd| unsafe { finish_on_tcp(socket, iov, fd, flags) });
                *got += rest.unwrap_or(0);
                // The receive may have found no more bytes and set EAGAIN, but the call has not failed.
                errno::set(errno);
                if *got == before || *got >= whole || socket.rx_mode.load(Acquire) == Mode::Tcp {
                    return Ok(());
                }
            }
            RecvStep::Kernel => {
                if !call.is_held() && !call.is_named() {
                    return Err(Stop::Anew);
                }
                if let Some(error) = reset::take_untold(socket) {
                    return Err(error.into());
                }
                if enter(socket) {
                    let real = |fd| stop::unless_interrupted(call.is_held(), patience, || real(fd));
                    // SAFETY: the pieces of `iov` are writable by `recv`'s contract.
                    match on_its_file(call, |fd| unsafe { plain(socket, fd, iov, flags, &real) }) {
                        Some(Break(n)) => {
                            if let Some(n) = stop::moved::<Data>(call, patience, n)? {
                                *got = n;
                                return Ok(());
                            }
                        }
                        Some(Continue(n)) => {
                            go_on(call);
                            *got = n;
                        }
                        None => {
                            leave(socket);
                            return Err(Stop::Failed(libc::EBADF));
                        }
                    }
                }
            }
            RecvStep::Leave => {
                let landed = landing.take().map_or(0, Landing::leave);
                iov.advance(landed);
                *got += landed;
                if landed > 0 && (!all || *got >= whole) {
                    return Ok(());
                }
            }
            RecvStep::Empty if *got > 0 && !all => return Ok(()),
            RecvStep::Empty => {
                if let Err(error) = wait::may_wait(socket, flags) {
                    // No hook has seen the program ask for readiness. If it asks by system calls of its own, it waits
                    // for the TCP socket alone, and nothing would wake it for bytes on the link.
                    if socket.blocking.is_polled_unseen() && *got == 0 && !std::mem::replace(&mut has_returned, true) {
                        within(|| return_to_tcp(socket, Reason::UnknownEpoll));
                        continue;
                    }
                    return Err(error.into());
                }
                stop::hold(call)?;
                if landing.is_none() && !peek && flags & libc::MSG_TRUNC == 0 {
                    *landing = Landing::new(socket, iov);
                }
                call.is_fresh = stop::wait::<Data>(call, patience, *got)?;
            }
        }
    }
}

/// Pauses a receive with these `flags` before its check for data, if a pause is due
/// ([`Pace`](crate::objects::socket::Pace)) and the call may wait.
#[inline]
fn rest(socket: &Socket, flags: c_int) {
    if socket.wakes.rx_rests.load(Relaxed)
        && socket.rx_mode.load(Relaxed) == Mode::Link
        && wait::may_wait(socket, flags).is_ok()
    {
        rest_now();
    }
}

#[inline(never)]
fn rest_now() {
    let start = cycles::now();
    while cycles::now().wrapping_sub(start) < REST {
        std::hint::spin_loop();
    }
}

/// Receives bytes from the ring, or bytes that a device has put into the buffer of a waiting receive.
#[inline]
unsafe fn from_link(
    call: &mut Call,
    iov: &mut Iov,
    flags: c_int,
    landing: &mut Option<Landing>,
) -> Result<RecvStep, Stop> {
    let socket = call.socket;
    let mut rx = socket.rx.lock().ok_or(libc::EINTR)?;
    if socket.rx_mode.load(Acquire) != Mode::Link {
        return Ok(RecvStep::Again);
    }
    check_place(call.place_by_name())?;
    // `ended` is read before the ring: when the end is seen, all bytes that precede it are in the ring.
    let ended = connection::is_over(socket, &rx);
    let rx_stays = rx.stays();
    let state = &mut *rx;
    let Some(consumer) = state.consumer.as_mut() else {
        return Ok(RecvStep::Kernel);
    };
    if flags & libc::MSG_TRUNC == 0 && iov.is_implausible() && consumer.has_data().unwrap_or(true) {
        return Err(Stop::Failed(libc::EFAULT));
    }
    let discard = flags & libc::MSG_TRUNC != 0;
    let peek = flags & libc::MSG_PEEK != 0;
    let mut got = 0;
    let mut wake = Wake::NONE;
    while iov.len() > 0 {
        let spans = if peek {
            consumer.peek(got, iov.len())
        } else {
            consumer.spans(iov.len())
        };
        let spans = match spans {
            Ok(spans) => spans,
            Err(error) => return Err(broken(rx, socket, &error)),
        };
        let here = spans.len().min(iov.len());
        if here == 0 {
            break;
        }
        // `is_waiting` is read only after the ring's tail: if a receive waits for a direct transfer, bytes before the
        // tail may lie in the buffer of the waiting receive, and not in the ring.
        if state.own.direct.is_waiting {
            return Ok(from_buffer(rx, iov, landing));
        }
        if got == 0 {
            check_place(call.place_by_kernel(&state.own.seen))?;
        }
        // SAFETY: the pieces are writable by `recv`'s contract.
        let done = iov.walk(here, |to, done, n| unsafe {
            if !discard {
                spans.copy_out(done, to, n);
            }
        });
        got += done;
        if !peek {
            // At most one round of this loop gets a wake-up, because taking the wake-up word clears it.
            let w = consumer.consume(done);
            wake = if wake.is_none() { w } else { wake };
            // The ring's tail is read once a call. A second read would take the cache lines from a writer that is about
            // to use them again.
            if consumer.known() == 0 {
                break;
            }
        }
    }
    if got > 0 {
        if !peek {
            on_read(socket, rx_stays, consumer, &mut state.own, got);
        }
        let is_short = iov.len() > 0;
        let part = is_short && rx.goes_on_in_tcp();
        if !(is_short && flags & libc::MSG_WAITALL != 0) {
            call.let_go(&mut rx.own.waiting);
        }
        let _section = rx.unlock();
        ready::notify_peer(socket, wake);
        return Ok(RecvStep::Got(got, part));
    }
    if iov.len() == 0 && matches!(consumer.end(), Ok(None)) && consumer.has_data().unwrap_or(true) {
        return Ok(RecvStep::Got(0, false));
    }
    at_nothing(call, rx, flags, ended)
}

/// Closes the link, because its ring has shown that the peer breaks the protocol. Returns the reason for which the call
/// ends.
#[cold]
pub(super) fn broken(rx: Guard<'_, Rx>, socket: &'static Socket, error: &RingError) -> Stop {
    let _section = rx.unlock();
    tx::violation(socket, error);
    Stop::Failed(libc::ECONNRESET)
}

/// Counts `n` bytes that were consumed from the ring, and offers a larger ring if the sender needs one. `stays`: the
/// ring is one of a link between hosts (`Rx::stays`).
#[inline(always)]
pub(super) fn on_read(socket: &'static Socket, stays: bool, consumer: &mut Consumer, own: &mut RxOwn, n: usize) {
    own.direct.last_read = n;
    own.last = own.seen.tick();
    if let Some(stats) = socket.told.stats() {
        stats.rx.add_link(n as u64);
        // Between hosts the writer does not share the cache lines, so the reader need not pause.
        let rests = !stays && own.pace.on_read(n as u64, consumer.known(), stats.sent_on_link());
        if rests != socket.wakes.rx_rests.load(Relaxed) {
            socket.wakes.rx_rests.store(rests, Relaxed);
        }
    }
    backpressure::keep_fit(socket, consumer);
}

/// Returns the step of a receive that has found the ring empty. The stream is at its end, goes on in TCP, or may bring
/// more bytes. `ended` was read before the ring, so if it is true all bytes of the stream were in the ring by then.
#[inline(always)]
pub(super) fn at_nothing(call: &mut Call, mut rx: Guard<'_, Rx>, flags: c_int, ended: bool) -> Result<RecvStep, Stop> {
    let socket = call.socket;
    let stays = rx.stays();
    let Some(consumer) = rx.consumer.as_mut() else {
        return Ok(RecvStep::Again);
    };
    match consumer.end() {
        Ok(None) if socket.rx_shut.load(Acquire) => Ok(RecvStep::Got(0, false)),
        Ok(end) if !ended && (stays || end.is_none()) => {
            if wait::may_wait(socket, flags).is_ok() {
                // The ring is empty, so to ask the kernel about the fd delays no bytes of the program.
                call.is_fresh = false;
                check_place(call.place_by_kernel(&rx.own.seen))?;
                call.hold(&mut rx.own.waiting);
            }
            let _section = rx.unlock();
            let has_come = ready::progress(socket);
            Ok(if has_come { RecvStep::Again } else { RecvStep::Empty })
        }
        Ok(_) => {
            let _section = rx.unlock();
            connection::leave_link_at_end(socket);
            Ok(RecvStep::Again)
        }
        Err(error) => Err(broken(rx, socket, &error)),
    }
}

/// Takes the bytes that a device has put into the buffer of a waiting receive. `landing` is set if that is the calling
/// receive; `None` means that another call waits.
#[cold]
fn from_buffer(mut rx: Guard<'_, Rx>, iov: &mut Iov, landing: &mut Option<Landing>) -> RecvStep {
    let Some(mine) = landing else {
        drop(rx);
        // The other call is about to take its bytes.
        std::thread::yield_now();
        return RecvStep::Empty;
    };
    if !mine.is_over() {
        return RecvStep::Leave;
    }
    let (taken, wake) = mine.take(&mut rx);
    if let Some(consumer) = rx.consumer.as_mut() {
        backpressure::keep_fit(mine.socket, consumer);
    }
    rx.own.last = rx.own.seen.tick();
    let section = rx.unlock();
    mine.tell(wake);
    *landing = None;
    drop(section);
    iov.advance(taken);
    if taken > 0 {
        RecvStep::Got(taken, false)
    } else {
        RecvStep::Again
    }
}

/// Takes the connection back to TCP. Waits until both directions are on TCP, or until bytes can be received before
/// that. `wait_until` bounds the wait for a peer that does not answer.
#[cold]
pub(crate) fn return_to_tcp(socket: &'static Socket, reason: Reason) {
    if let Some(mut control) = socket.control.lock() {
        connection::prefer_tcp(socket, &mut control, reason);
    }
    wait_until(|| {
        connection::flush(socket);
        let has_come = match socket.rx_mode.load(Acquire) {
            Mode::Marked => ready::among_markers(socket).is_some_and(|mask| mask != 0),
            Mode::Link => !connection::leave_link_at_end(socket) && has_unread(socket),
            _ => false,
        };
        has_come || socket.is_plain()
    });
}

/// Returns whether the link has brought bytes that the program has not read. If so, a close resets the connection.
pub(crate) fn has_unread(socket: &'static Socket) -> bool {
    socket.rx_mode.load(Acquire) == Mode::Link && socket.rx.lock().is_some_and(|mut rx| in_ring(&mut rx) > 0)
}

/// Returns the unread bytes in the direction's ring.
fn in_ring(rx: &mut Rx) -> u64 {
    let consumer = rx.consumer.as_mut();
    consumer.map_or(0, |consumer| consumer.available().unwrap_or(0))
}

/// The condition of a call that waits for bytes to receive.
pub(super) struct Data;

impl wait::Wanted for Data {
    const IS_DATA: bool = true;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        match socket.rx_mode.load(Acquire) {
            Mode::Link => {
                socket.rx_shut.load(Acquire)
                    || socket.rx.lock().is_none_or(|mut rx| {
                        connection::is_over(socket, &rx)
                            || rx.consumer.as_mut().is_none_or(|c| c.has_data().unwrap_or(true))
                    })
            }
            Mode::Marked => match ready::among_markers(socket) {
                Some(mask) => mask != 0,
                None => Self::is_worth_a_look(socket),
            },
            _ => true,
        }
    }
}

/// Serves shutdown() of the receiving direction. The program can still read the bytes that have come, then gets the
/// end.
pub(crate) fn shut(socket: &'static Socket) {
    // `rx_shut` is set on TCP too: the direction may move to a link later.
    socket.rx_shut.store(true, SeqCst);
    if socket.is_watched() {
        socket.wakes.anchor.fetch_or(libc::EPOLLRDHUP as u32, SeqCst);
        ready::notify_local(socket);
    }
}

// The count of readable bytes (FIONREAD) includes all bytes that have come, as the kernel's count does. An
// edge-triggered program may read exactly that many bytes, take that for the end of the available bytes (nginx does),
// and wait for the next event.

/// Returns the bytes that can be read now; `None` where the kernel's own count is right.
pub(crate) fn available(socket: &'static Socket) -> Option<usize> {
    crate::notify::fork::reclaim(socket);
    // Each pass may move the direction, at most from TCP to the link and back.
    for _ in 0..4 {
        match socket.rx_mode.load(Acquire) {
            Mode::Link => {
                let mut rx = socket.rx.lock()?;
                let goes_on = rx.goes_on_in_tcp();
                let n = rx.consumer.as_mut()?.available().ok()? as usize;
                if n > 0 && goes_on {
                    return Some(n + rx.carry.len() + in_kernel(socket));
                }
                drop(rx);
                if n > 0 || !connection::leave_link_at_end(socket) {
                    return Some(n);
                }
            }
            Mode::Marked => {
                let mut control = socket.control.lock()?;
                let rx = socket.rx.lock()?;
                let (ahead, rx) = connection::look_ahead(socket, &mut control, rx, AtMark::Stop)?;
                match ahead {
                    Ahead::Payload { .. } => return Some(among_markers(socket, &rx)),
                    Ahead::Nothing | Ahead::Shut => return Some(0),
                    Ahead::Ended => return None,
                    Ahead::Changed => {}
                }
            }
            _ => return None,
        }
    }
    None
}

/// Returns whether the bytes that TCP has may be markers.
pub(crate) fn may_have_markers(socket: &'static Socket) -> bool {
    socket.rx_mode.load(Acquire) != Mode::Tcp
}

/// Returns whether the program reads other bytes before the first byte that TCP has. If so, urgent data in TCP is not
/// next for the program.
pub(crate) fn comes_before_tcp(socket: &'static Socket) -> bool {
    let mode = socket.rx_mode.load(Acquire);
    mode != Mode::Tcp
        && socket
            .rx
            .lock()
            .is_some_and(|mut rx| mode == Mode::Link && in_ring(&mut rx) > 0 || !rx.carry.is_empty())
}

/// The bytes of the receiving direction that the kernel does not count, or wrongly counts as the program's.
#[derive(Clone, Copy, Default)]
pub(crate) struct Uncounted {
    /// Bytes on the link that have not been read.
    pub on_link: u64,
    /// Bytes in the carry: a scan has taken them out of TCP, and the program has not read them.
    pub carried: u64,
    /// Bytes of markers that TCP has brought, whether they are still in TCP or in the carry.
    pub ours: u64,
    /// When bytes were last taken from the link, by the [tick](crate::sys::time::tick); 0 means never.
    pub last: u64,
}

/// Returns the [`Uncounted`] bytes of this moment, and does not move the direction to the link or to TCP. The caller
/// holds the direction's lock.
pub(crate) fn uncounted(socket: &Socket, rx: &mut Rx) -> Uncounted {
    let mode = socket.rx_mode.load(Acquire);
    let in_tcp = || (rx.carry.len() + in_kernel(socket)) as u64;
    let ours = match mode {
        // All bytes that TCP has belong to the marker RESUME, which may not be complete yet.
        Mode::Link if !rx.goes_on_in_tcp() => in_tcp(),
        Mode::Marked => in_tcp().saturating_sub(among_markers(socket, rx) as u64),
        _ => 0,
    };
    Uncounted {
        on_link: if mode == Mode::Link { in_ring(rx) } else { 0 },
        carried: rx.carry.len() as u64,
        ours,
        last: rx.own.last,
    }
}

/// Returns how many bytes can be read after a receive, for TCP_INQ. The end counts as one more, as in Linux
/// (`tcp_inq_hint`). On a watched socket the check for the end makes no system call before the connection has ended.
pub(crate) fn after_receive(socket: &'static Socket) -> usize {
    let n = available(socket).unwrap_or_else(|| in_kernel(socket));
    let may_have_ended = !socket.is_watched() || socket.wakes.anchor.load(Acquire) & ENDED != 0;
    let has_ended = || {
        let _rx = socket.rx.lock();
        socket.numbers.anchor_fd().is_some_and(has_peer_ended)
    };
    n + usize::from(may_have_ended && has_ended())
}

fn among_markers(socket: &Socket, rx: &Rx) -> usize {
    let (carried, more) = (rx.carry.len(), in_kernel(socket));
    let (Some(nonce), Some(mut bytes)) = (rx.scan, scratch::zeroed(carried + more)) else {
        return carried + more;
    };
    if let Some(front) = bytes.get_mut(..carried) {
        front.copy_from_slice(rx.carry.as_slice());
    }
    let peeked = match (socket.tcp(), bytes.get_mut(carried..)) {
        (Some(tcp), Some(rest)) => tcp.peek_all(rest),
        _ => 0,
    };
    payload_in(&nonce, bytes.get(..carried + peeked).unwrap_or_default())
}

fn in_kernel(socket: &Socket) -> usize {
    socket.tcp().map_or(0, |tcp| tcp.unread())
}
