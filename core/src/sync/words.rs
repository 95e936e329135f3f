//! The atomics of shared memory, and the fences between a store and a load: those of std, or of loom in a model.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Orders this side's stores before its later loads, where the other side does the same with the words exchanged. For
/// words with other uses too, whose own orderings do not give that. It is a full fence, so it is not for the path of
/// each message.
#[inline]
pub fn store_load_fence() {
    fence(Ordering::SeqCst);
}

/// Separates, in a loom model, a `SeqCst` read-modify-write from the `SeqCst` loads that follow it; see [`super`].
#[inline(always)]
pub fn fence_after_rmw() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
