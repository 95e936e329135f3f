//! What is left of a connection that the program has closed before TCP had all that is to precede its end, or while
//! markers were on their way to it. The service thread sees to it (`service::linger`); the end of the process waits for
//! it for a moment.

use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire, Release},
};

use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stream::connection::Awaited;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Of one connection.
pub struct Remains {
    /// A copy of the kernel's socket, which is closed with this.
    pub fd: PrivateFd,
    /// The markers that may still come.
    pub awaited: Option<Awaited>,
    /// What is to be sent yet.
    pub unsent: Vec<u8>,
}

impl Remains {
    /// Of a connection that is being closed.
    pub fn new(fd: PrivateFd, awaited: Option<Awaited>, unsent: Vec<u8>) -> Self {
        COUNT.fetch_add(1, AcqRel);
        Self { fd, awaited, unsent }
    }

    /// Whether markers come before our own end.
    pub fn ends_last(&self) -> bool {
        self.awaited.as_ref().is_some_and(|awaited| awaited.precede_end)
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        let _ = COUNT.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1));
    }
}

/// Whether there are any in this process.
pub fn are_any() -> bool {
    COUNT.load(Acquire) != 0
}

/// In a fork child, which has none.
pub fn after_fork() {
    COUNT.store(0, Release);
}
