//! The place of a ring in an arena. An *arena* is the memory of one end of a link in which that end receives. Rings lie
//! in its *data area*; `fabric::layout` has its other parts. The type has a file of its own because `wire` and `fabric`
//! both need it: the messages OPEN and OPEN-ACK carry the place of a ring, and `wire` does not import `fabric`.
#![forbid(unsafe_code)]

/// log2 of the bytes of a page. A ring begins at a page of the data area. The page is small under loom, where every
/// byte is an object of the model.
pub const PAGE_LOG2: u8 = if cfg!(loom) { 2 } else { 12 };
/// log2 of the smallest ring in bytes: one page.
pub const MIN_RING_LOG2: u8 = PAGE_LOG2;
/// log2 of the largest ring in bytes: 64 MiB.
pub const MAX_RING_LOG2: u8 = PAGE_LOG2 + 14;

/// The place of one ring in a data area. The ring's size is a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    page: u32,
    log2: u8,
}

impl Region {
    /// Returns the place of a ring of `1 << log2` bytes that begins at page `page` of the data area. `None` if no ring
    /// may have that size.
    pub fn new(page: u32, log2: u8) -> Option<Self> {
        (MIN_RING_LOG2..=MAX_RING_LOG2)
            .contains(&log2)
            .then_some(Self { page, log2 })
    }

    /// Returns the first page, counted from the beginning of the data area.
    pub fn page(self) -> u32 {
        self.page
    }

    /// Returns log2 of the size in bytes.
    pub fn log2(self) -> u8 {
        self.log2
    }

    /// Returns the first byte, counted from the beginning of the data area.
    pub fn offset(self) -> usize {
        (self.page as usize) << PAGE_LOG2
    }

    /// Returns the size in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(self) -> usize {
        1 << self.log2
    }
}
