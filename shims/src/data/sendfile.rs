//! sendfile() and splice() on a direction that may be on the link.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Acquire;

use libc::ssize_t;
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::scratch::Scratch;
use rdmasock_core::stream::connection;

use crate::data::backpressure::{Room, no_room};
use crate::data::rx::{account, recv_slow};
use crate::data::scanning;
use crate::data::tx::{
    PIECE, commit, count_sent, in_kernel, is_more_to_come, leave, on_its_file_or_leave, plain, take_back, violation,
};
use crate::notify::call::{Began, Call, Direction, Place};
use crate::notify::{call, ready, reset, table, wait};
use crate::objects::socket::{Mode, Sending, Socket, Stage};
use crate::signals::jump::{or_if_cancelled, outside};
use crate::sys::iov::Iov;
use crate::sys::real::Cancellable;
use crate::sys::{errno, real};

/// The result in place of libc's call. It says that the direction is on TCP.
const LEFT: ssize_t = -2;

/// Serves sendfile(). On a link, reads the file straight into the ring.
///
/// # Safety
/// `offset` is null or valid.
pub unsafe fn sendfile(
    socket: &'static Socket,
    fd: c_int,
    input: c_int,
    offset: *mut libc::off_t,
    count: usize,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    if socket.tx_mode.load(Acquire) != Mode::Tcp && offset.is_null() && !is_regular(input) {
        // Only the kernel knows what such a file can give, and reading it might block.
        take_back(socket, rdmasock_core::stats::Reason::Unsupported);
    }
    let began = Began::now(socket, fd);
    let call = Call::new(began, Direction::Send);
    if socket.tx_mode.load(Acquire) == Mode::Tcp {
        if socket.promotion.stage() == Stage::Plain {
            let n = real(fd);
            count_sent(&began, n);
            return n;
        }
        if socket.enter_tx() {
            if call.is_named() {
                // Not quick: reading the input may take long.
                return plain(socket, false, || real(fd));
            }
            leave(socket);
        }
    }
    // SAFETY: `offset` is null or valid by this function's contract.
    unsafe { sendfile_slow(call, input, offset, count, real) }
}

