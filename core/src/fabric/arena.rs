//! Buddy allocator that divides the data area of one arena into rings. The allocator lies in private memory of the
//! arena's owner, so a peer never sees or changes its state. It does not map memory, and gives no pages back to the
//! kernel.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use crate::fabric::layout::{MAX_RING_LOG2, MIN_RING_LOG2, PAGE_LOG2, Region, UNIT_LOG2};

/// The number of ring sizes: the powers of two from one page to the largest ring.
const ORDERS: usize = (MAX_RING_LOG2 - MIN_RING_LOG2 + 1) as usize;
/// log2 of the number of pages of the largest region that begins at page 0. A larger one would lie in two segments of
/// the mapping (`side.rs`).
const UNIT: u32 = (UNIT_LOG2 - MIN_RING_LOG2) as u32;

/// The free space of one data area.
///
/// Only free blocks are stored, for each size in the order of their addresses. A fresh arena of 1 GiB has 15 blocks of
/// 64 MiB, and 9 smaller ones before them. The lowest free block of a size is taken first, so that little of the area's
/// memory is ever touched.
#[derive(Debug)]
pub struct Arena {
    /// For each order, which is log2 of a block's number of pages: the first pages of the free blocks.
    free: [BTreeSet<u32>; ORDERS],
    pages: u32,
    pages_in_use: u64,
}

impl Arena {
    /// Returns the allocator of a data area of `data_bytes` bytes, all free. Bytes beyond the last whole page, or
    /// beyond 2^32 pages, are not used.
    pub fn new(data_bytes: u64) -> Self {
        let pages = u32::try_from(data_bytes >> PAGE_LOG2).unwrap_or(u32::MAX);
        let mut arena = Self {
            free: Default::default(),
            pages,
            pages_in_use: 0,
        };
        let mut page = 0u32;
        while page < pages {
            let aligned = match page {
                0 => UNIT,
                _ => page.trailing_zeros().min(ORDERS as u32 - 1),
            };
            let fits = (pages - page).ilog2();
            let order = aligned.min(fits);
            if let Some(list) = arena.free.get_mut(order as usize) {
                list.insert(page);
            }
            page = page.saturating_add(1 << order);
        }
        arena
    }

    /// Allocates a region of `1 << log2` bytes, aligned to its size. Takes it from the smallest free block that is
    /// large enough; if there are several, from the lowest. `None` if there is no room, or if `log2` is outside
    /// `MIN_RING_LOG2..=MAX_RING_LOG2`.
    pub fn alloc(&mut self, log2: u8) -> Option<Region> {
        let order = usize::from(log2.checked_sub(MIN_RING_LOG2)?);
        let (mut have, page) = (order..ORDERS)
            .filter_map(|o| Some((o, *self.free.get(o)?.first()?)))
            .next()?;
        self.free.get_mut(have)?.remove(&page);
        while have > order {
            have -= 1;
            // The upper half stays free. The lower half is split further, until it has the size of the region.
            self.free.get_mut(have)?.insert(page + (1 << have));
        }
        self.pages_in_use += 1 << order;
        Region::new(page, log2)
    }

    /// Frees a region that `alloc` returned. A region that is outside the area, or that overlaps free space, is
    /// ignored: leaking it is safer than allocating it twice.
    pub fn free(&mut self, region: Region) {
        let mut order = usize::from(region.log2() - MIN_RING_LOG2);
        let mut page = region.page();
        let end = u64::from(page) + (1u64 << order);
        if end > u64::from(self.pages) || self.overlaps_free(page, order) {
            return;
        }
        self.pages_in_use = self.pages_in_use.saturating_sub(1 << order);
        while order + 1 < ORDERS {
            let buddy = page ^ (1 << order);
            if page.min(buddy) == 0 && order >= UNIT as usize {
                break;
            }
            if !self.free.get_mut(order).is_some_and(|l| l.remove(&buddy)) {
                break;
            }
            page &= !(1 << order);
            order += 1;
        }
        if let Some(list) = self.free.get_mut(order) {
            list.insert(page);
        }
    }

