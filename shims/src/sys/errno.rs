//! Reads and sets errno of the calling thread. errno is the program's, so a hook changes it only if the program's call
//! fails.

use std::ffi::c_int;

/// Returns the calling thread's errno.
#[inline]
pub(crate) fn get() -> c_int {
    // SAFETY: libc returns a pointer to the thread's own errno, which is valid as long as the thread lives.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
#[inline]
pub(crate) fn set(value: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = value }
}

/// Sets errno and returns -1.
#[inline]
pub(crate) fn fail<T: From<i8>>(value: c_int) -> T {
    set(value);
    T::from(-1)
}

/// Returns the result of a call that `error` has ended after `done` bytes: `done`, or if that is 0, -1 with errno set
/// to `error`.
#[inline]
pub(crate) fn after(done: usize, error: c_int) -> libc::ssize_t {
    if done > 0 { done as libc::ssize_t } else { fail(error) }
}
