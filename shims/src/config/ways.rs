//! How a large send travels between hosts: the policy, in one place.
//!
//! | protocol | how the bytes travel | when |
//! |---|---|---|
//! | eager | the sender copies them into a ring, the receiver out of it | below the [threshold](threshold), or nobody waits |
//! | put | the sender's device WRITEs them into a buffer that the receiver has posted | a receive waits with a buffer |
//! | get | the receiver's device READs them from the memory that the sender offers | the sender alone waits in its call |
//!
//! A blocking send of the threshold or more looks for a posted buffer first (`tx/direct.rs`), then offers its memory
//! (`tx/offered.rs`), then copies. A send that may not wait copies into the send buffer, from where the device puts the
//! bytes into a posted buffer all the same.
//!
//! The threshold is where a copy begins to cost more than a registration. What a copy costs is stated here; what a
//! registration costs is measured whenever one is made, for each link. Nothing is tried out for its own sake.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::config::ZeroCopy;

/// With `auto` no transfer is smaller than this, bytes: what a WRITE and its notification cost is not worth it.
pub const LEAST: usize = 16 * 1024;
/// With `auto` a send of so many bytes is large however slow registrations seem: so a wrong measurement is corrected.
const MOST: usize = 1024 * 1024;

const PAGE: u64 = 4096;
/// What it takes to copy a page at 10 GB/s, ns.
const COPY: u64 = 400;
/// What a transfer takes beside its bytes, ns: the request, its completion, and the word to the other end.
const TRANSFER: u64 = 3_000;
/// What a registration and its end take beside the pages, ns: two system calls.
const CALLS: u64 = 2_000;
/// What a page of a registration takes until it is known, ns: the threshold is 125 KiB then.
const FIRST_GUESS: u64 = 240;
/// A measurement counts one part in so many.
const PARTS: u64 = 8;

/// What registrations with a link's device cost. Two that write at once may lose one measurement.
pub struct Costs {
    /// Smoothed, ns for a page.
    page: AtomicU64,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            page: AtomicU64::new(FIRST_GUESS),
        }
    }
}

impl Costs {
    /// For another device: nothing is known.
    pub fn reset(&self) {
        self.page.store(FIRST_GUESS, Relaxed);
    }

    /// A registration of `len` bytes has taken `ns`. Its end is taken to cost as much again.
    pub fn on_registered(&self, len: usize, ns: u64) {
        let pages = (len as u64).div_ceil(PAGE).max(1);
        let page = (2 * ns).saturating_sub(CALLS) / pages;
        // A thread that was preempted has measured that.
        let page = page.min(2 * COPY);
        let old = self.page.load(Relaxed);
        let new = (old * (PARTS - 1) + page) / PARTS;
        if new != old {
            self.page.store(new, Relaxed);
        }
    }

    /// From how many bytes on a copy costs more than a transfer of memory that has to be registered, or that is.
    fn break_even(&self, is_registered: bool) -> usize {
        let (fixed, page) = match is_registered {
            true => (TRANSFER, 0),
            false => (TRANSFER + CALLS, self.page.load(Relaxed)),
        };
        let saved = COPY.saturating_sub(page).max(1);
        ((fixed * PAGE / saved) as usize).clamp(LEAST, MOST)
    }
}

/// From how many bytes on a send or a receive is not eager. `is_registered`: the device knows the memory already.
pub fn threshold(asked: ZeroCopy, costs: &Costs, is_registered: bool) -> usize {
    match asked {
        ZeroCopy::Off => usize::MAX,
        ZeroCopy::Auto => costs.break_even(is_registered),
        ZeroCopy::From(least) => least.bytes() as usize,
    }
}

/// The smallest piece that is worth a transfer of its own, bytes, where the whole is above the threshold.
pub fn least_piece(asked: ZeroCopy) -> usize {
    match asked {
        ZeroCopy::Off => usize::MAX,
        ZeroCopy::Auto => LEAST,
        ZeroCopy::From(least) => least.bytes() as usize,
    }
}

#[cfg(test)]
mod tests;
