//! The rest of a connection that the program has closed too early for TCP. Bytes or markers still have to go out before
//! its FIN, or markers still have to come in. The service thread finishes the connection (`service::linger`). The end
//! of the process waits a moment for it.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stream::connection::Awaited;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The rest of one connection.
pub struct Remains {
    /// A copy of the kernel's socket, which is closed when this value is dropped.
    pub fd: PrivateFd,
    /// The markers that may still come.
    pub awaited: Option<Awaited>,
    /// The bytes that are still to be sent.
    pub unsent: Vec<u8>,
}

impl Remains {
    /// Counts and returns the rest of a connection that is being closed.
    pub fn new(fd: PrivateFd, awaited: Option<Awaited>, unsent: Vec<u8>) -> Self {
        COUNT.fetch_add(1, AcqRel);
        Self { fd, awaited, unsent }
    }

    /// Returns whether the awaited markers have to come before this end's FIN.
    pub fn ends_last(&self) -> bool {
        self.awaited.as_ref().is_some_and(|awaited| awaited.precede_end)
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        let _ = COUNT.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1));
    }
}

/// Returns whether this process has any.
pub fn are_any() -> bool {
    COUNT.load(Acquire) != 0
}

/// Sets the count to 0 in a fork child, which has none.
pub fn after_fork() {
    COUNT.store(0, Release);
}
