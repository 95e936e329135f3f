//! What goes past a link's rings: whether it can, by which queue pair, and whose device is to move it.

use std::sync::atomic::Ordering::Relaxed;

use crate::config::config;
use crate::library::Library;
use crate::load;
use crate::mailbox::Command;
use crate::steering::Issuer;
use crate::verbs::Pair;

use super::{Remote, least_of};

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

    /// The peer's device reads what is lent to it.
    pub fn can_lend(&self) -> bool {
        self.terms.can_lend
    }

    /// Whose device is to move what this end sends, by the load of both; `None`: it does not matter, or nothing is
    /// known of the peer's. The peer hears of this end's load when it has been asked for.
    pub fn issuer(&self) -> Option<Issuer> {
        let now = crate::time::tick();
        self.balance.issuer(now, || {
            let own = load::average(now)?;
            self.end.set_load(own);
            Some((own, self.end.peer_load()?))
        })
    }

    /// Less is not worth a direct transfer, bytes.
    pub fn direct_min(&self) -> usize {
        least_of(config().zcopy)
    }

    /// Waits for what the peer's end says without its program, for as long as any end that lives needs; then the bulk
    /// queue pair is given up, and what it reaches is out of reach.
    #[cold]
    pub fn await_word(&self, is_there: impl Fn() -> bool) {
        let begun = crate::time::now_ns();
        loop {
            self.progress();
            let waited = crate::time::now_ns() - begun;
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
        let (now, last) = (crate::time::now_ns(), self.wished.load(Relaxed));
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
