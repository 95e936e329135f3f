//! Receiving from TCP that may hold markers: what a scan leaves to the program.

use std::ffi::c_int;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::Ordering::Acquire;

use libc::ssize_t;
use rdmasock_core::os::thread;
use rustix::event::PollFlags;
use rustix::net::RecvFlags;

use super::step::RecvStep;
use crate::notify::call::{Call, Place};
use crate::notify::closing;
use crate::notify::ready;
use crate::notify::reset;
use crate::notify::wait;
use crate::objects::socket::{Mode, Rx, Socket};
use crate::signals::jump::or_if_cancelled;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::real::Cancellable;
use rdmasock_core::scratch::Scratch;
use rdmasock_core::stream::connection::{self, Ahead, AtMark};

/// A scan began while the call was in the kernel: what it brought may hold markers. The result is as `plain`'s.
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
        let mut bytes = vec![0u8; n as usize];
        let mut from = *iov;
        // SAFETY: the pieces hold the n bytes that the kernel has just written.
        unsafe {
            from.copy_to(bytes.as_mut_ptr(), n as usize);
        }
        kept = connection::scan_taken(socket, &mut bytes) as ssize_t;
        // SAFETY: as many bytes at most as the pieces have room for.
        unsafe {
            iov.copy_from(bytes.as_ptr(), kept as usize);
        }
    }
    errno::set(errno);
    if n > 0 && peeked {
        // Peeked bytes are still there to be looked at in order.
        return Continue(0);
    }
    if kept > 0
        && let Some(stats) = socket.told.stats()
    {
        stats.add_rx_tcp(kept as u64);
    }
    if kept < n {
        // Markers have taken room in the program's buffer. What follows them in TCP or on the link is as much part of
        // this receive.
        return Continue(kept as usize);
    }
    Break(kept)
}

/// A call that a scan began under is back from the kernel's receive.
#[cold]
pub(super) fn leave_scanned(socket: &'static Socket) {
    socket.leave_rx();
    look_again(socket);
    thread::current().end();
}

/// The same, of a call that is not over. It has waited, so it holds the connection before it leaves: a close that found
/// it in the kernel would end the connection otherwise, and the call begin anew on what the number stands for by then.
#[cold]
pub(super) fn go_on(call: &mut Call) {
    let socket = call.socket;
    if let Some(mut rx) = socket.rx.lock() {
        call.hold(&mut rx.own.waiting);
    }
    leave_scanned(socket);
}

/// A call is about to enter the kernel's receive: as [`Socket::enter_rx`]. A look at TCP that the try has kept others
/// from follows.
#[inline]
pub(super) fn enter(socket: &'static Socket) -> bool {
    let entered = socket.enter_rx();
    if !entered {
        look_again(socket);
    }
    entered
}

/// A call is back from the kernel's receive.
#[inline]
pub(super) fn leave(socket: &'static Socket) {
    if socket.leave_rx() {
        look_again(socket);
    }
    thread::current().end();
}

/// Does what could not be done while a call was inside the kernel's receive: what the kernel has has had its edge.
#[cold]
pub(super) fn look_again(socket: &'static Socket) {
    let errno = errno::get();
    ready::among_markers(socket);
    connection::read_ahead(socket, false);
    if socket.rx_mode.load(Acquire) == Mode::Link
        && let Some(mut control) = socket.control.lock()
    {
        // RESUME may have been in what the call has brought.
        connection::look_for_resume(socket, &mut control);
    }
    // Those who found the direction occupied meanwhile look again.
    ready::notify_local(socket);
    if socket.numbers.is_closed() {
        closing::on_call_back(socket);
    }
    errno::set(errno);
}

