//! What a peer may make us use of a link: memory by the rings that it offers, time by what it queues. Not its buttons,
//! which are the local peer's.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::fabric::layout::{MAX_RING_LOG2, MIN_RING_LOG2};
use rdmasock_core::fabric::ring::{Allowance, TouchedArea};

use super::Link;
use super::looks::MOST_VAIN;
use crate::config::config;
use crate::objects::library::Library;
use crate::objects::mailbox::Command;

/// How many of the largest rings of a peer's arena are written into at most: for each of its streams one, the one
/// before, and as much again for what lies between; and some for all.
const RINGS_A_STREAM: u64 = 4;
const RINGS: u64 = 4;

impl Link {
    /// What the peer says of itself: the largest ring that it writes into, and the size of its data area, of
    /// which we write into no more than its streams need. Before the first stream.
    pub fn on_geometry(&self, max_ring: u64, data_bytes: u64) {
        let max_ring = max_ring.clamp(1 << MIN_RING_LOG2, 1 << MAX_RING_LOG2);
        let max_ring = 1 << max_ring.ilog2();
        self.peers_max_ring.store(max_ring, Release);
        if let Some(mut touched) = self.touched.lock() {
            *touched = Some(Arc::new(TouchedArea::new(data_bytes)));
        }
    }

    /// Bytes of the largest ring that we receive in.
    pub fn max_ring(&self) -> u64 {
        let ours = config().ring_max.bytes();
        ours.min(self.peers_max_ring.load(Acquire))
    }

    /// How far we adopt the rings that the peer offers to one more stream.
    pub(super) fn allowance(&self) -> Allowance {
        let touched = self.touched.lock();
        let Some(touched) = touched.as_ref().and_then(|touched| touched.as_ref()) else {
            return Allowance::default();
        };
        let largest = config().ring_max.bytes();
        let rings = RINGS + RINGS_A_STREAM * u64::from(self.streams() + 1);
        touched.allow(rings.saturating_mul(largest));
        Allowance::new(largest.ilog2() as u8, Arc::clone(touched))
    }

    /// A look at a stream that the peer may have queued has found something, or not. A peer that queues streams again
    /// and again with which nothing is the matter keeps our threads from sleeping; if nearly all looks are in vain, and
    /// there are many, the service thread asks whether bytes go over the link.
    #[inline]
    pub fn judge(&self, found: bool) {
        if found {
            self.looks.found.bump();
        } else if self.looks.vain.bump().is_multiple_of(MOST_VAIN) {
            self.on_many_vain();
        }
    }

    #[cold]
    fn on_many_vain(&self) {
        if self.looks.are_noise(crate::sys::time::now_ns()) && !self.is_remote() {
            Library::get().service.submit(Command::Vain(self.slot()));
        }
    }

    /// Whether hardly a byte has gone over the link since this was last asked: its streams have `moved` so many, by
    /// where they are. (Where several threads look for the same bytes all but one look in vain, and threads that block
    /// in a receive do not count what they find.) Service thread only.
    pub fn is_idle(&self, moved: u64) -> bool {
        let before = self.looks.moved.swap(moved, Relaxed);
        moved.wrapping_sub(before) < u64::from(MOST_VAIN)
    }
}
