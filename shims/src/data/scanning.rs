//! Receiving from TCP while it may hold markers: a scan takes the markers out and leaves the rest to the program. A
//! scan takes bytes out of TCP where it has to. Those that the program has not read yet are the *carry*.

use std::ffi::c_int;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::Ordering::Acquire;

use libc::ssize_t;
use rdmasock_core::os::thread;
use rdmasock_core::scratch;
use rdmasock_core::stream::connection::{self, Ahead, AtMark};
use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use crate::data::rx::RecvStep;
use crate::data::stop::{Stop, check_place};
use crate::notify::call::Call;
use crate::notify::{call, ready, reset, wait};
use crate::objects::socket::{Mode, Rx, Socket};
use crate::signals::jump::or_if_cancelled;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::real::Cancellable;

/// Scans the bytes that a call has received, because the scan for markers began while the call was in the kernel's
/// receive. Returns what `rx::plain` returns. `n` is the kernel's result.
#[cold]
pub(super) unsafe fn scanned(
    socket: &'static Socket,
    iov: &mut Iov,
    flags: c_int,
    n: ssize_t,
) -> ControlFlow<ssize_t, usize> {
    let errno = errno::get();
    let peeked = flags & libc::MSG_PEEK != 0;
    let mut kept = n;
    if n > 0 && !peeked && flags & libc::MSG_TRUNC == 0 {
        // Gathers the pieces so that a marker across two of them is seen.
        let Some(mut bytes) = scratch::zeroed(n as usize) else {
            // Without memory the markers cannot be found. They must not reach the program, and no byte may be missing.
            // So the connection is reset.
            let _control = socket.control.lock();
            reset::reset(socket);
            return Break(errno::fail(libc::ECONNRESET));
        };
        let mut from = *iov;
        // SAFETY: the kernel has just written these `n` bytes into the pieces.
        unsafe {
            from.copy_to(bytes.as_mut_ptr(), n as usize);
        }
        kept = connection::scan_taken(socket, &mut bytes) as ssize_t;
        // SAFETY: `kept` is at most `n`, for which the pieces have room.
        unsafe {
            iov.copy_from(bytes.as_ptr(), kept as usize);
        }
    }
    errno::set(errno);
    if n > 0 && peeked {
        // Peeked bytes are still in TCP, where the scan finds them in order.
        return Continue(0);
    }
    if kept > 0 {
        socket.told.count(|stats| stats.rx.add_tcp(kept as u64));
    }
    if kept < n {
        // Markers have taken room in the program's buffer. The bytes behind them, in TCP or on the link, belong to this
        // receive too.
        return Continue(kept as usize);
    }
    Break(kept)
}

/// Counts out a call that leaves the kernel's receive and during which a scan has begun. Does what other threads have
/// left to the call (`look_again`), and closes the thread's critical section.
#[cold]
pub(super) fn leave_scanned(socket: &'static Socket) {
    socket.leave_rx();
    look_again(socket);
    thread::current().end();
}

/// Does what [`leave_scanned`] does, for a call that continues. The call has waited, so it first holds the connection.
/// Without that, a close that has found the call in the kernel would end the connection when the call leaves, and the
/// call would go on with the file that its fd stands for by then.
#[cold]
pub(super) fn go_on(call: &mut Call) {
    let socket = call.socket;
    if let Some(mut rx) = socket.rx.lock() {
        call.hold(&mut rx.own.waiting);
    }
    leave_scanned(socket);
}

/// Counts in a call that enters the kernel's receive, as [`Socket::enter_rx`] does. Returns false if the direction is
/// not on plain TCP. Then this also scans TCP: another thread may have seen this call counted, and left the scan to it.
#[inline]
pub(super) fn enter(socket: &'static Socket) -> bool {
    let entered = socket.enter_rx();
    if !entered {
        look_again(socket);
    }
    entered
}

