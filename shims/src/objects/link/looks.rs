//! Counts the checks that a peer causes. Nearly all of them are to find something.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Checks in vain after which the service thread is asked about the peer.
pub const MOST_VAIN: u32 = 8192;
/// A check that finds something makes up for this many checks in vain.
const VAIN_A_FIND: u32 = 256;
/// `MOST_VAIN` checks in vain that take longer than this do no harm, ns.
const FAST: u64 = 10_000_000_000;

/// The counts of a link's checks, and their values at the last question.
#[derive(Default)]
pub struct Looks {
    pub vain: Counter,
    pub found: Counter,
    vain_before: AtomicU32,
    found_before: AtomicU32,
    /// Time of the last question, monotonic ns.
    at: AtomicU64,
    /// Sum of the streams' positions at the last question, bytes.
    pub moved: AtomicU64,
}

impl Looks {
    /// Resets the counts for another peer.
    pub fn reset(&self) {
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

    /// Returns whether nearly all checks since the last question were in vain, and came fast. `now` in monotonic ns.
    pub fn are_noise(&self, now: u64) -> bool {
        let since = |count: &Counter, before: &AtomicU32| {
            let count = count.get();
            count.wrapping_sub(before.swap(count, Relaxed))
        };
        let vain = since(&self.vain, &self.vain_before);
        let found = since(&self.found, &self.found_before);
        let is_fast = now.wrapping_sub(self.at.swap(now, Relaxed)) < FAST;
        // A thread that was slow to write its count has turned the count back. The difference is then small, or so
        // large that it looks like a wrap.
        let is_whole = (MOST_VAIN / 2..2 * MOST_VAIN).contains(&vain);
        is_whole && is_fast && found < vain / VAIN_A_FIND
    }
}

/// A counter that several threads may count too low: an exact one would cost more than it is worth.
#[derive(Default)]
pub struct Counter(AtomicU32);

impl Counter {
    #[inline]
    pub fn bump(&self) -> u32 {
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

    /// Returns whether checks that come every `pause` ns are ever noise, if each `find_every`th of them finds
    /// something.
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
        assert!(!is_noise(2, 10), "an event loop looks again at what it has reported");
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
