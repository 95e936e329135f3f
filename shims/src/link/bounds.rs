//! What a peer may make us use of a link: memory by the rings that it offers, time by what it queues. Not its buttons, which are
//! the neighbour's.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::fabric::layout::{MAX_RING_LOG2, MIN_RING_LOG2};
use rdmasock_core::fabric::ring::{Allowance, Ground};

use super::{AnyEnd, Link};
use crate::library::Library;
use crate::service::Command;

/// So many looks in vain are asked about,
const MOST_VAIN: u32 = 8192;
/// and one that finds something makes up for so many.
const VAIN_A_FIND: u32 = 16;

/// How many of the largest rings of a peer's arena are written into at most: for each of its streams one, the one before,
/// and as much again for what lies between; and some for all.
const RINGS_A_STREAM: u64 = 4;
const RINGS: u64 = 4;

impl Link {
    /// What the peer says of itself: the largest ring that it writes into, and the size of its data area, of
    /// which we write into no more than its streams need. Before the first stream.
    pub fn on_geometry(&self, max_ring: u64, data_bytes: u64) {
        let max_ring = max_ring.clamp(1 << MIN_RING_LOG2, 1 << MAX_RING_LOG2);
        let max_ring = 1 << max_ring.ilog2();
        self.peers_max_ring.store(max_ring, Release);
        if let Some(mut ground) = self.ground.lock() {
            *ground = Some(Arc::new(Ground::new(data_bytes)));
        }
    }

    /// Bytes of the largest ring that we receive in.
    pub fn max_ring(&self) -> u64 {
        let ours = Library::get().config.ring_max.bytes();
        ours.min(self.peers_max_ring.load(Acquire))
    }

    /// How far we adopt the rings that the peer offers to one more stream.
    pub(super) fn allowance(&self) -> Allowance {
        let ground = self.ground.lock();
        let Some(ground) = ground.as_ref().and_then(|ground| ground.as_ref()) else {
            return Allowance::default();
        };
        let largest = Library::get().config.ring_max.bytes();
        let rings = RINGS + RINGS_A_STREAM * u64::from(self.streams() + 1);
        ground.allow(rings.saturating_mul(largest));
        Allowance::new(largest.ilog2() as u8, Arc::clone(ground))
    }

    /// A look at a stream that the peer may have queued has found something, or not. A peer that queues streams again and
    /// again with which nothing is the matter keeps our threads from sleeping; if looks in vain are almost all that
    /// there are the service thread asks whether anything goes over the link.
    #[inline]
    pub fn judge(&self, found: bool) {
        // Neither add up exactly where several threads look.
        let vain = self.vain.load(Relaxed);
        if !found {
            self.on_vain(vain);
        } else if vain != 0 {
            self.vain.store(vain.saturating_sub(VAIN_A_FIND), Relaxed);
        }
    }

    #[cold]
    fn on_vain(&self, vain: u32) {
        self.vain.store(vain + 1, Relaxed);
        if vain + 1 == MOST_VAIN
            && let AnyEnd::Shm(end) = &self.end
            && let Some(link) = end.outside().link.get()
        {
            Library::get().service.submit(Command::Vain(link));
        }
    }

    /// Whether so many looks in vain are the peer's malice: not if as many bytes have gone over the link since that was last
    /// asked. (Where several threads look for the same bytes all but one look in vain.) Service thread only.
    pub fn is_only_noise(&self) -> bool {
        if self.vain.load(Relaxed) < MOST_VAIN / 2 {
            // Finds have made up for it, or the object has become another link since.
            return false;
        }
        let moved = self.sockets().into_iter().map(|socket| {
            let received = socket
                .rx
                .lock()
                .and_then(|rx| Some(rx.consumer.as_ref()?.position()));
            let sent = socket
                .tx
                .lock()
                .and_then(|tx| Some(tx.producer.as_ref()?.position()));
            received.unwrap_or(0) + sent.unwrap_or(0)
        });
        let moved = moved.fold(0, u64::wrapping_add);
        let since = moved.wrapping_sub(self.moved.swap(moved, Relaxed));
        self.vain.store(0, Relaxed);
        since < u64::from(MOST_VAIN)
    }
}
