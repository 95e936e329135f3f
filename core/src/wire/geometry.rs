//! The parts of an end's memory that the peer on a link learns of: sizes, and where a ring lies. The layout of an arena
//! is in `fabric/layout.rs`.

/// A ring for incoming data, offered to the peer: where it lies in the offerer's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOffer {
    page: u32,
    log2: u8,
}

impl RingOffer {
    /// log2 of the bytes of the smallest ring.
    pub const MIN_LOG2: u8 = 12;
    /// log2 of the bytes of the largest ring.
    pub const MAX_LOG2: u8 = 26;

    /// Creates the offer of a ring of 2^`log2` bytes that begins at page `page` of the arena's data area. `None` if
    /// `log2` is out of range.
    ///
    /// The producer that adopts the ring checks that it lies within the arena.
    pub fn new(page: u32, log2: u8) -> Option<Self> {
        (Self::MIN_LOG2..=Self::MAX_LOG2)
            .contains(&log2)
            .then_some(Self { page, log2 })
    }

    /// Returns the ring's first page, of 4,096 bytes each, counted from the beginning of the arena's data area.
    pub const fn page(&self) -> u32 {
        self.page
    }

    /// Returns log2 of the ring's bytes.
    pub const fn log2(&self) -> u8 {
        self.log2
    }
}

/// The sizes of the memory that an end shares with the peer. The fds travel beside it (P24).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the arena memfd, which holds the ready queues and the rings.
    pub arena_bytes: u64,
    /// Bytes of the waiter memfd, which holds sleep flags and futexes.
    pub waiter_bytes: u64,
    /// Streams that a ready queue has a bit for.
    pub queue_entries: u32,
    /// Waiters that the end may announce, at most.
    pub max_waiters: u32,
    /// Bytes of the largest ring that the end writes into.
    pub max_ring: u64,
}
