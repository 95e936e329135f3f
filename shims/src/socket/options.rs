//! Options as the program set them, where a link has to know.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// See the module.
#[derive(Default)]
pub struct Options {
    /// TCP_CORK.
    pub corked: AtomicBool,
    /// TCP_USER_TIMEOUT, ms; 0: none.
    pub user_timeout: AtomicU32,
    /// TCP_INQ.
    pub tells_more: AtomicBool,
}

impl Options {
    /// Of a new connection.
    pub fn reset(&self) {
        self.corked.store(false, Relaxed);
        self.user_timeout.store(0, Relaxed);
        self.tells_more.store(false, Relaxed);
    }
}
