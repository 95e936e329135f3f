//! Send buffers: rings of this end to which a producer moves when the peer's ring has no room. The peer does not know
//! of them. As its ring gets room, `pump.rs` carries the bytes of a buffer over to that ring, at the same positions.
//!
//! A stream has at most one buffer. Its producer moves to the buffer, and back when the peer has read all bytes. Each
//! move is made under the producer's lock and the engine's, so that producer and engine know at the same moment where
//! the next byte is. A buffer is free when its bytes have been read, or when the peer has closed the stream.

use crate::fabric::arena::Arena;
use crate::fabric::layout::{PAGE_LOG2, Region};
use crate::fabric::remote::Local;
use crate::fabric::remote::engine::Engine;
use crate::fabric::remote::qp::QueuePair;
use crate::fabric::remote::shared::Shared;
use crate::fabric::remote::stream::{Aside, State};
use crate::fabric::ring::{Producer, Wake};
use crate::lock::Lock;

impl<Q: QueuePair> Engine<Q> {
    /// Moves a producer to a send buffer, as [`LinkEnd::lend`](crate::fabric::LinkEnd::lend) describes.
    pub(super) fn lend<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, producer: &mut Producer, log2: u8) -> bool {
        let Some(part) = producer.fits_aside(log2) else {
            return false;
        };
        let s = self.streams.of_peer(theirs).map(|(_, s)| s);
        let s =
            s.filter(|s| s.state == State::Open && !s.out.stopped && s.out.aside.is_none() && s.out.foreseen.is_none());
        let (Some(s), Some(block)) = (s, g.block_mirror(theirs)) else {
            return false;
        };
        // If the producer has adopted another ring, the engine records that first.
        s.out.look(block);
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

    /// Moves a producer back, as [`LinkEnd::take_back`](crate::fabric::LinkEnd::take_back) describes.
    pub(super) fn take_back<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, producer: &mut Producer) -> bool {
        let (Some((mine, s)), Some(block)) = (self.streams.of_peer(theirs), g.block_mirror(theirs)) else {
            return false;
        };
        let out = &mut s.out;
        let (Some(aside), Some(ring)) = (out.aside, out.ring) else {
            return false;
        };
        let next = out.offered;
        // The producer may have adopted a ring before it moved to the buffer, without using that ring. SWITCH to that
        // ring has to be sent to the peer first.
        let is_carried = out.told == producer.position() && out.switch_at.is_none();
        let moves = is_carried && producer.move_back(ring, out.generation, next.map(|offer| offer.region));
        if moves {
            out.aside = None;
            g.buffers.give_back(aside.region);
            // From here on the producer itself adopts offers.
            let wake = next.map_or(Wake::NONE, |offer| block.put_offer(offer.pack()));
            g.tell_here(&mut self.means.after, wake, mine);
        }
        moves
    }
}

/// The memory for buffers: the part of the mirror's data area behind the copy of the peer's. There a cursor reaches a
/// buffer as it does the peer's rings.
pub(super) struct Buffers {
    arena: Lock<Arena>,
    bytes: u64,
    /// The page of the data area at which the buffers begin.
    first: u32,
}

impl Buffers {
    /// Returns room for `bytes` bytes of buffers behind the first `at` bytes of a data area; both are whole pages.
    pub(super) fn new(at: usize, bytes: usize) -> Self {
        Self {
            arena: Lock::new(Arena::new(bytes as u64)),
            bytes: bytes as u64,
            first: (at >> PAGE_LOG2) as u32,
        }
    }

    /// Frees all buffers, for another link.
    pub(super) fn reset(&self) {
        if let Some(mut arena) = self.arena.lock() {
            *arena = Arena::new(self.bytes);
        }
    }

    fn take(&self, log2: u8) -> Option<Region> {
        let region = self.arena.lock()?.alloc(log2)?;
        Region::new(self.first.checked_add(region.page())?, log2)
    }

    pub(super) fn give_back(&self, buffer: Region) {
        if let Some(page) = buffer.page().checked_sub(self.first)
            && let Some(region) = Region::new(page, buffer.log2())
            && let Some(mut arena) = self.arena.lock()
        {
            arena.free(region);
        }
    }

    #[cfg(test)]
    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.arena.lock().map_or(0, |a| a.bytes_in_use())
    }
}
