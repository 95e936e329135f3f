//! When a connection is worth promoting (docs/performance.md has the figures behind the default).
//!
//! Counts the requests and bytes that a connection has carried. A connection that ends below the threshold costs no
//! more than plain TCP (ARCHITECTURE, I3).

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// The least number of bytes that a call counts for. The cost of a small message on TCP is the cost of the call, and
/// does not depend on the length.
pub const CALL_WEIGHT: u64 = 256;

/// The limits at which a connection is promoted. It is promoted when it reaches either of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// The number of the request at whose first send the connection is promoted. A request begins when a connection
    /// turns from receiving to sending; the first send begins request 1. `None`: no limit.
    pub requests: Option<u32>,
    /// Bytes carried in both directions together. Each call counts for at least [`CALL_WEIGHT`] bytes. `None`: no
    /// limit.
    pub bytes: Option<u64>,
}

impl Threshold {
    /// Promotes a connection as soon as it is established.
    pub const AT_ONCE: Self = Self {
        requests: None,
        bytes: Some(0),
    };

    /// Returns a slightly lower threshold, for the accepting end. So that end reaches its threshold shortly before the
    /// connecting end reaches `self`. The connecting end then asks which process holds the connection, and the
    /// accepting end must have recorded that by then.
    pub fn just_before(&self) -> Self {
        Self {
            requests: self.requests.map(|n| n.saturating_sub(1).max(1)),
            bytes: self.bytes.map(|n| n - n / 8),
        }
    }

    /// Returns whether a connection that has just been established is already worth promoting.
    pub fn is_at_once(&self) -> bool {
        self.bytes == Some(0)
    }
}

/// The requests and bytes that one connection has carried. The counters are updated without locks. If two threads race,
/// the connection is promoted a call too early or too late at worst.
#[derive(Debug, Default)]
pub struct Progress {
    requests: AtomicU32,
    bytes: AtomicU64,
    receiving: AtomicBool,
}

impl Progress {
    /// Resets the counts, for a new connection in the same slot.
    pub fn reset(&self) {
        self.requests.store(0, Relaxed);
        self.bytes.store(0, Relaxed);
        self.receiving.store(true, Relaxed);
    }

    /// Returns whether this process has carried a byte over the connection.
    pub fn has_begun(&self) -> bool {
        self.bytes.load(Relaxed) > 0
    }

    /// Returns the number of requests: turn-arounds from receiving to sending.
    pub fn requests(&self) -> u32 {
        self.requests.load(Relaxed)
    }

    /// Raises the counts so far that the next call reaches any threshold.
    pub fn hurry(&self) {
        // Half of the range, so that later calls do not overflow the counters.
        self.bytes.store(u64::MAX / 2, Relaxed);
        self.requests.store(u32::MAX / 2, Relaxed);
        self.receiving.store(true, Relaxed);
    }

    /// Counts `n` bytes sent. Returns true if that reaches the threshold.
    #[inline]
    pub fn on_sent(&self, n: u64, threshold: &Threshold) -> bool {
        if self.receiving.load(Relaxed) {
            self.receiving.store(false, Relaxed);
            let requests = self.requests.load(Relaxed).saturating_add(1);
            self.requests.store(requests, Relaxed);
            if threshold.requests.is_some_and(|t| requests >= t) {
                return true;
            }
        }
        self.add(n, threshold)
    }

    /// Counts `n` bytes received. Returns true if that reaches the threshold.
    #[inline]
    pub fn on_received(&self, n: u64, threshold: &Threshold) -> bool {
        if !self.receiving.load(Relaxed) {
            self.receiving.store(true, Relaxed);
        }
        self.add(n, threshold)
    }

    #[inline]
    fn add(&self, n: u64, threshold: &Threshold) -> bool {
        let bytes = self.bytes.load(Relaxed).saturating_add(n.max(CALL_WEIGHT));
        self.bytes.store(bytes, Relaxed);
        threshold.bytes.is_some_and(|t| bytes >= t)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Progress {
        let p = Progress::default();
        p.reset();
        p
    }

    #[test]
    fn the_second_request_of_a_client_reaches_two_requests() {
        let t = Threshold {
            requests: Some(2),
            bytes: None,
        };
        let p = fresh();
        assert!(!p.on_sent(10, &t));
        assert!(!p.on_sent(10, &t), "a request in two pieces is one request");
        assert!(!p.on_received(10, &t));
        assert!(p.on_sent(10, &t));
    }

    #[test]
    fn small_messages_in_one_direction_reach_it_by_their_calls() {
        let t = Threshold {
            requests: None,
            bytes: Some(16384),
        };
        let p = fresh();
        assert!((1..16384 / CALL_WEIGHT).all(|_| !p.on_sent(8, &t)));
        assert!(p.on_sent(8, &t));
    }

    #[test]
    fn in_a_hurry_the_first_byte_reaches_any_threshold() {
        let (requests, bytes) = (Some(1000), Some(u64::MAX / 4));
        for t in [Threshold { requests, bytes: None }, Threshold { requests: None, bytes }] {
            let p = fresh();
            assert!(!p.on_sent(1, &t));
            p.hurry();
            assert!(p.on_sent(1, &t));
        }
    }

    #[test]
    fn bulk_in_one_direction_reaches_the_byte_threshold() {
        let t = Threshold {
            requests: Some(2),
            bytes: Some(16384),
        };
        let p = fresh();
        assert!(!p.on_received(16383, &t));
        assert!(p.on_received(1, &t));
    }
}
