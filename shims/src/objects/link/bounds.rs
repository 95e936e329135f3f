//! Bounds on what a peer can make this process spend on a link: memory by the rings that it offers, time by the streams
//! that it queues. The bound on its buttons is in `local_peer`.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::fabric::layout::{MAX_RING_LOG2, MIN_RING_LOG2};
use rdmasock_core::fabric::ring::{Allowance, TouchedArea};

use super::Link;
use super::looks::MOST_VAIN;
use crate::config::config;
use crate::objects::library::Library;
use crate::objects::mailbox::Command;

/// The size of a peer's data area that this end writes into is at most this many of the largest rings. For each of the
/// peer's streams: its ring, the ring before, and twice as much for the gaps between them; and some for all streams.
const RINGS_A_STREAM: u64 = 4;
const RINGS: u64 = 4;

impl Link {
    /// Sets the peer's geometry: the size of the largest ring that it writes into, and the size of its data area. This
    /// end uses that area only as far as the peer's streams need. To be called before the first stream.
    pub fn on_geometry(&self, max_ring: u64, data_bytes: u64) {
        let max_ring = max_ring.clamp(1 << MIN_RING_LOG2, 1 << MAX_RING_LOG2);
        let max_ring = 1 << max_ring.ilog2();
        self.peers_max_ring.store(max_ring, Release);
        if let Some(mut touched) = self.touched.lock() {
            *touched = Some(Arc::new(TouchedArea::new(data_bytes)));
        }
    }

    /// Returns the size of the largest ring that this end receives in, bytes.
    pub fn max_ring(&self) -> u64 {
        let ours = config().ring_max.bytes();
        ours.min(self.peers_max_ring.load(Acquire))
    }

    /// Returns the allowance by which this end adopts rings that the peer offers to one more stream.
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

    /// Counts a check of a stream that the peer may have queued; `found` if the stream was ready. A peer that queues
    /// unready streams again and again keeps this process's threads awake. If nearly all checks find nothing, and there
    /// are many, the service thread checks whether bytes move on the link.
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

    /// Returns whether hardly a byte has moved on the link since the last call. `moved` is the sum of its streams'
    /// positions, bytes. Service thread only.
    ///
    /// The counts of [`Self::judge`] alone do not say that. If several threads check for the same bytes, all but one
    /// find nothing. And threads that block in a receive do not count what they find.
    pub fn is_idle(&self, moved: u64) -> bool {
        let before = self.looks.moved.swap(moved, Relaxed);
        moved.wrapping_sub(before) < u64::from(MOST_VAIN)
    }
}
