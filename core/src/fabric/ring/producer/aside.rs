//! A producer between hosts whose peer's ring has no room writes *aside*: into a ring of its own end's, from which that
//! carries over what the peer has room for. Both moves are its end's (`remote/lend.rs`), which makes them under its own
//! lock and the producer's, so nothing is said of them in the block. W4 holds as long as the peer's ring is no larger
//! than this one. Not for producers within a host, whose readers see what they write.

use super::{Earlier, Producer};
use crate::fabric::layout::Region;

impl Producer {
    /// Whether it writes aside.
    pub fn is_aside(&self) -> bool {
        self.aside
    }

    /// How much of a ring of `1 << log2` bytes the bound lets it use aside, likewise; `None` if that is not more than
    /// what it has.
    pub(in crate::fabric) fn fits_aside(&mut self, log2: u8) -> Option<u8> {
        self.reload().ok()?;
        let may_move = !self.aside && !self.ended && self.ring.size() != 0;
        if !may_move {
            return None;
        }
        let part = self.part_of(log2)?;
        self.has_more(part).then_some(part)
    }

    /// Writes into `region` of its area from now on, which is nobody else's; what the peer has on offer is for its end
    /// to adopt. False if there is no such place.
    pub(in crate::fabric) fn move_aside(&mut self, region: Region) -> bool {
        let Ok(ring) = self.area.ring(region) else {
            return false;
        };
        self.offer = self.theirs().offer.look();
        self.backed = None;
        let first = self.earlier[0];
        self.change_ring(ring);
        // What is known of the consumer is older than what it has read of that.
        self.earlier[1] = first;
        self.aside = true;
        true
    }

    /// Writes into the peer's ring in `region` again, the one of that generation, and looks at what is on offer:
    /// perhaps the `next`. False if not all has been read, or the bound is for less than one of the two.
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
        // An older one has not the generation after this.
        self.offer = 0;
        self.generation = generation;
        self.change_ring(ring);
        self.aside = false;
        // What it has written aside is another's place from now on.
        self.earlier = [Earlier::none(self.switch_pos); 2];
        true
    }
}
