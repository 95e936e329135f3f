//! An arena as mapped in this process, and its owner's cursors on the ready queues. Every fabric with arenas of its own
//! builds its ends from these. Not for creating an arena, nor for the cursors on its rings.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::io::Errno;

use super::layout;
use super::layout::{GROUP_BYTES, Layout, Region};
use super::ready::{ReadyCursor, ReadyLine, ReadyQueue};
use super::ring::{DataArea, DirectionBlock};
use super::segments::{DataSegments, Segments};
use super::waiter::WaiterId;
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::os::memfd::Mapping;
use crate::sparse::Sparse;

/// The arena of one side, as mapped in this process: whole ([`new`](Self::new), [`anonymous`](Self::anonymous)), or as
/// far as it is used ([`blank`](Self::blank)). `anonymous` and `blank` make places for one arena after another.
///
/// The groups, which threads access without a lock, keep their addresses from one arena to the next. So a thread that
/// is late with a wake-up for a link that is gone does no harm.
pub struct Side {
    groups: Segments<GROUP_BYTES>,
    data: DataSegments,
    whole: Option<Whole>,
}

/// The mappings of an arena that is mapped as a whole.
struct Whole {
    /// The mapping of the groups, or of the whole arena if it has one mapping.
    groups: Mapping,
    /// The data area's own mapping, if it has one and is mapped.
    data: Lock<Option<Mapping>>,
}

impl Side {
    /// Returns the arena in `mapping`; `None` if the mapping is shorter than the layout says.
    pub fn new(mapping: Mapping, layout: Layout) -> Option<Self> {
        let start = mapping.as_ptr();
        (mapping.bytes() as u64 >= layout.file_len()).then(|| Self {
            groups: Segments::whole(start, layout::DATA_OFFSET),
            data: Segments::whole(start.wrapping_add(layout::DATA_OFFSET), layout.data_len()),
            whole: Some(Whole {
                groups: mapping,
                data: Lock::new(None),
            }),
        })
    }

    /// Returns a place for an arena in memory of this process alone, with no data area yet.
    pub fn anonymous() -> Result<Self, Errno> {
        let groups = Mapping::anonymous(layout::DATA_OFFSET)?;
        Ok(Self {
            groups: Segments::whole(groups.as_ptr(), layout::DATA_OFFSET),
            data: Segments::new(),
            whole: Some(Whole {
                groups,
                data: Lock::new(None),
            }),
        })
    }

    /// Maps a data area of zeroes for an [anonymous](Self::anonymous) arena that has none.
    pub fn map_data(&self, layout: &Layout) -> Result<(), Errno> {
        let whole = self.whole.as_ref().ok_or(Errno::INVAL)?;
        let data = Mapping::anonymous(layout.data_len())?;
        self.data.show_whole(data.as_ptr(), data.bytes());
        *whole.data.lock().ok_or(Errno::BUSY)? = Some(data);
        Ok(())
    }

    /// Returns a place for an arena, with none in it.
    pub fn blank() -> Result<Self, Errno> {
        let groups = Segments::new();
        groups.reserve(layout::DATA_OFFSET)?;
        Ok(Self {
            groups,
            data: Segments::new(),
            whole: None,
        })
    }

    /// Maps the beginning of the arena in a file of `layout`; later calls map more as it is used. For a place without
    /// an arena, and a file that keeps its size.
    pub fn show(&self, fd: BorrowedFd<'_>, layout: &Layout) -> Result<(), Errno> {
        self.groups.show(fd, 0, layout::DATA_OFFSET)?;
        let data = layout::DATA_OFFSET as u64;
        self.data.show(fd, data, layout.data_len())
    }

    /// Releases the arena's memory.
    ///
    /// # Safety
    /// No cursor on it is left, and no device reaches it.
    pub unsafe fn release(&self) {
        match &self.whole {
            None => {
                // SAFETY: only cursors access the data area.
                unsafe { self.data.unmap() };
                self.groups.neutralise();
            }
            Some(whole) => {
                if let Some(data) = whole.data.lock().and_then(|mut data| data.take()) {
                    self.data.forget_whole();
                    drop(data);
                }
                let groups = &whole.groups;
                // A hole in memory that the program has locked fails; that memory is replaced. If that fails too it
                // stays.
                let _ = groups.punch_hole(0..groups.bytes()).or_else(|_| groups.neutralise());
            }
        }
    }

    /// Replaces the memory in a fork child, which has none of it: a call that the fork has interrupted reads zeroes
    /// there.
    pub fn after_fork(&self) {
        if self.whole.is_none() {
            self.groups.after_fork();
            self.data.after_fork();
        }
    }

    /// Returns the bytes of the data area.
    pub fn data_len(&self) -> usize {
        self.data.total()
    }

    /// Returns the address of `offset` in the data area. For an arena that is mapped as a whole.
    pub(super) fn data_at(&self, offset: usize) -> *mut u8 {
        let start = self.data.at(0).map_or(std::ptr::null_mut(), NonNull::as_ptr);
        start.wrapping_add(offset)
    }

    pub(super) fn area(&self) -> DataArea {
        match self.whole {
            // SAFETY: the data area lies within the mapping (`new`), which stays for as long as there
            // are cursors (the contract of each fabric's `End::new`).
            Some(_) => unsafe { DataArea::new(self.data_at(0), self.data_len()) },
            // SAFETY: as above, and of `release`.
            None => unsafe { DataArea::of_segments(&self.data) },
        }
    }

