//! errno, which belongs to the program: set where a call fails, kept everywhere else.

use std::ffi::c_int;

/// The calling thread's errno.
#[inline]
pub fn get() -> c_int {
    // SAFETY: always a valid pointer to the thread's own errno.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
#[inline]
pub fn set(value: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = value }
}

/// Sets errno and gives -1.
#[inline]
pub fn fail<T: From<i8>>(value: c_int) -> T {
    set(value);
    T::from(-1)
}

/// What a call gives that `error` ends when it has moved `done` bytes.
#[inline]
pub fn after(done: usize, error: c_int) -> libc::ssize_t {
    if done > 0 { done as libc::ssize_t } else { fail(error) }
}
