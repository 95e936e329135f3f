//! An arena as mapped in this process, with its ready queues, and the numbers that its owner gives to streams. The
//! fabrics `shm` and `remote` build their ends from these types. Other code creates the files of arenas, and `ring` has
//! the cursors.
//!
//! An *arena* is the memory in which one end receives: groups, each with the ready queue lines and the direction blocks
//! of 256 streams, then the data area with the rings (`layout`). The groups are one *part* of the arena, the data area
//! is the other. A process maps a part as a whole, or in *segments*, as far as the part is used. A *cursor* is the
//! producer or the consumer of a stream.

use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize};

use rustix::io::Errno;

use crate::fabric::arena::Arena;
use crate::fabric::layout::{GROUP_BYTES, Layout, MAX_STREAMS, Region, UNIT_LOG2};
use crate::fabric::ready::{ReadyCursor, ReadyLine, ReadyQueue};
use crate::fabric::ring::{Consumer, DataArea, DirectionBlock, REGIONS};
use crate::fabric::waiter::WaiterId;
use crate::fabric::{OpenError, Opened, layout};
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::os::memfd::{Access, Extent, Mapping, PAGE};
use crate::sparse::Sparse;

/// The arena of one end of a link, as mapped in this process: as a whole ([`anonymous`](Self::anonymous)), or as far as
/// it is used ([`blank`](Self::blank)). A value of either kind holds one arena after another.
///
/// Threads access the groups without a lock, so the groups keep their addresses from one arena to the next. A thread
/// that is late with a wake-up for an earlier link then does no harm.
#[derive(Default)]
pub struct Side {
    groups: Segments<GROUP_BYTES>,
    data: DataSegments,
    whole: Option<Whole>,
}

/// The mappings of an arena whose groups and data area are each mapped as a whole, not segment by segment.
struct Whole {
    /// The mapping of the groups; in tests it may be the mapping of the whole arena.
    groups: Mapping,
    /// The data area's mapping. `None` if there is none yet, or if the data area lies in `groups`.
    data: Lock<Option<Mapping>>,
}

