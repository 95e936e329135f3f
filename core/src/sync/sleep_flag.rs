//! Whether somebody is asleep who has to be woken ([`SleepFlag`]), and whether that was done ([`RungMark`]). Not for
//! sleeping or waking (`fabric::waiter`, `os::doorbell`).

use super::words::{AtomicU64, Ordering, fence_after_rmw};

/// Bits of the flag that count sleepers; the others are the epoch.
const SLEEPERS: u64 = 0xffff;
const EPOCH: u64 = SLEEPERS + 1;

/// Says whether a waiter is, or is about to be, asleep. Written by the waiter
/// only; peers may map it read-only. All-zero: nobody sleeps.
///
/// Holds the number of sleeping threads and an epoch that every `begin` advances. Together they
/// never repeat (48 bits of epoch do not come round, and between two `begin`s the number only
/// falls), so a peer can tell that it has rung for just this state already.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SleepFlag(AtomicU64);

/// What one process remembers of its last ring at one waiter. Private to the ringing process.
#[derive(Debug, Default)]
pub struct RungMark(AtomicU64);

impl SleepFlag {
    /// A flag outside shared memory, for tests and models.
    pub fn new() -> Self {
        Self::default()
    }

    /// Announces that this thread is about to sleep. Then re-check everything that could be a
    /// reason not to, then sleep (or not), then [`end`](Self::end), then sweep.
    pub fn begin(&self) {
        self.0.fetch_add(EPOCH + 1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// This thread is awake. When it leaves something in the queues while other threads sleep
    /// on the same waiter, it must ring for them.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Somebody sleeps here, or is about to: to be asked after something was [published](super::Published).
    pub fn is_sleeping(&self) -> bool {
        self.0.load(Ordering::SeqCst) & SLEEPERS != 0
    }

    /// After something was [published](super::Published): true when the doorbell must be rung now. At most once per
    /// process and state of the flag: a bell rung for this state is still to be answered by `end`, which
    /// changes the state, and a sweep.
    pub fn must_ring(&self, mark: &RungMark) -> bool {
        let now = self.0.load(Ordering::SeqCst);
        now & SLEEPERS != 0 && mark.0.load(Ordering::Relaxed) != now && mark.0.swap(now, Ordering::Relaxed) != now
    }
}

impl RungMark {
    /// Never rung.
    pub fn new() -> Self {
        Self::default()
    }

    /// Back to that: for another peer's waiter.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
