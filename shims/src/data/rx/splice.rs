//! splice() out of a socket.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Acquire;

use libc::ssize_t;
use rdmasock_core::os::thread;

use super::marked::{enter, leave};
use super::{account, recv_slow};
use crate::notify::call::Began;
use crate::objects::socket::{Mode, Socket};
use crate::signals::jump::{or_if_cancelled, outside};
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::real::Cancellable;

/// Serves splice() from a socket that is on its way back to TCP. Bytes from the link or from among markers are copied
/// to the pipe `to`, at most `len` bytes. `real` is libc's own call, for bytes that are in TCP.
// Not inlined: the forced unwind of pthread_cancel runs the destructors here (see `hooks`).
#[inline(never)]
pub fn splice(
    socket: &'static Socket,
    fd: c_int,
    to: c_int,
    len: usize,
    nonblocking: bool,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    crate::notify::reclaim::reclaim(socket);
    let handlers = thread::current().handlers_at_call();
    loop {
        if socket.rx_mode.load(Acquire) == Mode::Tcp && enter(socket) {
            // If a scan began while the call waits, its markers would go into the pipe. So `splice_on` pins the socket
            // to TCP before.
            let n = or_if_cancelled(&real, || leave(socket));
            if n > 0 {
                account(socket, n as u64);
            }
            leave(socket);
            return n;
        }
        let room = match pipe_room(to, nonblocking) {
            Ok(room) => room.min(len),
            Err(error) => return errno::fail(error),
        };
        let mut buf = vec![0u8; room];
        let flags = if nonblocking { libc::MSG_DONTWAIT } else { 0 };
        let mut iov = Iov::one(buf.as_mut_ptr().cast(), room);
        // SAFETY: the buffer has `room` bytes. In place of libc's call `LEFT` is returned, so only the link and what
        // precedes a marker are read here.
        let n = unsafe { recv_slow(Began::now(socket, fd), &mut iov, flags, (None, handlers), &|_| LEFT) };
        if n == LEFT {
            continue;
        }
        if n > 0 {
            write_all(to, buf.get(..n as usize).unwrap_or_default());
        }
        return n;
    }
}

/// The result in place of libc's call. It says that the direction is on TCP.
const LEFT: ssize_t = -2;

/// Waits until the pipe is writable, unless `nonblocking`, and returns how many bytes it surely takes at once. Another
/// writer may fill the pipe between the poll and the write; then the write waits. `Err` is the errno.
fn pipe_room(pipe: c_int, nonblocking: bool) -> Result<usize, c_int> {
    /// Bytes: one page, the unit of a pipe's room.
    const PAGE: usize = 4096;
    let mut set = libc::pollfd {
        fd: pipe,
        events: libc::POLLOUT,
        revents: 0,
    };
    let timeout = if nonblocking { 0 } else { -1 };
    // SAFETY: `set` is one valid entry, and the count is 1.
    let call = || unsafe { crate::sys::real::poll().cancellable()(&raw mut set, 1, timeout) };
    match outside(call) {
        0 => Err(libc::EAGAIN),
        n if n < 0 => Err(errno::get()),
        _ => Ok(PAGE),
    }
}

/// Writes all `bytes` to the pipe. They were taken from the socket for it, so a full pipe is waited for.
fn write_all(pipe: c_int, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: `bytes` is readable.
        let n =
            outside(|| unsafe { crate::sys::real::write().cancellable()(pipe, bytes.as_ptr().cast(), bytes.len()) });
        match n {
            _ if thread::current().is_leaving() => return,
            n if n > 0 => bytes = bytes.get(n as usize..).unwrap_or_default(),
            _ if errno::get() == libc::EINTR => {}
            _ if errno::get() == libc::EAGAIN => {
                let _ = pipe_room(pipe, false);
            }
            // The pipe's reader is gone.
            _ => return,
        }
    }
}
