//! Whether a thread sleeps that must be woken ([`SleepFlag`]), and whether it was ([`RungMark`]). `fabric::waiter` and
//! `os::doorbell` do the sleeping and waking.

use super::words::{AtomicU64, Ordering, fence_after_rmw};

/// Bits of the flag that count sleepers; the others are the epoch.
const SLEEPERS: u64 = 0xffff;
const EPOCH: u64 = SLEEPERS + 1;

/// Tells whether a waiter sleeps, or is about to. Only the waiter writes to it; peers may map it read-only. All-zero:
/// no thread sleeps.
///
/// Holds the number of sleeping threads and an epoch that every `begin` advances. Together they never repeat: 48 bits
/// of epoch do not wrap, and between two `begin`s the number only falls. So a peer can tell that it has rung for this
/// state already.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SleepFlag(AtomicU64);

/// The state for which one process last rang at a waiter. Private to the ringing process.
#[derive(Debug, Default)]
pub struct RungMark(AtomicU64);

impl SleepFlag {
    /// Returns a flag outside shared memory, for tests and models.
    pub fn new() -> Self {
        Self::default()
    }

    /// Announces that this thread is about to sleep. Then check again every reason not to sleep, sleep if there is
    /// none, call [`end`](Self::end), and sweep.
    pub fn begin(&self) {
        self.0.fetch_add(EPOCH + 1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Announces that this thread is awake. If it leaves entries in the queues while other threads sleep on the same
    /// waiter, it must ring for them.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether a thread sleeps, or is about to. To be called after a [publication](super::Published).
    pub fn is_sleeping(&self) -> bool {
        self.0.load(Ordering::SeqCst) & SLEEPERS != 0
    }

    /// Returns `true` if the doorbell must be rung now, after a [publication](super::Published). It does so at most
    /// once per process and state of the flag. A bell that was rung for this state leads to an `end`, which changes the
    /// state, and a sweep.
    pub fn must_ring(&self, mark: &RungMark) -> bool {
        let now = self.0.load(Ordering::SeqCst);
        now & SLEEPERS != 0 && mark.0.load(Ordering::Relaxed) != now && mark.0.swap(now, Ordering::Relaxed) != now
    }
}

impl RungMark {
    /// Returns the mark of a process that has never rung.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the last ring, for another peer's waiter.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
