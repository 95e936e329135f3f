//! What the program has been told of a connection that the kernel would have told it, and what others are told of it.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering::Relaxed};

use rdmasock_core::stats::{Path, StreamStats, Why};

use crate::sys::ledger::Ledger;

/// See the module.
pub struct Told {
    /// TCP_USER_TIMEOUT has run out, and no call has said so yet.
    pub timed_out: AtomicBool,
    /// A call has told the program of the reset.
    pub reset_told: AtomicBool,
    /// What the kernel does not know of its traffic.
    pub ledger: Ledger,
    /// The statistics have its addresses.
    pub shown: AtomicBool,
    /// What the links that it was on lately were, as the code of a `Path`.
    links: AtomicU8,
    stats: AtomicPtr<StreamStats>,
}

impl Told {
    /// Nothing yet.
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

    /// For a new connection. The caller alone has it.
    pub fn reset(&self) {
        self.timed_out.store(false, Relaxed);
        self.reset_told.store(false, Relaxed);
        self.ledger.reset();
        self.shown.store(false, Relaxed);
    }

    /// Counters, if the socket has a slot in the statistics.
    #[inline]
    pub fn stats(&self) -> Option<&'static StreamStats> {
        // SAFETY: null, or a slot of a page that is never unmapped.
        unsafe { self.stats.load(Relaxed).as_ref() }
    }

    /// Gives it a slot, or none.
    pub fn set_stats(&self, stats: Option<&'static StreamStats>) {
        let stats = stats.map_or(std::ptr::null_mut(), |s| std::ptr::from_ref(s).cast_mut());
        self.stats.store(stats, Relaxed);
    }

    /// A direction is on a link of this kind from now on.
    pub fn note_link(&self, path: Path) {
        self.links.store(path as u8, Relaxed);
    }

    /// Whether the link that it is on, or was last, is one between hosts.
    pub fn was_between_hosts(&self) -> bool {
        self.links.load(Relaxed) == Path::Verbs as u8
    }

    /// Why the socket is on TCP, for `rdmasock stat`.
    pub fn set_why(&self, why: impl Into<Why>) {
        if let Some(stats) = self.stats() {
            stats.set_why(why);
        }
    }
}
