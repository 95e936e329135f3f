//! Socket options that the program has set and that change what a link does.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32};

use crate::sys::sockopt;

/// The options of one socket.
#[derive(Default)]
pub struct Options {
    /// TCP_CORK.
    pub corked: AtomicBool,
    /// TCP_USER_TIMEOUT, ms; 0: no timeout.
    pub user_timeout: AtomicU32,
    /// TCP_INQ.
    pub tells_more: AtomicBool,
    /// Whether SO_TIMESTAMP or a similar option is set: 0 not known yet, 1 no, 2 yes.
    stamps: AtomicU8,
}

impl Options {
    /// Resets the options for a new connection.
    pub fn reset(&self) {
        self.corked.store(false, Relaxed);
        self.user_timeout.store(0, Relaxed);
        self.tells_more.store(false, Relaxed);
        self.forget_stamps();
    }

    /// Forgets whether SO_TIMESTAMP or a similar option is set, since the program has set one. The next receive that
    /// depends on it asks the kernel.
    pub fn forget_stamps(&self) {
        self.stamps.store(0, Relaxed);
    }

    /// Returns whether receives report when data came. Asks the kernel once.
    pub fn stamps(&self, fd: BorrowedFd<'_>) -> bool {
        let mut known = self.stamps.load(Relaxed);
        if known == 0 {
            known = 1 + u8::from(sockopt::stamps(fd));
            self.stamps.store(known, Relaxed);
        }
        known == 2
    }
}