impl Side {
    /// Returns a side with an arena in memory of this process alone. The arena has no data area yet.
    pub fn anonymous() -> Result<Self, Errno> {
        let groups = Mapping::anonymous(layout::DATA_OFFSET)?;
        Ok(Self {
            groups: Segments::whole(groups.as_ptr(), layout::DATA_OFFSET),
            data: Segments::default(),
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

    /// Returns a side that holds no arena yet.
    pub fn blank() -> Self {
        Self::default()
    }

    /// Maps the beginning of the arena in the file `fd`, which has this layout and keeps its size. Later calls map more
    /// of the arena as it is used. Called while the side holds no arena.
    pub fn show(&self, fd: BorrowedFd<'_>, layout: &Layout) -> Result<(), Errno> {
        self.groups.show(fd, 0, layout::DATA_OFFSET)?;
        let data = layout::DATA_OFFSET as u64;
        self.data.show(fd, data, layout.data_len())
    }

    /// Releases the arena's memory.
    ///
    /// # Safety
    /// No cursor on the arena is left, and no device accesses it.
    pub unsafe fn release(&self) {
        match &self.whole {
            None => {
                // SAFETY: only cursors and devices access the data area, and by the contract none does any more.
                unsafe { self.data.unmap() };
                self.groups.neutralise();
            }
            Some(whole) => {
                if let Some(data) = whole.data.lock().and_then(|mut data| data.take()) {
                    self.data.forget_whole();
                    drop(data);
                }
                let groups = &whole.groups;
                // Punching a hole fails in memory that the program has locked. Such memory is replaced instead. If that
                // fails too, the memory stays.
                let _ = groups.punch_hole(0..groups.bytes()).or_else(|_| groups.neutralise());
            }
        }
    }

    /// Replaces the memory in a fork child, which has not inherited it. A call that the fork has interrupted reads
    /// zeroes there.
    pub fn after_fork(&self) {
        if self.whole.is_none() {
            self.groups.after_fork();
            self.data.after_fork();
        }
    }

    /// Returns the size of the data area in bytes.
    pub fn data_len(&self) -> usize {
        self.data.total()
    }

    /// Returns the address of `offset` in the data area of an arena that is mapped as a whole.
    pub(super) fn data_at(&self, offset: usize) -> *mut u8 {
        let start = self.data.at(0).map_or(std::ptr::null_mut(), NonNull::as_ptr);
        start.wrapping_add(offset)
    }

    pub(super) fn area(&self) -> DataArea {
        match self.whole {
            // SAFETY: the data area lies within the mapping (`map_data`), which stays as long as there are cursors (the
            // contract of each fabric's `End::new`).
            Some(_) => unsafe { DataArea::new(self.data_at(0), self.data_len()) },
            // SAFETY: by the same contract, and the contract of `release`.
            None => unsafe { DataArea::of_segments(&self.data) },
        }
    }

    /// Returns the block of a stream; `None` if its group is not [mapped](Self::reach) yet, or if there is no such
    /// stream.
    pub(super) fn block(&self, vqpn: Vqpn) -> Option<NonNull<DirectionBlock>> {
        Some(self.groups.at(layout::block_offset(vqpn.0)?)?.cast())
    }

    /// Returns the receiving end of a new stream of the arena's owner, with its first ring.
    ///
    /// # Safety
    /// The number is free, so neither end has a cursor on its block. The side outlives the consumer.
    pub(super) unsafe fn open(&self, vqpn: Vqpn, ring: Region) -> Result<Opened, OpenError> {
        let block = self.block(vqpn).ok_or(OpenError::Streams)?;
        // SAFETY: the block is within the mapping, and no cursor uses it, by the contract.
        unsafe { block.as_ref() }.reset();
        // SAFETY: as above. This is the block's only consumer, and the side outlives it.
        let mut consumer = unsafe { Consumer::new(block, self.area()) };
        // The result names no waiter, since no producer can be waiting yet.
        let _ = consumer.offer(ring).map_err(|_| OpenError::Arena)?;
        Ok(Opened { vqpn, ring, consumer })
    }

    /// Returns when the producer last notified the owner of bytes to read, in ticks of the host's
    /// [counter](crate::cycles); 0 if that is not known.
    #[inline]
    pub(super) fn told_at(&self, vqpn: Vqpn) -> u64 {
        // SAFETY: the address lies inside a segment of the groups, and is aligned (`layout`). Only atomics lie there.
        // The addresses accept reads and writes for as long as the side lives.
        self.block(vqpn).map_or(0, |block| unsafe { block.as_ref() }.told_at())
    }

    /// Maps the group of a stream. Fails with EINVAL if there is no such stream.
    pub(super) fn reach(&self, vqpn: Vqpn) -> Result<(), Errno> {
        self.groups.reach(layout::block_offset(vqpn.0).ok_or(Errno::INVAL)?)
    }

    /// Maps a stream's group, and gets memory for the stream's block and the group's lines. After that no write to them
    /// fails for lack of memory.
    pub(super) fn back_stream(&self, vqpn: Vqpn) -> Result<(), Errno> {
        let block = layout::block_offset(vqpn.0).ok_or(Errno::INVAL)?;
        self.groups.reach(block)?;
        self.groups.back(block, size_of::<DirectionBlock>())?;
        let lines = layout::line_offset(0, vqpn.0 / layout::GROUP_STREAMS).ok_or(Errno::INVAL)?;
        self.groups.back(lines, layout::LINES_BYTES)
    }

    /// Maps a ring and gets memory for it, so that no write to it fails for lack of memory.
    pub(super) fn back_ring(&self, region: Region) -> Result<(), Errno> {
        self.data.reach(region.offset())?;
        self.data.back(region.offset(), region.len())
    }

    /// Maps a ring that may never be used. A later use of the ring [cannot fail](Segments::hold).
    pub(super) fn hold_ring(&self, region: Region) -> Result<(), Errno> {
        self.data.hold(region.offset())
    }

    /// Releases the memory of a ring to the kernel. If that fails, the ring keeps its memory.
    pub(super) fn give_back(&self, region: Region) {
        // A reserve may have memory because the peer has written to it, although this process has not mapped it yet.
        let reached = self.data.reach(region.offset());
        let _ = reached.and_then(|()| self.data.punch_hole(region.offset(), region.len()));
    }

    /// Removes the streams that are queued for a waiter of the arena's owner, and calls `each` for each. One thread at
    /// a time may call this for a waiter.
    pub(super) fn drain(&self, waiter: WaiterId, mut each: impl FnMut(Vqpn)) {
        let Some(queue) = self.queue(waiter) else {
            return;
        };
        let mut cursor = ReadyCursor::default();
        if cursor.is_idle(&queue) {
            return;
        }
        cursor.begin(&queue);
        while let Some(vqpn) = cursor.pop(&queue) {
            each(Vqpn(vqpn));
        }
    }

    /// Returns whether a stream is queued for a waiter of the arena's owner. A stream that a thread has begun to remove
    /// does not count.
    pub(super) fn has_ready(&self, waiter: WaiterId) -> bool {
        self.queue(waiter)
            .is_some_and(|queue| !ReadyCursor::default().is_idle(&queue))
    }

    /// Returns the ready queue of a waiter of the arena's owner; `None` if the waiter has none.
    #[inline]
    pub(super) fn queue(&self, waiter: WaiterId) -> Option<Queue<'_>> {
        (u32::from(waiter.0) < layout::READY_QUEUES).then_some(Queue { side: self, waiter })
    }
}

/// The constructor for tests and the fuzzers.
#[cfg(any(test, feature = "mem", feature = "fuzzing"))]
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
}

impl Drop for Side {
    fn drop(&mut self) {
        if self.whole.is_none() {
            // SAFETY: code that holds a pointer into the arena borrows this value, or has promised that this value
            // lives longer (the contract of each fabric's `End::new`).
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
        // SAFETY: the address lies inside a segment of the groups, and is aligned (`layout`). Only atomics lie there.
        // The addresses accept reads and writes for as long as the side lives.
        Some(unsafe { line.as_ref() })
    }
}

// A part of an arena's file is mapped in segments: a first one of `UNIT` bytes, then segments that are each as long as
// all segments before them. A segment never moves. Each end maps further segments when it needs them, without the other
// end, and in any thread ([`Extent::followed_by`]). Mapping a segment needs no descriptor of the file: the new mapping
// continues the mapping of the segment before, from its last page on. So this page is mapped a second time, in front of
// the new segment.

/// The most segments of one part of an arena.
const MOST: usize = 20;

/// Bytes that this process has mapped in advance ([`Segments::hold`]), and their limit. Addresses are plentiful, but
/// the kernel limits a process to 65,530 mappings, and the program needs mappings too.
static HELD: AtomicUsize = AtomicUsize::new(0);
const MOST_HELD: usize = 8 << 30;

/// The mapped segments of one part of an arena. The default is a part of 0 bytes, with no mapping.
#[derive(Default)]
pub(super) struct Segments<const UNIT: usize> {
    /// The address of the first byte of each segment; null for a segment without addresses. One page lies in front of
    /// each segment but the first.
    at: [AtomicPtr<u8>; MOST],
    /// The number of segments that map the file and can be accessed.
    live: AtomicU32,
    /// The number of segments that map the file. Those beyond `live` cannot be accessed yet.
    shown: AtomicU32,
    /// Bytes that were mapped in advance for this part ([`HELD`]).
    held: AtomicUsize,
    /// The size of the part in bytes.
    total: AtomicUsize,
    growing: Lock<()>,
}

/// The mapped part of a data area.
pub(super) type DataSegments = Segments<{ 1 << UNIT_LOG2 }>;

impl<const UNIT: usize> Segments<UNIT> {
    /// Returns a part of `total` bytes, which the caller has mapped at `start` as a whole.
    fn whole(start: *mut u8, total: usize) -> Self {
        let this = Self::default();
        this.show_whole(start, total);
        this
    }

