//! Counts threads inside a region that may be closed at any moment ([`Presence`]).

use super::words::{AtomicU32, Ordering, fence_after_rmw};

/// Counts the threads inside a region. A thread that enters counts itself, then checks whether it may stay, and leaves
/// at once if not. A thread that needs the region empty publishes that it is closed, then checks the count. So no
/// thread stays unseen. The last thread to leave checks whether another waits for that, which has
/// [published](super::Published) its wait first. So one of the two finds the region empty.
#[derive(Debug, Default)]
pub struct Presence(AtomicU32);

impl Presence {
    /// Returns an empty region.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Counts the calling thread in. Then check whether it may stay ([`Published::look`](super::Published::look)).
    #[inline(always)]
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Counts the calling thread out; returns `true` if it was the last. Then check whether another thread waits for
    /// that. Releases the accesses inside to a thread that sees the region [empty](Self::is_empty).
    #[inline(always)]
    pub fn leave(&self) -> bool {
        let is_last = self.0.fetch_sub(1, Ordering::SeqCst) == 1;
        fence_after_rmw();
        is_last
    }

    /// Returns whether the region is empty. To be called after the closing was published, or by the last thread that
    /// left.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Returns the number of threads inside.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Empties the region in a fork child, which has none of the other threads.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
