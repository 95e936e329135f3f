//! Which grains of an arena are taken: one bit for each grain, in words that are only changed by atomic operations. A
//! thread searches for a *run*, successive grains that are free, then sets its bits word by word. If another thread has
//! taken a grain of the run meanwhile, the first thread clears the bits that it has set and searches again.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const BITS: usize = 64;

/// The bits of an arena's grains.
#[derive(Clone, Copy)]
pub(crate) struct Runs<'a>(pub &'a [AtomicU64]);

impl Runs<'_> {
    fn len(self) -> usize {
        self.0.len() * BITS
    }

    /// Takes the first free run of `n` grains that begins at a multiple of `align`. Returns its first grain; `None` if
    /// there is no such run.
    pub(crate) fn take(self, n: usize, align: usize) -> Option<usize> {
        let mut from = 0;
        loop {
            let at = self.find(from, n, align)?;
            if self.take_at(at, n) {
                return Some(at);
            }
            // Another thread has taken a grain of the run, so that thread has made progress. The search goes on from
            // here, because the grains before were taken a moment ago.
            from = at;
        }
    }

    /// Returns the first grain of such a run at or behind `from`. The run is free at this moment only.
    fn find(self, from: usize, n: usize, align: usize) -> Option<usize> {
        let mut at = from.next_multiple_of(align);
        while n > 0 && at.checked_add(n)? <= self.len() {
            match self.last_taken(at, n) {
                None => return Some(at),
                Some(taken) => at = (taken + 1).next_multiple_of(align),
            }
        }
        None
    }

    /// Returns the last taken grain of the `n` grains from `at` on; `None` if all are free.
    fn last_taken(self, at: usize, n: usize) -> Option<usize> {
        let mut found = None;
        for (index, mask) in words(at, n) {
            let taken = self.0.get(index)?.load(Relaxed) & mask;
            if taken != 0 {
                found = Some(index * BITS + (BITS - 1) - taken.leading_zeros() as usize);
            }
        }
        found
    }

    /// Takes the `n` grains from `at` on. Returns false, and takes no grain, if one of them is taken.
    pub(crate) fn take_at(self, at: usize, n: usize) -> bool {
        if at.checked_add(n).is_none_or(|end| end > self.len()) {
            return false;
        }
        for (done, (index, mask)) in words(at, n).enumerate() {
            // Acquire: pairs with the Release of `clear`, so the accesses of a grain's last owner come before the
            // accesses of its next owner.
            let taken = self.0.get(index).is_some_and(|word| {
                let with = |now: u64| (now & mask == 0).then_some(now | mask);
                word.fetch_update(Acquire, Relaxed, with).is_ok()
            });
            if !taken {
                words(at, n)
                    .take(done)
                    .for_each(|(index, mask)| self.clear(index, mask));
                return false;
            }
        }
        true
    }

    /// Gives back the `n` grains from `at` on, which the caller has taken.
    pub(crate) fn give(self, at: usize, n: usize) {
        words(at, n).for_each(|(index, mask)| self.clear(index, mask));
    }

    fn clear(self, index: usize, mask: u64) {
        if let Some(word) = self.0.get(index) {
            // Release: pairs with the Acquire of `take_at`.
            word.fetch_and(!mask, Release);
        }
    }

    /// Returns true if the `n` grains from `at` on are all free at this moment.
    pub(crate) fn is_free(self, at: usize, n: usize) -> bool {
        self.last_taken(at, n).is_none()
    }
}

/// Returns the indexes of the words that contain the `n` bits from `at` on, each with a mask of those bits.
fn words(at: usize, n: usize) -> impl Iterator<Item = (usize, u64)> {
    let (end, first) = (at + n, at / BITS);
    (first..end.div_ceil(BITS)).map(move |index| {
        let (from, to) = (at.max(index * BITS) % BITS, end.min((index + 1) * BITS) - index * BITS);
        let below = |bits: usize| if bits >= BITS { u64::MAX } else { (1 << bits) - 1 };
        (index, below(to) & !below(from))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bits(words: usize) -> Vec<AtomicU64> {
        (0..words).map(|_| AtomicU64::new(0)).collect()
    }

    /// Returns the first free run by a plain search of a list, for comparison.
    fn first(taken: &[bool], n: usize, align: usize) -> Option<usize> {
        (0..taken.len().saturating_sub(n - 1)).find(|at| at % align == 0 && !taken[*at..at + n].contains(&true))
    }

    proptest! {
        #[test]
        fn it_finds_what_a_list_finds(
            count in 1_usize..5,
            ops in proptest::collection::vec((any::<bool>(), 1_usize..150, 0_u32..6, any::<prop::sample::Index>()), 1..200),
        ) {
            let words = bits(count);
            let runs = Runs(&words);
            let mut reference = vec![false; count * BITS];
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (takes, n, align, which) in ops {
                if takes || held.is_empty() {
                    let expected = first(&reference, n, 1 << align);
                    prop_assert_eq!(runs.take(n, 1 << align), expected);
                    if let Some(at) = expected {
                        reference[at..at + n].fill(true);
                        held.push((at, n));
                    }
                } else {
                    let (at, n) = held.swap_remove(which.index(held.len()));
                    // Gives back only the end of the run, as if a block became shorter.
                    let kept = n / 3;
                    runs.give(at + kept, n - kept);
                    reference[at + kept..at + n].fill(false);
                    if kept > 0 {
                        held.push((at, kept));
                    }
                }
                for (at, taken) in reference.iter().enumerate() {
                    prop_assert_eq!(runs.is_free(at, 1), !taken);
                }
            }
        }

        #[test]
        fn a_run_is_taken_as_a_whole_or_not_at_all(at in 0_usize..300, n in 1_usize..300, other in 0_usize..256) {
            let words = bits(4);
            let runs = Runs(&words);
            assert!(runs.take_at(other, 1));
            let fits = at + n <= 256 && !(at..at + n).contains(&other);
            prop_assert_eq!(runs.take_at(at, n), fits);
            if !fits {
                let all = (0..256).filter(|at| !runs.is_free(*at, 1));
                prop_assert_eq!(all.collect::<Vec<_>>(), vec![other]);
            }
        }
    }

    #[test]
    fn a_grain_is_one_thread_s() {
        let words = bits(4);
        let runs = Runs(&words);
        let owners: Vec<AtomicU64> = bits(4 * BITS);
        std::thread::scope(|scope| {
            for me in 1..=4_u64 {
                let owners = &owners;
                scope.spawn(move || {
                    for round in 0..20_000_u64 {
                        let n = (round * me % 90 + 1) as usize;
                        let Some(at) = runs.take(n, 1) else { continue };
                        for owner in &owners[at..at + n] {
                            assert_eq!(owner.swap(me, Relaxed), 0);
                        }
                        for owner in &owners[at..at + n] {
                            assert_eq!(owner.swap(0, Relaxed), me);
                        }
                        runs.give(at, n);
                    }
                });
            }
        });
        assert!(runs.is_free(0, 4 * BITS));
    }
}