    /// Uses the `total` bytes at `start`, which the caller has mapped, as the part, as [`whole`](Self::whole) does. To
    /// be called on a part of 0 bytes.
    fn show_whole(&self, start: *mut u8, total: usize) {
        self.total.store(total, Release);
        let count = total.checked_sub(1).map_or(0, |last| segment_of::<UNIT>(last) + 1);
        (0..count).for_each(|k| self.set(k, start.wrapping_add(first_of(k) * UNIT)));
        self.shown.store(count as u32, Release);
        self.live.store(count as u32, Release);
    }

    /// Becomes a part of 0 bytes again. The caller unmaps the memory that it has [passed](Self::show_whole).
    fn forget_whole(&self) {
        self.forget();
        self.total.store(0, Release);
        (0..MOST).for_each(|k| self.lose(k));
    }

    /// Maps the first segment. The part begins at `offset` in the file `fd`, and has `total` bytes. If the segments
    /// have addresses from an earlier file, `total` must be the same as for that file.
    fn show(&self, fd: BorrowedFd<'_>, offset: u64, total: usize) -> Result<(), Errno> {
        self.total.store(total, Release);
        match self.extent(0) {
            Some(kept) => {
                // SAFETY: the extent is a mapping of this value. Its users form references to atomics only.
                let shown = unsafe { kept.show(fd, offset, Access::ReadWrite) };
                shown.inspect_err(|_| self.lose(0))?;
            }
            None => {
                let first = Extent::of_file(fd, offset, self.length(0), Access::ReadWrite)?;
                self.set(0, first.start().as_ptr());
            }
        }
        self.shown.store(1, Release);
        self.live.store(1, Release);
        Ok(())
    }

