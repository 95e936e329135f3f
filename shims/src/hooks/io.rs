//! The calls that move bytes: of one fd, and between a socket and a file or pipe. The calls that hand a descriptor to
//! I/O inside libc, which no hook sees, are here too: the connection goes back to TCP for good before the call.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Acquire;

use libc::{
    FILE, aiocb, c_char, c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, sigevent, size_t, sockaddr, socklen_t,
    ssize_t, timespec,
};
use rdmasock_core::stats::Reason;

use crate::data::{rx, sendfile, tx};
use crate::hooks::hooks;
use crate::notify::{call, reset, table};
use crate::objects::socket::{Mode, Socket, Stage};
use crate::process::pass;
use crate::signals::jump::within;
use crate::startup::lifecycle;
use crate::sys::iov::{Iov, is_no_length};
use crate::sys::real::Cancellable;
use crate::sys::time::Timeout;
use crate::sys::{errno, real};

/// Defines a call on one fd as two functions, of the shape that `hooks/mod.rs` explains. Without a connection the call
/// goes to libc's own function, with unchanged arguments; on a connection it is served:
///
/// ```text
/// call! {
///     pub fn NAME(fd, ARGUMENT: TYPE, …) -> RESULT;
///     before EXPRESSION;                    // optional: runs before libc's function, if `fd` has no connection
///     fn NAME_ON(socket, plain, kernel) …   // a block
/// }
/// ```
///
/// The block serves the call on `socket`. It may leave the whole call to libc by `plain()`. It may also make libc's
/// call on an fd that it chooses by `kernel(fd)`, which may block, and is a cancellation point.
macro_rules! call {
    (
        $(#[$what:meta])*
        pub fn $name:ident($fd:ident $(, $argument:ident: $type:ty)*) -> $result:ty;
        $(before $before:expr;)?
        fn $served:ident($socket:ident, $plain:ident, $kernel:ident) $body:block
    ) => {
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(real: $crate::sys::real::$name, $fd: c_int $(, $argument: $type)*) -> $result {
            match $crate::notify::table::socket($fd) {
                // SAFETY: the caller's arguments are passed on unchanged.
                None => unsafe {
                    $($before;)?
                    real($fd $(, $argument)*)
                },
                // SAFETY: the caller's arguments are passed on unchanged.
                Some(socket) => unsafe { $served(socket, real, $fd $(, $argument)*) },
            }
        }

        #[inline(never)]
        unsafe extern "C" fn $served(
            $socket: &'static $crate::objects::socket::Socket,
            real: $crate::sys::real::$name,
            $fd: c_int
            $(, $argument: $type)*
        ) -> $result {
            // SAFETY: the caller's arguments are passed on unchanged.
            let $plain = move || unsafe { real($fd $(, $argument)*) };
            // SAFETY: the caller's arguments are passed on unchanged, except for the fd.
            let $kernel = move |fd: c_int| unsafe { $crate::sys::real::Cancellable::cancellable(real)(fd $(, $argument)*) };
            $body
        }
    };
}

/// Defines the hooks of calls that fortified programs make (_FORTIFY_SOURCE). libc aborts if `len` exceeds `size`, the
/// size of the buffer. Otherwise the hook serves the call without `size`, with libc's function for that call.
macro_rules! fortified {
    ($(
        $(#[$what:meta])*
        pub fn $name:ident($($argument:ident: $type:ty),*) = $served:ident($plain:path);
    )*) => {$(
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(
            real: $crate::sys::real::$name,
            fd: c_int,
            buf: *mut c_void,
            len: size_t,
            size: size_t
            $(, $argument: $type)*
        ) -> ssize_t {
            match $crate::notify::table::socket(fd) {
                // SAFETY: the caller's arguments are passed on unchanged.
                Some(socket) if len <= size => unsafe { $served(socket, $plain(), fd, buf, len $(, $argument)*) },
                // SAFETY: the caller's arguments are passed on unchanged.
                _ => unsafe { real(fd, buf, len, size $(, $argument)*) },
            }
        }
    )*};
}

/// Returns the buffers of preadv2(2) or pwritev2(2), and the call's flags as flags of recv(2) or send(2). `None` if the
/// kernel refuses the call on a socket.
///
/// # Safety
/// As for [`Iov::vector`].
unsafe fn vector_at(iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> Option<(Iov, c_int)> {
    if offset != -1 {
        return None;
    }
    let flags = match flags {
        0 => 0,
        libc::RWF_NOWAIT => libc::MSG_DONTWAIT,
        _ => return None,
    };
    // SAFETY: `iov` is as for `Iov::vector`, by the contract.
    Some((unsafe { Iov::vector(iov, count) }?, flags))
}

// recv() and similar calls.

call! {
    /// `read(2)`.
    pub fn read(fd, buf: *mut c_void, len: size_t) -> ssize_t;
    fn read_on(socket, plain, kernel) {
        if len == 0 || is_no_length(len) {
            // The kernel moves no byte, and only checks the arguments.
            return plain();
        }
        // SAFETY: `buf` is the program's buffer of `len` bytes.
        unsafe { rx::recv(socket, fd, &mut Iov::one(buf, len), 0, &kernel) }
    }
}

call! {
    /// `readv(2)`.
    pub fn readv(fd, iov: *const iovec, count: c_int) -> ssize_t;
    fn readv_on(socket, plain, kernel) {
        // SAFETY: the program's array.
        let Some(mut array) = (unsafe { Iov::vector(iov, count) }).filter(|a| a.len() > 0) else {
            // The kernel refuses a bad array; for an empty one it checks only the fd.
            return plain();
        };
        // SAFETY: the cursor is over the program's buffers.
        unsafe { rx::recv(socket, fd, &mut array, 0, &kernel) }
    }
}

call! {
    /// `preadv2(2)`; on a socket only offset -1 is valid.
    pub fn preadv2(fd, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn preadv2_on(socket, plain, kernel) {
        // SAFETY: the program's array.
        let array = unsafe { vector_at(iov, count, offset, flags) };
        let Some((mut array, how)) = array.filter(|(a, _)| a.len() > 0) else {
            // The kernel refuses bad arguments; for an empty array it checks only the fd.
            return plain();
        };
        // SAFETY: the cursor is over the program's buffers.
        unsafe { rx::recv(socket, fd, &mut array, how, &kernel) }
    }
}

call! {
    /// `recv(2)`.
    pub fn recv(fd, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    fn recv_on(socket, plain, kernel) {
        if flags & libc::MSG_ERRQUEUE != 0 {
            // The error queue is the kernel's alone.
            return plain();
        }
        // SAFETY: `buf` is the program's buffer of `len` bytes.
        unsafe { rx::recv(socket, fd, &mut Iov::one(buf, len), flags, &kernel) }
    }
}

call! {
    /// `recvfrom(2)`.
    pub fn recvfrom(
        fd, buf: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t
    ) -> ssize_t;
    fn recvfrom_on(socket, plain, kernel) {
        if flags & libc::MSG_ERRQUEUE != 0 {
            return plain();
        }
        // SAFETY: `buf` is the program's buffer of `len` bytes.
        let n = unsafe { rx::recv(socket, fd, &mut Iov::one(buf, len), flags, &kernel) };
        if n >= 0 && !address.is_null() && !address_len.is_null() {
            // As in the kernel, a TCP socket reports no sender's address: its length is 0.
            // SAFETY: `address_len` is the program's own, and not null.
            unsafe { *address_len = 0 };
        }
        n
    }
}

fortified! {
    /// `read(2)` of a fortified program.
    pub fn read_chk() = read_on(real::read);
    /// `recv(2)` of a fortified program.
    pub fn recv_chk(flags: c_int) = recv_on(real::recv);
    /// `recvfrom(2)` of a fortified program.
    pub fn recvfrom_chk(flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t)
        = recvfrom_on(real::recvfrom);
}

call! {
    /// `recvmsg(2)`.
    pub fn recvmsg(fd, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn recvmsg_on(socket, plain, kernel) {
        if flags & libc::MSG_ERRQUEUE != 0 {
            return plain();
        }
        // SAFETY: `message` is the program's own, or an address where no memory can be.
        let array = unsafe { crate::sys::iov::plausible(message).and_then(|m| Iov::many(m.msg_iov, m.msg_iovlen)) };
        let Some(mut array) = array else {
            return plain();
        };
        // SAFETY: `message` is the program's own, and `plausible` has accepted it.
        let room = unsafe { (*message).msg_controllen };
        if room > 0 && !matches!(socket.promotion.stage(), Stage::Pinned | Stage::Plain) {
            // SAFETY: the program's fd of a socket, in the middle of its call.
            if socket.options.stamps(unsafe { BorrowedFd::borrow_raw(fd) }) {
                // The program wants to know when its data arrives, which only the kernel reports.
                within(|| pass::keep_on_tcp(socket, Reason::Unsupported));
            }
        }
        let was_plain = socket.rx_mode.load(Acquire) == Mode::Tcp;
        let is_kernels = Cell::new(false);
        // SAFETY: the cursor is over the program's buffers.
        let n = unsafe {
            rx::recv(socket, fd, &mut array, flags, &|fd| {
                let n = kernel(fd);
                is_kernels.set(n >= 0);
                n
            })
        };
        // If the direction has left TCP meanwhile, the kernel's message does not describe all bytes that were received.
        let is_all = was_plain && is_kernels.get() && socket.rx_mode.load(Acquire) == Mode::Tcp;
        if n >= 0 && !is_all {
            // A message from a TCP socket has no sender's address, and has control data only if the program has set
            // TCP_INQ.
            // SAFETY: `message` and its control buffer are the program's, and `message` is not null.
            unsafe {
                (*message).msg_namelen = 0;
                (*message).msg_controllen = room;
                (*message).msg_flags = 0;
                within(|| tell_more(socket, &mut *message));
            }
        }
        n
    }
}

/// Writes the control data of a message that was received without the kernel: the number of bytes left, if the program
/// has set TCP_INQ.
///
/// # Safety
/// The control buffer is the program's own, and of the length that the message says.
unsafe fn tell_more(socket: &'static Socket, message: &mut msghdr) {
    /// TCP_CM_INQ (linux/tcp.h).
    const LEFT: c_int = 36;
    let room = std::mem::replace(&mut message.msg_controllen, 0);
    if !socket.options.tells_more.load(Acquire) {
        return;
    }
    let header = size_of::<libc::cmsghdr>();
    if message.msg_control.is_null() || room < header {
        message.msg_flags |= libc::MSG_CTRUNC;
        return;
    }
    let errno = errno::get();
    let left = c_int::try_from(rx::after_receive(socket)).unwrap_or(c_int::MAX);
    errno::set(errno);
    let (whole, space) = (header + size_of::<c_int>(), header + size_of::<usize>());
    if room < whole {
        message.msg_flags |= libc::MSG_CTRUNC;
    }
    let bytes = left.to_ne_bytes();
    // SAFETY: `room` bytes are writable by the contract, and a header fits: `room` was compared with its size.
    unsafe {
        let at: *mut u8 = message.msg_control.cast();
        let cmsg = libc::cmsghdr {
            cmsg_len: whole.min(room),
            cmsg_level: libc::IPPROTO_TCP,
            cmsg_type: LEFT,
        };
        at.cast::<libc::cmsghdr>().write_unaligned(cmsg);
        let n = bytes.len().min(room - header);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.add(header), n);
    }
    message.msg_controllen = space.min(room);
}

call! {
    /// `recvmmsg(2)`.
    pub fn recvmmsg(
        fd, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec
    ) -> c_int;
    // As in the kernel, the call makes one recvmsg after the other.
    fn recvmmsg_on(socket, _plain, _kernel) {
        // SAFETY: `timeout` is null or the program's own.
        let deadline = match unsafe { timeout.as_ref() }.map(|t| Timeout::from_timespec(Some(t))) {
            Some(None) => return errno::fail(libc::EINVAL),
            Some(Some(t)) => Some(t.deadline()),
            None => None,
        };
        let mut done = 0;
        let began_on = table::token(fd);
        // The call does not go on if the fd stands for another file by then.
        while done < count && (done == 0 || table::token(fd) == began_on) {
            let waits = done == 0 || flags & libc::MSG_WAITFORONE == 0;
            let how = flags & !libc::MSG_WAITFORONE | if waits { 0 } else { libc::MSG_DONTWAIT };
            // SAFETY: the program's array has `count` entries.
            let entry = unsafe { &mut *messages.add(done as usize) };
            // SAFETY: the message is the program's, by the contract of recvmmsg(2).
            let n = unsafe { recvmsg_on(socket, real::recvmsg(), fd, &raw mut entry.msg_hdr, how) };
            if n < 0 {
                if done == 0 {
                    return -1;
                }
                // As in the kernel, the next call reports the error.
                if table::token(fd) == began_on {
                    reset::keep(socket, errno::get());
                }
                break;
            }
            entry.msg_len = n as c_uint;
            done += 1;
            // The kernel checks the time only after a message.
            if n == 0 && flags & libc::MSG_ERRQUEUE == 0 || deadline.is_some_and(|d| d.is_over()) {
                break;
            }
        }
        done as c_int
    }
}

// send() and similar calls.

call! {
    /// `write(2)`.
    pub fn write(fd, buf: *const c_void, len: size_t) -> ssize_t;
    fn write_on(socket, plain, kernel) {
        if is_no_length(len) {
            // The kernel only checks the arguments.
            return plain();
        }
        // SAFETY: `buf` is the program's buffer of `len` bytes.
        unsafe { tx::send(socket, fd, &mut Iov::one(buf, len), 0, &kernel) }
    }
}

call! {
    /// `writev(2)`.
    pub fn writev(fd, iov: *const iovec, count: c_int) -> ssize_t;
    fn writev_on(socket, plain, kernel) {
        // SAFETY: `iov` is the program's array of `count` entries; `vector` returns `None` for an array that the kernel
        // refuses.
        let Some(mut array) = (unsafe { Iov::vector(iov, count) }) else {
            return plain();
        };
        // SAFETY: the cursor is over the program's buffers.
        unsafe { tx::send(socket, fd, &mut array, 0, &kernel) }
    }
}

call! {
    /// `pwritev2(2)`; on a socket only offset -1 is valid.
    pub fn pwritev2(fd, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn pwritev2_on(socket, plain, kernel) {
        // SAFETY: `iov` is the program's array of `count` entries; `vector_at` returns `None` for arguments that the
        // kernel refuses.
        let Some((mut array, how)) = (unsafe { vector_at(iov, count, offset, flags) }) else {
            return plain();
        };
        // SAFETY: the cursor is over the program's buffers.
        unsafe { tx::send(socket, fd, &mut array, how, &kernel) }
    }
}

call! {
    /// `send(2)`.
    pub fn send(fd, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    fn send_on(socket, _plain, kernel) {
        if is_no_length(len) {
            return send_what_there_is(socket, fd, flags, &kernel);
        }
        // SAFETY: `buf` is the program's buffer of `len` bytes.
        unsafe { tx::send(socket, fd, &mut Iov::one(buf, len), flags, &kernel) }
    }
}

call! {
    /// `sendto(2)`.
    pub fn sendto(
        fd, buf: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t
    ) -> ssize_t;
    before before_fast_open(fd, flags);
    fn sendto_on(socket, _plain, kernel) {
        before_fast_open(fd, flags);
        if is_no_length(len) {
            return send_what_there_is(socket, fd, flags, &kernel);
        }
        // SAFETY: `buf` is the program's buffer of `len` bytes.
        unsafe { tx::send(socket, fd, &mut Iov::one(buf, len), flags, &kernel) }
    }
}

call! {
    /// `sendmsg(2)`.
    pub fn sendmsg(fd, message: *const msghdr, flags: c_int) -> ssize_t;
    before { pass::before_passing(message); before_fast_open(fd, flags) };
    fn sendmsg_on(socket, _plain, kernel) {
        before_fast_open(fd, flags);
        // SAFETY: `message` is the program's own, or an address where no memory can be.
        let array = unsafe {
            crate::sys::iov::plausible(message)
                .filter(|m| m.msg_controllen == 0)
                .and_then(|m| Iov::many(m.msg_iov, m.msg_iovlen))
        };
        let Some(mut array) = array else {
            // Control data asks for a service that only the kernel has. The other cases are left to the kernel to
            // refuse: no memory can be where the message lies, or `Iov::many` does not take its buffers.
            return send_what_there_is(socket, fd, flags, &kernel);
        };
        // SAFETY: the cursor is over the program's buffers.
        unsafe { tx::send(socket, fd, &mut array, flags, &kernel) }
    }
}

/// Takes the connection back to TCP for a send whose arguments only the kernel can judge. If the length exceeds
/// SSIZE_MAX, the kernel sends the bytes that it can read.
#[cold]
fn send_what_there_is(socket: &'static Socket, fd: c_int, flags: c_int, kernel: &impl Fn(c_int) -> ssize_t) -> ssize_t {
    tx::take_back(socket, rdmasock_core::stats::Reason::Unsupported);
    within(|| tx::send_on_tcp(socket, fd, flags, kernel))
}

call! {
    /// `sendmmsg(2)`.
    pub fn sendmmsg(fd, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    before { pass::before_passing_many(messages, count); before_fast_open(fd, flags) };
    // As in the kernel, the call makes one sendmsg after the other.
    fn sendmmsg_on(socket, _plain, _kernel) {
        let mut done = 0;
        let began_on = table::token(fd);
        while done < count.min(1024) && (done == 0 || table::token(fd) == began_on) {
            // SAFETY: the program's array has `count` entries.
            let entry = unsafe { &mut *messages.add(done as usize) };
            // SAFETY: the message is the program's, by the contract of sendmmsg(2).
            let n = unsafe { sendmsg_on(socket, real::sendmsg(), fd, &raw const entry.msg_hdr, flags) };
            if n < 0 {
                return if done > 0 { done as c_int } else { -1 };
            }
            entry.msg_len = n as c_uint;
            done += 1;
        }
        done as c_int
    }
}

/// Prepares for a send that connects the socket first (MSG_FASTOPEN).
#[inline]
fn before_fast_open(fd: c_int, flags: c_int) {
    if flags & libc::MSG_FASTOPEN != 0 {
        within(|| lifecycle::before_fast_open(fd));
    }
}

// The calls that move bytes between a socket and a file or pipe.

call! {
    /// `sendfile(2)`; only `out` can be a socket.
    pub fn sendfile(out, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn sendfile_on(socket, _plain, kernel) {
        // SAFETY: the program's own offset.
        within(|| unsafe { sendfile::sendfile(socket, out, input, offset, count, &kernel) })
    }
}

/// `splice(2)`; one end is a pipe, the other can be a socket.
#[inline]
pub unsafe extern "C" fn splice(
    real: real::splice,
    input: c_int,
    input_offset: *mut off_t,
    out: c_int,
    out_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    match (call::connection(input), call::connection(out)) {
        // SAFETY: the caller's arguments are passed on unchanged.
        (None, None) => unsafe { real(input, input_offset, out, out_offset, len, flags) },
        // SAFETY: the caller's arguments are passed on unchanged.
        (from, to) => unsafe { splice_on(from, to, real, input, input_offset, out, out_offset, len, flags) },
    }
}

/// Takes the sockets back to TCP and splices there: bytes that go through a pipe have to be in the kernel.
#[inline(never)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn splice_on(
    from: Option<&'static Socket>,
    to: Option<&'static Socket>,
    real: real::splice,
    input: c_int,
    input_offset: *mut off_t,
    out: c_int,
    out_offset: *mut off_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller's arguments are passed on unchanged.
    let call = || unsafe { real.cancellable()(input, input_offset, out, out_offset, len, flags) };
    let plain = !input_offset.is_null() || !out_offset.is_null() || len == 0 || !takes_splice(out);
    if from.is_some() && plain {
        // The kernel fails the call, or moves no byte, whether or not the socket has bytes.
        return call();
    }
    for socket in [from, to].into_iter().flatten() {
        tx::take_back(socket, rdmasock_core::stats::Reason::Splice);
    }
    match (from, to) {
        (Some(socket), _) => {
            let nonblocking = flags & libc::SPLICE_F_NONBLOCK != 0;
            within(|| sendfile::splice(socket, input, out, len, nonblocking, call))
        }
        (_, Some(socket)) => {
            // SAFETY: the caller's arguments are passed on, with an fd of the same socket as `out`.
            let call = |out| unsafe { real.cancellable()(input, input_offset, out, out_offset, len, flags) };
            within(|| tx::send_on_tcp(socket, out, 0, &call))
        }
        _ => call(),
    }
}

/// Returns whether `fd` is a pipe that is open for writing.
fn takes_splice(fd: c_int) -> bool {
    use rustix::fs::{FileType, OFlags};
    // SAFETY: `fd` is the program's own, in the middle of its call.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(fd).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Fifo)
        && rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.intersects(OFlags::WRONLY | OFlags::RDWR))
}

// The calls that hand a descriptor to I/O inside libc.

hooks! {
    /// `fdopen(3)`.
    pub fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    |plain| { give_to_libc(fd); plain() }

    /// `vdprintf(3)`, and `dprintf`; `arguments` is the `va_list`.
    pub fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    |plain| { give_to_libc(fd); plain() }

    /// `vdprintf(3)` and `dprintf` of a fortified program.
    pub fn vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    |plain| { give_to_libc(fd); plain() }

    /// `aio_read(3)` and `aio_write`.
    pub fn aio(block: *mut aiocb) -> c_int;
    // SAFETY: `block` is null or the program's own.
    |plain| { unsafe { give_block(block) }; plain() }

    /// `lio_listio(3)`.
    pub fn lio_listio(
        mode: c_int, blocks: *const *mut aiocb, count: c_int, event: *mut sigevent
    ) -> c_int;
    |plain| {
        for i in 0..if blocks.is_null() { 0 } else { count.max(0) as usize } {
            // SAFETY: `blocks` is the program's array of `count` pointers, each null or to a block.
            unsafe { give_block(*blocks.add(i)) };
        }
        plain()
    }
}

/// Hands the descriptor of an aio block to libc, as `give_to_libc` does.
///
/// # Safety
/// `block` is null, or the program's own.
#[inline]
unsafe fn give_block(block: *const aiocb) {
    // SAFETY: `block` is null or the program's own, by the contract.
    if let Some(block) = unsafe { block.as_ref() } {
        give_to_libc(block.aio_fildes);
    }
}

/// Takes the stream behind `fd` back to TCP for good: from here on libc does the I/O on `fd`.
#[inline]
fn give_to_libc(fd: c_int) {
    if let Some(socket) = crate::notify::table::socket(fd) {
        crate::process::pass::release(socket, rdmasock_core::stats::Reason::Stdio);
    }
}
