//! The layout of one arena file: the groups of streams, then the data area. This file only computes offsets; others map
//! the file and allocate rings in the data area.
//!
//! ```text
//! 0                GROUPS × group: READY_QUEUES × ReadyLine    (which of its streams have something to do)
//!                                  GROUP_STREAMS × DirectionBlock
//! DATA_OFFSET      data area: rings, carved by `Arena`
//! ```
//!
//! The file is sparse: pages that were never touched cost no memory. It need not be mapped either: both parts are
//! mapped from their beginnings on as far as they are used, in segments that double (`Segments`). So the addresses of a
//! link with few streams are a few hundred KiB.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Release};

use crate::fabric::OpenError;
use crate::fabric::arena::Arena;
use crate::fabric::ring::{Consumer, REGIONS};
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::sparse::Sparse;

/// log2 of the unit, in bytes, in which the data area is carved. Tiny under loom, where every
/// byte is a modelled object.
pub const PAGE_LOG2: u8 = if cfg!(loom) { 2 } else { 12 };
/// The unit, in bytes, in which the data area is carved.
pub const PAGE: usize = 1 << PAGE_LOG2;
/// log2 of the smallest ring in bytes: one page.
pub const MIN_RING_LOG2: u8 = PAGE_LOG2;
/// log2 of the largest ring in bytes: 64 MiB.
pub const MAX_RING_LOG2: u8 = PAGE_LOG2 + 14;
/// Streams of one link, and so the number of vQPNs.
pub const MAX_STREAMS: u32 = if cfg!(loom) { 128 } else { 16384 };
/// Ready queues of one arena, and so the number of waiters that one link can distinguish.
pub const READY_QUEUES: u32 = 64;
/// Largest data area in bytes: 64 GiB.
pub const MAX_DATA_BYTES: u64 = 64 << 30;

/// Streams of one group: their numbers differ only in the lower bits.
pub const GROUP_STREAMS: u32 = if cfg!(loom) { 64 } else { 256 };
/// Groups of one arena.
pub const GROUPS: u32 = MAX_STREAMS / GROUP_STREAMS;
/// Bytes of a `ReadyLine`, and their alignment.
pub const LINE_BYTES: usize = 64;
/// Bytes of a `DirectionBlock`.
pub const BLOCK_BYTES: usize = 256;
/// Bytes of a group's part of the ready queues.
pub const LINES_BYTES: usize = page_up(READY_QUEUES as usize * LINE_BYTES);
/// Bytes of one group.
pub const GROUP_BYTES: usize = LINES_BYTES + page_up(GROUP_STREAMS as usize * BLOCK_BYTES);
/// Offset of the data area.
pub const DATA_OFFSET: usize = GROUPS as usize * GROUP_BYTES;
/// log2 of the first segment of the data area in bytes. No larger region begins at page 0, so that none
/// lies in two segments.
pub const UNIT_LOG2: u8 = PAGE_LOG2 + 6;

const fn page_up(n: usize) -> usize {
    (n + PAGE - 1) & !(PAGE - 1)
}

/// A power-of-two piece of a data area: the place of one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    page: u32,
    log2: u8,
}

impl Region {
    /// Returns the region of `1 << log2` bytes that begins at page `page` of the data area. `None` when no ring may
    /// have that size.
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

/// The layout of one arena: everything but the size of the data area is constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    data_bytes: u64,
}

impl Layout {
    /// Returns the layout with a data area of `data_bytes` bytes: whole pages, at least one, at most `MAX_DATA_BYTES`.
    /// `None` for any other size.
    pub fn for_data(data_bytes: u64) -> Option<Self> {
        let whole = data_bytes != 0 && data_bytes.is_multiple_of(PAGE as u64);
        (whole && data_bytes <= MAX_DATA_BYTES).then_some(Self { data_bytes })
    }

    /// Returns the layout of the arena in a file of `bytes` bytes; `None` if no arena has that size.
    pub fn of_file(bytes: u64) -> Option<Self> {
        Self::for_data(bytes.checked_sub(DATA_OFFSET as u64)?)
    }

    /// Returns the largest layout whose data area is a power of two, at most `data_bytes` bytes, and whose file has at
    /// most `limit` bytes. `None` if there is none.
    pub fn within(data_bytes: u64, limit: u64) -> Option<Self> {
        let room = limit.checked_sub(DATA_OFFSET as u64)?.min(data_bytes);
        Self::for_data(1 << room.checked_ilog2()?)
    }

    /// Returns the bytes of the data area.
    pub fn data_len(&self) -> usize {
        self.data_bytes as usize
    }

    /// Returns the bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        DATA_OFFSET as u64 + self.data_bytes
    }
}

/// Returns the offset in the file of the part of ready queue `queue` that is for the streams of `group`. `None` when
/// there is no such queue or group.
pub fn line_offset(queue: u32, group: u32) -> Option<usize> {
    (queue < READY_QUEUES && group < GROUPS).then(|| group as usize * GROUP_BYTES + queue as usize * LINE_BYTES)
}

