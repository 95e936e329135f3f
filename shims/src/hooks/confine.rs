//! The calls by which a program restricts its own system calls.

use core::ffi::c_void;

use libc::{c_int, c_uint, c_ulong};

use crate::startup::confine;
use crate::sys::real::{PrctlFn, SeccompFn};

/// `prctl(2)`. Arguments are arbitrary where the option has none.
#[inline]
pub unsafe extern "C" fn prctl(real: PrctlFn, option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        match a as c_uint {
            libc::SECCOMP_MODE_STRICT => confine::before_strict(),
            // SAFETY: what the program gives the kernel for a filter.
            libc::SECCOMP_MODE_FILTER => unsafe { confine::before_filter(b as *const _) },
            _ => {}
        }
    }
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(option, a, b, c, d) }
}

/// `seccomp(2)`, for which libc has no function.
pub unsafe extern "C" fn seccomp(real: SeccompFn, operation: c_uint, flags: c_uint, argument: *mut c_void) -> c_int {
    match operation {
        libc::SECCOMP_SET_MODE_STRICT => confine::before_strict(),
        // SAFETY: what the program gives the kernel for a filter.
        libc::SECCOMP_SET_MODE_FILTER => unsafe { confine::before_filter(argument.cast()) },
        _ => {}
    }
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(operation, flags, argument) }
}
