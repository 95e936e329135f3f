//! The hooks of the calls that close, duplicate and control descriptors. The implementation is in
//! `rdmasock_shims::hooks::fd`.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{c_int, c_uint, c_ulong, c_void};
use rdmasock_shims::hooks::fd as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn close(fd: c_int) -> c_int => hook_close {
        calls::close(real::close(), fd)
    }
}

hook! {
    unsafe fn __close(fd: c_int) -> c_int => hook_underscore_close {
        calls::close(real::__close(), fd)
    }
}

hook! {
    unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int => hook_close_range {
        calls::close_range(real::close_range(), first, last, flags)
    }
}

hook! {
    unsafe fn closefrom(first: c_int) => hook_closefrom {
        calls::closefrom(real::closefrom(), first)
    }
}

hook! {
    unsafe fn dup(fd: c_int) -> c_int => hook_dup {
        calls::dup(real::dup(), fd)
    }
}

hook! {
    unsafe fn dup2(old: c_int, new: c_int) -> c_int => hook_dup2 {
        calls::dup2(real::dup2(), old, new)
    }
}

hook! {
    unsafe fn __dup2(old: c_int, new: c_int) -> c_int => hook_underscore_dup2 {
        calls::dup2(real::__dup2(), old, new)
    }
}

hook! {
    unsafe fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int => hook_dup3 {
        calls::dup3(real::dup3(), old, new, flags)
    }
}

hook! {
    unsafe fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int => hook_fcntl {
        calls::fcntl(real::fcntl(), fd, command, argument)
    }
}

hook! {
    unsafe fn __fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int => hook_underscore_fcntl {
        calls::fcntl(real::__fcntl(), fd, command, argument)
    }
}

hook! {
    unsafe fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int => hook_fcntl64 {
        calls::fcntl(real::fcntl64(), fd, command, argument)
    }
}

hook! {
    unsafe fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int => hook_ioctl {
        calls::ioctl(real::ioctl(), fd, request, argument)
    }
}
