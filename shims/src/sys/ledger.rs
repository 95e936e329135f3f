//! What a socket keeps for the truth of what a program reads of its connection: what the kernel does not know of its
//! traffic, and what was told of it. What is told is in `hooks/report.rs`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use rdmasock_core::stats::StreamStats;

/// One direction's part of the [`Ledger`].
#[derive(Default)]
pub struct Way {
    /// Bytes of ours that TCP has taken, or brought: markers.
    pub ours: AtomicU64,
    /// Bytes and calls that went over links before the process had this instance.
    pub bytes: AtomicU64,
    pub calls: AtomicU64,
}

impl Way {
    /// The program's counts do not include these.
    pub fn add_ours(&self, bytes: usize) {
        self.ours.fetch_add(bytes as u64, Relaxed);
    }

    fn reset(&self) {
        for count in [&self.ours, &self.bytes, &self.calls] {
            count.store(0, Relaxed);
        }
    }
}

/// What the kernel does not know of a connection's traffic, and what was told of it.
#[derive(Default)]
pub struct Ledger {
    pub sent: Way,
    pub received: Way,
    /// The most that `hooks/report.rs` has told, of each count in its order.
    pub told_bytes: [AtomicU64; 3],
    /// The most that `hooks/report.rs` has told, of each count that goes round, in its order.
    pub told_segments: [AtomicU32; 5],
}

impl Ledger {
    /// A new connection.
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

    /// In a fork child, whose statistics begin anew: what the parent's say is added to what was before.
    pub fn keep(&self, stats: Option<&StreamStats>) {
        if let Some(stats) = stats {
            for (way, counts) in [(&self.sent, stats.sent()), (&self.received, stats.received())] {
                way.bytes.fetch_add(counts.link_bytes, Relaxed);
                way.calls.fetch_add(counts.link_calls, Relaxed);
            }
        }
    }
}
