//! The counts that a socket needs to answer a program correctly about its connection. They are the traffic that the
//! kernel does not know of, and the numbers that the program was given before. `hooks/report.rs` gives the answers.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rdmasock_core::stats::StreamStats;

/// The part of the [`Ledger`] for one direction.
#[derive(Default)]
pub struct Way {
    /// Bytes of markers that TCP has taken or brought.
    pub ours: AtomicU64,
    /// Bytes and calls that went over links before this instance existed, in the parent of a fork child.
    pub bytes: AtomicU64,
    pub calls: AtomicU64,
}

impl Way {
    /// Adds bytes of markers, which the program's counts must not include.
    pub fn add_ours(&self, bytes: usize) {
        self.ours.fetch_add(bytes as u64, Relaxed);
    }

    fn reset(&self) {
        for count in [&self.ours, &self.bytes, &self.calls] {
            count.store(0, Relaxed);
        }
    }
}

/// The traffic of a connection that the kernel does not know of, and the counts that the program was given.
#[derive(Default)]
pub struct Ledger {
    pub sent: Way,
    pub received: Way,
    /// The largest value of each count that the program was given, in the order of `hooks/report.rs`.
    pub told_bytes: [AtomicU64; 3],
    /// The same for each 32-bit count that wraps.
    pub told_segments: [AtomicU32; 5],
}

impl Ledger {
    /// Clears all counts, for a new connection.
    pub fn reset(&self) {
        self.sent.reset();
        self.received.reset();
        for told in &self.told_bytes {
            told.store(0, Relaxed);
        }
        for told in &self.told_segments {
            told.store(0, Relaxed);
        }
    }

    /// Adds the counts of the parent's statistics, in a fork child whose own statistics begin at 0.
    pub fn keep(&self, stats: Option<&StreamStats>) {
        if let Some(stats) = stats {
            for (way, counts) in [(&self.sent, stats.sent()), (&self.received, stats.received())] {
                way.bytes.fetch_add(counts.link_bytes, Relaxed);
                way.calls.fetch_add(counts.link_calls, Relaxed);
            }
        }
    }
}
