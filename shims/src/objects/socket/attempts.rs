//! How often a connection was to be promoted, and when it may be again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::sys::time::now_ns;

/// When a connection is tried again for the first time after a failure, ns, and how often that doubles: up to four
/// minutes.
const RETRY_AFTER: u64 = 1_000_000_000;
const RETRY_DOUBLINGS: u32 = 8;
/// A connection that has gone so long without a failure, ns, since it might be promoted again, is as a new one.
const FORGIVEN_AFTER: u64 = 60_000_000_000;

/// See the module.
#[derive(Default)]
pub struct Attempts {
    /// Not before this instant (monotonic ns), if it is not 0.
    retry_at: AtomicU64,
    /// Attempts since it was last promoted.
    tries: AtomicU32,
    /// Attempts that came to nothing once they had begun, and links that failed under it, lately.
    failures: AtomicU32,
}

impl Attempts {
    /// Of a new connection.
    pub fn reset(&self) {
        self.retry_at.store(0, Relaxed);
        self.tries.store(0, Relaxed);
        self.failures.store(0, Relaxed);
    }

    /// Whether it is too early for another.
    pub fn is_early(&self) -> bool {
        let retry_at = self.retry_at.load(Relaxed);
        retry_at != 0 && now_ns() < retry_at
    }

    /// Not before `pause` ns from now.
    pub fn put_off(&self, pause: u64) {
        self.retry_at.store(now_ns() + pause, Relaxed);
    }

    /// Whether there was none since the last that came to something.
    pub fn is_first(&self) -> bool {
        self.tries.load(Relaxed) == 0
    }

    /// One more; gives how many there were before.
    pub fn count(&self) -> u32 {
        self.tries.fetch_add(1, Relaxed)
    }

    /// The connection is promoted.
    pub fn on_promoted(&self) {
        self.tries.store(0, Relaxed);
    }

    /// Whether one has failed lately.
    pub fn have_failed(&self) -> bool {
        self.failures.load(Relaxed) > 0
    }

    /// One has failed: the next is put off for a while, which doubles each time.
    pub fn on_failure(&self) {
        let now = now_ns();
        if now.saturating_sub(self.retry_at.load(Relaxed)) > FORGIVEN_AFTER {
            self.failures.store(0, Relaxed);
        }
        let failures = self.failures.fetch_add(1, Relaxed).min(RETRY_DOUBLINGS);
        self.retry_at.store(now + (RETRY_AFTER << failures), Relaxed);
    }

    /// For how long the next is put off, ns.
    #[cfg(test)]
    pub fn pause(&self) -> u64 {
        self.retry_at.load(Relaxed).saturating_sub(now_ns())
    }
}
