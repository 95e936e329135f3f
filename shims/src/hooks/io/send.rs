//! send() and similar calls.

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};

use super::shape::{call, vector_at};
use crate::data::tx;
use crate::notify::table;
use crate::objects::socket::Socket;
use crate::process::pass;
use crate::signals::jump::within;
use crate::startup::lifecycle;
use crate::sys::iov::{Iov, is_no_length};
use crate::sys::real::{self, SendFn, SendMmsgFn, SendMsgFn, SendToFn, VectorFlagsFn, VectorFn, WriteFn};

call! {
    /// `write(2)`.
    pub fn write(WriteFn, fd, buf: *const c_void, len: size_t) -> ssize_t;
    fn write_on(socket, plain, kernel) {
        if is_no_length(len) {
            // The kernel only checks the arguments.
            return plain();
        }
        // SAFETY: the program's buffer.
        unsafe { tx::send(socket, fd, &mut Iov::one(buf, len), 0, &kernel) }
    }
}

call! {
    /// `writev(2)`.
    pub fn writev(VectorFn, fd, iov: *const iovec, count: c_int) -> ssize_t;
    fn writev_on(socket, plain, kernel) {
        // SAFETY: the program's array; `vector` gives `None` for an array that the kernel refuses.
        let Some(mut array) = (unsafe { Iov::vector(iov, count) }) else {
            return plain();
        };
        // SAFETY: the program's buffers.
        unsafe { tx::send(socket, fd, &mut array, 0, &kernel) }
    }
}

call! {
    /// `pwritev2(2)`; on a socket only offset -1 is valid.
    pub fn pwritev2(VectorFlagsFn, fd, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn pwritev2_on(socket, plain, kernel) {
        // SAFETY: the program's array; `vector_at` gives `None` for arguments that the kernel refuses.
        let Some((mut array, how)) = (unsafe { vector_at(iov, count, offset, flags) }) else {
            return plain();
        };
        // SAFETY: the program's buffers.
        unsafe { tx::send(socket, fd, &mut array, how, &kernel) }
    }
}

call! {
    /// `send(2)`.
    pub fn send(SendFn, fd, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    fn send_on(socket, _plain, kernel) {
        if is_no_length(len) {
            return send_what_there_is(socket, fd, flags, &kernel);
        }
        // SAFETY: the program's buffer.
        unsafe { tx::send(socket, fd, &mut Iov::one(buf, len), flags, &kernel) }
    }
}

call! {
    /// `sendto(2)`.
    pub fn sendto(
        SendToFn, fd, buf: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t
    ) -> ssize_t;
    before before_fast_open(fd, flags);
    fn sendto_on(socket, _plain, kernel) {
        before_fast_open(fd, flags);
        if is_no_length(len) {
            return send_what_there_is(socket, fd, flags, &kernel);
        }
        // SAFETY: the program's buffer.
        unsafe { tx::send(socket, fd, &mut Iov::one(buf, len), flags, &kernel) }
    }
}

call! {
    /// `sendmsg(2)`.
    pub fn sendmsg(SendMsgFn, fd, message: *const msghdr, flags: c_int) -> ssize_t;
    before { pass::before_passing(message); before_fast_open(fd, flags) };
    fn sendmsg_on(socket, _plain, kernel) {
        before_fast_open(fd, flags);
        // SAFETY: checked for plausibility; the program's own.
        let array = unsafe {
            crate::sys::iov::plausible(message)
                .filter(|m| m.msg_controllen == 0)
                .and_then(|m| Iov::many(m.msg_iov, m.msg_iovlen))
        };
        let Some(mut array) = array else {
            // Control data on a TCP socket ask for a service of the kernel.
            return send_what_there_is(socket, fd, flags, &kernel);
        };
        // SAFETY: the program's buffers.
        unsafe { tx::send(socket, fd, &mut array, flags, &kernel) }
    }
}

/// Takes the connection back to TCP for a send whose arguments only the kernel can judge. If the length exceeds all
/// memory, the kernel sends the bytes that can be read.
#[cold]
fn send_what_there_is(socket: &'static Socket, fd: c_int, flags: c_int, kernel: &impl Fn(c_int) -> ssize_t) -> ssize_t {
    tx::take_back(socket, rdmasock_core::stats::Reason::Unsupported);
    within(|| tx::send_on_tcp(socket, fd, flags, kernel))
}

call! {
    /// `sendmmsg(2)`.
    pub fn sendmmsg(SendMmsgFn, fd, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    before { pass::before_passing_many(messages, count); before_fast_open(fd, flags) };
    fn sendmmsg_on(socket, _plain, _kernel) {
        // SAFETY: the caller's arguments, as they are.
        unsafe { send_messages(socket, fd, messages, count, flags) }
    }
}

/// With MSG_FASTOPEN a send connects the socket first.
#[inline]
fn before_fast_open(fd: c_int, flags: c_int) {
    if flags & libc::MSG_FASTOPEN != 0 {
        within(|| lifecycle::before_fast_open(fd));
    }
}

/// Makes one sendmsg after the other, as the kernel does.
///
/// # Safety
/// The arguments are the program's.
#[inline]
unsafe fn send_messages(
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
        let n = unsafe { sendmsg_on(socket, real::sendmsg(), fd, &raw const entry.msg_hdr, flags) };
        if n < 0 {
            return if done > 0 { done as c_int } else { -1 };
        }
        entry.msg_len = n as c_uint;
        done += 1;
    }
    done as c_int
}
