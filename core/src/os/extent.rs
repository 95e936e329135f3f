//! Ranges of addresses over shared files. The mapping of a range can be replaced without releasing its addresses, and
//! more of the file can be mapped without its descriptor.
//!
//! A fork child has none of the memory (MADV_DONTFORK), and core dumps leave it out. `memfd` decides whether a peer's
//! file can be trusted; this file does not.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, mremap,
    mremap_fixed, munlock, munmap,
};

/// The bytes of a page, the unit of mappings.
pub const PAGE: usize = 4096;

/// The accesses that a mapping permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read only; writing raises SIGSEGV.
    ReadOnly,
}

/// A range of addresses with a mapping. This is a plain value: its user [unmaps](Self::unmap) it. Other processes write
/// to the memory at any time, so methods return a pointer and no reference.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a range belongs to the process, not to a thread. This type itself never reads or writes the memory; its users
// synchronise their accesses through the pointer.
unsafe impl Send for Extent {}
// SAFETY: as above; all methods take plain values.
unsafe impl Sync for Extent {}

impl Extent {
    /// Returns the range of `bytes` that begins at `start`. Touches no memory.
    pub const fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns the address of the first byte.
    pub const fn start(self) -> NonNull<u8> {
        self.start
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub const fn len(self) -> usize {
        self.bytes
    }

    /// Maps private anonymous memory: it reads as zeroes and can be written.
    pub fn neutral(bytes: usize) -> Result<Self, Errno> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
        unsafe { neutral(null_mut(), bytes, MapFlags::empty()) }
    }

    /// Maps `bytes` of a file from `offset` on, at new addresses.
    pub fn of_file(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> Result<Self, Errno> {
        // SAFETY: as in `neutral`.
        unsafe { file(null_mut(), bytes, MapFlags::empty(), fd, offset, access) }
    }

    /// Maps the file from `offset` on, in place of the mapping that the range has now.
    ///
    /// # Safety
    /// The caller owns the range, and no references into it exist.
    pub unsafe fn show(self, fd: BorrowedFd<'_>, offset: u64, access: Access) -> Result<(), Errno> {
        let at = self.start.as_ptr();
        // SAFETY: by the contract.
        unsafe { file(at, self.bytes, MapFlags::FIXED, fd, offset, access) }.map(drop)
    }

    /// Releases the memory but keeps the addresses: from now on they read as zeroes and can be written, for all who
    /// still hold a pointer.
    ///
    /// # Safety
    /// As for [`show`](Self::show).
    pub unsafe fn neutralise(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { neutral(self.start.as_ptr(), self.bytes, MapFlags::FIXED) }.map(drop)
    }

    /// Maps zeroes in a fork child, which has not inherited this mapping, as [`neutralise`](Self::neutralise) does.
    /// Does nothing if the addresses have been mapped since the fork.
    ///
    /// # Safety
    /// As for [`show`](Self::show).
    pub unsafe fn after_fork(self) {
        // SAFETY: by the contract; MAP_FIXED_NOREPLACE replaces no mapping.
        let _ = unsafe { neutral(self.start.as_ptr(), self.bytes, MapFlags::FIXED_NOREPLACE) };
    }

    /// Maps the `bytes` of the file that follow this range, behind a copy of the last page of this range. The addresses
    /// are new, or those of `over`, whose mapping is replaced and has a page and `bytes`.
    ///
    /// mremap(2) with an old size of 0 maps the same shared file again, from the old address on, with the length that
    /// is asked for. So no descriptor has to be kept for each peer. The new mapping has the permissions of this one.
    ///
    /// # Safety
    /// This range is a mapping of a shared file, which has the bytes; `over` is as for [`show`](Self::show).
    pub unsafe fn followed_by(self, bytes: usize, over: Option<Extent>) -> Result<Self, Errno> {
        let last = self.start.as_ptr().wrapping_add(self.bytes - PAGE).cast();
        let (whole, flags) = (PAGE + bytes, MremapFlags::MAYMOVE);
        // As in `file`: if the program locks its memory (MCL_CURRENT), this range is locked, and its copy would be
        // locked and filled.
        // SAFETY: the caller owns the range, by the contract.
        let _ = unsafe { munlock(self.start.as_ptr().cast(), self.bytes) };
        // SAFETY: the last page is mapped, by the contract, and stays so. The range of `over` is the caller's, by the
        // contract.
        let start = unsafe {
            match over {
                None => mremap(last, 0, whole, flags)?,
                Some(over) => mremap_fixed(last, 0, whole, flags, over.start.as_ptr().cast())?,
            }
        };
        // The new mapping inherits the advice of this one.
        Self::of(start, whole)
    }

    /// Forbids all access to the range, so that it is not filled if the program locks its memory.
    ///
    /// # Safety
    /// The range is exactly one mapping made by [`of_file`](Self::of_file) or [`followed_by`](Self::followed_by), and
    /// no thread uses it.
    pub unsafe fn shut(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { mprotect(self.start.as_ptr().cast(), self.bytes, MprotectFlags::empty()) }
    }

    /// Permits reads and writes again, after [`shut`](Self::shut) of this range or of the range that it
    /// [follows](Self::followed_by). Neither limits nor the number of mappings can make it fail: no address is new, no
    /// mapping is split, and shared memory is accounted to its file.
    ///
    /// # Safety
    /// The range is exactly one mapping of the library's.
    pub unsafe fn open(self) -> Result<(), Errno> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: by the contract; the range loses no permission.
        unsafe { mprotect(self.start.as_ptr().cast(), self.bytes, access) }
    }

