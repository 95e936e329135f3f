//! The layout of one arena file: the groups of streams, then the data area. This file only computes offsets. `side`
//! maps the file, and `arena` allocates rings in the data area.
//!
//! ```text
//! 0                GROUPS × group: READY_QUEUES × ReadyLine    (which of its streams have events)
//!                                  GROUP_STREAMS × DirectionBlock
//! DATA_OFFSET      data area: rings, allocated by `Arena`
//! ```
//!
//! The file is sparse: pages that were never touched cost no memory. A process need not map the whole file either. It
//! maps the groups and the data area, each from its beginning as far as it is used, in segments that double
//! (`Segments`). So a link with few streams takes a few hundred KiB of addresses.
#![forbid(unsafe_code)]

pub use crate::region::{MAX_RING_LOG2, MIN_RING_LOG2, PAGE_LOG2, Region};

/// The unit in which the data area is divided into rings, in bytes.
pub const PAGE: usize = 1 << PAGE_LOG2;
/// The most streams of one link, and so the number of vQPNs.
pub const MAX_STREAMS: u32 = if cfg!(loom) { 128 } else { 16384 };
/// The number of ready queues of one arena, and so of the waiters that one link can distinguish.
pub const READY_QUEUES: u32 = 64;
/// The largest size of a data area in bytes: 64 GiB.
pub const MAX_DATA_BYTES: u64 = 64 << 30;

/// The number of streams in one group. Streams of one group have numbers that differ only in the lower bits.
pub const GROUP_STREAMS: u32 = if cfg!(loom) { 64 } else { 256 };
/// The number of groups in one arena.
pub const GROUPS: u32 = MAX_STREAMS / GROUP_STREAMS;
/// The size of a `ReadyLine` in bytes, which is also its alignment.
pub const LINE_BYTES: usize = 64;
/// The size of a `DirectionBlock` in bytes.
pub const BLOCK_BYTES: usize = 256;
/// The size in bytes of the lines of all ready queues in one group, rounded up to whole pages.
pub const LINES_BYTES: usize = (READY_QUEUES as usize * LINE_BYTES).next_multiple_of(PAGE);
/// The size of one group in bytes.
pub const GROUP_BYTES: usize = LINES_BYTES + (GROUP_STREAMS as usize * BLOCK_BYTES).next_multiple_of(PAGE);
/// The offset of the data area in the file, in bytes.
pub const DATA_OFFSET: usize = GROUPS as usize * GROUP_BYTES;
/// log2 of the size in bytes of the data area's first segment. A region that begins at page 0 is no larger, so that
/// each region lies in one segment.
pub const UNIT_LOG2: u8 = PAGE_LOG2 + 6;

/// The layout of one arena. Only the size of the data area differs between arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    data_bytes: u64,
}

impl Layout {
    /// Returns the layout with a data area of `data_bytes` bytes, which has to be whole pages, at least one, and at
    /// most `MAX_DATA_BYTES`. `None` for any other size.
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

    /// Returns the size of the data area in bytes.
    pub fn data_len(&self) -> usize {
        self.data_bytes as usize
    }

    /// Returns the size of the whole file in bytes.
    pub fn file_len(&self) -> u64 {
        DATA_OFFSET as u64 + self.data_bytes
    }
}

/// Returns the offset in the file of the line of ready queue `queue` for the streams of `group`. `None` if there is no
/// such queue or group.
pub fn line_offset(queue: u32, group: u32) -> Option<usize> {
    (queue < READY_QUEUES && group < GROUPS).then(|| group as usize * GROUP_BYTES + queue as usize * LINE_BYTES)
}

/// Returns the offset in the file of the direction block of `vqpn`; `None` if there is no such stream.
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
