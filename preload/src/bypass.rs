//! The hooks of the calls that hand a descriptor to I/O inside libc. The implementation is in
//! `rdmasock_shims::hooks::io`. `dprintf` is variadic and so in `variadic.rs`.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{FILE, aiocb, c_char, c_int, c_void, sigevent};
use rdmasock_shims::hooks::io as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE => hook_fdopen {
        calls::fdopen(real::fdopen(), fd, mode)
    }
}

hook! {
    unsafe fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int => hook_vdprintf {
        calls::vdprintf(real::vdprintf(), fd, format, arguments)
    }
}

hook! {
    unsafe fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int => hook_vdprintf_chk {
        calls::vdprintf_chk(real::__vdprintf_chk(), fd, flag, format, arguments)
    }
}

hook! {
    unsafe fn aio_read(block: *mut aiocb) -> c_int => hook_aio_read {
        calls::aio(real::aio_read(), block)
    }
}

hook! {
    unsafe fn aio_read64(block: *mut aiocb) -> c_int => hook_aio_read64 {
        calls::aio(real::aio_read64(), block)
    }
}

hook! {
    unsafe fn aio_write(block: *mut aiocb) -> c_int => hook_aio_write {
        calls::aio(real::aio_write(), block)
    }
}

hook! {
    unsafe fn aio_write64(block: *mut aiocb) -> c_int => hook_aio_write64 {
        calls::aio(real::aio_write64(), block)
    }
}

hook! {
    unsafe fn lio_listio(mode: c_int, blocks: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int => hook_lio_listio {
        calls::lio_listio(real::lio_listio(), mode, blocks, count, event)
    }
}

hook! {
    unsafe fn lio_listio64(mode: c_int, blocks: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int => hook_lio_listio64 {
        calls::lio_listio(real::lio_listio64(), mode, blocks, count, event)
    }
}
