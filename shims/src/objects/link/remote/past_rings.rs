//! What goes past a link's rings: whether it can, from which size on, and by which queue pair.

use std::sync::atomic::Ordering::Relaxed;

use crate::config::config;
use crate::config::verbs::Pair;
use crate::config::ways;
use crate::objects::library::Library;
use crate::objects::mailbox::Command;

use super::Remote;

/// How often a bulk queue pair is wished for, ns.
const WISH_EVERY: u64 = 500_000_000;

/// How long the peer's end may take for a word, and how long that is looked for without a pause, ns.
const WORD_WITHIN: u64 = 200_000_000;
const SPINS_FOR: u64 = 100_000;

impl Remote {
    /// Both ends have direct transfers.
    pub fn is_direct(&self) -> bool {
        self.terms.is_direct
    }

    /// A smaller piece is not worth a direct transfer, bytes.
    pub fn direct_min(&self) -> usize {
        ways::least_piece(config().zcopy)
    }

    /// From how many bytes on a send or a receive is not eager. `is_registered`: the device knows the memory already.
    pub fn threshold(&self, is_registered: bool) -> usize {
        ways::threshold(config().zcopy, &self.costs, is_registered)
    }

    /// Waits for what the peer's end says without its program, for as long as any end that lives needs; then the bulk
    /// queue pair is given up, and what it reaches is out of reach.
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

    /// Whether there may be direct transfers now. If not a bulk queue pair is asked for, which may take its time.
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

    /// Direct transfers go over this one from now on. Service thread only.
    pub fn attach_bulk(&self, pair: Pair) -> Option<Pair> {
        let back = self.end.attach_bulk(pair);
        self.has_bulk.store(back.is_none(), Relaxed);
        back
    }

    /// It is lost, for both ends.
    pub fn drop_bulk(&self) {
        self.end.drop_bulk();
        self.has_bulk.store(false, Relaxed);
    }

    /// Ends those that were lost; gives how many. Service thread only.
    pub fn end_retired(&self) -> usize {
        let count = self.end.end_retired(drop);
        if count > 0 {
            self.has_bulk.store(false, Relaxed);
        }
        count
    }
}
