//! send() and its kin.

use crate::iov::Iov;
use crate::jump::within;
use crate::pass;
use crate::real::Cancellable;
use crate::socket::Socket;
use crate::table;
use crate::tx;

use crate::real::{SendFn, SendMmsgFn, SendMsgFn, SendToFn, VectorFlagsFn, VectorFn, WriteFn};
use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
};

/// `write(2)`.
#[inline]
pub unsafe extern "C" fn write(
    real: WriteFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len) },
        // SAFETY: likewise.
        Some(socket) => unsafe { write_on(socket, real, fd, buf, len) },
    }
}

#[inline(never)]
unsafe extern "C" fn write_on(
    socket: &'static Socket,
    real: WriteFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
) -> ssize_t {
    let mut iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        tx::send(socket, fd, &mut iov, 0, &|fd| {
            real.cancellable()(fd, buf, len)
        })
    }
}

/// `writev(2)`.
#[inline]
pub unsafe extern "C" fn writev(
    real: VectorFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, iov, count) },
        // SAFETY: likewise.
        Some(socket) => unsafe { writev_on(socket, real, fd, iov, count) },
    }
}

#[inline(never)]
unsafe extern "C" fn writev_on(
    socket: &'static Socket,
    real: VectorFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the program's array; what the kernel would not take, it refuses.
    let Some(mut array) = (unsafe { Iov::vector(iov, count) }) else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count) };
    };
    // SAFETY: the program's buffers.
    unsafe {
        tx::send(socket, fd, &mut array, 0, &|fd| {
            real.cancellable()(fd, iov, count)
        })
    }
}

/// `pwritev2(2)`; on a socket only offset -1 is valid.
#[inline]
pub unsafe extern "C" fn pwritev2(
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
        Some(socket) => unsafe { pwritev2_on(socket, real, fd, iov, count, offset, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn pwritev2_on(
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
    let Some((mut array, how)) = super::socket_flags(offset, flags).and_then(array) else {
        // What it would not take the kernel refuses.
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count, offset, flags) };
    };
    // SAFETY: the program's buffers.
    unsafe {
        tx::send(socket, fd, &mut array, how, &|fd| {
            real.cancellable()(fd, iov, count, offset, flags)
        })
    }
}

/// `send(2)`.
#[inline]
pub unsafe extern "C" fn send(
    real: SendFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, flags) },
        // SAFETY: likewise.
        Some(socket) => unsafe { send_on(socket, real, fd, buf, len, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn send_on(
    socket: &'static Socket,
    real: SendFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let mut iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        tx::send(socket, fd, &mut iov, flags, &|fd| {
            real.cancellable()(fd, buf, len, flags)
        })
    }
}

/// `sendto(2)`.
#[inline]
pub unsafe extern "C" fn sendto(
    real: SendToFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, flags, address, address_len) },
        // SAFETY: likewise.
        Some(socket) => unsafe {
            sendto_on(socket, real, fd, buf, len, flags, address, address_len)
        },
    }
}

#[inline(never)]
unsafe extern "C" fn sendto_on(
    socket: &'static Socket,
    real: SendToFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> ssize_t {
    let mut iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        tx::send(socket, fd, &mut iov, flags, &|fd| {
            real.cancellable()(fd, buf, len, flags, address, address_len)
        })
    }
}

/// `sendmsg(2)`.
#[inline]
pub unsafe extern "C" fn sendmsg(
    real: SendMsgFn,
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe {
            pass::before_passing(message);
            real(fd, message, flags)
        },
        // SAFETY: likewise.
        Some(socket) => unsafe { sendmsg_on(socket, real, fd, message, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn sendmsg_on(
    socket: &'static Socket,
    real: SendMsgFn,
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: checked for plausibility; the program's own.
    let array = unsafe {
        crate::iov::plausible(message)
            .filter(|m| m.msg_controllen == 0)
            .and_then(|m| Iov::many(m.msg_iov, m.msg_iovlen))
    };
    let Some(mut array) = array else {
        // Control data of a TCP socket ask for something of the kernel's.
        tx::take_back(socket, rdmasock_core::stats::Reason::Unsupported);
        // SAFETY: the caller's arguments, as they are.
        let call = |fd| unsafe { real.cancellable()(fd, message, flags) };
        return within(|| tx::send_on_tcp(socket, fd, &call));
    };
    // SAFETY: the program's buffers.
    unsafe {
        tx::send(socket, fd, &mut array, flags, &|fd| {
            real.cancellable()(fd, message, flags)
        })
    }
}

/// `sendmmsg(2)`.
#[inline]
pub unsafe extern "C" fn sendmmsg(
    real: SendMmsgFn,
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    match table::socket(fd) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe {
            pass::before_passing_many(messages, count);
            real(fd, messages, count, flags)
        },
        // SAFETY: likewise.
        Some(socket) => unsafe { sendmmsg_on(socket, fd, messages, count, flags) },
    }
}

/// One sendmsg after the other, as the kernel does it.
#[inline(never)]
unsafe extern "C" fn sendmmsg_on(
    socket: &'static Socket,
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let mut done = 0;
    let began_on = table::token(fd);
    while done < count.min(1024) && (done == 0 || table::token(fd) == began_on) {
        // SAFETY: the program's array has `count` entries.
        let entry = unsafe { &mut *messages.add(done as usize) };
        // SAFETY: likewise.
        let n = unsafe {
            sendmsg_on(
                socket,
                crate::real::sendmsg(),
                fd,
                &raw const entry.msg_hdr,
                flags,
            )
        };
        if n < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        entry.msg_len = n as c_uint;
        done += 1;
    }
    done as c_int
}