    /// Returns the size of the part in bytes.
    fn total(&self) -> usize {
        self.total.load(Acquire)
    }

    /// Returns the address of the byte at `offset` of the part; `None` if this byte is not mapped yet.
    #[inline]
    pub(super) fn at(&self, offset: usize) -> Option<NonNull<u8>> {
        let k = segment_of::<UNIT>(offset);
        if k >= self.live.load(Acquire) as usize {
            return None;
        }
        let start = NonNull::new(self.at.get(k)?.load(Acquire))?;
        NonNull::new(start.as_ptr().wrapping_add(offset - first_of(k) * UNIT))
    }

    /// Maps the segments up to the byte at `offset`. Fails with EINVAL if the part has no such byte, and with EBUSY in
    /// a signal handler that has interrupted this call. Does not fail for a byte that is [held](Self::hold).
    pub(super) fn reach(&self, offset: usize) -> Result<(), Errno> {
        if offset >= self.total() {
            return Err(Errno::INVAL);
        }
        let k = segment_of::<UNIT>(offset);
        if k < self.live.load(Acquire) as usize {
            return Ok(());
        }
        let _growing = self.growing.lock().ok_or(Errno::BUSY)?;
        for next in self.live.load(Acquire) as usize..=k {
            if next < self.shown.load(Acquire) as usize {
                let extent = self.extent(next).ok_or(Errno::INVAL)?;
                // SAFETY: the extent is exactly one mapping of this value.
                unsafe { extent.open() }?;
            } else {
                self.show_next(next)?;
            }
            self.live.store(next as u32 + 1, Release);
        }
        Ok(())
    }

    /// Maps the segments up to the byte at `offset`. A segment that this call maps cannot be accessed before it is
    /// [reached](Self::reach). Until then it takes addresses and never memory, even if the program locks all of its
    /// memory. Fails as `reach` does, and with ENOMEM if the process would hold more than `MOST_HELD` bytes.
    fn hold(&self, offset: usize) -> Result<(), Errno> {
        if offset >= self.total() {
            return Err(Errno::INVAL);
        }
        let k = segment_of::<UNIT>(offset);
        if k < self.shown.load(Acquire) as usize {
            return Ok(());
        }
        let _growing = self.growing.lock().ok_or(Errno::BUSY)?;
        for next in self.shown.load(Acquire) as usize..=k {
            let bytes = self.length(next);
            let is_allowed = HELD.fetch_add(bytes, AcqRel) + bytes <= MOST_HELD;
            let allowed = is_allowed.then_some(()).ok_or(Errno::NOMEM);
            let shown = allowed.and_then(|()| self.show_next(next));
            let extent = shown.inspect_err(|_| {
                HELD.fetch_sub(bytes, AcqRel);
            })?;
            self.held.fetch_add(bytes, AcqRel);
            // The mapping has the access rights of the segment before. So access has to be forbidden for the first held
            // segment only: the later ones inherit that.
            if next == self.live.load(Acquire) as usize {
                // SAFETY: the segment was mapped above, and no other code has its address.
                unsafe { extent.shut() }?;
            }
        }
        Ok(())
    }

    /// Maps segment `next`, the first that is not mapped, with the access rights of the segment before.
    fn show_next(&self, next: usize) -> Result<Extent, Errno> {
        let before = next.checked_sub(1).and_then(|k| self.extent(k));
        let before = before.ok_or(Errno::INVAL)?;
        let length = self.length(next);
        // SAFETY: the segment before is a mapping of the file, which is sealed at a length that includes this segment.
        let made = unsafe { before.followed_by(length, self.extent(next)) };
        let made = made.inspect_err(|_| self.lose(next))?;
        self.set(next, made.start().as_ptr().wrapping_add(PAGE));
        self.shown.store(next as u32 + 1, Release);
        Ok(made)
    }

    /// Returns whether the `length` bytes from `offset` on lie in one segment. Each ring that a peer offers has to lie
    /// in one segment.
    pub(super) fn is_piece(&self, offset: usize, length: usize) -> bool {
        let end = offset.checked_add(length).filter(|end| *end <= self.total());
        end.is_some_and(|end| segment_of::<UNIT>(offset) == segment_of::<UNIT>(end - 1))
    }