/// Counts out a call that leaves the kernel's receive, and closes the thread's critical section. The last such call
/// scans TCP if a scan has begun meanwhile, and ends the connection if the program has closed it.
#[inline]
pub(super) fn leave(socket: &'static Socket) {
    if socket.leave_rx() {
        look_again(socket);
    }
    thread::current().end();
}

/// Does what other threads had to leave to a call that was inside the kernel's receive. Scans TCP, because the kernel
/// does not report the same bytes to an edge-triggered set again. Wakes the waiting threads. Ends a connection that the
/// program has closed.
#[cold]
fn look_again(socket: &'static Socket) {
    let errno = errno::get();
    ready::among_markers(socket);
    connection::read_ahead(socket, false);
    if socket.rx_mode.load(Acquire) == Mode::Link
        && let Some(mut control) = socket.control.lock()
    {
        // The call may have received the marker RESUME, behind the one that moved the direction to the link.
        connection::look_for_resume(socket, &mut control);
    }
    // Other threads may have found the direction in use by this call, and try again now.
    ready::notify_local(socket);
    if socket.numbers.is_closed() {
        call::on_call_back(socket);
    }
    errno::set(errno);
}

/// Receives the bytes that TCP has while the direction is scanned. `has_some`: the call has bytes already, and does not
/// have to wait for all (MSG_WAITALL).
pub(super) unsafe fn from_marked(
    call: &mut Call,
    iov: &mut Iov,
    flags: c_int,
    has_some: bool,
) -> Result<RecvStep, Stop> {
    let socket = call.socket;
    let mut control = socket.control.lock().ok_or(libc::EINTR)?;
    let rx = socket.rx.lock().ok_or(libc::EINTR)?;
    check_place(call.place(&rx.own.seen))?;
    let looked = match connection::seen_ahead(socket, &rx, iov.len()) {
        Some(ahead) => Some((ahead, rx)),
        None => connection::look_ahead(socket, &mut control, rx, AtMark::GoOn),
    };
    let (ahead, mut rx) = looked.ok_or(libc::EINTR)?;
    Ok(match ahead {
        Ahead::Changed => RecvStep::Again,
        Ahead::Nothing => {
            if wait::may_wait(socket, flags).is_ok() {
                call.hold(&mut rx.own.waiting);
            }
            RecvStep::Empty
        }
        // The call returns the bytes that it has, and the next call reports the end.
        Ahead::Shut | Ahead::Ended if has_some => RecvStep::Empty,
        Ahead::Shut => RecvStep::Got(0, false),
        Ahead::Ended => {
            // Only the kernel's call can say how the connection has ended. It does not block now.
            let anchor = socket.numbers.anchor_fd().ok_or(libc::EBADF)?;
            let peek = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            let step = match rustix::net::recv(anchor, &mut [0u8; 1], peek) {
                Ok((_, 0)) => Ok(RecvStep::Kernel),
                Err(error) if error != rustix::io::Errno::AGAIN => {
                    // The kernel has just reported this error, so the kept copy must not be reported again.
                    socket.take_untold();
                    Err(Stop::Failed(error.raw_os_error()))
                }
                _ => return Ok(RecvStep::Again),
            };
            connection::on_end_told(socket, &mut rx);
            step?
        }
        // SAFETY: the pieces of `iov` are writable by this function's contract.
        Ahead::Payload { carry, kernel } => unsafe {
            let step = take_payload(socket, &mut rx, iov, flags, carry, kernel)?;
            // Handles a marker behind the payload now. The anchor's event for the marker has been reported already, so
            // an edge-triggered program would not call again.
            if rx.scanned == 0 {
                let _ = connection::look_ahead(socket, &mut control, rx, AtMark::Stop);
            }
            step
        },
    })
}

