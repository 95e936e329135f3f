//! The ways in which a call by number is served: whether it is one of a connection's at all, whether it may wait, and
//! whether it is about the library's tables.

use core::ffi::c_long;

use libc::c_int;
use rustix::io::Errno;

use crate::notify::table;
use crate::startup::lifecycle;
use crate::sys::errno;
use crate::sys::vfork;

/// What a number is served by: the six arguments, of which a call uses those that it has, and the result as
/// `syscall` gives it.
pub type Handler = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_long;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE` of glibc's pthread.h.
const CANCEL_DISABLE: c_int = 1;

/// As libc gives it.
pub(super) fn result(of: Result<usize, Errno>) -> c_long {
    match of {
        Ok(value) => value as c_long,
        Err(error) => errno::fail::<c_long>(error.raw_os_error()),
    }
}

/// Serves a call that waits for nothing but the kernel, in any process.
pub(super) fn direct(_first: usize, served: impl FnOnce() -> c_long, _plain: impl FnOnce() -> c_long) -> c_long {
    served()
}

/// Serves a call that may wait for a link, which is a cancellation point as libc's functions are; a system call by
/// number is none.
pub(super) fn waits(_first: usize, served: impl FnOnce() -> c_long, _plain: impl FnOnce() -> c_long) -> c_long {
    let mut before = 0;
    // SAFETY: async-signal-safe in glibc; the state is this thread's own.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    let result = served();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, core::ptr::null_mut()) };
    result
}

/// [`waits`] for a call on the descriptor `fd`, if that is a socket.
pub(super) fn waits_on(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if table::is_known(fd as c_int) {
        waits(fd, served, plain)
    } else {
        plain()
    }
}

/// Serves a call that changes what the library's tables say, which are not about a process that runs on our memory
/// without our knowing how it began.
pub(super) fn owns(_first: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if vfork::is_stranger() { plain() } else { served() }
}

/// [`owns`] for a call on the descriptor `fd`.
pub(super) fn owns_fd(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    let concerns = table::is_known(fd as c_int) || lifecycle::is_hidden(fd as c_int);
    if concerns { owns(fd, served, plain) } else { plain() }
}

/// [`owns`] for a call that makes a number out of the descriptor `fd`: all that is done for one of no socket's is about
/// that number.
pub(super) fn owns_made(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if table::is_known(fd as c_int) {
        owns(fd, served, plain)
    } else {
        served()
    }
}
