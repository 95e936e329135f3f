//! sendfile() and splice() on a direction that may be on the link.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering::Acquire;

use libc::ssize_t;
use rdmasock_core::fabric::ring::Spans;
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::scratch;
use rdmasock_core::stats::Reason;

use crate::data::rx::{account, recv_slow};
use crate::data::scanning;
use crate::data::stop::Stop;
use crate::data::tx::{Source, on_tcp, send_from, take_back};
use crate::notify::call::Began;
use crate::notify::{reset, table};
use crate::objects::socket::{Mode, Socket};
use crate::signals::jump::{or_if_cancelled, outside};
use crate::sys::iov::{Iov, LONGEST};
use crate::sys::real::Cancellable;
use crate::sys::{errno, real};

/// Serves sendfile(). On a link, reads the file straight into the ring.
///
/// # Safety
/// `offset` is null or valid.
// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
pub(crate) unsafe fn sendfile(
    socket: &'static Socket,
    fd: c_int,
    input: c_int,
    offset: *mut libc::off_t,
    count: usize,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    if socket.tx_mode.load(Acquire) != Mode::Tcp && offset.is_null() && !is_regular(input) {
        // Only the kernel knows how many bytes such a file can give, and reading it might block.
        take_back(socket, Reason::Unsupported);
    }
    let began = Began::now(socket, fd);
    if let Some(n) = on_tcp(&began, None, || real(fd)) {
        return n;
    }
    let mut file = File {
        input,
        offset,
        left: count.min(LONGEST),
        has_begun: false,
    };
    // SAFETY: `offset` is null or valid by this function's contract.
    let result = unsafe { send_from(began, &mut file, 0, real) };
    result.unwrap_or_else(|| match table::socket(fd) {
        // SAFETY: `offset` is null or valid by this function's contract.
        Some(socket) => unsafe { sendfile(socket, fd, input, offset, count, real) },
        None => real(fd),
    })
}

/// A file that sendfile() reads.
struct File {
    input: c_int,
    /// The program's offset, which advances with the bytes that are read. If null, the file's own position advances.
    offset: *mut libc::off_t,
    left: usize,
    /// Bytes were read already.
    has_begun: bool,
}

impl Source for File {
    fn len(&self) -> usize {
        self.left
    }

    unsafe fn fill(&mut self, spans: &Spans<'_>, n: usize) -> Result<Option<usize>, Stop> {
        if n == 0 && self.left > 0 {
            return Ok(Some(0));
        }
        let mut room = n;
        let pieces = spans.pieces().map(|(at, len)| {
            let iov_len = len.min(room);
            room -= iov_len;
            libc::iovec {
                iov_base: at.cast(),
                iov_len,
            }
        });
        // The read is made under the direction's lock, so it must not block for long. For a file that is not regular (a
        // pipe, say) and has no `offset`, `sendfile` has therefore asked for the way back to TCP. With an `offset`,
        // preadv fails on a pipe, and the kernel's sendfile() decides. SAFETY: the first `n` bytes of the spans are the
        // caller's by this function's contract. `offset` is null or valid by the contract of `sendfile`.
        let read = unsafe {
            let (number, at) = match self.offset.as_ref() {
                None => (libc::SYS_readv, 0),
                Some(at) => (libc::SYS_preadv, *at as usize),
            };
            let pieces = kernel::address(pieces.as_ptr());
            kernel::call(number, [self.input as usize, pieces, 2, at, 0, 0])
        };
        let done = match read {
            Ok(done) => done,
            // The read has failed before a byte was sent. The input may be a pipe or the like, or the kernel's
            // sendfile() fails with another errno than a read. So the kernel's own sendfile() decides.
            Err(error) if !self.has_begun && error != rustix::io::Errno::INTR => return Ok(None),
            Err(error) => return Err(Stop::Failed(error.raw_os_error())),
        };
        if !self.offset.is_null() {
            // SAFETY: `offset` is not null, and so valid by the contract of `sendfile`.
            unsafe { *self.offset += done as libc::off_t };
        }
        self.has_begun |= done > 0;
        self.left = if done < n { 0 } else { self.left - done };
        Ok(Some(done))
    }

    /// Sends the rest of the file by the kernel's sendfile(). `offset`, or the file's own position, is behind the last
    /// byte sent.
    fn send_rest(&mut self, socket: &'static Socket, fd: c_int, _: c_int) -> ssize_t {
        // SAFETY: the program's own arguments, which it keeps valid during its call.
        let n = unsafe { real::sendfile().cancellable()(fd, self.input, self.offset, self.left) };
        if n < 0 {
            reset::keep(socket, errno::get());
        }
        n
    }
}

fn is_regular(fd: c_int) -> bool {
    // SAFETY: the program's own fd, which it keeps open during its call.
    rustix::fs::fstat(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) })
        .is_ok_and(|s| rustix::fs::FileType::from_raw_mode(s.st_mode) == rustix::fs::FileType::RegularFile)
}

/// Serves splice() from a socket that is on its way back to TCP. Bytes that lie on the link or among markers are copied
/// to the pipe `to`, at most `len` bytes. Bytes in TCP are moved by `real`, libc's own call.
// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
pub(crate) fn splice(
    socket: &'static Socket,
    fd: c_int,
    to: c_int,
    len: usize,
    nonblocking: bool,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    crate::notify::fork::reclaim(socket);
    let handlers = thread::current().handlers_at_call();
    loop {
        if socket.rx_mode.load(Acquire) == Mode::Tcp && scanning::enter(socket) {
            // A scan that began during this call would let markers into the pipe. None begins: before this call,
            // `splice_on` has ruled out further promotions of the socket.
            let n = or_if_cancelled(&real, || scanning::leave(socket));
            if n > 0 {
                account(socket, n as u64);
            }
            scanning::leave(socket);
            return n;
        }
        let room = match pipe_room(to, nonblocking) {
            Ok(room) => room.min(len),
            Err(error) => return errno::fail(error),
        };
        let Some(mut buf) = scratch::zeroed(room) else {
            return errno::fail(libc::ENOMEM);
        };
        let flags = if nonblocking { libc::MSG_DONTWAIT } else { 0 };
        let mut iov = Iov::one(buf.as_mut_ptr().cast(), room);
        let is_on_tcp = Cell::new(false);
        let real = |_| {
            is_on_tcp.set(true);
            -1
        };
        // SAFETY: the buffer has `room` bytes. `real` does not call libc, so the receive takes bytes of the link and
        // bytes in front of markers, and stops where the direction is on plain TCP.
        let n = unsafe { recv_slow(Began::now(socket, fd), &mut iov, flags, (None, handlers), &real) };
        if n < 0 && is_on_tcp.get() {
            continue;
        }
        if n > 0 {
            write_all(to, buf.get(..n as usize).unwrap_or_default());
        }
        return n;
    }
}

/// Waits until the pipe is writable, unless `nonblocking`. Returns a number of bytes that the pipe takes at once. If
/// another writer fills the pipe between the poll and the write, the write waits. `Err` is the errno.
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

/// Writes all `bytes` to the pipe, and waits while the pipe is full. The bytes have been taken out of the socket
/// already.
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
