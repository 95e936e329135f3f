//! Work that is left to whoever holds a lock ([`Handoff`]).

use super::words::{AtomicU32, Ordering, store_load_fence};

/// What is to be done under a lock that one only tries to take. Who wants something done adds it and then tries the
/// lock; who has the lock takes what there is, does it, lets go of the lock, and then [looks](Self::is_empty) again. So
/// what was added is done by the one or the other, and nobody waits, though the lock may be held by the very thread
/// that a signal handler has interrupted.
#[derive(Debug, Default)]
pub struct Handoff(AtomicU32);

impl Handoff {
    /// Nothing is to be done.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Adds these bits to what is to be done. Then, until [nothing is](Self::is_empty), try the lock and
    /// [take](Self::take) them; done if somebody else has it.
    pub fn add(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
    }

    /// Whether there is nothing to be done: after something was added, before the lock is tried; and after the lock was
    /// let go of.
    pub fn is_empty(&self) -> bool {
        // The lock's own operations are no `SeqCst` ones: a fence here is before the trial and after the release.
        store_load_fence();
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Takes what is to be done, with the lock.
    pub fn take(&self) -> u32 {
        self.0.swap(0, Ordering::SeqCst)
    }
}
