//! The atomics that shared memory is written over, and the fences between a store and a load: std's, or loom's in a
//! model.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Between what this side has stored and what it loads next, where the other side does the same with the two exchanged
/// and this in between. For words that have other uses, too, whose orderings therefore do not count; a full fence, so
/// not where each message passes.
#[inline]
pub fn store_load_fence() {
    fence(Ordering::SeqCst);
}

/// Separates, in a model, a `SeqCst` read-modify-write from the `SeqCst` loads that follow it; see [`super`].
#[inline(always)]
pub fn fence_after_rmw() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
