//! The memory for send buffers. A send buffer is a ring of this end, to which a producer moves when the peer's ring has
//! no room. They lie in the mirror's data area, behind the copy of the peer's, so that a cursor reaches them as it does
//! the peer's rings. `lend.rs` decides which stream gets one.

#![forbid(unsafe_code)]

use crate::fabric::arena::Arena;
use crate::fabric::layout::{PAGE_LOG2, Region};
use crate::lock::Lock;

/// The part of the mirror's data area that is for buffers.
pub(super) struct Buffers {
    arena: Lock<Arena>,
    bytes: u64,
    /// The page of the data area at which the buffers begin.
    first: u32,
}

impl Buffers {
    /// Returns room for `bytes` bytes of buffers behind the first `at` bytes of a data area, whole pages.
    pub fn new(at: usize, bytes: usize) -> Self {
        Self {
            arena: Lock::new(Arena::new(bytes as u64)),
            bytes: bytes as u64,
            first: (at >> PAGE_LOG2) as u32,
        }
    }

    /// Frees all buffers, for another link.
    pub fn reset(&self) {
        if let Some(mut arena) = self.arena.lock() {
            *arena = Arena::new(self.bytes);
        }
    }

    pub fn take(&self, log2: u8) -> Option<Region> {
        let region = self.arena.lock()?.alloc(log2)?;
        Region::new(self.first.checked_add(region.page())?, log2)
    }

    pub fn give_back(&self, buffer: Region) {
        if let Some(page) = buffer.page().checked_sub(self.first)
            && let Some(region) = Region::new(page, buffer.log2())
            && let Some(mut arena) = self.arena.lock()
        {
            arena.free(region);
        }
    }

    #[cfg(test)]
    pub fn bytes_in_use(&self) -> u64 {
        self.arena.lock().map_or(0, |a| a.bytes_in_use())
    }
}
