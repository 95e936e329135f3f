//! Ring memory as raw pointers, and copies into and out of it. The peer may change every byte at any time, so the
//! library never forms a reference to payload. It copies the bytes, then interprets the copy. The file also has the
//! bound on how much of a receiver's memory a sender writes into ([`Allowance`]).

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;

use crate::fabric::layout::{MIN_RING_LOG2, Region};
#[cfg(not(loom))]
use crate::fabric::side::DataSegments;

/// A byte of shared memory. Under loom it is a modelled cell: a model fails if one side reads or overwrites payload
/// without being ordered after the other side's access.
#[cfg(not(loom))]
pub type Byte = u8;
/// A byte of shared memory, as a modelled cell.
#[cfg(loom)]
pub type Byte = loom::cell::UnsafeCell<u8>;

/// The data area of a mapped arena.
#[derive(Clone, Copy, Debug)]
pub struct DataArea(Place);

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Mapped as a whole, at consecutive addresses.
    Whole { base: NonNull<Byte>, len: usize },
    /// Mapped in segments, as far as it is used.
    #[cfg(not(loom))]
    Segments(NonNull<DataSegments>),
}

/// Why a region cannot be used as a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRing {
    /// The region is outside the data area: the offer is wrong.
    #[error("region outside the data area")]
    Outside,
    /// The process cannot map the region, because of its own limits.
    #[error("no memory for the region")]
    Unmapped,
}

impl DataArea {
    /// Returns the data area of the `len` bytes from `base` on.
    ///
    /// # Safety
    /// The bytes stay mapped, readable and writable, for as long as this value or a cursor made from it is used. They
    /// lie outside every Rust allocation that is accessed through references.
    pub unsafe fn new(base: *mut Byte, len: usize) -> Self {
        let len = if base.is_null() { 0 } else { len };
        let base = NonNull::new(base).unwrap_or(NonNull::dangling());
        Self(Place::Whole { base, len })
    }

    /// Returns the memory of the ring in `region`. If the area is mapped in segments, first maps them as far as
    /// `region`.
    pub(super) fn ring(&self, region: Region) -> Result<RingMemory, NoRing> {
        let (base, len) = match self.0 {
            Place::Whole { base, len } => (base, len),
            // SAFETY: the segments exist for as long as this value is used (`of_segments`).
            #[cfg(not(loom))]
            Place::Segments(segments) => return ring_in(unsafe { segments.as_ref() }, region),
        };
        let end = region.offset().checked_add(region.len());
        if end.is_none_or(|end| end > len) {
            return Err(NoRing::Outside);
        }
        Ok(RingMemory {
            // In bounds of the area, by the check above.
            ptr: base.as_ptr().wrapping_add(region.offset()),
            size: region.len() as u64,
        })
    }

    /// Gets memory for `len` bytes, at most the ring's size, from position `pos` of the ring in `region` on. The region
    /// is mapped. Returns false if there is no memory. An area that is mapped as a whole has its memory already.
    pub(super) fn back(&self, region: Region, pos: u64, len: u64) -> bool {
        match self.0 {
            Place::Whole { .. } => true,
            #[cfg(not(loom))]
            Place::Segments(segments) => {
                let size = region.len() as u64;
                let (at, len) = (pos & (size - 1), len.min(size));
                let first = len.min(size - at);
                let pieces = [(at, first), (0, len - first)];
                // SAFETY: the segments exist for as long as this value is used (`of_segments`).
                let segments = unsafe { segments.as_ref() };
                pieces
                    .into_iter()
                    .all(|(at, n)| n == 0 || segments.back(region.offset() + at as usize, n as usize).is_ok())
            }
        }
    }
}

#[cfg(not(loom))]
impl DataArea {
    /// Returns the data area that is mapped as `segments`.
    ///
    /// # Safety
    /// The segments exist, and their mappings stay, for as long as this value or a cursor made from it is used.
    pub(in crate::fabric) unsafe fn of_segments(segments: &DataSegments) -> Self {
        Self(Place::Segments(NonNull::from(segments)))
    }

