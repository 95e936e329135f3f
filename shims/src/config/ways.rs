//! Decides by which protocol a large send travels between hosts.
//!
//! | protocol | how the bytes travel | when |
//! |---|---|---|
//! | eager | the sender copies into a ring, the receiver out of it | below [threshold](threshold), or no call waits |
//! | put | the sender's device WRITEs them into a buffer that the receiver has posted | a receive waits with a buffer |
//! | get | the receiver's device READs them from memory that the sender offers | only the sender waits in its call |
//!
//! A blocking send of the threshold or more first waits a moment for a posted buffer. Without one it offers its memory.
//! If that fails too, it copies (`data/zero_copy.rs`). A send that may not wait copies into the send buffer. From there
//! the device WRITEs the bytes into a posted buffer, if there is one.
//!
//! The threshold is the size at which a copy begins to cost more than a registration. The cost of a copy is stated
//! here. The cost of a registration is measured for each link, whenever a registration is made. No registration is made
//! only to measure.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::config::ZeroCopy;

/// The smallest transfer with `auto`, bytes. For fewer bytes a WRITE and its notification cost more than the saved
/// copy.
pub(crate) const LEAST: usize = 16 * 1024;
/// The largest threshold with `auto`, bytes, however slow the measured registrations are. Sends of this size still
/// register memory, and so correct a wrong measurement.
const MOST: usize = 1024 * 1024;

const PAGE: u64 = 4096;
/// The time to copy a page at 10 GB/s, ns.
const COPY: u64 = 400;
/// The time of a transfer without its bytes, ns: the request, its completion, and the notification of the other end.
const TRANSFER: u64 = 3_000;
/// The time of a registration and its deregistration without the pages, ns: two system calls.
const CALLS: u64 = 2_000;
/// The time for a page of a registration until one is measured, ns. It leads to a threshold of 125 KiB.
const FIRST_GUESS: u64 = 240;
/// A new measurement has a weight of 1/`PARTS` in the smoothed cost.
const PARTS: u64 = 8;

/// The measured cost of registrations with a link's device. If two threads write at once, one measurement may be lost.
pub struct Costs {
    /// The smoothed cost of a page, ns.
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
    /// Forgets the measurements, for another device.
    pub fn reset(&self) {
        self.page.store(FIRST_GUESS, Relaxed);
    }

    /// Records that a registration of `len` bytes has taken `ns` ns. Its deregistration is assumed to take as long.
    pub fn on_registered(&self, len: usize, ns: u64) {
        let pages = (len as u64).div_ceil(PAGE).max(1);
        let page = (2 * ns).saturating_sub(CALLS) / pages;
        // The time of a preempted thread includes its preemption, so the measurement is bounded.
        let page = page.min(2 * COPY);
        let old = self.page.load(Relaxed);
        let new = (old * (PARTS - 1) + page) / PARTS;
        if new != old {
            self.page.store(new, Relaxed);
        }
    }

    /// Returns the size from which on a copy costs more than a transfer, bytes. `is_registered` says that the memory is
    /// registered already.
    fn break_even(&self, is_registered: bool) -> usize {
        let (fixed, page) = match is_registered {
            true => (TRANSFER, 0),
            false => (TRANSFER + CALLS, self.page.load(Relaxed)),
        };
        let saved = COPY.saturating_sub(page).max(1);
        ((fixed * PAGE / saved) as usize).clamp(LEAST, MOST)
    }
}

/// Returns the size from which on a send or a receive is not eager, bytes. `is_registered` says that the device knows
/// the memory already.
pub(crate) fn threshold(asked: ZeroCopy, costs: &Costs, is_registered: bool) -> usize {
    match asked {
        ZeroCopy::Off => usize::MAX,
        ZeroCopy::Auto => costs.break_even(is_registered),
        ZeroCopy::From(least) => least.bytes() as usize,
    }
}

/// Returns the smallest piece of a send or receive that is worth a transfer of its own, bytes. The whole is above the
/// threshold.
pub(crate) fn least_piece(asked: ZeroCopy) -> usize {
    match asked {
        ZeroCopy::Off => usize::MAX,
        ZeroCopy::Auto => LEAST,
        ZeroCopy::From(least) => least.bytes() as usize,
    }
}

#[cfg(test)]
mod tests;
