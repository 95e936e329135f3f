//! The calls that move bytes.

use crate::errno;
use crate::iov::Iov;
use crate::pass;
use crate::real::Cancellable;
use crate::rx;
use crate::socket::{Socket, mode};
use crate::table;
use crate::tx;

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
    let iov = Iov::one(buf.cast(), len);
    if len == 0 {
        // SAFETY: the caller's arguments, as they are: the kernel looks at the number only.
        return unsafe { real(fd, buf, len) };
    }
    // SAFETY: the program's buffer.
    unsafe { rx::recv(socket, fd, iov, 0, || real.cancellable()(fd, buf, len)) }
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
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, size) },
        // SAFETY: likewise.
        Some(socket) => unsafe { read_chk_on(socket, real, fd, buf, len, size) },
    }
}

#[inline(never)]
unsafe extern "C" fn read_chk_on(
    socket: &'static Socket,
    real: ReadChkFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
) -> ssize_t {
    if len > size {
        // SAFETY: libc's own check says what is wrong.
        return unsafe { real(fd, buf, len, size) };
    }
    let iov = Iov::one(buf.cast(), len);
    if len == 0 {
        // SAFETY: the caller's arguments, as they are: the kernel looks at the number only.
        return unsafe { real(fd, buf, len, size) };
    }
    // SAFETY: the program's buffer.
    unsafe {
        rx::recv(socket, fd, iov, 0, || {
            real.cancellable()(fd, buf, len, size)
        })
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
    // SAFETY: the program's array; what the kernel would not take, it refuses.
    let Some(array) = usize::try_from(count)
        .ok()
        .and_then(|n| unsafe { Iov::many(iov, n) })
    else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count) };
    };
    if array.len() == 0 {
        // SAFETY: the caller's arguments, as they are: the kernel looks at the number only.
        return unsafe { real(fd, iov, count) };
    }
    // SAFETY: the program's buffers.
    unsafe { rx::recv(socket, fd, array, 0, || real.cancellable()(fd, iov, count)) }
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
    if offset != -1 || flags & !libc::RWF_NOWAIT != 0 {
        // SAFETY: the caller's arguments, as they are; the kernel refuses them.
        return unsafe { real(fd, iov, count, offset, flags) };
    }
    let how = if flags & libc::RWF_NOWAIT != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    // SAFETY: the program's array; what the kernel would not take, it refuses.
    let Some(array) = usize::try_from(count)
        .ok()
        .and_then(|n| unsafe { Iov::many(iov, n) })
    else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count, offset, flags) };
    };
    if array.len() == 0 {
        // SAFETY: the caller's arguments, as they are: the kernel looks at the number only.
        return unsafe { real(fd, iov, count, offset, flags) };
    }
    // SAFETY: the program's buffers.
    unsafe {
        rx::recv(socket, fd, array, how, || {
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
    let iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        rx::recv(socket, fd, iov, flags, || {
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
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, size, flags) },
        // SAFETY: likewise.
        Some(socket) => unsafe { recv_chk_on(socket, real, fd, buf, len, size, flags) },
    }
}

#[inline(never)]
unsafe extern "C" fn recv_chk_on(
    socket: &'static Socket,
    real: RecvChkFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
) -> ssize_t {
    if len > size {
        // SAFETY: libc's own check says what is wrong.
        return unsafe { real(fd, buf, len, size, flags) };
    }
    let iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        rx::recv(socket, fd, iov, flags, || {
            real.cancellable()(fd, buf, len, size, flags)
        })
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
    let iov = Iov::one(buf, len);
    // SAFETY: the program's buffer.
    let n = unsafe {
        rx::recv(socket, fd, iov, flags, || {
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
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(fd, buf, len, size, flags, address, address_len) },
        // SAFETY: likewise.
        Some(socket) => unsafe {
            recvfrom_chk_on(
                socket,
                real,
                fd,
                buf,
                len,
                size,
                flags,
                address,
                address_len,
            )
        },
    }
}

#[inline(never)]
unsafe extern "C" fn recvfrom_chk_on(
    socket: &'static Socket,
    real: RecvFromChkFn,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    if len > size {
        // SAFETY: libc's own check says what is wrong.
        return unsafe { real(fd, buf, len, size, flags, address, address_len) };
    }
    let iov = Iov::one(buf, len);
    // SAFETY: the program's buffer.
    let n = unsafe {
        rx::recv(socket, fd, iov, flags, || {
            real.cancellable()(fd, buf, len, size, flags, address, address_len)
        })
    };
    if n >= 0 && !address.is_null() && !address_len.is_null() {
        // What the kernel says of a stream's sender.
        // SAFETY: the program's own, checked for null.
        unsafe { *address_len = 0 };
    }
    n
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
    let Some(array) = array else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, message, flags) };
    };
    let was_plain = socket.rx_mode.load(std::sync::atomic::Ordering::Acquire) == mode::TCP;
    // SAFETY: the program's buffers.
    let n = unsafe {
        rx::recv(socket, fd, array, flags, || {
            real.cancellable()(fd, message, flags)
        })
    };
    if n >= 0 && !was_plain {
        // A stream's message has neither sender nor control data.
        // SAFETY: not null, see above.
        unsafe {
            (*message).msg_namelen = 0;
            (*message).msg_controllen = 0;
            (*message).msg_flags = 0;
        }
    }
    n
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
    let deadline =
        unsafe { timeout.as_ref() }.map(|t| crate::time::Timeout::from_timespec(Some(t)));
    let deadline = match deadline {
        Some(None) => return errno::fail(libc::EINVAL),
        Some(Some(t)) => Some(t.deadline()),
        None => None,
    };
    let mut done = 0;
    while done < count {
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
    let iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe { tx::send(socket, fd, iov, 0, || real.cancellable()(fd, buf, len)) }
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
    let Some(array) = usize::try_from(count)
        .ok()
        .and_then(|n| unsafe { Iov::many(iov, n) })
    else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count) };
    };
    // SAFETY: the program's buffers.
    unsafe { tx::send(socket, fd, array, 0, || real.cancellable()(fd, iov, count)) }
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
    if offset != -1 || flags & !libc::RWF_NOWAIT != 0 {
        // SAFETY: the caller's arguments, as they are; the kernel refuses them.
        return unsafe { real(fd, iov, count, offset, flags) };
    }
    let how = if flags & libc::RWF_NOWAIT != 0 {
        libc::MSG_DONTWAIT
    } else {
        0
    };
    // SAFETY: the program's array; what the kernel would not take, it refuses.
    let Some(array) = usize::try_from(count)
        .ok()
        .and_then(|n| unsafe { Iov::many(iov, n) })
    else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, iov, count, offset, flags) };
    };
    // SAFETY: the program's buffers.
    unsafe {
        tx::send(socket, fd, array, how, || {
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
    let iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        tx::send(socket, fd, iov, flags, || {
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
    let iov = Iov::one(buf.cast(), len);
    // SAFETY: the program's buffer.
    unsafe {
        tx::send(socket, fd, iov, flags, || {
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
    let Some(array) = array else {
        // Control data of a TCP socket ask for something of the kernel's.
        tx::take_back(socket, rdmasock_core::stats::Reason::Unsupported);
        // SAFETY: the caller's arguments, as they are.
        let call = || unsafe { real.cancellable()(fd, message, flags) };
        return tx::send_on_tcp(socket, fd, call);
    };
    // SAFETY: the program's buffers.
    unsafe {
        tx::send(socket, fd, array, flags, || {
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
    while done < count.min(1024) {
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

/// `sendfile(2)`; only `out` can be a socket.
#[inline]
pub unsafe extern "C" fn sendfile(
    real: SendFileFn,
    out: c_int,
    input: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    match table::socket(out) {
        // SAFETY: the caller's arguments, as they are.
        None => unsafe { real(out, input, offset, count) },
        // SAFETY: likewise.
        Some(socket) => unsafe { sendfile_on(socket, real, out, input, offset, count) },
    }
}

#[inline(never)]
unsafe extern "C" fn sendfile_on(
    socket: &'static Socket,
    real: SendFileFn,
    out: c_int,
    input: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the program's own offset.
    unsafe {
        tx::sendfile(socket, out, input, offset, count, || {
            real.cancellable()(out, input, offset, count)
        })
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
    match (table::socket(input), table::socket(out)) {
        // SAFETY: the caller's arguments, as they are.
        (None, None) => unsafe { real(input, input_offset, out, out_offset, len, flags) },
        // SAFETY: likewise.
        (from, to) => unsafe {
            splice_on(
                from,
                to,
                real,
                input,
                input_offset,
                out,
                out_offset,
                len,
                flags,
            )
        },
    }
}

/// Bytes that go through a pipe inside the kernel have to be in the kernel.
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
        // Refused, whatever the socket holds.
        return call();
    }
    for socket in [from, to].into_iter().flatten() {
        tx::take_back(socket, rdmasock_core::stats::Reason::Splice);
    }
    match (from, to) {
        (Some(socket), _) => {
            let nonblocking = flags & libc::SPLICE_F_NONBLOCK != 0;
            rx::splice(socket, input, out, len, nonblocking, call)
        }
        (_, Some(socket)) => tx::send_on_tcp(socket, out, call),
        _ => call(),
    }
}

/// The writing end of a pipe.
fn takes_splice(fd: c_int) -> bool {
    use rustix::fs::{FileType, OFlags};
    // SAFETY: the program's own number, in the middle of its call.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(fd).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Fifo)
        && rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.intersects(OFlags::WRONLY | OFlags::RDWR))
}