    /// Returns the address of position `pos` of the ring in `region`, and how many of `len` bytes are contiguous there.
    /// `None` if the region is not wholly inside the area, or cannot be mapped.
    pub(in crate::fabric) fn piece(&self, region: Region, pos: u64, len: u64) -> Option<(*mut u8, usize)> {
        let [first, _] = self.ring(region).ok()?.spans(pos, len).pieces();
        Some(first)
    }

    /// Returns the offset of `at`, in bytes, in an area that is mapped as a whole; `at` lies in the area.
    pub(in crate::fabric) fn offset_of(&self, at: *const u8) -> usize {
        let base = match self.0 {
            Place::Whole { base, .. } => base.as_ptr().addr(),
            Place::Segments(_) => 0,
        };
        at.addr().wrapping_sub(base)
    }

    /// Copies `bytes` to position `pos` of the ring in `region`. Returns false if `bytes` is longer than the ring, or
    /// if the region cannot be used as a ring.
    ///
    /// # Safety
    /// No other thread, process or device uses that part of the ring.
    pub(in crate::fabric) unsafe fn copy_in(&self, region: Region, pos: u64, bytes: &[u8]) -> bool {
        let ring = self.ring(region).map(|ring| ring.spans(pos, bytes.len() as u64));
        // SAFETY: `bytes` is readable. It is not part of the ring, since no slice is ever formed in shared memory.
        ring.is_ok_and(|spans| unsafe { spans.copy_in(0, bytes.as_ptr(), bytes.len()) == bytes.len() })
    }

    /// Fills `bytes` from position `pos` of the ring in `region` on. Returns false in the same two cases as `copy_in`.
    ///
    /// # Safety
    /// No thread, process or device writes to that part of the ring.
    pub(in crate::fabric) unsafe fn copy_out(&self, region: Region, pos: u64, bytes: &mut [u8]) -> bool {
        let ring = self.ring(region).map(|ring| ring.spans(pos, bytes.len() as u64));
        // SAFETY: `bytes` is writable, and not part of the ring.
        ring.is_ok_and(|spans| unsafe { spans.copy_out(0, bytes.as_mut_ptr(), bytes.len()) == bytes.len() })
    }
}

/// Returns the memory of the ring in `region`, in an area that is mapped in segments. First maps the segments as far as
/// `region`.
#[cfg(not(loom))]
fn ring_in(segments: &DataSegments, region: Region) -> Result<RingMemory, NoRing> {
    if !segments.is_piece(region.offset(), region.len()) {
        return Err(NoRing::Outside);
    }
    let reached = segments.reach(region.offset()).ok();
    let start = reached.and_then(|()| segments.at(region.offset()));
    Ok(RingMemory {
        ptr: start.ok_or(NoRing::Unmapped)?.as_ptr(),
        size: region.len() as u64,
    })
}

/// The memory of one ring inside a data area. The size is 0 (no ring) or a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingMemory {
    ptr: *mut Byte,
    size: u64,
}

impl RingMemory {
    pub(super) const NONE: RingMemory = RingMemory {
        ptr: std::ptr::null_mut(),
        size: 0,
    };

    #[inline(always)]
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Returns a quarter of the ring in bytes. The consumer publishes consumed bytes, and the producer waits for space,
    /// in quarters.
    #[inline(always)]
    pub(super) fn quarter(&self) -> u64 {
        self.size / 4
    }

    /// Returns the ring of `1 << log2` bytes at the beginning of this ring; `None` if no ring may be so small, or if
    /// this ring is smaller.
    pub(super) fn part(&self, log2: u8) -> Option<Self> {
        let size = 1u64.checked_shl(log2.into())?;
        (log2 >= MIN_RING_LOG2 && size <= self.size).then_some(Self { size, ..*self })
    }

