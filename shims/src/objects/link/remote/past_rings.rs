//! Transfers past a link's rings: whether they are possible, from which size on they pay, and which queue pair carries
//! them.

use std::sync::atomic::Ordering::Relaxed;

use super::Remote;
use crate::config::verbs::Pair;
use crate::config::{config, ways};
use crate::objects::library::Library;
use crate::objects::mailbox::Command;

/// Least time between two requests for a bulk queue pair, ns.
const WISH_EVERY: u64 = 500_000_000;

/// How long the peer's end may take for an answer, and how long this end polls for it without a pause, ns.
const WORD_WITHIN: u64 = 200_000_000;
const SPINS_FOR: u64 = 100_000;

impl Remote {
    /// Returns whether both ends support direct transfers.
    pub fn is_direct(&self) -> bool {
        self.terms.is_direct
    }

    /// Returns the least size of a direct transfer that pays, bytes.
    pub fn direct_min(&self) -> usize {
        ways::least_piece(config().zcopy)
    }

    /// Returns the size from which on a send or a receive is not eager, bytes. `is_registered`: the device knows the
    /// memory already.
    pub fn threshold(&self, is_registered: bool) -> usize {
        ways::threshold(config().zcopy, &self.costs, is_registered)
    }

    /// Waits until `is_there` says that the peer's end has answered, which it does without its program. After
    /// `WORD_WITHIN`, longer than any live end needs, gives up the bulk queue pair: the device then cannot access the
    /// memory any more.
    #[cold]
    pub fn await_word(&self, is_there: impl Fn() -> bool) {
        let begun = crate::sys::time::now_ns();
        loop {
            self.progress();
            let waited = crate::sys::time::now_ns() - begun;
            if is_there() || self.is_down() {
                return;
            }
            if waited > WORD_WITHIN {
                return self.drop_bulk();
            }
            if waited > SPINS_FOR {
                let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                    tv_sec: 0,
                    tv_nsec: 20_000,
                });
            }
        }
    }

    /// Returns whether direct transfers are possible now. If not, a bulk queue pair is asked for, which the service
    /// thread makes later.
    pub fn goes_direct(&self, slot: u32) -> bool {
        if !self.terms.is_direct {
            return false;
        }
        let has_bulk = self.has_bulk.load(Relaxed);
        if !has_bulk {
            self.wish(slot);
        }
        has_bulk
    }

    #[cold]
    fn wish(&self, slot: u32) {
        let (now, last) = (crate::sys::time::now_ns(), self.wished.load(Relaxed));
        let is_due = last == 0 || now > last + WISH_EVERY;
        if is_due && self.wished.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            Library::get().service.submit(Command::WantBulk(slot));
        }
    }

    /// Makes direct transfers use this queue pair from now on. Returns it if the link has one already, or is down.
    /// Service thread only.
    pub fn attach_bulk(&self, pair: Pair) -> Option<Pair> {
        let back = self.end.attach_bulk(pair);
        self.has_bulk.store(back.is_none(), Relaxed);
        back
    }

    /// Gives up the bulk queue pair, for both ends.
    pub fn drop_bulk(&self) {
        self.end.drop_bulk();
        self.has_bulk.store(false, Relaxed);
    }

    /// Ends the bulk queue pairs that were given up. Returns how many. Service thread only.
    pub fn end_retired(&self) -> usize {
        let count = self.end.end_retired(drop);
        if count > 0 {
            self.has_bulk.store(false, Relaxed);
        }
        count
    }
}
