//! Send buffers: rings of this end's own, where the producers of streams write whose peer's ring has no room. The peer knows nothing
//! of them: a buffer's bytes go to its ring as that has room, at the same positions. They lie in the mirror's data area, behind
//! what is the peer's, so that a cursor reaches them as it does the peer's rings. Not how they are carried over (`pump/data.rs`).
//!
//! A stream has at most one. Its producer moves there, and back when all has been read, under its own lock and the engine's, so
//! that both know at the same moment where the next byte is. A buffer is free when its bytes have been read, or the peer has closed.

use super::end::Local;
use super::engine::Engine;
use super::ground::Ground;
use super::qp::QueuePair;
use super::stream::{Aside, State};
use crate::fabric::arena::Arena;
use crate::fabric::layout::{PAGE_LOG2, Region};
use crate::fabric::ring::carry::pack_offer;
use crate::fabric::ring::{Producer, Wake};
use crate::lock::Lock;

/// Where there is room for buffers.
pub(super) struct Buffers {
    arena: Lock<Arena>,
    /// The page of the data area that they begin at.
    first: u32,
}

impl Buffers {
    /// `bytes` of them behind the first `at` bytes of a data area, whole pages.
    pub fn new(at: usize, bytes: usize) -> Self {
        Self {
            arena: Lock::new(Arena::new(bytes as u64)),
            first: (at >> PAGE_LOG2) as u32,
        }
    }

    fn take(&self, log2: u8) -> Option<Region> {
        let region = self.arena.lock()?.alloc(log2)?;
        Region::new(self.first.checked_add(region.page())?, log2)
    }

    pub fn give_back(&self, buffer: Region) {
        if let Some(page) = buffer.page().checked_sub(self.first)
            && let Some(region) = Region::new(page, buffer.log2())
            && let Some(mut arena) = self.arena.lock()
        {
            arena.free(region);
        }
    }

    #[cfg(test)]
    pub fn bytes_in_use(&self) -> u64 {
        self.arena.lock().map_or(0, |a| a.bytes_in_use())
    }
}

impl Engine {
    /// See [`LinkEnd::lend`](crate::fabric::LinkEnd::lend).
    pub fn lend<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        theirs: u32,
        producer: &mut Producer,
        log2: u8,
    ) -> bool {
        let Some(part) = producer.fits_aside(log2) else {
            return false;
        };
        let (Some(mine), Some(block)) = (self.streams.mine(theirs), g.block_mirror(theirs)) else {
            return false;
        };
        let s = self.streams.get(mine).filter(|s| s.state == State::Open);
        let Some(s) = s.filter(|s| !s.out.stopped && s.out.aside.is_none()) else {
            return false;
        };
        // What it has adopted before comes before.
        s.out.look(block, super::end::ENGINE.0);
        let Some(region) = g.buffers.take(part) else {
            return false;
        };
        let from = producer.position();
        let moves = producer.move_aside(region);
        if moves {
            s.out.aside = Some(Aside { from, region });
        } else {
            g.buffers.give_back(region);
        }
        moves
    }

    /// See [`LinkEnd::take_back`](crate::fabric::LinkEnd::take_back).
    pub fn take_back<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        theirs: u32,
        producer: &mut Producer,
    ) -> bool {
        let (Some(mine), Some(block)) = (self.streams.mine(theirs), g.block_mirror(theirs)) else {
            return false;
        };
        let Some(out) = self.streams.get(mine).map(|s| &mut s.out) else {
            return false;
        };
        let (Some(aside), Some(ring)) = (out.aside, out.ring) else {
            return false;
        };
        let next = out.offered();
        let is_carried = out.told == producer.position();
        let moves =
            is_carried && producer.move_back(ring, out.generation, next.map(|(_, ring)| ring));
        if moves {
            out.aside = None;
            g.buffers.give_back(aside.region);
            // From here on it is for the producer.
            let wake = next.map_or(Wake::NONE, |(generation, ring)| {
                block.put_offer(pack_offer(generation, ring))
            });
            g.tell_here(&mut self.after, wake, mine);
        }
        moves
    }

    /// See [`End::unsent`](super::End::unsent).
    pub fn unsent<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>, theirs: u32) -> u64 {
        let Some(mine) = self.streams.mine(theirs) else {
            return 0;
        };
        let told = self.streams.get(mine).map(|s| s.out.told);
        let tail = g.block_mirror(theirs).map(|block| block.tail());
        told.zip(tail)
            .map_or(0, |(told, tail)| tail.saturating_sub(told))
    }
}
