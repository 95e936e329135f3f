//! The ways between the engine of a link between hosts and those who wait in its own process: the words by which either
//! is told. Not who waits for what.

use crate::fabric::ring::Wake;
use crate::fabric::waiter::WaiterId;
use crate::sync::{AtomicBool, SleepFlag};

/// The attention word by which the engine is told. It names no waiter.
pub const ENGINE: Wake = Wake(1 << 31);

/// The service thread's waiter.
pub(super) const SERVICE: WaiterId = WaiterId(0);

/// How the engine reaches those who wait in this process. No call may wait, or call the end.
pub trait Local: Send + Sync {
    /// By which our `waiter` sleeps.
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag>;

    /// Wakes whoever sleeps, or will next sleep, on the doorbell of our `waiter`.
    fn ring(&self, waiter: WaiterId);

    /// Something of ours is in the ready queue of our `waiter`, which is rung after this if it sleeps.
    fn on_queued(&self, _waiter: WaiterId) {}

    /// Where it stands that the queue pair [is armed](super::End::is_armed); the end's own. Whoever has many links
    /// looks at all of them, so they are best side by side.
    fn armed(&self) -> &AtomicBool;

    /// Somebody is to call [`End::settle`](super::End::settle) some ms later.
    fn settle_later(&self);

    /// The peer's device has read so many bytes from our program's memory.
    fn on_lent(&self, _bytes: u64) {}

    /// Ours has read so many from the memory of the peer's program.
    fn on_taken(&self, _bytes: u64) {}

    /// Our program wants back what it has lent.
    fn on_recalled(&self) {}
}
