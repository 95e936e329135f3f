//! Ranges of addresses over shared files: what is mapped there can be replaced without that anybody
//! else gets the addresses, and more of the file can be mapped without its descriptor.
//!
//! A fork child has none of the memory (MADV_DONTFORK), and core dumps leave it out. Not here: whose file
//! it is, and whether that is to be trusted (`memfd`).

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::mm::{madvise, mmap, mmap_anonymous, mprotect, mremap, mremap_fixed, munlock, munmap};

/// The unit of mappings in bytes.
pub const PAGE: usize = 4096;

/// What a mapping permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read only; writing raises SIGSEGV.
    ReadOnly,
}

/// A range of addresses with something mapped. A value only: whoever has it sees to the [end](Self::unmap).
/// Other processes write to the memory at any time, so it gives out a pointer and no reference.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a range belongs to the process, not to a thread, and this type itself never reads or
// writes the memory; its users synchronise what they do through the pointer.
unsafe impl Send for Extent {}
// SAFETY: as above; all methods take plain values.
unsafe impl Sync for Extent {}

impl Extent {
    /// The range that begins at `start`. Nothing is touched by making the value.
    pub const fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// The first byte.
    pub const fn start(self) -> NonNull<u8> {
        self.start
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub const fn len(self) -> usize {
        self.bytes
    }

    /// Memory that is nobody's: it reads as zeroes and takes writes.
    pub fn neutral(bytes: usize) -> Result<Self, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nobody's memory.
        unsafe { neutral(null_mut(), bytes, MapFlags::empty()) }
    }

    /// The first `bytes` of a file from `offset` on, at new addresses.
    pub fn of_file(fd: BorrowedFd<'_>, offset: u64, bytes: usize, access: Access) -> Result<Self, Errno> {
        // SAFETY: as in `neutral`.
        unsafe { file(null_mut(), bytes, MapFlags::empty(), fd, offset, access) }
    }

    /// The file from `offset` on, in place of what is mapped here.
    ///
    /// # Safety
    /// The range is the caller's, and nobody holds references into it.
    pub unsafe fn show(self, fd: BorrowedFd<'_>, offset: u64, access: Access) -> Result<(), Errno> {
        let at = self.start.as_ptr();
        // SAFETY: by the contract.
        unsafe { file(at, self.bytes, MapFlags::FIXED, fd, offset, access) }.map(drop)
    }

    /// Lets go of the memory but not of the addresses: they read as zeroes and take writes from now
    /// on, for whoever still holds a pointer.
    ///
    /// # Safety
    /// As for [`show`](Self::show).
    pub unsafe fn neutralise(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { neutral(self.start.as_ptr(), self.bytes, MapFlags::FIXED) }.map(drop)
    }

    /// In a fork child, which does not have what is mapped here: as by [`neutralise`](Self::neutralise), unless
    /// somebody has taken the addresses since the fork.
    ///
    /// # Safety
    /// As for [`show`](Self::show).
    pub unsafe fn after_fork(self) {
        // SAFETY: by the contract; nothing is replaced.
        let _ = unsafe { neutral(self.start.as_ptr(), self.bytes, MapFlags::FIXED_NOREPLACE) };
    }

    /// The `bytes` of the file that follow what is mapped here, behind a page that is the last one of this
    /// range: at new addresses, or in place of what is mapped at `over`, which has a page and `bytes`.
    ///
    /// mremap(2) of no bytes of a shared mapping maps the same file again, from there on and as far as is asked for. So
    /// it takes no descriptor, which would have to be kept for each peer. What permits no access here does not there.
    ///
    /// # Safety
    /// This range is a mapping of a shared file, which has the bytes; `over` is as for [`show`](Self::show).
    pub unsafe fn followed_by(self, bytes: usize, over: Option<Extent>) -> Result<Self, Errno> {
        let last = self.start.as_ptr().wrapping_add(self.bytes - PAGE).cast();
        let (whole, flags) = (PAGE + bytes, MremapFlags::MAYMOVE);
        // As in `file`: a program that locks what it has (MCL_CURRENT) has locked this, and its copy would be locked
        // and filled. SAFETY: ours, by the contract.
        let _ = unsafe { munlock(self.start.as_ptr().cast(), self.bytes) };
        // SAFETY: the last page is mapped, by the contract, and stays so; and see `over`.
        let start = unsafe {
            match over {
                None => mremap(last, 0, whole, flags)?,
                Some(over) => mremap_fixed(last, 0, whole, flags, over.start.as_ptr().cast())?,
            }
        };
        // The new mapping has the advice that this one was given.
        Self::of(start, whole)
    }

    /// From now on nobody can access what is mapped here, so it is not filled where a program locks its memory.
    ///
    /// # Safety
    /// This is one mapping of [`of_file`](Self::of_file)'s or [`followed_by`](Self::followed_by)'s, and nobody uses it.
    pub unsafe fn shut(self) -> Result<(), Errno> {
        // SAFETY: by the contract.
        unsafe { mprotect(self.start.as_ptr().cast(), self.bytes, MprotectFlags::empty()) }
    }

    /// What was [shut](Self::shut), or is mapped behind such, can be read and written. Neither limits nor the number of
    /// mappings stand against it: no address is new, no mapping is split, and shared memory is counted with its file.
    ///
    /// # Safety
    /// This is one mapping of ours.
    pub unsafe fn open(self) -> Result<(), Errno> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: by the contract; nothing loses a permission.
        unsafe { mprotect(self.start.as_ptr().cast(), self.bytes, access) }
    }

    /// Makes sure that the memory of the pages that `range` (bytes) touches is there: whoever writes to it, in whatever
    /// process, does not fail for want of memory. An error means that there is not so much.
    ///
    /// Kernels before 5.14 cannot say, and are taken at the sparse file's word.
    pub fn back(self, range: Range<usize>) -> Result<(), Errno> {
        let (first, end) = (range.start & !(PAGE - 1), range.end.next_multiple_of(PAGE));
        if first >= end || end > self.bytes {
            return Err(Errno::INVAL);
        }
        // SAFETY: within the range; faults pages in, without a change to what they hold.
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

    /// Gives the whole pages within `range` (bytes) back to the kernel, for all who map them; they
    /// read as zeroes afterwards. EINVAL if `range` leaves the mapping.
    pub fn punch_hole(self, range: Range<usize>) -> Result<(), Errno> {
        if range.end > self.bytes {
            return Err(Errno::INVAL);
        }
        let (first, end) = (range.start.next_multiple_of(PAGE), range.end & !(PAGE - 1));
        if first >= end {
            return Ok(());
        }
        // SAFETY: `first..end` lies within the mapping, whose memory nobody holds references to.
        unsafe { madvise(self.start.as_ptr().add(first).cast(), end - first, Advice::LinuxRemove) }
    }

    /// The addresses are anybody's from now on.
    ///
    /// # Safety
    /// The range is the caller's, and nobody uses it any more.
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
/// With MAP_FIXED in `flags` the range is the caller's.
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
    // A child is another instance, and what its parent receives is not its to read. Nor should a core dump hold
    // gigabytes of rings. Only advice: no error.
    for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
        // SAFETY: exactly the new mapping.
        let _ = unsafe { madvise(start, bytes, advice) };
    }
    // What a program that has called mlockall(2) needs of it is backed when it is used. What follows the range must not
    // be filled when it is mapped.
    // SAFETY: as above.
    let _ = unsafe { munlock(start, bytes) };
    Extent::of(start, bytes)
}
