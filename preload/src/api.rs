//! The functions of `include/rdmasock.h`: no hooks, for libc has none of them. The implementation is in
//! `rdmasock_shims::api`.

use libc::{c_int, iovec, size_t, ssize_t};
use rdmasock_shims::api::info::{self, Info};
use rdmasock_shims::api::{prefer, view};

/// Tells what the connection runs on, and what it has carried.
///
/// # Safety
/// `info` points to a `struct rdmasock_info` of the size that it begins with.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdmasock_info(fd: c_int, info: *mut Info) -> c_int {
    // SAFETY: by the contract.
    unsafe { info::info(fd, info) }
}

/// Sets what the connection is to run on.
///
/// # Safety
/// None is needed: of C's ABI only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdmasock_prefer(fd: c_int, way: c_int) -> c_int {
    // SAFETY: as above.
    unsafe { prefer::prefer(fd, way) }
}

/// The next bytes that were received, where they lie.
///
/// # Safety
/// `pieces` has as many entries as `count` points to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdmasock_view(fd: c_int, pieces: *mut iovec, count: *mut c_int, flags: c_int) -> ssize_t {
    // SAFETY: by the contract.
    unsafe { view::view(fd, pieces, count, flags) }
}

/// The program is done with `n` bytes of those.
///
/// # Safety
/// Nobody looks at them any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdmasock_release(fd: c_int, n: size_t) -> c_int {
    // SAFETY: by the contract.
    unsafe { view::release(fd, n) }
}
