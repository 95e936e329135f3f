//! A producer that finds no room while the consumer does not read. It first checks for consumed but unpublished bytes.
//! Then it moves to the ring that the consumer has in reserve (see *The reserve* in `ring.rs`), and gets the memory for
//! it. Between hosts consumers have no reserve; see `aside.rs`.

use super::Producer;
use crate::fabric::layout::{MIN_RING_LOG2, Region};
use crate::fabric::ring::error::{RingError, Violation};
use crate::fabric::ring::memory::NoRing;
use crate::fabric::ring::offer::Offer;
use crate::sync::Ordering;

/// Bytes of a reserve that get memory at a time.
const PIECE: u64 = 128 * 1024;

/// A reserve: the consumer's word, the whole region, and the part at its beginning that the producer wants.
struct Reserve {
    word: u64,
    whole: Region,
    part: Region,
}

impl Producer {
    /// Makes room for a sender that must not wait. First counts the bytes that the consumer has read and not published.
    /// If that is too little, moves on to as much of the reserve as the bound allows. That has to be more than the
    /// ring, and `may_take` has to agree to its bytes. True if there is more room than before.
    pub fn make_room(&mut self, may_take: impl FnOnce(u64) -> bool) -> Result<bool, RingError> {
        if self.look_closely()? {
            return Ok(true);
        }
        match self.next_reserve() {
            Some(next) if self.has_more(next.part.log2()) && may_take(next.part.len() as u64) => self.move_to(&next),
            _ => Ok(false),
        }
    }

    /// Returns whether [`make_room`](Self::make_room) would find room.
    pub fn could_have_room(&mut self) -> Result<bool, RingError> {
        Ok(self.look_closely()? || self.has_reserve())
    }

    /// Returns whether there is a reserve to move to, by this side's knowledge of the consumer.
    pub(super) fn has_reserve(&self) -> bool {
        self.next_reserve().is_some_and(|next| self.has_more(next.part.log2()))
    }

    /// Reads the consumer's own count of consumed bytes; that costs the consumer a cache miss at its next read. True if
    /// a quarter of the ring is then free.
    fn look_closely(&mut self) -> Result<bool, RingError> {
        self.reload()?;
        // SAFETY: mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        // Acquires the consumer's reads of the bytes before, which `consume` releases.
        let consumed = last.consumed.load(Ordering::Acquire);
        if consumed > self.tail {
            return Err(Violation::HeadBeyondTail.into());
        }
        self.head = self.head.max(consumed);
        if !self.ended {
            self.limit = self.writable();
        }
        let quarter = self.ring.quarter().min(self.most() / 4);
        Ok(quarter != 0 && self.limit - self.tail >= quarter)
    }

    /// Returns whether the ring has room for bytes to be sent, but this process no memory.
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// Returns whether the producer could write more bytes into a ring of `1 << log2` bytes.
    pub(super) fn has_more(&self, log2: u8) -> bool {
        let is_bound = self.bound != 0 && self.tail - self.head >= self.bound;
        1 << log2 > self.ring.size() && !is_bound
    }

    /// Returns log2 of the bytes that the bound lets the producer use of a ring of `1 << log2` bytes. `None` if the
    /// bound has no next power of two.
    pub(super) fn part_of(&self, log2: u8) -> Option<u8> {
        let part = match self.bound {
            0 => log2,
            bound => bound.checked_next_power_of_two()?.ilog2() as u8,
        };
        Some(part.max(MIN_RING_LOG2).min(log2))
    }

    /// Returns the reserve; `None` if it cannot be taken now.
    fn next_reserve(&self) -> Option<Reserve> {
        let word = self.theirs().reserve.load(Ordering::Acquire);
        if word == self.reserve || self.ended || self.aside || self.head < self.switch_pos {
            return None;
        }
        let whole = Offer::unpack(word)?.region;
        let part = Region::new(whole.page(), self.part_of(whole.log2())?)?;
        Some(Reserve { word, whole, part })
    }

    fn move_to(&mut self, &Reserve { word, whole, part }: &Reserve) -> Result<bool, RingError> {
        self.reserve = word;
        if !self.allowance.reaches(whole) {
            return Ok(false);
        }
        let ring = match self.area.ring(whole) {
            Ok(ring) => ring,
            Err(NoRing::Outside) => return Err(Violation::BadOffer.into()),
            Err(NoRing::Unmapped) => return Ok(false),
        };
        let ring = ring.part(part.log2()).ok_or(Violation::BadOffer)?;
        if !self.allowance.admits(part) {
            return Err(Violation::BeyondAllowance.into());
        }
        // Without memory for the first piece the direction stays where it is.
        if !self.area.back(part, self.tail, PIECE) {
            return Ok(false);
        }
        self.backed = Some((part, self.tail + PIECE));
        let generation = Offer::next_generation(self.generation);
        self.switch_to(ring, generation, part.log2());
        Ok(true)
    }

    /// Gets memory for `want` more bytes of the reserve. Once the producer has been around the ring, all of it has
    /// memory.
    pub(super) fn back_more(&mut self, want: u64) {
        let Some((region, backed)) = self.backed else {
            return;
        };
        let end = self.switch_pos + self.ring.size();
        if backed >= end {
            self.backed = None;
        } else if self.window().min(end) > backed {
            let more = want.next_multiple_of(PIECE).max(PIECE).min(end - backed);
            self.starved = !self.area.back(region, backed, more);
            if !self.starved {
                self.backed = Some((region, backed + more));
            }
        }
        self.limit = self.writable();
    }
}