/// What a scanning socket has in TCP, for a call that already `has_some` bytes and does not want all.
pub(super) unsafe fn from_marked(call: &mut Call, iov: &mut Iov, flags: c_int, has_some: bool) -> RecvStep {
    let socket = call.socket;
    let Some(mut control) = socket.control.lock() else {
        return RecvStep::Fail(libc::EINTR);
    };
    let Some(rx) = socket.rx.lock() else {
        return RecvStep::Fail(libc::EINTR);
    };
    let place = call.place(&rx.own.seen);
    if place != Place::Here {
        return RecvStep::Elsewhere(place);
    }
    let looked = match connection::seen_ahead(socket, &rx, iov.len()) {
        Some(ahead) => Some((ahead, rx)),
        None => connection::look_ahead(socket, &mut control, rx, AtMark::GoOn),
    };
    let Some((ahead, mut rx)) = looked else {
        return RecvStep::Fail(libc::EINTR);
    };
    match ahead {
        Ahead::Changed => RecvStep::Again,
        Ahead::Nothing => {
            if wait::may_wait(socket, flags).is_ok() {
                call.hold(&mut rx.own.waiting);
            }
            RecvStep::Empty
        }
        // What has come before is the call's, and the next one tells.
        Ahead::Shut if has_some => RecvStep::Empty,
        Ahead::Shut => RecvStep::Got(0),
        Ahead::Ended => {
            // Only the kernel's call tells how it ended; it does not block now.
            let Some(anchor) = socket.numbers.anchor_fd() else {
                return RecvStep::Fail(libc::EBADF);
            };
            let mut byte = [0u8; 1];
            if has_some {
                // The next call tells.
                return RecvStep::Empty;
            }
            let step = match rustix::net::recv(anchor, &mut byte, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
                Ok((_, 0)) => RecvStep::Kernel,
                Err(error) if error != rustix::io::Errno::AGAIN => {
                    // Said once, whoever knows of it.
                    socket.take_untold();
                    RecvStep::Fail(reset::as_timed_out(socket, error.raw_os_error()))
                }
                _ => return RecvStep::Again,
            };
            connection::on_end_told(socket, &mut rx);
            step
        }
        // SAFETY: by this function's contract.
        Ahead::Payload { carry, kernel } => unsafe {
            let step = take_payload(socket, &mut rx, iov, flags, carry, kernel);
            // A marker that was behind it has had its edge at the anchor already: who waits for
            // edges would not look again.
            if rx.scanned == 0 {
                let _ = connection::look_ahead(socket, &mut control, rx, AtMark::Stop);
            }
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
) -> RecvStep {
    let peek = flags & libc::MSG_PEEK != 0;
    let discard = flags & libc::MSG_TRUNC != 0;
    let mut got = 0;
    if carry > 0 {
        let n = carry.min(iov.len()).min(rx.carry.len());
        if !discard {
            // SAFETY: the carry holds n bytes.
            unsafe { iov.copy_from(rx.carry.as_slice().as_ptr(), n) };
        }
        if !peek {
            rx.carry.consume(n);
        }
        got += n;
    }
    let Some(anchor) = socket.numbers.anchor_fd() else {
        return RecvStep::Fail(libc::EBADF);
    };
    // Without memory for more, what there is.
    let mut buf = Scratch::new(kernel.min(iov.len()).min(4096)).unwrap_or_default();
    let mut skip = 0;
    // A receive ends in front of urgent data, which may be next behind the carry.
    while got < carry + kernel && iov.len() > 0 && !(peek && skip > 0) && !(got > 0 && is_at_mark(socket)) {
        let want = (carry + kernel - got).min(iov.len()).min(buf.len());
        let Some(piece) = buf.get_mut(..want) else {
            break;
        };
        let flags = RecvFlags::DONTWAIT | if peek { RecvFlags::PEEK } else { RecvFlags::empty() };
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
        // Somebody else has taken what the scan saw.
        rx.scanned = 0;
        return RecvStep::Empty;
    }
    if !peek {
        rx.on_taken(got);
    }
    if !peek && let Some(stats) = socket.told.stats() {
        stats.add_rx_tcp(got as u64);
    }
    // A scan looks at a piece at a time, and stops at markers.
    RecvStep::GotPart(got)
}

/// Whether urgent data is next in TCP: a receive that has something ends there (tcp(7), SIOCATMARK).
pub(super) fn is_at_mark(socket: &Socket) -> bool {
    socket.numbers.anchor_fd().is_some_and(crate::sys::sockopt::is_at_mark)
}

/// Whether TCP has nothing but an error: a receive that has something leaves that to the next, and a look would take it
/// from the socket.
fn is_error_next(socket: &Socket) -> bool {
    socket.numbers.anchor_fd().is_some_and(|fd| {
        rustix::io::ioctl_fionread(fd) == Ok(0) && ready::has_failed(ready::anchor(fd, PollFlags::IN))
    })
}

/// Receives from the kernel the rest of a call of which `got` bytes came over the link, or from among markers, before
/// the direction went back to TCP. Returns how many bytes the call has then. If the direction has begun to scan
/// meanwhile, more may follow there.
pub(super) unsafe fn finish_on_tcp(
    socket: &'static Socket,
    iov: &mut Iov,
    fd: c_int,
    flags: c_int,
    mut got: usize,
) -> ssize_t {
    loop {
        let (to, len) = iov.head();
        if len == 0 || is_at_mark(socket) || is_error_next(socket) {
            return got as ssize_t;
        }
        if !enter(socket) {
            return got as ssize_t;
        }
        // SAFETY: the piece is writable by the program's word.
        let call = || unsafe { crate::sys::real::recv().cancellable()(fd, to.cast(), len, flags) };
        let n = or_if_cancelled(call, || leave(socket));
        if n < 0 {
            reset::keep(socket, errno::get());
        }
        let n = n.max(0) as usize;
        let mut kept = n;
        if n > 0 && socket.rx_was_marked() {
            // SAFETY: the kernel has written n bytes there, and nobody else looks at the program's buffer during the
            // call.
            kept = connection::scan_taken(socket, unsafe { std::slice::from_raw_parts_mut(to, n) });
        }
        leave(socket);
        got += kept;
        iov.advance(kept);
        if kept < len {
            return got as ssize_t;
        }
    }
}
