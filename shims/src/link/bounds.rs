//! What a peer may make us use of a link: memory by the rings that it offers, time by what it queues. Not its buttons, which are
//! the local peer's.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::fabric::layout::{MAX_RING_LOG2, MIN_RING_LOG2};
use rdmasock_core::fabric::ring::{Allowance, Ground};

use super::{AnyEnd, Link};
use crate::config::config;
use crate::library::Library;
use crate::service::Command;

/// So many looks in vain are asked about.
const MOST_VAIN: u32 = 8192;
/// One that finds something makes up for so many.
const VAIN_A_FIND: u32 = 256;
/// In more than this they harm nobody, ns.
const FAST: u64 = 10_000_000_000;

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
        let ours = config().ring_max.bytes();
        ours.min(self.peers_max_ring.load(Acquire))
    }

    /// How far we adopt the rings that the peer offers to one more stream.
    pub(super) fn allowance(&self) -> Allowance {
        let ground = self.ground.lock();
        let Some(ground) = ground.as_ref().and_then(|ground| ground.as_ref()) else {
            return Allowance::default();
        };
        let largest = config().ring_max.bytes();
        let rings = RINGS + RINGS_A_STREAM * u64::from(self.streams() + 1);
        ground.allow(rings.saturating_mul(largest));
        Allowance::new(largest.ilog2() as u8, Arc::clone(ground))
    }

    /// A look at a stream that the peer may have queued has found something, or not. A peer that queues streams again and
    /// again with which nothing is the matter keeps our threads from sleeping; if nearly all looks are in vain, and there
    /// are many, the service thread asks whether bytes go over the link.
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
        if self.looks.are_noise(crate::time::now_ns())
            && let AnyEnd::Shm(end) = &self.end
            && let Some(link) = end.outside().link.get()
        {
            Library::get().service.submit(Command::Vain(link));
        }
    }

    /// Whether hardly a byte has gone over the link since this was last asked. (Where several threads look for the same
    /// bytes all but one look in vain, and threads that block in a receive do not count what they find.) Service thread
    /// only.
    pub fn is_idle(&self) -> bool {
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
        let before = self.looks.moved.swap(moved, Relaxed);
        moved.wrapping_sub(before) < u64::from(MOST_VAIN)
    }
}

/// What looks for the peer's sake have come to, and what that was at the last question.
#[derive(Default)]
pub(super) struct Looks {
    vain: Counter,
    found: Counter,
    vain_before: AtomicU32,
    found_before: AtomicU32,
    /// Monotonic ns.
    at: AtomicU64,
    moved: AtomicU64,
}

impl Looks {
    /// For another peer.
    pub(super) fn reset(&self) {
        let Self {
            vain,
            found,
            vain_before,
            found_before,
            at,
            moved,
        } = self;
        for count in [&vain.0, &found.0, vain_before, found_before] {
            count.store(0, Relaxed);
        }
        at.store(0, Relaxed);
        moved.store(0, Relaxed);
    }

    /// Whether nearly all looks since the last question were in vain, and came fast.
    fn are_noise(&self, now: u64) -> bool {
        let since = |count: &Counter, before: &AtomicU32| {
            let count = count.get();
            count.wrapping_sub(before.swap(count, Relaxed))
        };
        let vain = since(&self.vain, &self.vain_before);
        let found = since(&self.found, &self.found_before);
        let is_fast = now.wrapping_sub(self.at.swap(now, Relaxed)) < FAST;
        // A thread that was slow to write its count has turned it back: that is a short time, or what looks like an
        // endless one.
        let is_whole = (MOST_VAIN / 2..2 * MOST_VAIN).contains(&vain);
        is_whole && is_fast && found < vain / VAIN_A_FIND
    }
}

/// Does not count exactly where several threads do: that would cost more than it counts.
#[derive(Default)]
struct Counter(AtomicU32);

impl Counter {
    #[inline]
    fn bump(&self) -> u32 {
        let n = self.get().wrapping_add(1);
        self.0.store(n, Relaxed);
        n
    }

    fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks of which one in `find_every` finds something, so many ns after each other; whether that is ever noise.
    fn is_noise(find_every: u32, pause: u64) -> bool {
        let looks = Looks::default();
        let mut now = 1 << 40;
        (1..200_000).any(|n| {
            now += pause;
            if n % find_every == 0 {
                looks.found.bump();
                return false;
            }
            looks.vain.bump().is_multiple_of(MOST_VAIN) && looks.are_noise(now)
        })
    }

    #[test]
    fn looks_in_vain_are_noise_if_they_are_many_and_fast_and_hardly_anything_is_found() {
        assert!(is_noise(u32::MAX, 1_000));
        assert!(is_noise(1_000, 1_000));
        assert!(!is_noise(100, 1_000), "something is found");
        assert!(
            !is_noise(2, 10),
            "an event loop looks again at what it has reported"
        );
        assert!(!is_noise(u32::MAX, 2_000_000), "they cost nothing");
    }

    #[test]
    fn a_question_that_is_asked_twice_is_answered_once() {
        let looks = Looks::default();
        assert!((1..=MOST_VAIN).all(|_| looks.vain.bump() > 0));
        looks.are_noise(1 << 40);
        assert!(!looks.are_noise((1 << 40) + 1));
        looks.vain.0.fetch_sub(1, Relaxed);
        looks.vain.bump();
        assert!(!looks.are_noise((1 << 40) + 2));
    }
}
