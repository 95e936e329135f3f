//! How much of the program's memory devices may reach at a time, over all links. The kernel keeps such pages in memory
//! and counts them, like the rings, against the limit on locked memory. So this budget is half of the limit; the other
//! half is for links to come.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::process::{Resource, getrlimit};

/// The unit in which the kernel counts locked memory, bytes.
pub const PAGE: u64 = 4096;

/// The bytes that are registered now.
#[derive(Default)]
pub struct Budget(AtomicU64);

/// Returns half of the limit on locked memory, bytes; `u64::MAX` without a limit. The program may change the limit at
/// any time.
pub fn limit() -> u64 {
    getrlimit(Resource::Memlock).current.map_or(u64::MAX, |limit| limit / 2)
}

impl Budget {
    /// Takes up to `wanted` bytes of `limit`, plus two pages, because the memory may begin and end within a page.
    /// Returns how many bytes may be registered, and the cost that [`give_back`](Self::give_back) needs. `None` if
    /// fewer than `least` bytes are left.
    pub fn take(&self, wanted: usize, least: usize, limit: u64) -> Option<(usize, u64)> {
        let edges = 2 * PAGE;
        let mut len = 0;
        let taken = self.0.fetch_update(Relaxed, Relaxed, |taken| {
            let free = limit.checked_sub(taken)?.checked_sub(edges)?;
            len = wanted.min(usize::try_from(free).unwrap_or(usize::MAX));
            (len >= least).then(|| taken + len as u64 + edges)
        });
        taken.ok().map(|_| (len, len as u64 + edges))
    }

    /// Takes `bytes` bytes of `limit`, which are whole pages. Returns the cost that [`give_back`](Self::give_back)
    /// needs; `None` if fewer bytes are left.
    pub fn take_pages(&self, bytes: u64, limit: u64) -> Option<u64> {
        let with = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= limit);
        self.0.fetch_update(Relaxed, Relaxed, with).ok().map(|_| bytes)
    }

    /// Gives back what a registration has taken.
    pub fn give_back(&self, cost: u64) {
        self.0.fetch_sub(cost, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;

    #[test]
    fn no_more_is_taken_than_there_is() {
        let budget = Budget::default();
        let limit = 1024 * KIB as u64;
        let (first, first_cost) = budget.take(600 * KIB, 64 * KIB, limit).unwrap();
        assert_eq!((first, first_cost), (600 * KIB, 608 * KIB as u64));
        // The second call gets the rest of the limit.
        let (second, second_cost) = budget.take(600 * KIB, 64 * KIB, limit).unwrap();
        assert_eq!(second, 1024 * KIB - 608 * KIB - 8 * KIB);
        assert_eq!(budget.take(4 * KIB, 4 * KIB, limit), None);
        budget.give_back(first_cost);
        assert_eq!(budget.take(700 * KIB, 601 * KIB, limit), None);
        assert_eq!(budget.take(700 * KIB, 600 * KIB, limit).unwrap().0, 600 * KIB);
        budget.give_back(first_cost);
        budget.give_back(second_cost);
        assert_eq!(budget.0.into_inner(), 0);
    }

    #[test]
    fn there_may_be_nothing_and_no_limit() {
        let budget = Budget::default();
        for limit in [0, 4096, 8192] {
            assert_eq!(budget.take(100_000, 1, limit), None);
        }
        assert_eq!(budget.take(1 << 30, 1, u64::MAX).unwrap().0, 1 << 30);
        // A limit that was lowered meanwhile, below what is taken.
        assert_eq!(budget.take(1, 1, 8192), None);
    }
}
