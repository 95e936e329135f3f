//! The part of a shared file that is mapped here, which grows: a first segment of `UNIT` bytes, and then one
//! after the other that is as long as all before it. A segment never moves.
//!
//! Either end maps more when it has to, by itself and in any thread: see `Extent::followed_by`. What is
//! mapped in front of a segment is the last page of the one before, so the file needs no descriptor.
//!
//! What may have to be used at a moment at which nothing may fail is mapped in advance, without access
//! ([`hold`](Segments::hold)): until it is reached it takes addresses, and never memory, whatever the program locks.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicUsize,
    Ordering::{AcqRel, Acquire, Release},
};

use rustix::io::Errno;

use super::layout::UNIT_LOG2;
use crate::lock::Lock;
use crate::os::extent::{Access, Extent, PAGE};

/// More segments no part of an arena has.
const MOST: usize = 20;

/// Bytes that this process has mapped in advance, and how many there may be: addresses are many, but of mappings the
/// kernel lets a process have 65,530, which its own memory needs too.
static HELD: AtomicUsize = AtomicUsize::new(0);
const MOST_HELD: usize = 8 << 30;

/// See the module.
pub(super) struct Segments<const UNIT: usize> {
    /// The first byte of each segment that has addresses; in front of all but the first there is a page.
    at: [AtomicPtr<u8>; MOST],
    /// How many show the file and can be used.
    live: AtomicU32,
    /// How many show the file: what is more cannot be accessed yet.
    shown: AtomicU32,
    /// Bytes of what was mapped in advance ([`HELD`]).
    held: AtomicUsize,
    /// Bytes of the part.
    total: AtomicUsize,
    growing: Lock<()>,
}

/// The mapped part of a data area.
pub(super) type DataSegments = Segments<{ 1 << UNIT_LOG2 }>;

impl<const UNIT: usize> Segments<UNIT> {
    /// Nothing mapped, of a part of no bytes.
    pub const fn new() -> Self {
        Self {
            at: [const { AtomicPtr::new(null_mut()) }; MOST],
            live: AtomicU32::new(0),
            shown: AtomicU32::new(0),
            held: AtomicUsize::new(0),
            total: AtomicUsize::new(0),
            growing: Lock::new(()),
        }
    }

    /// All of a part of `total` bytes, which somebody else has mapped at `start`.
    pub fn whole(start: *mut u8, total: usize) -> Self {
        let this = Self::new();
        this.show_whole(start, total);
        this
    }

    /// As [`whole`](Self::whole), for a part of no bytes.
    pub fn show_whole(&self, start: *mut u8, total: usize) {
        self.total.store(total, Release);
        let mut count = 0;
        for (k, at) in self.at.iter().enumerate() {
            if first_of(k) * UNIT >= total {
                break;
            }
            at.store(start.wrapping_add(first_of(k) * UNIT), Release);
            count += 1;
        }
        self.shown.store(count, Release);
        self.live.store(count, Release);
    }

    /// Is a part of no bytes again. Whoever has [shown](Self::show_whole) it sees to the mapping.
    pub fn forget_whole(&self) {
        self.forget();
        self.total.store(0, Release);
        (0..MOST).for_each(|k| self.lose(k));
    }

    /// Addresses for the first segment, before there is a file.
    pub fn reserve(&self, total: usize) -> Result<(), Errno> {
        self.total.store(total, Release);
        let first = Extent::neutral(self.length(0))?;
        self.set(0, first.start());
        Ok(())
    }

    /// Maps the first segment of the part that begins at `offset` of the file and has `total` bytes. Where the
    /// segments have addresses, `total` is as before.
    pub fn show(&self, fd: BorrowedFd<'_>, offset: u64, total: usize) -> Result<(), Errno> {
        self.total.store(total, Release);
        match self.extent(0) {
            Some(kept) => {
                // SAFETY: ours; only atomics are referred to.
                let shown = unsafe { kept.show(fd, offset, Access::ReadWrite) };
                shown.inspect_err(|_| self.lose(0))?;
            }
            None => {
                let first = Extent::of_file(fd, offset, self.length(0), Access::ReadWrite)?;
                self.set(0, first.start());
            }
        }
        self.shown.store(1, Release);
        self.live.store(1, Release);
        Ok(())
    }

    /// Bytes of the part.
    pub fn total(&self) -> usize {
        self.total.load(Acquire)
    }

    /// The byte at `offset`, which is in the part, if it is mapped.
    #[inline]
    pub fn at(&self, offset: usize) -> Option<NonNull<u8>> {
        let k = segment_of::<UNIT>(offset);
        if k >= self.live.load(Acquire) as usize {
            return None;
        }
        let start = NonNull::new(self.at.get(k)?.load(Acquire))?;
        NonNull::new(start.as_ptr().wrapping_add(offset - first_of(k) * UNIT))
    }