// Not inlined: the forced unwind of pthread_cancel runs the call's destructor here (see `hooks`).
#[inline(never)]
unsafe fn sendfile_slow(
    mut call: Call,
    input: c_int,
    offset: *mut libc::off_t,
    count: usize,
    real: &impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    let socket = call.socket;
    let mut sent = 0usize;
    let mut patience = wait::Patience::default();
    let count = count.min(0x7fff_f000);
    crate::notify::fork::reclaim(socket);
    loop {
        if !call.is_held() && !call.is_named() {
            let fd = call.fd;
            drop(call);
            return match table::socket(fd) {
                _ if sent > 0 => sent as ssize_t,
                // SAFETY: `offset` is null or valid by this function's contract.
                Some(socket) => unsafe { sendfile(socket, fd, input, offset, count, real) },
                None => real(fd),
            };
        }
        if socket.tx_mode.load(Acquire) == Mode::Marked && connection::flush(socket) {
            continue;
        }
        let Some(mut tx) = socket.tx.lock() else {
            return errno::fail(libc::EINTR);
        };
        let on_link = socket.tx_mode.load(Acquire) == Mode::Link;
        let place = call.place(&tx.own.seen);
        if place != Place::Here {
            drop(tx);
            call::look_again(socket, call.fd);
            if place == Place::Lost {
                return errno::after(sent, libc::EBADF);
            }
            continue;
        }
        let gone = socket.wakes.is_dead() || tx.producer.as_mut().is_none_or(ready::is_reader_gone);
        if tx.end.is_shut() && (on_link || socket.tx_mode.load(Acquire) == Mode::Marked) {
            drop(tx);
            return crate::data::tx::after_shutdown(sent, 0);
        }
        if on_link && gone {
            socket.tx_mode.go(Sending::Left);
        }
        if socket.tx_mode.load(Acquire) == Mode::Tcp {
            drop(tx);
            if sent > 0 && !crate::data::tx::goes_on(&mut call, 0) {
                return sent as ssize_t;
            }
            if sent > 0 && socket.enter_tx() {
                // The rest of the call goes on in TCP, as a send's does (`tx::goes_on`). `offset`, or the file's own
                // position, is where this call has come to.
                let before = errno::get();
                // SAFETY: the program's own arguments, which it keeps valid during its call.
                let rest = |fd| unsafe { real::sendfile().cancellable()(fd, input, offset, count - sent) };
                let went = on_its_file_or_leave(&call, |fd| in_kernel(socket, false, || rest(fd)));
                let taken = went.unwrap_or(0);
                if taken < 0 {
                    reset::keep(socket, errno::get());
                }
                errno::set(before);
                return sent as ssize_t + taken.max(0);
            }
            if sent == 0 && socket.enter_tx() {
                let went = on_its_file_or_leave(&call, |fd| plain(socket, false, || real(fd)));
                return went.unwrap_or_else(|| errno::fail(libc::EBADF));
            }
            continue;
        }
        let want = (count - sent).min(PIECE);
        let spans = match tx.producer.as_mut().filter(|_| on_link).map(|p| p.spans(want.max(1))) {
            Some(Ok(spans)) => Some(spans),
            Some(Err(error)) => {
                drop(tx);
                violation(socket, &error);
                continue;
            }
            None => None,
        };
        let mut left = want;
        let pieces = spans
            .map_or([(std::ptr::null_mut(), 0); 2], |s| s.pieces())
            .map(|(at, len)| {
                let iov_len = len.min(left);
                left -= iov_len;
                libc::iovec {
                    iov_base: at.cast(),
                    iov_len,
                }
            });
        let room = want - left;
        if count > sent && room == 0 {
            let waits = wait::may_wait(socket, 0).is_ok();
            match no_room(socket, &mut tx, waits) {
                Room::There => continue,
                Room::Full => {}
                Room::Unbacked => {
                    drop(tx);
                    take_back(socket, rdmasock_core::stats::Reason::Resources);
                    continue;
                }
            }
            if let Err(error) = wait::may_wait(socket, 0) {
                return errno::after(sent, error);
            }
            call.hold(&mut tx.own.waiting);
            drop(tx);
            patience.is_partial = sent > 0;
            if let Err(error) = wait::wait_for::<crate::data::tx::Space>(socket, &mut patience) {
                return errno::after(sent, error);
            }
            continue;
        }
        // Reading a regular file does not block for long; reading any other would block under the lock.
        // SAFETY: the pieces are the ring's free part, which belongs to the producer, and this thread holds its lock.
        // `offset` is null or valid by the contract.
        let read = unsafe {
            let (number, at) = match offset.as_ref() {
                None => (libc::SYS_readv, 0),
                Some(at) => (libc::SYS_preadv, *at as usize),
            };
            let pieces = kernel::address(pieces.as_ptr());
            kernel::call(number, [input as usize, pieces, 2, at, 0, 0])
        };
        if read.is_err_and(|error| sent == 0 && error != rustix::io::Errno::INTR) {
            // The input is a pipe or the like after all, or the kernel has its own error for it.
            drop(tx);
            take_back(socket, rdmasock_core::stats::Reason::Unsupported);
            continue;
        }
        let n = match read {
            Err(error) => return errno::after(sent, error.raw_os_error()),
            Ok(0) => return sent as ssize_t,
            Ok(n) => n,
        };
        let holds = sent + n == count && is_more_to_come(socket, 0, n);
        let wake = commit(socket, &mut tx, n, holds);
        drop(tx);
        ready::notify_peer(socket, wake);
        if !offset.is_null() {
            // SAFETY: `offset` is not null, and so valid by the contract.
            unsafe { *offset += n as libc::off_t };
        }
        sent += n;
        if sent >= count || n < room {
            return sent as ssize_t;
        }
    }
}

fn is_regular(fd: c_int) -> bool {
    // SAFETY: the program's own fd, which it keeps open during its call.
    rustix::fs::fstat(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) })
        .is_ok_and(|s| rustix::fs::FileType::from_raw_mode(s.st_mode) == rustix::fs::FileType::RegularFile)
}

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
    crate::notify::fork::reclaim(socket);
    let handlers = thread::current().handlers_at_call();
    loop {
        if socket.rx_mode.load(Acquire) == Mode::Tcp && scanning::enter(socket) {
            // If a scan began while the call waits, its markers would go into the pipe. So `splice_on` pins the socket
            // to TCP before.
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
        let Some(mut buf) = Scratch::new(room) else {
            return errno::fail(libc::ENOMEM);
        };
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
