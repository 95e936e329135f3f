//! The hooks of the calls that make, connect, configure and shut sockets. The implementation is in
//! `rdmasock_shims::hooks::socket`.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{c_int, c_void, sockaddr, socklen_t};
use rdmasock_shims::hooks::socket as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int => hook_socket {
        calls::socket(real::socket(), domain, kind, protocol)
    }
}

hook! {
    unsafe fn listen(fd: c_int, backlog: c_int) -> c_int => hook_listen {
        calls::listen(real::listen(), fd, backlog)
    }
}

hook! {
    unsafe fn accept(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> c_int => hook_accept {
        calls::accept(real::accept(), fd, address, address_len)
    }
}

hook! {
    unsafe fn accept4(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t, flags: c_int) -> c_int => hook_accept4 {
        calls::accept4(real::accept4(), fd, address, address_len, flags)
    }
}

hook! {
    unsafe fn connect(fd: c_int, address: *const sockaddr, address_len: socklen_t) -> c_int => hook_connect {
        calls::connect(real::connect(), fd, address, address_len)
    }
}

hook! {
    unsafe fn __connect(fd: c_int, address: *const sockaddr, address_len: socklen_t) -> c_int => hook_underscore_connect {
        calls::connect(real::__connect(), fd, address, address_len)
    }
}

hook! {
    unsafe fn shutdown(fd: c_int, how: c_int) -> c_int => hook_shutdown {
        calls::shutdown(real::shutdown(), fd, how)
    }
}

hook! {
    unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, value_len: *mut socklen_t) -> c_int => hook_getsockopt {
        calls::getsockopt(real::getsockopt(), fd, level, name, value, value_len)
    }
}

hook! {
    unsafe fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, value_len: socklen_t) -> c_int => hook_setsockopt {
        calls::setsockopt(real::setsockopt(), fd, level, name, value, value_len)
    }
}