/// Returns the offset in the file of the direction block of `vqpn`; `None` when there is no such stream.
pub fn block_offset(vqpn: u32) -> Option<usize> {
    let (group, place) = (vqpn / GROUP_STREAMS, vqpn % GROUP_STREAMS);
    (vqpn < MAX_STREAMS).then(|| group as usize * GROUP_BYTES + LINES_BYTES + place as usize * BLOCK_BYTES)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_are_aligned() {
        for group in [0, 1, GROUPS - 1] {
            let first = group * GROUP_STREAMS;
            let last_line = line_offset(READY_QUEUES - 1, group).unwrap();
            assert!(last_line + LINE_BYTES <= block_offset(first).unwrap());
            let last_block = block_offset(first + GROUP_STREAMS - 1).unwrap();
            let end = line_offset(0, group + 1).unwrap_or(DATA_OFFSET);
            assert!(last_block + BLOCK_BYTES <= end);
            assert_eq!(block_offset(first).unwrap() % PAGE, 0);
        }
        assert_eq!(line_offset(1, 0).unwrap() % LINE_BYTES, 0);
        assert_eq!(block_offset(1).unwrap() % BLOCK_BYTES, 0);
        assert_eq!(DATA_OFFSET % PAGE, 0);
        assert_eq!((line_offset(READY_QUEUES, 0), line_offset(0, GROUPS)), (None, None));
        assert_eq!(block_offset(MAX_STREAMS), None);
    }

    #[test]
    fn a_file_is_as_long_as_its_arena() {
        let layout = Layout::for_data(1 << 30).unwrap();
        assert_eq!(Layout::of_file(layout.file_len()), Some(layout));
        for bytes in [0, DATA_OFFSET as u64, layout.file_len() - 1, u64::MAX] {
            assert_eq!(Layout::of_file(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn data_areas_have_bounds() {
        assert_eq!(Layout::for_data(0), None);
        assert_eq!(Layout::for_data(4095), None);
        assert!(Layout::for_data(MAX_DATA_BYTES).is_some());
        assert_eq!(Layout::for_data(MAX_DATA_BYTES + 4096), None);
    }

    #[test]
    fn an_arena_is_made_to_fit_a_limit() {
        let whole = Layout::for_data(1 << 30).unwrap();
        assert_eq!(Layout::within(1 << 30, u64::MAX), Some(whole));
        assert_eq!(Layout::within(1 << 30, whole.file_len()), Some(whole));
        let half = Layout::for_data(1 << 29);
        assert_eq!(Layout::within(1 << 30, whole.file_len() - 1), half);
        assert_eq!(Layout::within(1 << 30, DATA_OFFSET as u64 + 4095), None);
        assert_eq!(Layout::within(1 << 30, 0), None);
    }
}

// The numbers that an end gives to its streams, and the memory of its arena. Records which ends are done with a
// number; its rings are free once both are. Private to the end; the peer never sees it.

/// Which ends are done with a stream's number.
pub(super) mod done {
    pub const LOCAL: u8 = 1;
    pub const PEER: u8 = 2;
    pub const BOTH: u8 = LOCAL | PEER;
    /// A user in this process still accesses its rings.
    pub const HELD: u8 = 4;
}

struct Inner {
    arena: Arena,
    next: u32,
    free: Vec<u32>,
    /// Rings of streams that this end is done with but the peer is not.
    zombies: Vec<(u32, [Option<Region>; REGIONS])>,
}

impl Inner {
    fn new(data_bytes: u64) -> Self {
        Self {
            arena: Arena::new(data_bytes),
            next: 0,
            free: Vec::new(),
            zombies: Vec::new(),
        }
    }
}

/// The numbers and the arena of one end.
pub(super) struct Numbers {
    done: Sparse<AtomicU8, { MAX_STREAMS as usize / 128 }, 128>,
    inner: Lock<Inner>,
}

/// A number that both ends are done with. The caller gives back its rings, then the number.
#[must_use = "the number and its rings stay taken"]
#[derive(Debug)]
pub(super) struct Done {
    pub number: Vqpn,
    pub regions: Vec<Region>,
}

impl Numbers {
    /// Returns the numbers for an arena whose data area has `data_bytes` bytes; none is in use.
    pub fn new(data_bytes: u64) -> Self {
        Self {
            done: Sparse::new(),
            inner: Lock::new(Inner::new(data_bytes)),
        }
    }

    /// Starts anew for another arena, whose data area has `data_bytes` bytes; no number is in use.
    pub fn reset(&self, data_bytes: u64) {
        if let Some(mut inner) = self.inner.lock() {
            *inner = Inner::new(data_bytes);
        }
    }

    /// Returns a bound: every number ever given is below it.
    pub fn ever_given(&self) -> u32 {
        self.inner.lock().map_or(0, |n| n.next)
    }

    /// Takes a free number, and a ring of `1 << log2` bytes.
    pub fn take(&self, log2: u8) -> Result<(Vqpn, Region), OpenError> {
        let mut inner = self.inner.lock().ok_or(OpenError::Busy)?;
        let number = match inner.free.pop() {
            Some(number) => number,
            None if inner.next < MAX_STREAMS => {
                inner.next += 1;
                inner.next - 1
            }
            None => return Err(OpenError::Streams),
        };
        let Some(region) = inner.arena.alloc(log2) else {
            inner.free.push(number);
            return Err(OpenError::Arena);
        };
        if let Some(done) = self.done.make(number as usize) {
            done.store(0, Release);
        }
        Ok((Vqpn(number), region))
    }

    /// Gives back a number that was not used, and its ring.
    pub fn put_back(&self, number: Vqpn, region: Region) {
        if let Some(mut inner) = self.inner.lock() {
            inner.arena.free(region);
            inner.free.push(number.0);
        }
    }

    /// Keeps the rings of a stream that this end has left until both have.
    pub fn keep(&self, number: Vqpn, consumer: Option<Consumer>) {
        if let (Some(consumer), Some(mut inner)) = (consumer, self.inner.lock()) {
            inner.zombies.push((number.0, consumer.into_regions()));
        }
    }

    /// Records that the ends in `bits` ([`done`]) are done with the number. Returns its rings, once: when both ends are
    /// done and no user holds them.
    pub fn mark(&self, number: Vqpn, bits: u8) -> Option<Done> {
        let before = self.done.get(number.0 as usize)?.fetch_or(bits, AcqRel);
        if before == done::BOTH || before | bits != done::BOTH {
            return None;
        }
        self.done(number)
    }

    /// Holds the rings of a number that this end is not done with: they are not given back before
    /// [`let_go`](Self::let_go) is called, once.
    pub fn hold(&self, number: Vqpn) {
        if let Some(done) = self.done.get(number.0 as usize) {
            done.fetch_or(done::HELD, AcqRel);
        }
    }

    /// Ends a [`hold`](Self::hold). Returns the rings if both ends are done with the number by now.
    pub fn let_go(&self, number: Vqpn) -> Option<Done> {
        let before = self.done.get(number.0 as usize)?.fetch_and(!done::HELD, AcqRel);
        if before != done::BOTH | done::HELD {
            return None;
        }
        self.done(number)
    }

    fn done(&self, number: Vqpn) -> Option<Done> {
        let mut inner = self.inner.lock()?;
        let mut regions = Vec::new();
        inner.zombies.retain(|(v, r)| {
            if *v == number.0 {
                regions.extend(r.iter().flatten().copied());
            }
            *v != number.0
        });
        Some(Done { number, regions })
    }

    /// Makes the number free for another stream.
    pub fn give_back(&self, number: Vqpn) {
        if let Some(mut inner) = self.inner.lock() {
            inner.free.push(number.0);
        }
    }

    /// Allocates a ring of `1 << log2` bytes; `None` if the arena has no room.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        self.inner.lock()?.arena.alloc(log2)
    }

    /// Allocates a ring of `1 << log2` bytes, if then at most `most` bytes of the arena are in use; otherwise `None`.
    pub fn reserve(&self, log2: u8, most: u64) -> Option<Region> {
        let mut inner = self.inner.lock()?;
        let fits = inner.arena.bytes_in_use() + (1 << log2) <= most;
        fits.then(|| inner.arena.alloc(log2)).flatten()
    }

    /// Frees a ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        if let Some(mut inner) = self.inner.lock() {
            inner.arena.free(region);
        }
    }

    #[cfg(test)]
    pub fn bytes_in_use(&self) -> u64 {
        self.inner.lock().map_or(0, |n| n.arena.bytes_in_use())
    }
}

#[cfg(test)]
mod numbers_tests {
    use super::*;

    #[test]
    fn rings_that_are_held_are_given_back_when_they_are_let_go_of() {
        let numbers = Numbers::new(1 << 20);
        let (number, _) = numbers.take(12).unwrap();
        numbers.hold(number);
        assert!(numbers.mark(number, done::LOCAL).is_none());
        assert!(numbers.mark(number, done::PEER).is_none());
        let (other, _) = numbers.take(12).unwrap();
        assert_ne!(other, number);
        assert_eq!(numbers.let_go(number).unwrap().number, number);
        assert!(numbers.let_go(number).is_none() && numbers.mark(number, done::LOCAL).is_none());
    }

    #[test]
    fn what_is_let_go_of_first_is_given_back_when_both_ends_are_done() {
        let numbers = Numbers::new(1 << 20);
        let (number, _) = numbers.take(12).unwrap();
        numbers.hold(number);
        assert!(numbers.mark(number, done::PEER).is_none());
        assert!(numbers.let_go(number).is_none());
        assert_eq!(numbers.mark(number, done::LOCAL).unwrap().number, number);
    }
}
