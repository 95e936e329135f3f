//! The calls that hand a descriptor to I/O inside libc, which no hook sees: the stream goes back to
//! TCP for good before the call.

use crate::real::{AioFn, FdopenFn, LioFn, VdprintfChkFn, VdprintfFn};
use libc::{FILE, aiocb, c_char, c_int, c_void, sigevent};

/// `fdopen(3)`.
#[inline]
pub unsafe extern "C" fn fdopen(real: FdopenFn, fd: c_int, mode: *const c_char) -> *mut FILE {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, mode) }
}

/// `vdprintf(3)`, and `dprintf`; `arguments` is the `va_list`.
#[inline]
pub unsafe extern "C" fn vdprintf(
    real: VdprintfFn,
    fd: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, format, arguments) }
}

/// `vdprintf(3)` and `dprintf` of a fortified program.
#[inline]
pub unsafe extern "C" fn vdprintf_chk(
    real: VdprintfChkFn,
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, flag, format, arguments) }
}

/// `aio_read(3)` and `aio_write`.
#[inline]
pub unsafe extern "C" fn aio(real: AioFn, block: *mut aiocb) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(block) }
}

/// `lio_listio(3)`.
#[inline]
pub unsafe extern "C" fn lio_listio(
    real: LioFn,
    mode: c_int,
    blocks: *const *mut aiocb,
    count: c_int,
    event: *mut sigevent,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(mode, blocks, count, event) }
}
