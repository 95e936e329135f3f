//! The calls that move bytes between a socket and a file or pipe.

use libc::{c_int, c_uint, off_t, size_t, ssize_t};

use super::shape::call;
use crate::data::{rx, tx};
use crate::notify::closing;
use crate::objects::socket::Socket;
use crate::signals::jump::within;
use crate::sys::real::{Cancellable, SendFileFn, SpliceFn};

call! {
    /// `sendfile(2)`; only `out` can be a socket.
    pub fn sendfile(SendFileFn, out, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn sendfile_on(socket, _plain, kernel) {
        // SAFETY: the program's own offset.
        within(|| unsafe { tx::sendfile::sendfile(socket, out, input, offset, count, &kernel) })
    }
}

/// `splice(2)`; one end is a pipe, the other can be a socket.
#[inline]
pub unsafe extern "C" fn splice(
    real: SpliceFn,
    input: c_int,
    input_offset: *mut off_t,
    out: c_int,
    out_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    match (closing::connection(input), closing::connection(out)) {
        // SAFETY: the caller's arguments, as they are.
        (None, None) => unsafe { real(input, input_offset, out, out_offset, len, flags) },
        // SAFETY: likewise.
        (from, to) => unsafe { splice_on(from, to, real, input, input_offset, out, out_offset, len, flags) },
    }
}

/// Takes the sockets back to TCP and splices there: bytes that go through a pipe have to be in the kernel.
#[inline(never)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn splice_on(
    from: Option<&'static Socket>,
    to: Option<&'static Socket>,
    real: SpliceFn,
    input: c_int,
    input_offset: *mut off_t,
    out: c_int,
    out_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real.cancellable()(input, input_offset, out, out_offset, len, flags) };
    let plain = !input_offset.is_null() || !out_offset.is_null() || len == 0 || !takes_splice(out);
    if from.is_some() && plain {
        // The kernel refuses the call, with or without bytes in the socket.
        return call();
    }
    for socket in [from, to].into_iter().flatten() {
        tx::take_back(socket, rdmasock_core::stats::Reason::Splice);
    }
    match (from, to) {
        (Some(socket), _) => {
            let nonblocking = flags & libc::SPLICE_F_NONBLOCK != 0;
            within(|| rx::splice::splice(socket, input, out, len, nonblocking, call))
        }
        (_, Some(socket)) => {
            // SAFETY: likewise.
            let call = |out| unsafe { real.cancellable()(input, input_offset, out, out_offset, len, flags) };
            within(|| tx::send_on_tcp(socket, out, 0, &call))
        }
        _ => call(),
    }
}

/// Returns whether `fd` is the writing end of a pipe.
fn takes_splice(fd: c_int) -> bool {
    use rustix::fs::{FileType, OFlags};
    // SAFETY: the program's own number, in the middle of its call.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(fd).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Fifo)
        && rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.intersects(OFlags::WRONLY | OFlags::RDWR))
}
