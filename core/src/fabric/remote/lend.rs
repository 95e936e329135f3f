//! Which stream has a send buffer, and from which position on. The peer knows nothing of it: a buffer's bytes go to the
//! peer's ring as that has room, at the same positions. Not how they are carried over (`pump/data.rs`).
//!
//! A stream has at most one. Its producer moves there, and back when all has been read, under its own lock and the
//! engine's, so that both know at the same moment where the next byte is. A buffer is free when its bytes have been
//! read, or the peer has closed.

use super::engine::Engine;
use super::local::{ENGINE, Local};
use super::qp::QueuePair;
use super::shared::Shared;
use super::stream::{Aside, State};
use crate::fabric::ring::proxy::pack_offer;
use crate::fabric::ring::{Producer, Wake};

impl<Q: QueuePair> Engine<Q> {
    /// See [`LinkEnd::lend`](crate::fabric::link::LinkEnd::lend).
    pub fn lend<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, producer: &mut Producer, log2: u8) -> bool {
        let Some(part) = producer.fits_aside(log2) else {
            return false;
        };
        let s = self.streams.of_peer(theirs).filter(|s| s.state == State::Open);
        let s = s.filter(|s| !s.out.stopped && s.out.aside.is_none() && !s.out.is_ahead_of_offers());
        let (Some(s), Some(block)) = (s, g.block_mirror(theirs)) else {
            return false;
        };
        // What it has adopted before comes before.
        s.out.look(block, ENGINE.0);
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

    /// See [`LinkEnd::take_back`](crate::fabric::link::LinkEnd::take_back).
    pub fn take_back<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, producer: &mut Producer) -> bool {
        let (Some(mine), Some(block)) = (self.streams.mine(theirs), g.block_mirror(theirs)) else {
            return false;
        };
        let Some(out) = self.streams.get(mine).map(|s| &mut s.out) else {
            return false;
        };
        let (Some(aside), Some(ring)) = (out.aside, out.ring) else {
            return false;
        };
        let next = out.offered;
        // A ring that it has adopted before it moved aside, and has not used, is to be told of first.
        let is_carried = out.told == producer.position() && out.switch_at.is_none();
        let moves = is_carried && producer.move_back(ring, out.generation, next.map(|(_, ring)| ring));
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
    pub fn unsent<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> u64 {
        let told = self.streams.of_peer(theirs).map(|s| s.out.told);
        let tail = g.block_mirror(theirs).map(|block| block.tail());
        told.zip(tail).map_or(0, |(told, tail)| tail.saturating_sub(told))
    }
}