    /// Returns the pieces that hold positions `pos..pos + len`; `len` is cut to the size of the ring.
    #[inline(always)]
    pub(super) fn spans<'a>(&self, pos: u64, len: u64) -> Spans<'a> {
        let len = len.min(self.size);
        let at = pos & self.size.wrapping_sub(1);
        let first = len.min(self.size.wrapping_sub(at));
        Spans {
            first: self.ptr.wrapping_add(at as usize),
            first_len: first as usize,
            second: self.ptr,
            second_len: (len - first) as usize,
            cursor: PhantomData,
        }
    }
}

/// Up to two pieces of ring memory, in stream order. They borrow the cursor, so that they cannot outlive a commit, a
/// consume or a switch of rings.
#[derive(Clone, Copy, Debug)]
pub struct Spans<'a> {
    first: *mut Byte,
    first_len: usize,
    second: *mut Byte,
    second_len: usize,
    cursor: PhantomData<&'a mut ()>,
}

impl Spans<'_> {
    /// Returns the number of bytes in both pieces.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.first_len + self.second_len
    }

    /// Returns whether both pieces are empty.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns each piece as (pointer, length in bytes), for vectored I/O on ring memory. The second piece may be
    /// empty.
    #[inline(always)]
    pub fn pieces(&self) -> [(*mut Byte, usize); 2] {
        [(self.first, self.first_len), (self.second, self.second_len)]
    }

    /// Copies up to `len` bytes from `src` to the pieces, beginning at their byte `offset`. Returns how many bytes
    /// fitted.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes and not part of the pieces.
    #[inline(always)]
    pub unsafe fn copy_in(&self, offset: usize, src: *const u8, len: usize) -> usize {
        // SAFETY: `src` is readable by the contract, and `done + n <= len`. `each` passes parts of the pieces, which
        // are mapped as long as the cursor that they borrow.
        self.each(offset, len, |ring, done, n| unsafe { to_ring(src.add(done), ring, n) })
    }

    /// Copies up to `len` bytes to `dst`, beginning at byte `offset` of the pieces. Returns how many bytes that were.
    ///
    /// # Safety
    /// `dst` is writable for `len` bytes and not part of the pieces.
    #[inline(always)]
    pub unsafe fn copy_out(&self, offset: usize, dst: *mut u8, len: usize) -> usize {
        // SAFETY: as in `copy_in`, with `dst` writable by the contract.
        self.each(offset, len, |ring, done, n| unsafe {
            from_ring(ring, dst.add(done), n)
        })
    }

    /// Calls `copy(part, bytes done, length)` for the one or two parts that hold `len` bytes from `offset` on. Returns
    /// how many bytes those parts hold.
    #[inline(always)]
    fn each(&self, offset: usize, len: usize, copy: impl Fn(*mut Byte, usize, usize)) -> usize {
        if offset < self.first_len && len <= self.first_len - offset {
            copy(self.first.wrapping_add(offset), 0, len);
            return len;
        }
        let first = len.min(self.first_len.saturating_sub(offset));
        let second_at = offset.saturating_sub(self.first_len).min(self.second_len);
        let second = (len - first).min(self.second_len - second_at);
        if first > 0 {
            copy(self.first.wrapping_add(offset), 0, first);
        }
        if second > 0 {
            copy(self.second.wrapping_add(second_at), first, second);
        }
        first + second
    }
}

// Except under loom, both directions are a plain copy.
#[cfg(not(loom))]
use self::{copy as from_ring, copy as to_ring};

