//! How a ring is named in a word of a direction block: the one that a consumer offers, and the one that a producer has
//! adopted.

#![forbid(unsafe_code)]

use crate::fabric::layout::Region;

/// The ring that a producer has adopted, as one word: the generation of the offer (24 bits), or the next one and the
/// log2 of the bytes of the reserve's beginning that are the ring (8 bits; 0 for a ring that was offered).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Adopted {
    pub generation: u32,
    pub part: u8,
}

impl Adopted {
    pub fn pack(self) -> u32 {
        u32::from(self.part) << 24 | self.generation
    }

    pub fn unpack(word: u32) -> Self {
        Self {
            generation: word & 0xff_ffff,
            part: (word >> 24) as u8,
        }
    }
}

/// An offered ring. In one word, so that it is read whole: generation (24 bits, never 0),
/// log2 of the size in bytes (8), first page (32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub generation: u32,
    pub region: Region,
}

impl Offer {
    pub fn pack(self) -> u64 {
        u64::from(self.generation) << 40 | u64::from(self.region.log2()) << 32 | u64::from(self.region.page())
    }

    /// `None` when the generation is 0 or no ring may have that size; the place is not checked.
    pub fn unpack(word: u64) -> Option<Self> {
        let region = Region::new(word as u32, (word >> 32) as u8)?;
        let generation = (word >> 40) as u32;
        (generation != 0).then_some(Self { generation, region })
    }

    /// The generation after `generation`.
    pub fn next_generation(generation: u32) -> u32 {
        ((generation + 1) & 0xff_ffff).max(1)
    }
}
