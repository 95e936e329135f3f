//! Threads of ours run no handlers of the program's.

/// Blocks all signals of this thread while it lives, so that a new thread starts with them blocked.
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
        // SAFETY: the set that was in force before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut());
        }
    }
}
