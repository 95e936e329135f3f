//! The atomics that the shared-memory algorithms are written over: std's, or loom's under
//! `--cfg loom`, so that the models check the code that ships. Not for locks or threads.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Separates a `SeqCst` read-modify-write from the `SeqCst` loads that follow it.
///
/// Every sleep protocol here is Dekker's: each side announces with a `SeqCst` read-modify-write
/// and then looks with a `SeqCst` load, so the single total order of `SeqCst` operations already
/// forbids that both miss the other, and no instruction is needed (x86-64: the locked
/// instruction is the fence; aarch64: `stlxr`/`ldar`). loom takes `SeqCst` accesses for `AcqRel`
/// only and honours `SeqCst` fences, so the models get a fence at the same place.
#[inline(always)]
pub fn fence_after_rmw() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}