unsafe fn take_payload(
    socket: &'static Socket,
    rx: &mut Rx,
    iov: &mut Iov,
    flags: c_int,
    carry: usize,
    kernel: usize,
) -> Result<RecvStep, Stop> {
    let peek = flags & libc::MSG_PEEK != 0;
    let discard = flags & libc::MSG_TRUNC != 0;
    let put = |iov: &mut Iov, from: &[u8], n: usize| match discard {
        true => iov.walk(n, |_, _, _| ()),
        // SAFETY: the pieces of `iov` are writable by this function's contract, and `from` has at least `n` bytes.
        false => unsafe { iov.copy_from(from.as_ptr(), n) },
    };
    let mut got = put(iov, rx.carry.as_slice(), carry.min(rx.carry.len()));
    if !peek && got > 0 {
        rx.carry.consume(got);
    }
    let anchor = socket.numbers.anchor_fd().ok_or(libc::EBADF)?;
    // Without memory for a buffer, the receive takes only the carry.
    let mut buf = scratch::zeroed(kernel.min(iov.len()).min(4096)).unwrap_or_default();
    let mut has_peeked = false;
    // A receive ends in front of urgent data. Urgent data may follow the carry directly.
    while got < carry + kernel && iov.len() > 0 && !has_peeked && !(got > 0 && is_at_mark(socket)) {
        let want = (carry + kernel - got).min(iov.len()).min(buf.len());
        let Some(piece) = buf.get_mut(..want) else {
            break;
        };
        let flags = RecvFlags::DONTWAIT | if peek { RecvFlags::PEEK } else { RecvFlags::empty() };
        match rustix::net::recv(anchor, piece, flags) {
            Ok((_, n)) if n > 0 => {
                got += put(iov, &buf, n);
                has_peeked = peek;
            }
            Err(rustix::io::Errno::INTR) => {}
            _ => break,
        }
    }
    if got == 0 {
        // Another reader has taken the bytes that the scan counted.
        rx.scanned = 0;
        return Ok(RecvStep::Empty);
    }
    if !peek {
        rx.on_taken(got);
        socket.told.count(|stats| stats.rx.add_tcp(got as u64));
    }
    // A scan takes one piece at a time and stops at markers, so more bytes may follow.
    Ok(RecvStep::Got(got, true))
}

/// Returns whether urgent data is next in TCP. A receive that has bytes ends there (tcp(7), SIOCATMARK).
pub(super) fn is_at_mark(socket: &Socket) -> bool {
    socket.numbers.anchor_fd().is_some_and(crate::sys::sockopt::is_at_mark)
}

/// Returns whether TCP has an error and no bytes. A receive that has bytes already leaves the error to the next call.
/// It must not call the kernel's receive, because that would take the error from the socket.
fn is_error_next(socket: &Socket) -> bool {
    socket.numbers.anchor_fd().is_some_and(|fd| {
        rustix::io::ioctl_fionread(fd) == Ok(0) && ready::has_failed(ready::anchor(fd, PollFlags::IN))
    })
}

/// Receives the rest of a call from the kernel, after the direction has gone back to TCP. The call's first bytes came
/// over the link or from among markers. Returns the number of further bytes. If the direction has begun to scan
/// meanwhile, more may follow among the markers.
pub(super) unsafe fn finish_on_tcp(socket: &'static Socket, iov: &mut Iov, fd: c_int, flags: c_int) -> usize {
    let mut got = 0;
    loop {
        let (to, len) = iov.head();
        if len == 0 || is_at_mark(socket) || is_error_next(socket) || !enter(socket) {
            return got;
        }
        // SAFETY: the program's contract with recv(2) makes the piece writable.
        let call = || unsafe { crate::sys::real::recv().cancellable()(fd, to.cast(), len, flags) };
        let n = or_if_cancelled(call, || leave(socket));
        if n < 0 {
            reset::keep(socket, errno::get());
        }
        let mut kept = n.max(0) as usize;
        if kept > 0 && socket.rx_was_marked() {
            // SAFETY: the kernel has written `kept` bytes there, and only this call uses the program's buffer before it
            // returns.
            kept = connection::scan_taken(socket, unsafe { std::slice::from_raw_parts_mut(to, kept) });
        }
        leave(socket);
        got += kept;
        iov.advance(kept);
        if kept < len {
            return got;
        }
    }
}