    /// Returns how many bytes are allocated.
    pub fn bytes_in_use(&self) -> u64 {
        self.pages_in_use << PAGE_LOG2
    }

    fn overlaps_free(&self, page: u32, order: usize) -> bool {
        let last = page + ((1u32 << order) - 1);
        self.free.iter().enumerate().any(|(o, list)| {
            // Finds a free block of order `o` that contains `page`, or that lies inside the region.
            let containing = page & !((1u32 << o) - 1);
            list.range(containing..=last).next().is_some()
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn everything_freed_merges_back() {
        let mut arena = Arena::new(1 << 30);
        let small: Vec<_> = (0..1000).map(|_| arena.alloc(12).unwrap()).collect();
        assert_eq!(arena.bytes_in_use(), 1000 * 4096);
        assert_eq!(small[999].page(), 999);
        for r in small {
            arena.free(r);
        }
        assert_eq!(arena.bytes_in_use(), 0);
        // 15 blocks of 64 MiB are free. In the first 64 MiB of the area free blocks are smaller.
        assert_eq!(arena.free[ORDERS - 1].len(), 15);
        let big: Vec<_> = (0..15).map(|_| arena.alloc(26).unwrap()).collect();
        assert_eq!(big.len(), 15);
        let rest: Vec<_> = [18, 18, 19, 20, 21, 22, 23, 24, 25]
            .into_iter()
            .map(|log2| arena.alloc(log2).unwrap().page())
            .collect();
        assert_eq!(rest, [0, 64, 128, 256, 512, 1024, 2048, 4096, 8192]);
        assert!(arena.alloc(12).is_none());
    }

    #[test]
    fn a_region_freed_twice_is_ignored() {
        let mut arena = Arena::new(1 << 24);
        let a = arena.alloc(14).unwrap();
        let b = arena.alloc(12).unwrap();
        arena.free(a);
        arena.free(a);
        arena.free(Region::new(a.page() + 1, 12).unwrap());
        assert_eq!(arena.bytes_in_use(), 4096);
        arena.free(b);
        assert_eq!(arena.bytes_in_use(), 0);
        assert_eq!(arena.alloc(24), None);
        assert_eq!(arena.alloc(23).map(Region::page), Some(2048));
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        let mut arena = Arena::new(1 << 30);
        assert!(arena.alloc(11).is_none());
        assert!(arena.alloc(27).is_none());
        assert!(Arena::new(1 << 20).alloc(20).is_none());
        assert!(Arena::new(0).alloc(12).is_none());
    }

    proptest! {
        #[test]
        fn regions_never_overlap(
            pages in 1u64..3000,
            ops in proptest::collection::vec((any::<bool>(), 12u8..20, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut arena = Arena::new(pages << PAGE_LOG2);
            let mut live: Vec<Region> = Vec::new();
            for (give, log2, which) in ops {
                if give || live.is_empty() {
                    if let Some(r) = arena.alloc(log2) {
                        prop_assert!(r.offset() + r.len() <= (pages as usize) << PAGE_LOG2);
                        let unit = 1usize << UNIT_LOG2;
                        let segment = |at: usize| (at / unit).checked_ilog2();
                        prop_assert_eq!(segment(r.offset()), segment(r.offset() + r.len() - 1));
                        for o in &live {
                            prop_assert!(r.offset() + r.len() <= o.offset() || o.offset() + o.len() <= r.offset());
                        }
                        live.push(r);
                    }
                } else {
                    arena.free(live.swap_remove(which.index(live.len())));
                }
                let used: usize = live.iter().map(|r| r.len()).sum();
                prop_assert_eq!(arena.bytes_in_use(), used as u64);
            }
        }
    }
}
