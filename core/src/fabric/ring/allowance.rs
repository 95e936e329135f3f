//! Bounds how much of a receiver's memory a sender writes into. A page of shared memory is charged to the process that
//! touches it first, which is the sender. But the receiver decides where its rings lie and when their memory is given
//! back. So a sender checks each offered ring against an allowance before it adopts it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::fabric::layout::{MAX_RING_LOG2, Region};

/// log2 of the bytes of a piece, the unit in which written memory is counted.
const PIECE_LOG2: u32 = 16;

/// The pieces of one data area that a sender has ever written into, and how many they may be. A correct receiver takes
/// the lowest place that is free for a ring, and gives back places that it does not use. So the count is little more
/// than the most that was in use at a time.
#[derive(Debug)]
pub struct TouchedArea {
    /// A bit for each piece, set once the piece may have been written into.
    pieces: Box<[AtomicU64]>,
    count: AtomicU64,
    /// The most pieces that may be written into.
    most: AtomicU64,
}

impl TouchedArea {
    /// Returns the state of an area of `bytes` bytes: no piece is written into, and none may be.
    pub fn new(bytes: u64) -> Self {
        let words = (bytes >> PIECE_LOG2).div_ceil(64) + 1;
        Self {
            pieces: (0..words).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            most: AtomicU64::new(0),
        }
    }

    /// Raises the limit to `bytes` bytes; never lowers it.
    pub fn allow(&self, bytes: u64) {
        self.most.fetch_max(bytes >> PIECE_LOG2, AcqRel);
    }

    /// Counts the region's pieces as written into. False if the area is too small for the region, or if more pieces are
    /// counted than the limit allows.
    fn enter(&self, region: Region) -> bool {
        let first = region.offset() >> PIECE_LOG2;
        let last = (region.offset() + region.len() - 1) >> PIECE_LOG2;
        let mut count = self.count.load(Acquire);
        for piece in first..=last {
            let bit = 1 << (piece % 64);
            let Some(word) = self.pieces.get(piece / 64) else {
                return false;
            };
            if word.load(Acquire) & bit == 0 && word.fetch_or(bit, AcqRel) & bit == 0 {
                count = self.count.fetch_add(1, AcqRel) + 1;
            }
        }
        count <= self.most.load(Acquire)
    }
}

/// Which rings a sender adopts: their largest size, and how much of the area they may touch.
#[derive(Debug, Clone)]
pub struct Allowance {
    largest: u8,
    touched: Option<Arc<TouchedArea>>,
}

impl Default for Allowance {
    /// Admits every ring.
    fn default() -> Self {
        Self {
            largest: MAX_RING_LOG2,
            touched: None,
        }
    }
}

impl Allowance {
    /// Admits rings of at most `1 << largest` bytes, as far as the limit of `touched` goes.
    pub fn new(largest: u8, touched: Arc<TouchedArea>) -> Self {
        Self {
            largest,
            touched: Some(touched),
        }
    }

    /// Returns whether the region ends within the limit, counted from the area's beginning. To be asked before the
    /// region is mapped, since that maps all that precedes it. So an offer takes addresses of this process only up to
    /// the limit.
    pub(super) fn reaches(&self, region: Region) -> bool {
        let end = (region.offset() + region.len()) as u64;
        let most = |area: &Arc<TouchedArea>| area.most.load(Acquire) << PIECE_LOG2;
        self.touched.as_ref().is_none_or(|area| end <= most(area))
    }

    pub(super) fn admits(&self, region: Region) -> bool {
        region.log2() <= self.largest && self.touched.as_ref().is_none_or(|area| area.enter(region))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(page: u32, log2: u8) -> Region {
        Region::new(page, log2).unwrap()
    }

    #[test]
    fn a_ring_that_is_too_large_is_not_adopted() {
        let touched = Arc::new(TouchedArea::new(1 << 30));
        touched.allow(1 << 30);
        let allowance = Allowance::new(22, touched);
        assert!(allowance.admits(region(0, 22)) && !allowance.admits(region(0, 23)));
        assert!(Allowance::default().admits(region(0, MAX_RING_LOG2)));
    }

    #[test]
    fn the_same_places_again_cost_nothing_and_ever_new_ones_end() {
        let touched = Arc::new(TouchedArea::new(1 << 30));
        touched.allow(8 << 20);
        let allowance = Allowance::new(22, Arc::clone(&touched));
        for _ in 0..100 {
            assert!(allowance.admits(region(0, 22)) && allowance.admits(region(1024, 12)));
        }
        let more = (1..256).take_while(|i| allowance.admits(region(i << 10, 22)));
        assert_eq!(more.count(), 1);
        touched.allow(1 << 20);
        assert!(!allowance.admits(region(255 << 10, 12)), "never less");
        assert!(!allowance.admits(region(u32::MAX, 12)), "outside of all");
    }
}
