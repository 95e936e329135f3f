//! The ways to serve a call by number. They differ in whether the call may be a connection's, whether it may wait, and
//! whether it is about the library's tables.

use core::ffi::c_long;

use libc::c_int;
use rustix::io::Errno;

use crate::notify::table;
use crate::startup::lifecycle;
use crate::sys::{errno, vfork};

/// The handler of a number. It gets six arguments, and uses as many as the call has. It returns the result as `syscall`
/// does.
pub type Handler = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_long;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE` of glibc's pthread.h.
const CANCEL_DISABLE: c_int = 1;

/// Returns a system call's result as libc does: -1 on an error, with errno set.
pub(super) fn result(of: Result<usize, Errno>) -> c_long {
    match of {
        Ok(value) => value as c_long,
        Err(error) => errno::fail::<c_long>(error.raw_os_error()),
    }
}

/// Serves a call that waits only for the kernel, in any process.
pub(super) fn direct(_first: usize, served: impl FnOnce() -> c_long, _plain: impl FnOnce() -> c_long) -> c_long {
    served()
}

/// Serves a call that may wait for a link. Such a wait is a cancellation point, as libc's functions are, but a system
/// call by number is none. So cancellation is disabled meanwhile.
pub(super) fn waits(_first: usize, served: impl FnOnce() -> c_long, _plain: impl FnOnce() -> c_long) -> c_long {
    let mut before = 0;
    // SAFETY: async-signal-safe in glibc; the state is this thread's own.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    let result = served();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, core::ptr::null_mut()) };
    result
}

/// Serves a call by [`waits`] if the library's tables have the descriptor `fd`; otherwise makes the system call.
pub(super) fn waits_on(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if table::is_known(fd as c_int) {
        waits(fd, served, plain)
    } else {
        plain()
    }
}

/// Serves a call that changes the library's tables. A process may run on this memory without the library knowing how it
/// began. The tables are not about such a process, so there the system call is made.
pub(super) fn owns(_first: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if vfork::is_stranger() { plain() } else { served() }
}

/// Serves a call by [`owns`] if the tables have the descriptor `fd`, or if it is the library's own. Otherwise makes the
/// system call.
pub(super) fn owns_fd(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    let concerns = table::is_known(fd as c_int) || lifecycle::is_hidden(fd as c_int);
    if concerns { owns(fd, served, plain) } else { plain() }
}

/// Serves a call that makes a new fd from `fd`. If the tables have `fd`, by [`owns`]. Otherwise the call is served also
/// in a process that the tables are not about, because the hook then changes nothing but the new fd.
pub(super) fn owns_made(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if table::is_known(fd as c_int) {
        owns(fd, served, plain)
    } else {
        served()
    }
}
