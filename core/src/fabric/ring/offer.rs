//! Packs the name of a ring into one word of a direction block: the ring that a consumer offers, or the ring that a
//! producer has adopted.

#![forbid(unsafe_code)]

use crate::fabric::layout::Region;

/// The ring that a producer has adopted, as one word. Low 24 bits: the generation of the offer, or for a reserve the
/// generation after the ring before. High 8 bits: for a reserve, log2 of the bytes at its beginning that are the ring;
/// 0 for an offered ring.
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

    /// Decodes an offer. `None` when the generation is 0 or no ring may have that size; the place is not checked.
    pub fn unpack(word: u64) -> Option<Self> {
        let region = Region::new(word as u32, (word >> 32) as u8)?;
        let generation = (word >> 40) as u32;
        (generation != 0).then_some(Self { generation, region })
    }

    /// Returns the generation after `generation`: 24 bits, never 0.
    pub fn next_generation(generation: u32) -> u32 {
        ((generation + 1) & 0xff_ffff).max(1)
    }
}
