//! The connection between the engine of a link between hosts and the waiters of its own process: the words by which
//! either is notified. Not which thread waits for which event.

use crate::fabric::ring::Wake;
use crate::fabric::waiter::WaiterId;
use crate::sync::{AtomicBool, SleepFlag};

/// The attention word by which the engine is notified. It names no waiter.
pub const ENGINE: Wake = Wake(1 << 31);

/// The service thread's waiter.
pub(super) const SERVICE: WaiterId = WaiterId(0);

/// The calls by which the engine reaches the waiters of this process. No call may wait, or call the end.
pub trait Local: Send + Sync {
    /// Returns the sleep flag of this process's `waiter`.
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag>;

    /// Wakes the thread that sleeps, or will next sleep, on the doorbell of this process's `waiter`.
    fn ring(&self, waiter: WaiterId);

    /// Reports that a stream is in the ready queue of `waiter`, which is rung afterwards if it sleeps.
    fn on_queued(&self, _waiter: WaiterId) {}

    /// Returns the word that records whether the queue pair [is armed](super::End::is_armed); each end has its own. A
    /// process with many links reads all these words, so they are best side by side.
    fn armed(&self) -> &AtomicBool;

    /// Asks for a call of [`End::settle`](super::End::settle) some ms later.
    fn settle_later(&self);

    /// Reports how many bytes the peer's device has just read from the memory of this end's program.
    fn on_lent(&self, _bytes: u64) {}

    /// Reports how many bytes this end's device has just read from the memory of the peer's program.
    fn on_taken(&self, _bytes: u64) {}

    /// Reports that this end's program recalls memory that it has lent.
    fn on_recalled(&self) {}
}
