//! How often promotions of a connection were attempted, and when the next attempt may begin.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::sys::time::now_ns;

/// Pause after the first failure, ns, and how many times later failures double it: up to four minutes.
const RETRY_AFTER: u64 = 1_000_000_000;
const RETRY_DOUBLINGS: u32 = 8;
/// Time without a failure, counted from the end of the last pause, after which the pause starts small again, ns.
const FORGIVEN_AFTER: u64 = 60_000_000_000;

/// The attempts to promote one connection.
#[derive(Default)]
pub struct Attempts {
    /// Earliest time of the next attempt, monotonic ns; 0: at any time.
    retry_at: AtomicU64,
    /// Attempts since the connection was last promoted.
    tries: AtomicU32,
    /// Recent attempts that failed after they had begun, and recent failures of links under the connection.
    failures: AtomicU32,
}

impl Attempts {
    /// Resets the counts for a new connection.
    pub fn reset(&self) {
        self.retry_at.store(0, Relaxed);
        self.tries.store(0, Relaxed);
        self.failures.store(0, Relaxed);
    }

    /// Returns whether it is too early for another attempt.
    pub fn is_early(&self) -> bool {
        let retry_at = self.retry_at.load(Relaxed);
        retry_at != 0 && now_ns() < retry_at
    }

    /// Puts the next attempt off by `pause` ns from now.
    pub fn put_off(&self, pause: u64) {
        self.retry_at.store(now_ns() + pause, Relaxed);
    }

    /// Returns whether there was no attempt since the connection was made or last promoted.
    pub fn is_first(&self) -> bool {
        self.tries.load(Relaxed) == 0
    }

    /// Counts one more attempt. Returns the number of attempts before it.
    pub fn count(&self) -> u32 {
        self.tries.fetch_add(1, Relaxed)
    }

    /// Notes that the connection is promoted.
    pub fn on_promoted(&self) {
        self.tries.store(0, Relaxed);
    }

    /// Returns whether an attempt or link has failed lately.
    pub fn have_failed(&self) -> bool {
        self.failures.load(Relaxed) > 0
    }

    /// Counts a failure and puts the next attempt off, for a pause that doubles with each failure.
    pub fn on_failure(&self) {
        let now = now_ns();
        if now.saturating_sub(self.retry_at.load(Relaxed)) > FORGIVEN_AFTER {
            self.failures.store(0, Relaxed);
        }
        let failures = self.failures.fetch_add(1, Relaxed).min(RETRY_DOUBLINGS);
        self.retry_at.store(now + (RETRY_AFTER << failures), Relaxed);
    }

    /// Returns for how long the next attempt is put off, ns.
    #[cfg(test)]
    pub fn pause(&self) -> u64 {
        self.retry_at.load(Relaxed).saturating_sub(now_ns())
    }
}
