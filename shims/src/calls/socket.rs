//! The calls that make, connect, configure and shut sockets. `bind`, `getsockname` and `getpeername`
//! are not among them: the anchor answers.

use crate::real::{
    Accept4Fn, AcceptFn, ConnectFn, GetSockOptFn, SetSockOptFn, SocketFn, SocketIntFn,
};
use libc::{c_int, c_void, sockaddr, socklen_t};

/// `socket(2)`.
#[inline]
pub unsafe extern "C" fn socket(
    real: SocketFn,
    domain: c_int,
    kind: c_int,
    protocol: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(domain, kind, protocol) }
}

/// `listen(2)`.
#[inline]
pub unsafe extern "C" fn listen(real: SocketIntFn, fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, backlog) }
}

/// `accept(2)`.
#[inline]
pub unsafe extern "C" fn accept(
    real: AcceptFn,
    fd: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, address, address_len) }
}

/// `accept4(2)`.
#[inline]
pub unsafe extern "C" fn accept4(
    real: Accept4Fn,
    fd: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, address, address_len, flags) }
}

/// `connect(2)`.
#[inline]
pub unsafe extern "C" fn connect(
    real: ConnectFn,
    fd: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, address, address_len) }
}

/// `shutdown(2)`.
#[inline]
pub unsafe extern "C" fn shutdown(real: SocketIntFn, fd: c_int, how: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, how) }
}

/// `getsockopt(2)`.
#[inline]
pub unsafe extern "C" fn getsockopt(
    real: GetSockOptFn,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    value_len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, level, name, value, value_len) }
}

/// `setsockopt(2)`.
#[inline]
pub unsafe extern "C" fn setsockopt(
    real: SetSockOptFn,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    value_len: socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, level, name, value, value_len) }
}
