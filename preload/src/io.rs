//! The hooks of the calls that move bytes. The implementation is in `rdmasock_shims::hooks::io`.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rdmasock_shims::hooks::io as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t => hook_read {
        calls::read(real::read(), fd, buf, len)
    }
}

hook! {
    unsafe fn __read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t => hook_underscore_read {
        calls::read(real::__read(), fd, buf, len)
    }
}

hook! {
    unsafe fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t => hook_read_chk {
        calls::read_chk(real::__read_chk(), fd, buf, len, size)
    }
}

hook! {
    unsafe fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t => hook_readv {
        calls::readv(real::readv(), fd, iov, count)
    }
}

hook! {
    unsafe fn preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => hook_preadv2 {
        calls::preadv2(real::preadv2(), fd, iov, count, offset, flags)
    }
}

hook! {
    unsafe fn preadv64v2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => hook_preadv64v2 {
        calls::preadv2(real::preadv64v2(), fd, iov, count, offset, flags)
    }
}

hook! {
    unsafe fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t => hook_recv {
        calls::recv(real::recv(), fd, buf, len, flags)
    }
}

hook! {
    unsafe fn __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t => hook_recv_chk {
        calls::recv_chk(real::__recv_chk(), fd, buf, len, size, flags)
    }
}

hook! {
    unsafe fn recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t => hook_recvfrom {
        calls::recvfrom(real::recvfrom(), fd, buf, len, flags, address, address_len)
    }
}

hook! {
    unsafe fn __recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> ssize_t => hook_recvfrom_chk {
        calls::recvfrom_chk(real::__recvfrom_chk(), fd, buf, len, size, flags, address, address_len)
    }
}

hook! {
    unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t => hook_recvmsg {
        calls::recvmsg(real::recvmsg(), fd, message, flags)
    }
}

hook! {
    unsafe fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int => hook_recvmmsg {
        calls::recvmmsg(real::recvmmsg(), fd, messages, count, flags, timeout)
    }
}

hook! {
    unsafe fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t => hook_write {
        calls::write(real::write(), fd, buf, len)
    }
}

hook! {
    unsafe fn __write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t => hook_underscore_write {
        calls::write(real::__write(), fd, buf, len)
    }
}

hook! {
    unsafe fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t => hook_writev {
        calls::writev(real::writev(), fd, iov, count)
    }
}

hook! {
    unsafe fn pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => hook_pwritev2 {
        calls::pwritev2(real::pwritev2(), fd, iov, count, offset, flags)
    }
}

hook! {
    unsafe fn pwritev64v2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t => hook_pwritev64v2 {
        calls::pwritev2(real::pwritev64v2(), fd, iov, count, offset, flags)
    }
}

hook! {
    unsafe fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t => hook_send {
        calls::send(real::send(), fd, buf, len, flags)
    }
}

hook! {
    unsafe fn __send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t => hook_underscore_send {
        calls::send(real::__send(), fd, buf, len, flags)
    }
}

hook! {
    unsafe fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, address: *const sockaddr, address_len: socklen_t) -> ssize_t => hook_sendto {
        calls::sendto(real::sendto(), fd, buf, len, flags, address, address_len)
    }
}

hook! {
    unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t => hook_sendmsg {
        calls::sendmsg(real::sendmsg(), fd, message, flags)
    }
}

hook! {
    unsafe fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int => hook_sendmmsg {
        calls::sendmmsg(real::sendmmsg(), fd, messages, count, flags)
    }
}

hook! {
    unsafe fn sendfile(out: c_int, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t => hook_sendfile {
        calls::sendfile(real::sendfile(), out, input, offset, count)
    }
}

hook! {
    unsafe fn sendfile64(out: c_int, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t => hook_sendfile64 {
        calls::sendfile(real::sendfile64(), out, input, offset, count)
    }
}

hook! {
    unsafe fn splice(input: c_int, input_offset: *mut off_t, out: c_int, out_offset: *mut off_t, len: size_t, flags: c_uint) -> ssize_t => hook_splice {
        calls::splice(real::splice(), input, input_offset, out, out_offset, len, flags)
    }
}
