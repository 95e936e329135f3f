//! The atomics of shared memory, and the fences between a store and a load: those of std, or of loom in a model.

#[cfg(not(loom))]
pub use std::sync::atomic::AtomicBool;
#[cfg(not(loom))]
pub use std::sync::atomic::AtomicPtr;
#[cfg(not(loom))]
pub use std::sync::atomic::AtomicU8;
#[cfg(not(loom))]
pub use std::sync::atomic::AtomicU32;
#[cfg(not(loom))]
pub use std::sync::atomic::AtomicU64;
#[cfg(not(loom))]
pub use std::sync::atomic::Ordering;
#[cfg(not(loom))]
pub use std::sync::atomic::fence;

#[cfg(loom)]
pub use loom::sync::atomic::AtomicBool;
#[cfg(loom)]
pub use loom::sync::atomic::AtomicPtr;
#[cfg(loom)]
pub use loom::sync::atomic::AtomicU8;
#[cfg(loom)]
pub use loom::sync::atomic::AtomicU32;
#[cfg(loom)]
pub use loom::sync::atomic::AtomicU64;
#[cfg(loom)]
pub use loom::sync::atomic::Ordering;
#[cfg(loom)]
pub use loom::sync::atomic::fence;

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