    /// Gets memory for the `length` bytes from `offset` on, which are mapped and lie in one segment, as
    /// [`Extent::back`] does.
    pub(super) fn back(&self, offset: usize, length: usize) -> Result<(), Errno> {
        let (extent, at) = self.place(offset).ok_or(Errno::INVAL)?;
        extent.back(at..at + length)
    }

    /// Releases the memory of the `length` bytes from `offset` on, which are mapped and lie in one segment, as
    /// [`Extent::punch_hole`] does.
    fn punch_hole(&self, offset: usize, length: usize) -> Result<(), Errno> {
        let (extent, at) = self.place(offset).ok_or(Errno::INVAL)?;
        extent.punch_hole(at..at + length)
    }

    /// Unmaps the file, but keeps the addresses for the next file.
    fn neutralise(&self) {
        self.forget();
        for (k, extent) in self.extents() {
            // SAFETY: the extent is a mapping of this value. Its users form references to atomics only.
            if unsafe { extent.neutralise() }.is_err() {
                self.lose(k);
            }
        }
    }

    /// Replaces the mappings in a fork child, which has not inherited the memory. Sets the size to 0 bytes, since a
    /// thread of the parent may have been mapping more.
    fn after_fork(&self) {
        self.forget();
        for (_, extent) in self.extents() {
            // SAFETY: the extent is a mapping of this value. Its users form references to atomics only.
            unsafe { extent.after_fork() };
        }
        self.total.store(0, Release);
    }

    /// Unmaps the file and gives the addresses back.
    ///
    /// # Safety
    /// No pointer into a segment is used any more.
    unsafe fn unmap(&self) {
        self.forget();
        for (k, extent) in self.extents() {
            self.lose(k);
            // SAFETY: the extent is a mapping of this value, and no pointer into it is used, by the contract.
            unsafe { extent.unmap() };
        }
    }

    /// Records that no segment maps the file any more.
    fn forget(&self) {
        self.live.store(0, Release);
        self.shown.store(0, Release);
        HELD.fetch_sub(self.held.swap(0, AcqRel), AcqRel);
    }

    fn set(&self, k: usize, start: *mut u8) {
        if let Some(at) = self.at.get(k) {
            at.store(start, Release);
        }
    }

    /// Forgets the addresses of a segment. Called when the caller ends the mapping, or when a call that replaces the
    /// mapping has failed: the kernel may have removed the mapping then.
    fn lose(&self, k: usize) {
        self.set(k, null_mut());
    }

    /// Returns the extent that contains a mapped byte, and the byte's offset in the extent.
    fn place(&self, offset: usize) -> Option<(Extent, usize)> {
        let at = self.at(offset)?;
        let extent = self.extent(segment_of::<UNIT>(offset))?;
        Some((extent, at.as_ptr().addr() - extent.start().as_ptr().addr()))
    }

    /// Returns the whole mapping of a segment, including the page in front of it.
    fn extent(&self, k: usize) -> Option<Extent> {
        let start = NonNull::new(self.at.get(k)?.load(Acquire))?;
        let front = if k == 0 { 0 } else { PAGE };
        let start = NonNull::new(start.as_ptr().wrapping_sub(front))?;
        Some(Extent::new(start, front + self.length(k)))
    }

    fn extents(&self) -> impl Iterator<Item = (usize, Extent)> {
        (0..MOST).filter_map(|k| Some((k, self.extent(k)?)))
    }

