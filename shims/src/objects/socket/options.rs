//! Options as the program set them, where a link has to know.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed};

use crate::sys::sockopt;

/// See the module.
#[derive(Default)]
pub struct Options {
    /// TCP_CORK.
    pub corked: AtomicBool,
    /// TCP_USER_TIMEOUT, ms; 0: none.
    pub user_timeout: AtomicU32,
    /// TCP_INQ.
    pub tells_more: AtomicBool,
    /// SO_TIMESTAMP and its kin: 0 is not known yet, 1 none, 2 one is set.
    stamps: AtomicU8,
}

impl Options {
    /// Of a new connection.
    pub fn reset(&self) {
        self.corked.store(false, Relaxed);
        self.user_timeout.store(0, Relaxed);
        self.tells_more.store(false, Relaxed);
        self.forget_stamps();
    }

    /// One of SO_TIMESTAMP and its kin was set: which, the next receive that it concerns asks the kernel.
    pub fn forget_stamps(&self) {
        self.stamps.store(0, Relaxed);
    }

    /// Whether receives are told when data came. The kernel is asked once.
    pub fn stamps(&self, fd: BorrowedFd<'_>) -> bool {
        let mut known = self.stamps.load(Relaxed);
        if known == 0 {
            known = 1 + u8::from(sockopt::stamps(fd));
            self.stamps.store(known, Relaxed);
        }
        known == 2
    }
}
