//! recv() and its kin.

use std::cell::Cell;
use std::sync::atomic::Ordering::Acquire;

use crate::errno;
use crate::iov::Iov;
use crate::jump::within;
use crate::real::Cancellable;
use crate::rx;
use crate::socket::{Mode, Socket};
use crate::table;
use crate::time::Timeout;

use crate::real::{
    ReadChkFn, ReadFn, RecvChkFn, RecvFn, RecvFromChkFn, RecvFromFn, RecvMmsgFn, RecvMsgFn,
    VectorFlagsFn, VectorFn,
};
use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};

/// `read(2)`.
#[inline]
pub unsafe extern "C" fn read(real: ReadFn, fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len) },
        // SAFETY: likewise.
        Some(socket) => unsafe { read_on(socket, real, fd, buf, len) },
    }
}

#[inline(never)]
unsafe extern "C" fn read_on(
    socket: &'static Socket,
    real: ReadFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
) -> ssize_t {
    if len == 0 {
        // SAFETY: the caller's arguments, as they are: the kernel looks at the number only.
        return unsafe { real(fd, buf, len) };
    }
    let mut iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        rx::recv(socket, fd, &mut iov, 0, &|fd| {
            real.cancellable()(fd, buf, len)
        })
    }
}

/// `read(2)` of a fortified program; libc aborts if `len` exceeds `size`.
#[inline]
pub unsafe extern "C" fn read_chk(
    real: ReadChkFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
) -> ssize_t {
    match table::socket(fd) {
        // libc would find nothing wrong.
        // SAFETY: the caller's arguments, as they are.
        Some(socket) if len <= size => unsafe {
            read_on(socket, crate::real::read(), fd, buf, len)
        },
        // SAFETY: likewise.
        _ => unsafe { real(fd, buf, len, size) },
    }
}

/// `readv(2)`.
#[inline]
pub unsafe extern "C" fn readv(
    real: VectorFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, iov, count) },
        // SAFETY: likewise.
        Some(socket) => unsafe { readv_on(socket, real, fd, iov, count) },
    }
}

#[inline(never)]
unsafe extern "C" fn readv_on(
    socket: &'static Socket,
    real: VectorFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the program's array.
    let Some(mut array) = (unsafe { Iov::vector(iov, count) }).filter(|a| a.len() > 0) else {
        // What it would not take the kernel refuses; of nothing it looks at the number only.
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count) };
    };
    // SAFETY: the program's buffers.
    unsafe {
        rx::recv(socket, fd, &mut array, 0, &|fd| {
            real.cancellable()(fd, iov, count)
        })
    }
}

/// `preadv2(2)`; on a socket only offset -1 is valid.
#[inline]
pub unsafe extern "C" fn preadv2(
    real: VectorFlagsFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, iov, count, offset, flags) },
        // SAFETY: likewise.
        Some(socket) => unsafe { preadv2_on(socket, real, fd, iov, count, offset, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn preadv2_on(
    socket: &'static Socket,
    real: VectorFlagsFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program's array.
    let array = |how| unsafe { Iov::vector(iov, count) }.map(|array| (array, how));
    let served = super::socket_flags(offset, flags).and_then(array);
    let Some((mut array, how)) = served.filter(|(a, _)| a.len() > 0) else {
        // As for readv.
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count, offset, flags) };
    };
    // SAFETY: the program's buffers.
    unsafe {
        rx::recv(socket, fd, &mut array, how, &|fd| {
            real.cancellable()(fd, iov, count, offset, flags)
        })
    }
}

/// `recv(2)`.
#[inline]
pub unsafe extern "C" fn recv(
    real: RecvFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, flags) },
        // SAFETY: likewise.
        Some(socket) => unsafe { recv_on(socket, real, fd, buf, len, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn recv_on(
    socket: &'static Socket,
    real: RecvFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let mut iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        rx::recv(socket, fd, &mut iov, flags, &|fd| {
            real.cancellable()(fd, buf, len, flags)
        })
    }
}

/// `recv(2)` of a fortified program; libc aborts if `len` exceeds `size`.
#[inline]
pub unsafe extern "C" fn recv_chk(
    real: RecvChkFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // libc would find nothing wrong.
        // SAFETY: the caller's arguments, as they are.
        Some(socket) if len <= size => unsafe {
            recv_on(socket, crate::real::recv(), fd, buf, len, flags)
        },
        // SAFETY: likewise.
        _ => unsafe { real(fd, buf, len, size, flags) },
    }
}

/// `recvfrom(2)`.
#[inline]
pub unsafe extern "C" fn recvfrom(
    real: RecvFromFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, flags, address, address_len) },
        // SAFETY: likewise.
        Some(socket) => unsafe {
            recvfrom_on(socket, real, fd, buf, len, flags, address, address_len)
        },
    }
}