    fn length(&self, k: usize) -> usize {
        let (first, end) = (first_of(k) * UNIT, first_of(k + 1) * UNIT);
        end.min(self.total()).saturating_sub(first)
    }
}

/// Returns the index of the first unit of segment `k`.
const fn first_of(k: usize) -> usize {
    match k {
        0 => 0,
        k => 1 << (k - 1),
    }
}

#[inline]
const fn segment_of<const UNIT: usize>(offset: usize) -> usize {
    (usize::BITS - (offset / UNIT).leading_zeros()) as usize
}

/// Bits for the users of a stream's number. A bit is set once that user has finished with the number.
pub(super) mod done {
    pub(crate) const LOCAL: u8 = 1;
    pub(crate) const PEER: u8 = 2;
    pub(crate) const BOTH: u8 = LOCAL | PEER;
    /// The users in this process that [hold](super::Numbers::hold) the number's rings. The bit is set while there are
    /// none.
    pub(crate) const USERS: u8 = 4;
    pub(crate) const ALL: u8 = BOTH | USERS;
}

struct Inner {
    arena: Arena,
    next: u32,
    free: Vec<u32>,
    /// The rings of streams that this end has closed, until the peer has closed them too.
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

/// The numbers that an end gives to its streams, and the free space of its arena. The value records which ends have
/// finished with a number. When both have, the number's rings are free. The peer never sees this record.
pub(super) struct Numbers {
    done: Sparse<AtomicU8, { MAX_STREAMS as usize / 128 }, 128>,
    inner: Lock<Inner>,
}

/// A number that both ends have finished with. The caller frees its rings, then the number.
#[must_use = "the number and its rings stay taken"]
#[derive(Debug)]
pub(super) struct Done {
    pub number: Vqpn,
    pub regions: Vec<Region>,
}

impl Numbers {
    /// Returns the numbers for an arena whose data area has `data_bytes` bytes. No number is in use.
    pub(super) fn new(data_bytes: u64) -> Self {
        Self {
            done: Sparse::new(),
            inner: Lock::new(Inner::new(data_bytes)),
        }
    }

    /// Starts again for another arena, whose data area has `data_bytes` bytes. No number is in use then.
    pub(super) fn reset(&self, data_bytes: u64) {
        if let Some(mut inner) = self.inner.lock() {
            *inner = Inner::new(data_bytes);
        }
    }

    /// Returns a bound: every number that was ever taken for this arena is below it.
    pub(super) fn ever_given(&self) -> u32 {
        self.inner.lock().map_or(0, |n| n.next)
    }

    /// Takes a free number, and a ring of `1 << log2` bytes.
    pub(super) fn take(&self, log2: u8) -> Result<(Vqpn, Region), OpenError> {
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
            done.store(done::USERS, Release);
        }
        Ok((Vqpn(number), region))
    }

    /// Records the rings of a stream that this end has closed, so that they are freed when both ends have closed it.
    pub(super) fn keep(&self, number: Vqpn, consumer: Option<Consumer>) {
        if let (Some(consumer), Some(mut inner)) = (consumer, self.inner.lock()) {
            inner.zombies.push((number.0, consumer.into_regions()));
        }
    }

    /// Holds the rings of a number that this end has not closed. The rings are not freed before the caller
    /// [marks](Self::mark) [`done::USERS`], which it does once.
    pub(super) fn hold(&self, number: Vqpn) {
        if let Some(done) = self.done.get(number.0 as usize) {
            done.fetch_and(!done::USERS, AcqRel);
        }
    }

    /// Records that the users in `bits` ([`done`]) have finished with the number. When both ends have finished and no
    /// user holds the rings, returns the number and its rings, once; otherwise `None`.
    pub(super) fn mark(&self, number: Vqpn, bits: u8) -> Option<Done> {
        let before = self.done.get(number.0 as usize)?.fetch_or(bits, AcqRel);
        if before == done::ALL || before | bits != done::ALL {
            return None;
        }
        let mut inner = self.inner.lock()?;
        let left = inner.zombies.extract_if(.., |(left, _)| *left == number.0);
        let regions = left.flat_map(|(_, regions)| regions).flatten().collect();
        Some(Done { number, regions })
    }

    /// Makes the number free for another stream.
    pub(super) fn give_back(&self, number: Vqpn) {
        if let Some(mut inner) = self.inner.lock() {
            inner.free.push(number.0);
        }
    }

    /// Allocates a ring of `1 << log2` bytes; `None` if the arena has no room.
    pub(super) fn allocate(&self, log2: u8) -> Option<Region> {
        self.inner.lock()?.arena.alloc(log2)
    }

    /// Allocates a ring of `1 << log2` bytes. `None` if the arena has no room, or if more than `most` of its bytes
    /// would be in use.
    pub(super) fn reserve(&self, log2: u8, most: u64) -> Option<Region> {
        let mut inner = self.inner.lock()?;
        let fits = inner.arena.bytes_in_use() + (1 << log2) <= most;
        fits.then(|| inner.arena.alloc(log2)).flatten()
    }

    /// Frees a ring that neither end uses any more.
    pub(super) fn free(&self, region: Region) {
        if let Some(mut inner) = self.inner.lock() {
            inner.arena.free(region);
        }
    }

    #[cfg(test)]
    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.inner.lock().map_or(0, |n| n.arena.bytes_in_use())
    }
}

#[cfg(test)]
mod tests;
