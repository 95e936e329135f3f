//! A producer between hosts whose peer's ring has no room writes *aside*: into a buffer of its own end. The engine
//! carries over from there as many bytes as the peer has room for. The end itself (`remote/lend.rs`) makes both moves,
//! under its own lock and the producer's, so the block records neither. W4 holds as long as the peer's ring is no
//! larger than this one. Producers within a host do not write aside: their readers see each byte as it is written.

use super::{Earlier, Producer};
use crate::fabric::layout::Region;

impl Producer {
    /// Returns whether the producer writes aside.
    pub fn is_aside(&self) -> bool {
        self.aside
    }

    /// Returns log2 of the bytes that the bound lets the producer use, aside, of a ring of `1 << log2` bytes. `None` if
    /// that is not more than its ring has, or it cannot move.
    pub(in crate::fabric) fn fits_aside(&mut self, log2: u8) -> Option<u8> {
        self.reload().ok()?;
        let may_move = !self.aside && !self.ended && self.ring.size() != 0;
        if !may_move {
            return None;
        }
        let part = self.part_of(log2)?;
        self.has_more(part).then_some(part)
    }

    /// Moves the producer to `region` of its area, which no other stream uses. The end adopts the peer's offers
    /// meanwhile. False if the region cannot be used.
    pub(in crate::fabric) fn move_aside(&mut self, region: Region) -> bool {
        let Ok(ring) = self.area.ring(region) else {
            return false;
        };
        self.offer = self.theirs().offer.look();
        self.backed = None;
        let first = self.earlier[0];
        self.change_ring(ring);
        // The known head may be older than the consumer's progress in that ring.
        self.earlier[1] = first;
        self.aside = true;
        true
    }

    /// Moves the producer back to the peer's ring in `region`, which has `generation`, and lets it check the ring on
    /// offer: perhaps `next`. False if bytes are unread, or if half of the larger of the two exceeds the bound.
    pub(in crate::fabric) fn move_back(&mut self, region: Region, generation: u32, next: Option<Region>) -> bool {
        let is_read = self.reload().is_ok() && self.head == self.tail;
        let half = next.map_or(0, Region::len).max(region.len()) as u64 / 2;
        let is_too_large = self.bound != 0 && half > self.bound;
        if !self.aside || self.ended || !is_read || is_too_large {
            return false;
        }
        let Ok(ring) = self.area.ring(region) else {
            return false;
        };
        // An older offer does not have the generation after this one.
        self.offer = 0;
        self.generation = generation;
        self.change_ring(ring);
        self.aside = false;
        // The buffer that it has written aside is for other streams from now on.
        self.earlier = [Earlier::none(self.switch_pos); 2];
        true
    }
}
