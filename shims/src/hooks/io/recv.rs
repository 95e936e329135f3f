//! recv() and similar calls.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Acquire;

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rdmasock_core::stats::Reason;

use super::shape::{call, fortified, vector_at};
use crate::data::rx;
use crate::notify::{reset, table};
use crate::objects::socket::{Mode, Socket, Stage};
use crate::process::pass;
use crate::signals::jump::within;
use crate::sys::errno;
use crate::sys::iov::{Iov, is_no_length};
use crate::sys::real::{
    self, ReadChkFn, ReadFn, RecvChkFn, RecvFn, RecvFromChkFn, RecvFromFn, RecvMmsgFn, RecvMsgFn, VectorFlagsFn,
    VectorFn,
};
use crate::sys::time::Timeout;

call! {
    /// `read(2)`.
    pub fn read(ReadFn, fd, buf: *mut c_void, len: size_t) -> ssize_t;
    fn read_on(socket, plain, kernel) {
        if len == 0 || is_no_length(len) {
            // The kernel only checks the arguments.
            return plain();
        }
        // SAFETY: the program's buffer.
        unsafe { rx::recv(socket, fd, &mut Iov::one(buf, len), 0, &kernel) }
    }
}

call! {
    /// `readv(2)`.
    pub fn readv(VectorFn, fd, iov: *const iovec, count: c_int) -> ssize_t;
    fn readv_on(socket, plain, kernel) {
        // SAFETY: the program's array.
        let Some(mut array) = (unsafe { Iov::vector(iov, count) }).filter(|a| a.len() > 0) else {
            // The kernel refuses a bad array; for an empty one it checks only the fd.
            return plain();
        };
        // SAFETY: the program's buffers.
        unsafe { rx::recv(socket, fd, &mut array, 0, &kernel) }
    }
}

call! {
    /// `preadv2(2)`; on a socket only offset -1 is valid.
    pub fn preadv2(VectorFlagsFn, fd, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn preadv2_on(socket, plain, kernel) {
        // SAFETY: the program's array.
        let array = unsafe { vector_at(iov, count, offset, flags) };
        let Some((mut array, how)) = array.filter(|(a, _)| a.len() > 0) else {
            // The kernel refuses bad arguments; for an empty array it checks only the fd.
            return plain();
        };
        // SAFETY: the program's buffers.
        unsafe { rx::recv(socket, fd, &mut array, how, &kernel) }
    }
}

call! {
    /// `recv(2)`.
    pub fn recv(RecvFn, fd, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    fn recv_on(socket, plain, kernel) {
        if flags & libc::MSG_ERRQUEUE != 0 {
            // The error queue is the kernel's alone.
            return plain();
        }
        // SAFETY: the program's buffer.
        unsafe { rx::recv(socket, fd, &mut Iov::one(buf, len), flags, &kernel) }
    }
}

call! {
    /// `recvfrom(2)`.
    pub fn recvfrom(
        RecvFromFn, fd, buf: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t
    ) -> ssize_t;
    fn recvfrom_on(socket, plain, kernel) {
        if flags & libc::MSG_ERRQUEUE != 0 {
            return plain();
        }
        // SAFETY: the program's buffer.
        let n = unsafe { rx::recv(socket, fd, &mut Iov::one(buf, len), flags, &kernel) };
        if n >= 0 && !address.is_null() && !address_len.is_null() {
            // The length that the kernel reports for the address of a stream's sender.
            // SAFETY: the program's own, checked for null.
            unsafe { *address_len = 0 };
        }
        n
    }
}

fortified! {
    /// `read(2)` of a fortified program.
    pub fn read_chk(ReadChkFn) = read_on(real::read);
    /// `recv(2)` of a fortified program.
    pub fn recv_chk(RecvChkFn, flags: c_int) = recv_on(real::recv);
    /// `recvfrom(2)` of a fortified program.
    pub fn recvfrom_chk(RecvFromChkFn, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t)
        = recvfrom_on(real::recvfrom);
}

call! {
    /// `recvmsg(2)`.
    pub fn recvmsg(RecvMsgFn, fd, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn recvmsg_on(socket, plain, kernel) {
        if flags & libc::MSG_ERRQUEUE != 0 {
            return plain();
        }
        // SAFETY: checked for plausibility; the program's own.
        let array = unsafe { crate::sys::iov::plausible(message).and_then(|m| Iov::many(m.msg_iov, m.msg_iovlen)) };
        let Some(array) = array else {
            return plain();
        };
        // SAFETY: the program's message, not null, and its buffers.
        unsafe { receive_message(socket, fd, message, array, flags, kernel) }
    }
}

/// Receives into `array`, and fills in the message as the kernel would.
///
/// # Safety
/// `message` is the program's own, and `array` its buffers.
#[inline]
unsafe fn receive_message(
    socket: &'static Socket,
    fd: c_int,
    message: *mut msghdr,
    mut array: Iov,
    flags: c_int,
    kernel: impl Fn(c_int) -> ssize_t,
) -> ssize_t {
    // SAFETY: by the contract.
    let room = unsafe { (*message).msg_controllen };
    if room > 0 && !matches!(socket.promotion.stage(), Stage::Pinned | Stage::Plain) {
        // SAFETY: the program's fd of a socket, in the middle of its call.
        if socket.options.stamps(unsafe { BorrowedFd::borrow_raw(fd) }) {
            // Only the kernel knows when the data arrived.
            within(|| pass::keep_on_tcp(socket, Reason::Unsupported));
        }
    }
    let was_plain = socket.rx_mode.load(Acquire) == Mode::Tcp;
    let is_kernels = Cell::new(false);
    // SAFETY: the program's buffers.
    let n = unsafe {
        rx::recv(socket, fd, &mut array, flags, &|fd| {
            let n = kernel(fd);
            is_kernels.set(n >= 0);
            n
        })
    };
    // If the direction has moved meanwhile, the kernel's message is not about all bytes that were received.
    let is_all = was_plain && is_kernels.get() && socket.rx_mode.load(Acquire) == Mode::Tcp;
    if n >= 0 && !is_all {
        // A stream's message has no sender, and has control data only if the program asks how much is left.
        // SAFETY: by the contract.
        unsafe {
            (*message).msg_namelen = 0;
            (*message).msg_controllen = room;
            (*message).msg_flags = 0;
            within(|| tell_more(socket, &mut *message));
        }
    }
    n
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
        RecvMmsgFn, fd, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec
    ) -> c_int;
    fn recvmmsg_on(socket, _plain, _kernel) {
        // SAFETY: the caller's arguments, as they are.
        unsafe { receive_messages(socket, fd, messages, count, flags, timeout) }
    }
}

/// Makes one recvmsg after the other, as the kernel does.
///
/// # Safety
/// The arguments are the program's.
#[inline]
unsafe fn receive_messages(
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
    // A file that gets the fd later is not this call's.
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
                real::recvmsg(),
                fd,
                &raw mut entry.msg_hdr,
                how & !libc::MSG_WAITFORONE,
            )
        };
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
