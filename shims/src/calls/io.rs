//! The calls that move bytes.

use crate::real::{
    ReadChkFn, ReadFn, RecvChkFn, RecvFn, RecvFromChkFn, RecvFromFn, RecvMmsgFn, RecvMsgFn,
    SendFileFn, SendFn, SendMmsgFn, SendMsgFn, SendToFn, SpliceFn, VectorFlagsFn, VectorFn,
    WriteFn,
};
use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};

/// `read(2)`.
#[inline]
pub unsafe extern "C" fn read(real: ReadFn, fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, size) }
}

/// `readv(2)`.
#[inline]
pub unsafe extern "C" fn readv(
    real: VectorFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, iov, count) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, iov, count, offset, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, size, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, flags, address, address_len) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, size, flags, address, address_len) }
}

/// `recvmsg(2)`.
#[inline]
pub unsafe extern "C" fn recvmsg(
    real: RecvMsgFn,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, message, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, messages, count, flags, timeout) }
}

/// `write(2)`.
#[inline]
pub unsafe extern "C" fn write(
    real: WriteFn,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len) }
}

/// `writev(2)`.
#[inline]
pub unsafe extern "C" fn writev(
    real: VectorFn,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, iov, count) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, iov, count, offset, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, buf, len, flags, address, address_len) }
}

/// `sendmsg(2)`.
#[inline]
pub unsafe extern "C" fn sendmsg(
    real: SendMsgFn,
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, message, flags) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, messages, count, flags) }
}

/// `sendfile(2)`; only `out` can be a socket.
#[inline]
pub unsafe extern "C" fn sendfile(
    real: SendFileFn,
    out: c_int,
    input: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(out, input, offset, count) }
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
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(input, input_offset, out, out_offset, len, flags) }
}