    /// Allocates the memory of all pages that `range` (bytes) touches, so that no process fails for want of memory when
    /// it writes there. An error means that there is not enough memory.
    ///
    /// Kernels before 5.14 cannot do this (MADV_POPULATE_WRITE); for them the call succeeds, without a guarantee.
    pub fn back(self, range: Range<usize>) -> Result<(), Errno> {
        let (first, end) = (range.start & !(PAGE - 1), range.end.next_multiple_of(PAGE));
        if first >= end || end > self.bytes {
            return Err(Errno::INVAL);
        }
        // SAFETY: within the range; the call faults pages in and does not change their content.
        let backed = unsafe {
            madvise(
                self.start.as_ptr().wrapping_add(first).cast(),
                end - first,
                Advice::LinuxPopulateWrite,
            )
        };
        match backed {
            Err(Errno::INVAL) => Ok(()),
            backed => backed,
        }
    }

    /// Frees the whole pages within `range` (bytes), for all processes that map them; they read as zeroes afterwards.
    /// EINVAL if `range` exceeds the mapping.
    pub fn punch_hole(self, range: Range<usize>) -> Result<(), Errno> {
        if range.end > self.bytes {
            return Err(Errno::INVAL);
        }
        let (first, end) = (range.start.next_multiple_of(PAGE), range.end & !(PAGE - 1));
        if first >= end {
            return Ok(());
        }
        // SAFETY: `first..end` lies within the mapping, whose users hold no references into it.
        unsafe { madvise(self.start.as_ptr().add(first).cast(), end - first, Advice::LinuxRemove) }
    }

    /// Unmaps the range: the kernel may map its addresses for any other purpose from now on.
    ///
    /// # Safety
    /// The caller owns the range, and no thread uses it any more.
    pub unsafe fn unmap(self) {
        // SAFETY: by the contract.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }

    fn of(start: *mut std::ffi::c_void, bytes: usize) -> Result<Self, Errno> {
        // The kernel never maps at null unless asked to.
        NonNull::new(start.cast())
            .map(|start| Self { start, bytes })
            .ok_or(Errno::NOMEM)
    }
}

/// # Safety
/// With MAP_FIXED in `flags` the caller owns the range.
unsafe fn neutral(at: *mut u8, bytes: usize, flags: MapFlags) -> Result<Extent, Errno> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = flags | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: by the contract.
    Extent::of(unsafe { mmap_anonymous(at.cast(), bytes, prot, flags)? }, bytes)
}

/// # Safety
/// As for `neutral`.
unsafe fn file(
    at: *mut u8,
    bytes: usize,
    flags: MapFlags,
    fd: BorrowedFd<'_>,
    offset: u64,
    access: Access,
) -> Result<Extent, Errno> {
    let prot = match access {
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        Access::ReadOnly => ProtFlags::READ,
    };
    let flags = flags | MapFlags::SHARED | MapFlags::NORESERVE;
    // SAFETY: by the contract.
    let start = unsafe { mmap(at.cast(), bytes, prot, flags, fd, offset)? };
    // A fork child is another instance, and must not read what its parent receives. Nor should a core dump hold
    // gigabytes of rings. Both are advice, so errors are ignored.
    for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
        // SAFETY: exactly the new mapping.
        let _ = unsafe { madvise(start, bytes, advice) };
    }
    // In a program that has called mlockall(2), pages are allocated when they are used (`back`). The part of the file
    // behind the range (`followed_by`) must not be filled when it is mapped.
    // SAFETY: as above.
    let _ = unsafe { munlock(start, bytes) };
    Extent::of(start, bytes)
}
