//! Work that is left to the holder of a lock ([`Handoff`]).

use super::words::{AtomicU32, Ordering, store_load_fence};

/// Work to be done under a lock that callers only try to take. A thread with work adds it, and then tries the lock. The
/// holder of the lock takes the work, does it, releases the lock, and then [checks](Self::is_empty) again. So one of
/// the two does the work, and neither waits. The holder may be the very thread that a signal handler has interrupted.
#[derive(Debug, Default)]
pub struct Handoff(AtomicU32);

impl Handoff {
    /// Returns a value without work.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Adds these bits to the work. Then, until [none is left](Self::is_empty), try the lock and [take](Self::take) the
    /// work; finished if another thread holds the lock.
    pub fn add(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
    }

    /// Returns whether there is no work. To be called after work was added, before the lock is tried; and after the
    /// lock was released.
    pub fn is_empty(&self) -> bool {
        // The lock's own operations are not `SeqCst`. This fence is ordered before the attempt to lock, and after the
        // release.
        store_load_fence();
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Takes the work. The caller holds the lock.
    pub fn take(&self) -> u32 {
        self.0.swap(0, Ordering::SeqCst)
    }
}