    /// Returns the block of a stream; `None` before its group is [mapped](Self::reach), or if there is no such stream.
    pub(super) fn block(&self, vqpn: Vqpn) -> Option<NonNull<DirectionBlock>> {
        Some(self.groups.at(layout::block_offset(vqpn.0)?)?.cast())
    }

    /// Returns when the producer last notified the owner of bytes to read, by the host's [counter](crate::cycles); 0 if
    /// that is not known.
    #[inline]
    pub(super) fn told_at(&self, vqpn: Vqpn) -> u64 {
        // SAFETY: inside a segment of groups, aligned (layout), only atomics. The addresses accept reads and writes for
        // as long as the side lives.
        self.block(vqpn).map_or(0, |block| unsafe { block.as_ref() }.told_at())
    }

    /// Maps the group of a stream. EINVAL if there is no such stream.
    pub(super) fn reach(&self, vqpn: Vqpn) -> Result<(), Errno> {
        self.groups.reach(layout::block_offset(vqpn.0).ok_or(Errno::INVAL)?)
    }

    /// Gets memory for a stream's block and for its group's lines, so that no write to them fails for lack of it.
    pub(super) fn back_stream(&self, vqpn: Vqpn) -> Result<(), Errno> {
        let block = layout::block_offset(vqpn.0).ok_or(Errno::INVAL)?;
        self.groups.back(block, size_of::<DirectionBlock>())?;
        let lines = layout::line_offset(0, vqpn.0 / layout::GROUP_STREAMS).ok_or(Errno::INVAL)?;
        self.groups.back(lines, layout::LINES_BYTES)
    }

    /// Maps a ring and gets memory for it, so that no write to it fails for lack of memory.
    pub(super) fn back_ring(&self, region: Region) -> Result<(), Errno> {
        self.data.reach(region.offset())?;
        self.data.back(region.offset(), region.len())
    }

    /// Maps a ring that may never be used, so that its use [cannot fail](Segments::hold).
    pub(super) fn hold_ring(&self, region: Region) -> Result<(), Errno> {
        self.data.hold(region.offset())
    }

    /// Gives the memory of a ring back to the kernel. If that fails the memory stays.
    pub(super) fn give_back(&self, region: Region) {
        // A reserve may have memory that only the peer has written to, and need not be mapped here yet.
        let reached = self.data.reach(region.offset());
        let _ = reached.and_then(|()| self.data.punch_hole(region.offset(), region.len()));
    }

    /// Returns the ready queue of a waiter of the arena's owner; `None` if the waiter has none.
    #[inline]
    pub(super) fn queue(&self, waiter: WaiterId) -> Option<Queue<'_>> {
        (u32::from(waiter.0) < layout::READY_QUEUES).then_some(Queue { side: self, waiter })
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if self.whole.is_none() {
            // SAFETY: holders of a pointer into the arena borrow this value, or have promised to outlive it (the
            // contract of each fabric's `End::new`).
            unsafe {
                self.groups.unmap();
                self.data.unmap();
            }
        }
    }
}

/// A ready queue in an arena.
pub(super) struct Queue<'a> {
    side: &'a Side,
    waiter: WaiterId,
}

impl ReadyQueue for Queue<'_> {
    #[inline]
    fn line(&self, group: usize) -> Option<&ReadyLine> {
        let offset = layout::line_offset(self.waiter.0.into(), u32::try_from(group).ok()?)?;
        let line = self.side.groups.at(offset)?.cast::<ReadyLine>();
        // SAFETY: inside a segment of groups, aligned (layout), only atomics. The addresses accept reads and writes for
        // as long as the side lives.
        Some(unsafe { line.as_ref() })
    }
}

/// Cursors that are allocated together.
const CURSORS: usize = 4;

/// The cursors of this end's waiters on the ready queues of its arena.
pub(super) struct Sweeps(Sparse<Sweep, { layout::READY_QUEUES as usize / CURSORS }, CURSORS>);

struct Sweep(Lock<ReadyCursor>);

impl Default for Sweep {
    fn default() -> Self {
        Self(Lock::new(ReadyCursor::new()))
    }
}

impl Sweeps {
    pub fn new() -> Self {
        Self(Sparse::new())
    }

    /// Takes the streams that are queued for `waiter` in `mine`.
    pub fn drain(&self, mine: &Side, waiter: WaiterId, mut each: impl FnMut(Vqpn)) {
        let Some(queue) = mine.queue(waiter) else {
            return;
        };
        // The last drain has finished its sweep, so an empty queue is all to check.
        if ReadyCursor::new().is_idle(&queue) {
            return;
        }
        let sweep = self.0.get(waiter.0.into()).or_else(|| self.0.make(waiter.0.into()));
        let Some(mut cursor) = sweep.and_then(|s| s.0.lock()) else {
            return;
        };
        cursor.begin(&queue);
        while let Some(vqpn) = cursor.pop(&queue) {
            each(Vqpn(vqpn));
        }
    }

    /// Returns whether a stream is queued for `waiter` in `mine` and no thread is about to take it: a
    /// [`drain`](Self::drain) always finishes its sweep. Takes no lock, since a set checks each of its links before
    /// each sleep.
    pub fn has_ready(mine: &Side, waiter: WaiterId) -> bool {
        mine.queue(waiter)
            .is_some_and(|queue| !ReadyCursor::new().is_idle(&queue))
    }

    /// Resets the cursors for another arena.
    pub fn reset(&self) {
        for sweep in self.0.made() {
            if let Some(mut cursor) = sweep.0.lock() {
                *cursor = ReadyCursor::new();
            }
        }
    }
}
