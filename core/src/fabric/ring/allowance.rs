//! How much of a receiver's memory a sender writes into. A page of shared memory is charged to who touches it first,
//! which is the sender; but it is the receiver who says where its rings are, and who gives their memory back. So a
//! sender does not adopt whatever is offered.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire},
};

use crate::fabric::layout::{MAX_RING_LOG2, Region};

/// Bytes of the area that are counted as one, as a power of two.
const PIECE_LOG2: u32 = 16;

/// What was ever written into of one data area. A correct receiver takes the lowest place that is free for a ring, and
/// gives back what it does not use: that is little more than what was in use at a time.
#[derive(Debug)]
pub struct TouchedArea {
    /// A bit each piece.
    pieces: Box<[AtomicU64]>,
    count: AtomicU64,
    /// Pieces that may be.
    most: AtomicU64,
}

impl TouchedArea {
    /// An area of `bytes`, of which nothing was written into, nor may be.
    pub fn new(bytes: u64) -> Self {
        let words = (bytes >> PIECE_LOG2).div_ceil(64) + 1;
        Self {
            pieces: (0..words).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            most: AtomicU64::new(0),
        }
    }

    /// At least `bytes` may be written into.
    pub fn allow(&self, bytes: u64) {
        self.most.fetch_max(bytes >> PIECE_LOG2, AcqRel);
    }

    /// Enters the region. False if it is more than may be, by what was entered before.
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

/// The rings that one sender adopts.
#[derive(Debug, Clone)]
pub struct Allowance {
    largest: u8,
    touched: Option<Arc<TouchedArea>>,
}

impl Default for Allowance {
    /// All that there can be.
    fn default() -> Self {
        Self {
            largest: MAX_RING_LOG2,
            touched: None,
        }
    }
}

impl Allowance {
    /// Rings of at most `1 << largest` bytes, as far as the area goes.
    pub fn new(largest: u8, touched: Arc<TouchedArea>) -> Self {
        Self {
            largest,
            touched: Some(touched),
        }
    }

    /// Whether the region lies as near to the area's beginning as rings may. Asked before it is mapped, which maps all
    /// that precedes it: so what a peer says has addresses of this process taken only as far as it may be written into.
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