/// Copies as memcpy does. Up to 16 bytes take two moves that may overlap in the middle, since a call of memcpy costs
/// more than such a copy.
///
/// The peer may change shared memory during the copy, and the result is then any mixture. Only a peer that breaks the
/// protocol causes that, and only to its own bytes. The library bases no decision on these bytes.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes; they do not overlap.
#[cfg(not(loom))]
#[inline(always)]
unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    /// # Safety
    /// As for `copy`, and `size_of::<T>() <= len <= 2 * size_of::<T>()`.
    #[inline(always)]
    unsafe fn ends<T: Copy>(src: *const u8, dst: *mut u8, len: usize) {
        let last = len - size_of::<T>();
        // SAFETY: both moves are within `len` bytes of `src` and of `dst`. The accesses need no alignment.
        unsafe {
            let a = src.cast::<T>().read_unaligned();
            let b = src.add(last).cast::<T>().read_unaligned();
            dst.cast::<T>().write_unaligned(a);
            dst.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: by the contract; the lengths of each arm suit its type.
    unsafe {
        match len {
            8..=16 => ends::<u64>(src, dst, len),
            4..=7 => ends::<u32>(src, dst, len),
            2..=3 => ends::<u16>(src, dst, len),
            1 => *dst = *src,
            0 => {}
            _ => std::ptr::copy_nonoverlapping(src, dst, len),
        }
    }
}

/// # Safety
/// `src` is readable and `ring` part of a mapped area for `len` bytes; they do not overlap.
#[cfg(loom)]
unsafe fn to_ring(src: *const u8, ring: *mut Byte, len: usize) {
    for i in 0..len {
        // SAFETY: by this function's contract.
        unsafe { (*ring.add(i)).with_mut(|byte| *byte = *src.add(i)) };
    }
}

/// # Safety
/// `dst` is writable and `ring` part of a mapped area for `len` bytes; they do not overlap.
#[cfg(loom)]
unsafe fn from_ring(ring: *const Byte, dst: *mut u8, len: usize) {
    for i in 0..len {
        // SAFETY: by this function's contract.
        unsafe { (*ring.add(i)).with(|byte| *dst.add(i) = *byte) };
    }
}

// The kernel charges a page of shared memory to the process that touches it first, which is the sender. But the
// receiver decides where its rings lie and when their memory is released. So a sender checks each offered ring against
// an allowance before it adopts the ring. A correct receiver places a ring as low in its arena as is free.

/// The rings that a sender may adopt: their largest size, and how far from the area's beginning they may reach. The
/// default admits every ring.
#[derive(Debug, Clone, Default)]
pub struct Allowance(Option<(u8, Arc<AtomicU64>)>);

impl Allowance {
    /// Admits rings of at most `1 << largest` bytes within the first `reach` bytes of the area. The caller may increase
    /// `reach` later.
    pub fn new(largest: u8, reach: Arc<AtomicU64>) -> Self {
        Self(Some((largest, reach)))
    }

    /// Returns whether the region ends within reach. To be called before the region is mapped, since mapping it also
    /// maps all parts of the area before it. So an offer makes this process use addresses and memory only up to the
    /// reach.
    pub(super) fn reaches(&self, region: Region) -> bool {
        let end = (region.offset() + region.len()) as u64;
        self.0.as_ref().is_none_or(|(_, reach)| end <= reach.load(Acquire))
    }

    /// Returns whether the region is not larger than the largest ring that is admitted.
    pub(super) fn admits(&self, region: Region) -> bool {
        self.0.as_ref().is_none_or(|(largest, _)| region.log2() <= *largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::layout::MAX_RING_LOG2;

    fn region(page: u32, log2: u8) -> Region {
        Region::new(page, log2).unwrap()
    }

    #[test]
    fn a_ring_that_is_too_large_is_not_adopted() {
        let allowance = Allowance::new(22, Arc::new(AtomicU64::new(1 << 30)));
        assert!(allowance.admits(region(0, 22)) && !allowance.admits(region(0, 23)));
        assert!(Allowance::default().admits(region(0, MAX_RING_LOG2)));
    }

    #[test]
    fn a_ring_beyond_reach_is_not_adopted_before_the_reach_grows() {
        let reach = Arc::new(AtomicU64::new(8 << 20));
        let allowance = Allowance::new(22, Arc::clone(&reach));
        let (last, next) = (region(1 << 10, 22), region(2 << 10, 12));
        assert!(allowance.reaches(region(0, 12)) && allowance.reaches(last));
        assert!(!allowance.reaches(next) && !allowance.reaches(region(u32::MAX, 12)));
        reach.fetch_max(12 << 20, std::sync::atomic::Ordering::AcqRel);
        assert!(allowance.reaches(next) && Allowance::default().reaches(region(u32::MAX, 12)));
    }
}
