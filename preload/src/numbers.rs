//! The hooks of calls that only make a descriptor. They see to it that the descriptor gets the lowest free number.
//! `rdmasock_shims::hooks::fd` implements them.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{c_char, c_int, c_uint, sigset_t};
use rdmasock_shims::hooks::fd as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int => hook_open {
        calls::open(real::open(), path, flags, mode)
    }
}

hook! {
    unsafe fn open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int => hook_open64 {
        calls::open(real::open64(), path, flags, mode)
    }
}

hook! {
    unsafe fn __open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int => hook_underscore_open {
        calls::open(real::__open(), path, flags, mode)
    }
}

hook! {
    unsafe fn __open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int => hook_underscore_open64 {
        calls::open(real::__open64(), path, flags, mode)
    }
}

hook! {
    unsafe fn __open_2(path: *const c_char, flags: c_int) -> c_int => hook_underscore_open_2 {
        calls::open_2(real::__open_2(), path, flags)
    }
}

hook! {
    unsafe fn __open64_2(path: *const c_char, flags: c_int) -> c_int => hook_underscore_open64_2 {
        calls::open_2(real::__open64_2(), path, flags)
    }
}

hook! {
    unsafe fn openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int => hook_openat {
        calls::openat(real::openat(), at, path, flags, mode)
    }
}

hook! {
    unsafe fn openat64(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int => hook_openat64 {
        calls::openat(real::openat64(), at, path, flags, mode)
    }
}

hook! {
    unsafe fn __openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int => hook_underscore_openat_2 {
        calls::openat_2(real::__openat_2(), at, path, flags)
    }
}

hook! {
    unsafe fn __openat64_2(at: c_int, path: *const c_char, flags: c_int) -> c_int => hook_underscore_openat64_2 {
        calls::openat_2(real::__openat64_2(), at, path, flags)
    }
}

hook! {
    unsafe fn creat(path: *const c_char, mode: c_uint) -> c_int => hook_creat {
        calls::creat(real::creat(), path, mode)
    }
}

hook! {
    unsafe fn creat64(path: *const c_char, mode: c_uint) -> c_int => hook_creat64 {
        calls::creat(real::creat64(), path, mode)
    }
}

hook! {
    unsafe fn pipe(ends: *mut c_int) -> c_int => hook_pipe {
        calls::pipe(real::pipe(), ends)
    }
}

hook! {
    unsafe fn __pipe(ends: *mut c_int) -> c_int => hook_underscore_pipe {
        calls::pipe(real::__pipe(), ends)
    }
}

hook! {
    unsafe fn pipe2(ends: *mut c_int, flags: c_int) -> c_int => hook_pipe2 {
        calls::pipe2(real::pipe2(), ends, flags)
    }
}

hook! {
    unsafe fn socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int => hook_socketpair {
        calls::socketpair(real::socketpair(), domain, kind, protocol, ends)
    }
}

hook! {
    unsafe fn eventfd(value: c_uint, flags: c_int) -> c_int => hook_eventfd {
        calls::eventfd(real::eventfd(), value, flags)
    }
}

hook! {
    unsafe fn timerfd_create(clock: c_int, flags: c_int) -> c_int => hook_timerfd_create {
        calls::timerfd_create(real::timerfd_create(), clock, flags)
    }
}

hook! {
    unsafe fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int => hook_signalfd {
        calls::signalfd(real::signalfd(), fd, mask, flags)
    }
}

hook! {
    unsafe fn inotify_init() -> c_int => hook_inotify_init {
        calls::inotify_init(real::inotify_init())
    }
}

hook! {
    unsafe fn inotify_init1(flags: c_int) -> c_int => hook_inotify_init1 {
        calls::inotify_init1(real::inotify_init1(), flags)
    }
}

hook! {
    unsafe fn memfd_create(name: *const c_char, flags: c_uint) -> c_int => hook_memfd_create {
        calls::memfd_create(real::memfd_create(), name, flags)
    }
}
