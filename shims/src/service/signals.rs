//! Threads of the library. They run no signal handlers of the program, and a thread that cannot be made is an error.
//! `std::thread` is not used: it takes memory from libc's `malloc` and aborts if that has none.

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use rustix::io::Errno;

type Body = Box<dyn FnOnce() + Send>;

/// Runs `body` in a new, detached thread with a stack of `stack` bytes. Returns the errors of pthread_create(3).
pub fn spawn(name: &'static CStr, stack: usize, body: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let body: Body = Box::new(move || {
        let _ = rustix::thread::set_name(name);
        body();
    });
    let body = Box::into_raw(Box::new(body));
    // SAFETY: the attributes are initialised before they are used. `body` is a valid box, which the thread takes over.
    let failed = unsafe {
        let mut attributes = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(&mut attributes, stack);
        let failed = libc::pthread_create(&mut std::mem::zeroed(), &attributes, run, body.cast());
        libc::pthread_attr_destroy(&mut attributes);
        failed
    };
    if failed != 0 {
        // SAFETY: no thread was made that would take the box.
        drop(unsafe { Box::from_raw(body) });
        return Err(Errno::from_raw_os_error(failed));
    }
    Ok(())
}

extern "C" fn run(body: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` has leaked this box for this thread alone.
    let body = unsafe { Box::from_raw(body.cast::<Body>()) };
    let _ = catch_unwind(AssertUnwindSafe(body));
    null_mut()
}

/// Blocks all signals of the calling thread until it is dropped, so that a new thread starts with them blocked. Holds
/// the mask from before.
pub struct SignalsBlocked(pub libc::sigset_t);

impl SignalsBlocked {
    pub fn new() -> Self {
        // SAFETY: the sets are plain memory, filled before they are read.
        unsafe {
            let mut all = std::mem::zeroed();
            let mut old = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
            Self(old)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `self.0` is the signal mask that pthread_sigmask(3) filled in `new`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, null_mut());
        }
    }
}
