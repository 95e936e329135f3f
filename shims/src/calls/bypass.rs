//! The calls that hand a descriptor to I/O inside libc, which no hook sees: the stream goes back to
//! TCP for good before the call.

use crate::real::{AioFn, FdopenFn, LioFn, VdprintfChkFn, VdprintfFn};
use libc::{FILE, aiocb, c_char, c_int, c_void, sigevent};

/// `fdopen(3)`.
#[inline]
pub unsafe extern "C" fn fdopen(real: FdopenFn, fd: c_int, mode: *const c_char) -> *mut FILE {
    give_to_libc(fd);
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, mode) }
}

/// `vdprintf(3)`, and `dprintf`; `arguments` is the `va_list`.
#[inline]
pub unsafe extern "C" fn vdprintf(real: VdprintfFn, fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int {
    give_to_libc(fd);
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
    give_to_libc(fd);
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd, flag, format, arguments) }
}

/// `aio_read(3)` and `aio_write`.
#[inline]
pub unsafe extern "C" fn aio(real: AioFn, block: *mut aiocb) -> c_int {
    // SAFETY: null, or the program's own.
    if let Some(block) = unsafe { block.as_ref() } {
        give_to_libc(block.aio_fildes);
    }
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
    for i in 0..if blocks.is_null() { 0 } else { count.max(0) as usize } {
        // SAFETY: the program's array of pointers, each null or to a block.
        if let Some(block) = unsafe { (*blocks.add(i)).as_ref() } {
            give_to_libc(block.aio_fildes);
        }
    }
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(mode, blocks, count, event) }
}

/// From here on libc does the I/O.
#[inline]
fn give_to_libc(fd: c_int) {
    if let Some(socket) = crate::table::socket(fd) {
        crate::pass::release(socket, rdmasock_core::stats::Reason::Stdio);
    }
}
