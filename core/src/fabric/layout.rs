//! Where things lie in one arena file: header page, ready queues, direction blocks, data area.
//! Only numbers; mapping the file and handing out the data area is done elsewhere.
//!
//! ```text
//! 0                header page: `Layout::header`
//! READY_OFFSET     READY_QUEUES × ReadyQueue         (which streams have something to do)
//! BLOCKS_OFFSET    MAX_STREAMS  × DirectionBlock     (indexed by vQPN)
//! DATA_OFFSET      data area: rings, carved by `Arena`
//! ```
//!
//! The file is sparse: what was never touched costs no memory.

#![forbid(unsafe_code)]

use std::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ready::ReadyQueue;
use super::ring::DirectionBlock;

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
/// Ready queues of one arena, and so the number of waiters that one link can tell apart.
pub const READY_QUEUES: u32 = 64;
/// Largest data area in bytes: 64 GiB.
pub const MAX_DATA_BYTES: u64 = 64 << 30;

/// Offset of ready queue 0.
pub const READY_OFFSET: usize = PAGE;
/// Offset of the direction block of vQPN 0.
pub const BLOCKS_OFFSET: usize =
    page_up(READY_OFFSET + READY_QUEUES as usize * size_of::<ReadyQueue>());
/// Offset of the data area.
pub const DATA_OFFSET: usize =
    page_up(BLOCKS_OFFSET + MAX_STREAMS as usize * size_of::<DirectionBlock>());

const MAGIC: [u8; 8] = *b"rdmasock";
const VERSION: u32 = 2;

/// Bytes of the header at offset 0.
pub const HEADER_BYTES: usize = size_of::<RawHeader>();

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
    /// The region of `1 << log2` bytes that begins at page `page` of the data area. `None` when
    /// no ring may have that size.
    pub fn new(page: u32, log2: u8) -> Option<Self> {
        (MIN_RING_LOG2..=MAX_RING_LOG2)
            .contains(&log2)
            .then_some(Self { page, log2 })
    }

    /// First page, counted from the beginning of the data area.
    pub fn page(self) -> u32 {
        self.page
    }

    /// log2 of the size in bytes.
    pub fn log2(self) -> u8 {
        self.log2
    }

    /// First byte, counted from the beginning of the data area.
    pub fn offset(self) -> usize {
        (self.page as usize) << PAGE_LOG2
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(self) -> usize {
        1 << self.log2
    }
}

/// The header as it lies in the file, in the byte order of the host that both sides share.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: u32,
    page_log2: u32,
    streams: u32,
    queues: u32,
    data_bytes: u64,
}

/// Why the arena of a peer cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The header does not begin as an arena's does.
    #[error("not an arena (bad magic)")]
    Magic,
    /// The peer speaks another version of the layout.
    #[error("arena layout version {0} is not supported")]
    Version(u32),
    /// The header's sizes are not those of this version.
    #[error("arena header has impossible sizes")]
    Sizes,
    /// The file is not as long as the header says.
    #[error("arena file is {file} bytes long, its header says {header}")]
    Length {
        /// Real length in bytes.
        file: u64,
        /// Length in bytes that follows from the header.
        header: u64,
    },
}

/// The layout of one arena: everything but the size of the data area is constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    data_bytes: u64,
}

impl Layout {
    /// The arena with a data area of `data_bytes` bytes: whole pages, at least one, at most
    /// `MAX_DATA_BYTES`; `None` otherwise.
    pub fn for_data(data_bytes: u64) -> Option<Self> {
        let whole = data_bytes != 0 && data_bytes.is_multiple_of(PAGE as u64);
        (whole && data_bytes <= MAX_DATA_BYTES).then_some(Self { data_bytes })
    }

