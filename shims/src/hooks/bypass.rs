//! The calls that hand a descriptor to I/O inside libc, which no hook sees: the stream goes back to
//! TCP for good before the call.

use libc::{FILE, aiocb, c_char, c_int, c_void, sigevent};

use crate::hooks::simple::hooks;
use crate::sys::real::{AioFn, FdopenFn, LioFn, VdprintfChkFn, VdprintfFn};

hooks! {
    /// `fdopen(3)`.
    pub fn fdopen(FdopenFn, fd: c_int, mode: *const c_char) -> *mut FILE;
    |plain| { give_to_libc(fd); plain() }

    /// `vdprintf(3)`, and `dprintf`; `arguments` is the `va_list`.
    pub fn vdprintf(VdprintfFn, fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    |plain| { give_to_libc(fd); plain() }

    /// `vdprintf(3)` and `dprintf` of a fortified program.
    pub fn vdprintf_chk(VdprintfChkFn, fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    |plain| { give_to_libc(fd); plain() }

    /// `aio_read(3)` and `aio_write`.
    pub fn aio(AioFn, block: *mut aiocb) -> c_int;
    // SAFETY: null, or the program's own.
    |plain| { unsafe { give_block(block) }; plain() }

    /// `lio_listio(3)`.
    pub fn lio_listio(
        LioFn, mode: c_int, blocks: *const *mut aiocb, count: c_int, event: *mut sigevent
    ) -> c_int;
    |plain| {
        for i in 0..if blocks.is_null() { 0 } else { count.max(0) as usize } {
            // SAFETY: the program's array of pointers, each null or to a block.
            unsafe { give_block(*blocks.add(i)) };
        }
        plain()
    }
}

/// Releases the descriptor of an aio block to libc.
///
/// # Safety
/// `block` is null, or the program's own.
#[inline]
unsafe fn give_block(block: *const aiocb) {
    // SAFETY: by the contract.
    if let Some(block) = unsafe { block.as_ref() } {
        give_to_libc(block.aio_fildes);
    }
}

/// Takes the stream behind `fd` back to TCP for good: from now on libc does the I/O.
#[inline]
fn give_to_libc(fd: c_int) {
    if let Some(socket) = crate::notify::table::socket(fd) {
        crate::process::pass::release(socket, rdmasock_core::stats::Reason::Stdio);
    }
}
