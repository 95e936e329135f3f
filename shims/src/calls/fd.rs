//! The calls that close, duplicate and control descriptors.

use crate::real::{CloseFn, CloseFromFn, CloseRangeFn, Dup2Fn, Dup3Fn, DupFn, FcntlFn, IoctlFn};
use libc::{c_int, c_uint, c_ulong, c_void};

/// `close(2)`.
#[inline]
pub unsafe extern "C" fn close(real: CloseFn, fd: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd) }
}

/// `close_range(2)`.
#[inline]
pub unsafe extern "C" fn close_range(
    real: CloseRangeFn,
    first: c_uint,
    last: c_uint,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(first, last, flags) }
}

/// `closefrom(3)`; libc's own calls `close_range` unseen by its hook.
#[inline]
pub unsafe extern "C" fn closefrom(real: CloseFromFn, first: c_int) {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(first) }
}

/// `dup(2)`.
#[inline]
pub unsafe extern "C" fn dup(real: DupFn, fd: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd) }
}

/// `dup2(2)`. As 0, 1 or 2 a stream gets into the hands of stdio, whose I/O no hook sees.
#[inline]
pub unsafe extern "C" fn dup2(real: Dup2Fn, old: c_int, new: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(old, new) }
}

/// `dup3(2)`; see [`dup2`].
#[inline]
pub unsafe extern "C" fn dup3(real: Dup3Fn, old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(old, new, flags) }
}

/// `fcntl(2)`. `argument` is arbitrary where the command has none.
#[inline]
pub unsafe extern "C" fn fcntl(
    real: FcntlFn,
    fd: c_int,
    command: c_int,
    argument: c_ulong,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, command, argument) }
}

/// `ioctl(2)`. `argument` is arbitrary where the request has none.
#[inline]
pub unsafe extern "C" fn ioctl(
    real: IoctlFn,
    fd: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, request, argument) }
}