    /// Maps as much as reaches to the byte at `offset`. EINVAL if the part has no such byte; EBUSY in a signal handler
    /// that has interrupted this. Does not fail for what is [held](Self::hold).
    pub fn reach(&self, offset: usize) -> Result<(), Errno> {
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
                // SAFETY: one mapping of ours.
                unsafe { extent.open() }?;
            } else {
                self.show_next(next)?;
            }
            self.live.store(next as u32 + 1, Release);
        }
        Ok(())
    }

    /// Maps as much as reaches to the byte at `offset`, without access but for what can be used already. Errors as
    /// [`reach`](Self::reach)'s; ENOMEM also where the process has too much of this.
    pub fn hold(&self, offset: usize) -> Result<(), Errno> {
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
            if HELD.fetch_add(bytes, AcqRel) + bytes > MOST_HELD {
                HELD.fetch_sub(bytes, AcqRel);
                return Err(Errno::NOMEM);
            }
            self.held.fetch_add(bytes, AcqRel);
            let extent = self.show_next(next)?;
            // What is behind one without access has none either.
            if next == self.live.load(Acquire) as usize {
                // SAFETY: just mapped, and nobody knows of it.
                unsafe { extent.shut() }?;
            }
        }
        Ok(())
    }

    /// Maps segment `next`, the first that is not, with the access of the one before.
    fn show_next(&self, next: usize) -> Result<Extent, Errno> {
        let before = next.checked_sub(1).and_then(|k| self.extent(k));
        let before = before.ok_or(Errno::INVAL)?;
        let length = self.length(next);
        // SAFETY: the segment before is a mapping of the file, which is sealed at a length that this is in.
        let made = unsafe { before.followed_by(length, self.extent(next)) };
        let made = made.inspect_err(|_| self.lose(next))?;
        if let Some(start) = NonNull::new(made.start().as_ptr().wrapping_add(PAGE)) {
            self.set(next, start);
        }
        self.shown.store(next as u32 + 1, Release);
        Ok(made)
    }

    /// Whether `length` bytes from `offset` on lie in one segment, which is where a peer may have placed something.
    pub fn is_piece(&self, offset: usize, length: usize) -> bool {
        let end = offset.checked_add(length).filter(|end| *end <= self.total());
        end.is_some_and(|end| segment_of::<UNIT>(offset) == segment_of::<UNIT>(end - 1))
    }

    /// As [`Extent::back`], of a piece that is mapped.
    pub fn back(&self, offset: usize, length: usize) -> Result<(), Errno> {
        let (extent, at) = self.place(offset).ok_or(Errno::INVAL)?;
        extent.back(at..at + length)
    }

    /// As [`Extent::punch_hole`], of a piece that is mapped.
    pub fn punch_hole(&self, offset: usize, length: usize) -> Result<(), Errno> {
        let (extent, at) = self.place(offset).ok_or(Errno::INVAL)?;
        extent.punch_hole(at..at + length)
    }

    /// Lets go of the file, but keeps the addresses for the next.
    pub fn neutralise(&self) {
        self.forget();
        for k in 0..MOST {
            let Some(extent) = self.extent(k) else {
                continue;
            };
            // SAFETY: ours; only atomics are referred to.
            if unsafe { extent.neutralise() }.is_err() {
                self.lose(k);
            }
        }
    }

    /// In a fork child, which has none of the memory, and does not get any: a thread of the parent may have been
    /// growing.
    pub fn after_fork(&self) {
        self.forget();
        for extent in (0..MOST).filter_map(|k| self.extent(k)) {
            // SAFETY: ours; only atomics are referred to.
            unsafe { extent.after_fork() };
        }
        self.total.store(0, Release);
    }

    /// Lets go of the file and the addresses.
    ///
    /// # Safety
    /// Nobody has a pointer into a segment any more.
    pub unsafe fn unmap(&self) {
        self.forget();
        for k in 0..MOST {
            let extent = self.extent(k);
            self.lose(k);
            if let Some(extent) = extent {
                // SAFETY: by the contract; ours.
                unsafe { extent.unmap() };
            }
        }
    }

    /// None shows the file any more.
    fn forget(&self) {
        self.live.store(0, Release);
        self.shown.store(0, Release);
        HELD.fetch_sub(self.held.swap(0, AcqRel), AcqRel);
    }

    fn set(&self, k: usize, start: NonNull<u8>) {
        if let Some(at) = self.at.get(k) {
            at.store(start.as_ptr(), Release);
        }
    }

    /// The addresses of a segment are not ours any more: the kernel had no memory to replace what is mapped there, and
    /// may have taken that away.
    fn lose(&self, k: usize) {
        if let Some(at) = self.at.get(k) {
            at.store(null_mut(), Release);
        }
    }

    /// The extent and the place in it of a byte that is mapped.
    fn place(&self, offset: usize) -> Option<(Extent, usize)> {
        let at = self.at(offset)?;
        let extent = self.extent(segment_of::<UNIT>(offset))?;
        Some((extent, at.as_ptr().addr() - extent.start().as_ptr().addr()))
    }

    /// All that is mapped for a segment, with the page in front.
    fn extent(&self, k: usize) -> Option<Extent> {
        let start = NonNull::new(self.at.get(k)?.load(Acquire))?;
        let front = if k == 0 { 0 } else { PAGE };
        let start = NonNull::new(start.as_ptr().wrapping_sub(front))?;
        Some(Extent::new(start, front + self.length(k)))
    }

    fn length(&self, k: usize) -> usize {
        let (first, end) = (first_of(k) * UNIT, first_of(k + 1) * UNIT);
        end.min(self.total()).saturating_sub(first)
    }
}

impl<const UNIT: usize> fmt::Debug for Segments<UNIT> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("live", &self.live)
            .field("total", &self.total)
            .finish_non_exhaustive()
    }
}

/// The first unit of a segment.
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

#[cfg(test)]
mod tests;
