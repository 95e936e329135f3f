//! Reports about a connection: errors that the kernel would have reported and calls of the program have, and the counts
//! for `rdmasock stat`.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8};

use rdmasock_core::stats::{Path, StreamStats, Why};

use crate::sys::ledger::Ledger;

/// The reports about one connection.
pub struct Told {
    /// TCP_USER_TIMEOUT has run out, and no call has reported it yet.
    pub timed_out: AtomicBool,
    /// A call has reported the reset to the program.
    pub reset_told: AtomicBool,
    /// Traffic of the connection that the kernel does not know.
    pub ledger: Ledger,
    /// The statistics show its addresses.
    pub shown: AtomicBool,
    /// The code of the [`Path`] of the link that a direction is on, or was on last.
    links: AtomicU8,
    stats: AtomicPtr<StreamStats>,
}

impl Told {
    /// Returns an empty record.
    pub fn new() -> Self {
        Self {
            timed_out: AtomicBool::new(false),
            reset_told: AtomicBool::new(false),
            ledger: Ledger::default(),
            shown: AtomicBool::new(false),
            links: AtomicU8::new(Path::Shm as u8),
            stats: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Resets the record for a new connection. The caller alone has it.
    pub fn reset(&self) {
        self.timed_out.store(false, Relaxed);
        self.reset_told.store(false, Relaxed);
        self.ledger.reset();
        self.shown.store(false, Relaxed);
    }

    /// Returns the connection's counters; `None` if it has no slot in the statistics.
    #[inline]
    pub fn stats(&self) -> Option<&'static StreamStats> {
        // SAFETY: null, or a slot of a page that is never unmapped.
        unsafe { self.stats.load(Relaxed).as_ref() }
    }

    /// Sets the connection's slot in the statistics, or none.
    pub fn set_stats(&self, stats: Option<&'static StreamStats>) {
        let stats = stats.map_or(std::ptr::null_mut(), |s| std::ptr::from_ref(s).cast_mut());
        self.stats.store(stats, Relaxed);
    }

    /// Notes that a direction is on a link with this path from now on.
    pub fn note_link(&self, path: Path) {
        self.links.store(path as u8, Relaxed);
    }

    /// Returns whether the link that a direction is on, or was on last, leads to another host.
    pub fn was_between_hosts(&self) -> bool {
        self.links.load(Relaxed) == Path::Verbs as u8
    }

    /// Sets the reason why the socket is on TCP, for `rdmasock stat`.
    pub fn set_why(&self, why: impl Into<Why>) {
        if let Some(stats) = self.stats() {
            stats.set_why(why);
        }
    }
}