#[inline(never)]
unsafe extern "C" fn recvfrom_on(
    socket: &'static Socket,
    real: RecvFromFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    let mut iov = Iov::one(buf, len);
    // SAFETY: the program's buffer.
    let n = unsafe {
        rx::recv(socket, fd, &mut iov, flags, &|fd| {
            real.cancellable()(fd, buf, len, flags, address, address_len)
        })
    };
    if n >= 0 && !address.is_null() && !address_len.is_null() {
        // What the kernel says of a stream's sender.
        // SAFETY: the program's own, checked for null.
        unsafe { *address_len = 0 };
    }
    n
}

/// `recvfrom(2)` of a fortified program; libc aborts if `len` exceeds `size`.
#[inline]
pub unsafe extern "C" fn recvfrom_chk(
    real: RecvFromChkFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    match table::socket(fd) {
        // libc would find nothing wrong.
        // SAFETY: the caller's arguments, as they are.
        Some(socket) if len <= size => unsafe {
            recvfrom_on(
                socket,
                crate::real::recvfrom(),
                fd,
                buf,
                len,
                flags,
                address,
                address_len,
            )
        },
        // SAFETY: likewise.
        _ => unsafe { real(fd, buf, len, size, flags, address, address_len) },
    }
}

/// `recvmsg(2)`.
#[inline]
pub unsafe extern "C" fn recvmsg(
    real: RecvMsgFn,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, message, flags) },
        // SAFETY: likewise.
        Some(socket) => unsafe { recvmsg_on(socket, real, fd, message, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn recvmsg_on(
    socket: &'static Socket,
    real: RecvMsgFn,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: checked for plausibility; the program's own.
    let array =
        unsafe { crate::iov::plausible(message).and_then(|m| Iov::many(m.msg_iov, m.msg_iovlen)) };
    let Some(mut array) = array else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, message, flags) };
    };
    // SAFETY: not null, see above.
    let room = unsafe { (*message).msg_controllen };
    let was_plain = socket.rx_mode.load(Acquire) == Mode::Tcp;
    let is_kernels = Cell::new(false);
    // SAFETY: the program's buffers.
    let n = unsafe {
        rx::recv(socket, fd, &mut array, flags, &|fd| {
            let n = real.cancellable()(fd, message, flags);
            is_kernels.set(n >= 0);
            n
        })
    };
    // Where the direction has moved meanwhile, what the kernel has said is not of all that was received.
    let is_all = was_plain && is_kernels.get() && socket.rx_mode.load(Acquire) == Mode::Tcp;
    if n >= 0 && !is_all {
        // A stream's message has no sender, and control data only where the program wants to know how much is left.
        // SAFETY: not null, see above.
        unsafe {
            (*message).msg_namelen = 0;
            (*message).msg_controllen = room;
            (*message).msg_flags = 0;
            within(|| tell_more(socket, &mut *message));
        }
    }
    n
}

/// The control data of a message that was received without the kernel: how much is left, if the program has set TCP_INQ.
///
/// # Safety
/// The control buffer is the program's own, and of the length that the message says.
unsafe fn tell_more(socket: &'static Socket, message: &mut msghdr) {
    /// TCP_CM_INQ (linux/tcp.h).
    const LEFT: c_int = 36;
    let room = std::mem::replace(&mut message.msg_controllen, 0);
    if !socket.tells_more.load(Acquire) {
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
    // SAFETY: `room` bytes are writable by the contract, in which there is place for a header.
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

/// `recvmmsg(2)`.
#[inline]
pub unsafe extern "C" fn recvmmsg(
    real: RecvMmsgFn,
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, messages, count, flags, timeout) },
        // SAFETY: likewise.
        Some(socket) => unsafe { recvmmsg_on(socket, fd, messages, count, flags, timeout) },
    }
}

/// One recvmsg after the other, as the kernel does it.
#[inline(never)]
unsafe extern "C" fn recvmmsg_on(
    socket: &'static Socket,
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: null, or the program's own.
    let deadline = unsafe { timeout.as_ref() }.map(|t| Timeout::from_timespec(Some(t)));
    let deadline = match deadline {
        Some(None) => return errno::fail(libc::EINVAL),
        Some(Some(t)) => Some(t.deadline()),
        None => None,
    };
    let mut done = 0;
    let began_on = table::token(fd);
    // What the number stands for later is not this call's.
    while done < count && (done == 0 || table::token(fd) == began_on) {
        let how = if done > 0 && flags & libc::MSG_WAITFORONE != 0 {
            flags | libc::MSG_DONTWAIT
        } else {
            flags
        };
        // SAFETY: the program's array has `count` entries.
        let entry = unsafe { &mut *messages.add(done as usize) };
        // SAFETY: likewise.
        let n = unsafe {
            recvmsg_on(
                socket,
                crate::real::recvmsg(),
                fd,
                &raw mut entry.msg_hdr,
                how & !libc::MSG_WAITFORONE,
            )
        };
        if n < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        entry.msg_len = n as c_uint;
        done += 1;
        // The kernel looks at the time only after a message.
        if n == 0 || deadline.is_some_and(|d| d.is_over()) {
            break;
        }
    }
    done as c_int
}