    /// Reads a peer's header (the first `HEADER_BYTES` of its file, already copied out of the
    /// shared memory) of a sealed file of `file_len` bytes.
    pub fn from_header(header: &[u8; HEADER_BYTES], file_len: u64) -> Result<Self, LayoutError> {
        let raw = RawHeader::read_from_bytes(header).map_err(|_| LayoutError::Sizes)?;
        if raw.magic != MAGIC {
            return Err(LayoutError::Magic);
        }
        if raw.version != VERSION {
            return Err(LayoutError::Version(raw.version));
        }
        let expected = (u32::from(PAGE_LOG2), MAX_STREAMS, READY_QUEUES);
        if (raw.page_log2, raw.streams, raw.queues) != expected {
            return Err(LayoutError::Sizes);
        }
        let layout = Self::for_data(raw.data_bytes).ok_or(LayoutError::Sizes)?;
        if layout.file_len() != file_len {
            return Err(LayoutError::Length {
                file: file_len,
                header: layout.file_len(),
            });
        }
        Ok(layout)
    }

    /// The header to write at offset 0 of a new arena.
    pub fn header(&self) -> [u8; HEADER_BYTES] {
        zerocopy::transmute!(RawHeader {
            magic: MAGIC,
            version: VERSION,
            page_log2: u32::from(PAGE_LOG2),
            streams: MAX_STREAMS,
            queues: READY_QUEUES,
            data_bytes: self.data_bytes,
        })
    }

    /// Bytes of the data area.
    pub fn data_len(&self) -> usize {
        self.data_bytes as usize
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        DATA_OFFSET as u64 + self.data_bytes
    }
}

/// Bytes of the file of an arena whose data area has `data_bytes` bytes; `None` when no arena
/// may have that size.
pub fn required_size(data_bytes: u64) -> Option<u64> {
    Some(Layout::for_data(data_bytes)?.file_len())
}

/// Offset in the file of ready queue `queue`; `None` when there is no such queue.
pub fn ready_offset(queue: u32) -> Option<usize> {
    (queue < READY_QUEUES).then(|| READY_OFFSET + queue as usize * size_of::<ReadyQueue>())
}

/// Offset in the file of the direction block of `vqpn`; `None` when there is no such stream.
pub fn block_offset(vqpn: u32) -> Option<usize> {
    (vqpn < MAX_STREAMS).then(|| BLOCKS_OFFSET + vqpn as usize * size_of::<DirectionBlock>())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_are_aligned() {
        let last_queue = ready_offset(READY_QUEUES - 1).unwrap();
        assert!(last_queue + size_of::<ReadyQueue>() <= BLOCKS_OFFSET);
        let last_block = block_offset(MAX_STREAMS - 1).unwrap();
        assert!(last_block + size_of::<DirectionBlock>() <= DATA_OFFSET);
        assert_eq!(ready_offset(1).unwrap() % align_of::<ReadyQueue>(), 0);
        assert_eq!(block_offset(1).unwrap() % align_of::<DirectionBlock>(), 0);
        assert_eq!(DATA_OFFSET % PAGE, 0);
        assert_eq!(ready_offset(READY_QUEUES), None);
        assert_eq!(block_offset(MAX_STREAMS), None);
    }

    #[test]
    fn a_header_reads_back_and_a_wrong_one_is_refused() {
        let layout = Layout::for_data(1 << 30).unwrap();
        let good = layout.header();
        assert_eq!(Layout::from_header(&good, layout.file_len()), Ok(layout));
        assert!(matches!(
            Layout::from_header(&good, layout.file_len() - 1),
            Err(LayoutError::Length { .. })
        ));
        for (at, want) in [
            (0, LayoutError::Magic),
            (8, LayoutError::Version(VERSION ^ 0x80)),
            (12, LayoutError::Sizes),
            (16, LayoutError::Sizes),
            (20, LayoutError::Sizes),
            (24, LayoutError::Sizes),
        ] {
            let mut bad = good;
            bad[at] ^= 0x80;
            assert_eq!(Layout::from_header(&bad, layout.file_len()), Err(want));
        }
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(required_size(0), None);
        assert_eq!(required_size(4097), None);
        assert_eq!(required_size(MAX_DATA_BYTES + 4096), None);
        assert_eq!(required_size(4096), Some(DATA_OFFSET as u64 + 4096));
        assert!(Region::new(0, 11).is_none() && Region::new(0, 27).is_none());
    }
}
