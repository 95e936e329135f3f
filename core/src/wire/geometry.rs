//! What one end of a link shows the other of its memory: sizes, and where a ring lies. Not what lies where in an arena
//! (`fabric/layout.rs`).

/// A ring for incoming data, offered to the other end: where it lies in the offerer's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOffer {
    page: u32,
    log2: u8,
}

impl RingOffer {
    /// The smallest ring, as the logarithm of its bytes.
    pub const MIN_LOG2: u8 = 12;
    /// The largest ring, as the logarithm of its bytes.
    pub const MAX_LOG2: u8 = 26;

    /// A ring of 2^`log2` bytes at page `page` of the arena; `None` where `log2` is out of range.
    ///
    /// The producer that adopts the ring checks that it lies within the arena.
    pub fn new(page: u32, log2: u8) -> Option<Self> {
        (Self::MIN_LOG2..=Self::MAX_LOG2)
            .contains(&log2)
            .then_some(Self { page, log2 })
    }

    /// The first page of the arena, of 4096 bytes each.
    pub const fn page(&self) -> u32 {
        self.page
    }

    /// The logarithm of the ring's bytes.
    pub const fn log2(&self) -> u8 {
        self.log2
    }
}

/// The sizes of what one end of a link shares with the other; the fds travel beside it (P24).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the arena memfd, which holds the rings.
    pub arena_bytes: u64,
    /// Bytes of the waiter memfd, which holds ready queues and sleeper flags.
    pub waiter_bytes: u64,
    /// Entries of one ready queue.
    pub queue_entries: u32,
    /// How many waiters the end may announce.
    pub max_waiters: u32,
    /// Bytes of the largest ring that the end writes into.
    pub max_ring: u64,
}
